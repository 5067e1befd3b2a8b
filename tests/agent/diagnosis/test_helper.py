"""The helper in every rank, which writes its stacks on a signal."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.campaigns.hangs import line_of
from tests.support.stacks import diagnose_fleet, wait_until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_helper_writes_the_stacks_of_a_program_and_of_its_fork(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    script = """\
import os, time
def child(): time.sleep(600)  # child
def parent(): os.wait()  # parent
pid = os.fork()
print("up", flush=True)
parent() if pid else child()
"""
    fleet.launch(script, world_size=1)
    wait_until(fleet.ranks_are_up)
    (rank,) = diagnose_fleet(fleet)["ranks"]
    assert rank["where"] == f"job.py:{line_of(script, '# parent')} in parent"
    assert [row["where"] for row in rank["workers"]] == [f"job.py:{line_of(script, '# child')} in child"]


def test_program_that_holds_the_gil_still_writes_its_stack(
    make_fleet: "Callable[[int], Fleet]",
) -> None:
    fleet = make_fleet(1)
    script = """\
import ctypes
print("up", flush=True)
ctypes.PyDLL(None).sleep(600)  # here
"""
    fleet.launch(script, world_size=1)
    wait_until(fleet.ranks_are_up)
    assert diagnose_fleet(fleet)["ranks"][0]["where"] == f"job.py:{line_of(script)} in <module>"


def test_sitecustomize_and_sigusr2_of_the_user_are_kept(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.write("own/sitecustomize.py", "import builtins\nbuiltins.mine = 'mine'\n")
    script = """\
import signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: print("signalled", flush=True))
import sitecustomize
print("up", mine, sitecustomize.__file__, [path for path in sys.path if "helper" in path], flush=True)
while True: time.sleep(0.1)  # here
"""
    fleet.launch(script, world_size=1, variables={"PYTHONPATH": str(fleet.workdirs[0] / "own")})
    wait_until(fleet.ranks_are_up)
    assert diagnose_fleet(fleet)["ranks"][0]["where"] == f"job.py:{line_of(script)} in <module>"
    wait_until(lambda: fleet.log(0).endswith(b"\n"))
    file = fleet.workdirs[0] / "own" / "sitecustomize.py"
    assert fleet.log(0) == f"up mine {file} []\n".encode()
