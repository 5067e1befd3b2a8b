"""Jobs that hang on purpose: the right rank and line are named, and the job lives on."""

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from awsddp.jobs import protocol
from awsddp.jobs.supervisor.hang import diagnose, ranges

if TYPE_CHECKING:
    from tests.jobs.conftest import Fleet

BEGIN = """\
import os, sys, threading, time
rank = int(os.environ["RANK"])
import torch, torch.distributed as dist
"""
GROUP = (
    BEGIN
    + """\
dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(4))
print("up", flush=True)
"""
)
# name: (script, a line of the culprit's place, words of the explanation); rank 2 is the one to name
HANGS = {
    "skip": (
        GROUP
        + """\
def train(step):
    if rank != 2:
        dist.all_reduce(torch.ones(4))
    else:
        time.sleep(600)  # here
train(3)
""",
        "in all_reduce (collective 4)",
    ),
    "other": (
        GROUP
        + """\
def train(step):
    if rank == 2:
        dist.barrier()  # here
    else:
        dist.all_reduce(torch.ones(4))
train(3)
time.sleep(600)
""",
        "called barrier where the others called all_reduce as collective 4",
    ),
    "loader": (
        GROUP
        + """\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if rank == 2: time.sleep(600)  # here
        return torch.ones(4)
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    dist.all_reduce(batch)
    dist.barrier()
""",
        "its worker processes: ",
    ),
    "lock": (
        GROUP
        + """\
lock = threading.Lock()
def save():
    lock.acquire()
    with lock:  # here
        pass
if rank == 2: save()
dist.barrier()
""",
        "wait in barrier (collective 4)",
    ),
    "stopped": (GROUP + "dist.barrier() if rank != 2 else time.sleep(600)\n", "SIGSTOP"),
    "never": (
        BEGIN
        + """\
print("up", flush=True)
if rank == 2:
    time.sleep(600)  # here
dist.init_process_group("gloo")
""",
        "did not join the process group",
    ),
}


def line_of(script: str, mark: str = "# here") -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if mark in line)


def look(fleet: "Fleet", job: str = "job") -> dict[str, Any]:
    """Ask all nodes and read their answers, as `doctor --why` does."""
    answers = {node: fleet.ask(node, protocol.stacks_request(job)) for node in range(len(fleet.hosts))}
    layout = [(rank.rank, rank.local_rank, rank.node) for rank in fleet.ranks]
    return diagnose(layout, answers, workdirs=dict(enumerate(map(str, fleet.workdirs))), exit_codes={})


def settled(fleet: "Fleet") -> dict[str, Any]:
    """Return what is seen once all ranks are up and nobody moves any more."""
    from tests.jobs.conftest import until

    until(fleet.up, seconds=90)
    before: list[Any] = []

    def stands_still() -> bool:
        found = look(fleet)
        now = [(one["state"], one["stack"], one["collective"]) for one in found["ranks"]]
        before[:], same = [now], before == [now]
        return same and not found["explanation"].startswith("The job may")

    until(stands_still, seconds=60)
    return look(fleet)


def hang(fleet: "Fleet", name: str) -> dict[str, Any]:
    script, _ = HANGS[name]
    fleet.launch(script)
    if name == "stopped":
        from tests.jobs.conftest import until

        until(fleet.up, seconds=90)
        pid = next(one["pid"] for one in look(fleet)["ranks"] if one["rank"] == 2)
        os.kill(pid, signal.SIGSTOP)
    return settled(fleet)


@pytest.mark.prove
@pytest.mark.parametrize("name", HANGS)
def test_rank_that_the_others_wait_for_is_named_with_its_line(fleet: "Fleet", name: str) -> None:
    script, words = HANGS[name]
    found = hang(fleet, name)
    assert found["behind"] == [2], found["explanation"]
    assert words in found["explanation"]
    if "# here" in script:
        assert f"job.py:{line_of(script)} in" in found["explanation"]
    assert all(fleet.document(node)["state"] == "running" for node in (0, 1))


def test_ranges() -> None:
    assert ranges([3, 0, 1, 5, 2]) == "0-3,5"
