"""Jobs under torch's elastic agent: real agents, real ranks, two nodes of this machine."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.agent import messages
from awsddp.agent_client.logs import Merger

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]

SECONDS = 200.0


def test_ranks_get_what_torchrun_gives_them(fleet: "Fleet") -> None:
    fleet.launch(
        "import os, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR TORCHELASTIC_RESTART_COUNT'.split()\n"
        "print(*[os.environ[name] for name in names], *sys.argv[1:])\n",
        launcher="torchrun",
        args=("{rank}/{world_size}", "{{}}", "a b"),
    )
    job = fleet.wait(seconds=SECONDS)
    log = (fleet.folder(0) / "logs" / "launcher0.log").read_text()
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("succeeded", [0, 0, 0, 0]), (job, log)
    first = fleet.hosts[0].node.private_ip
    said = [fleet.log(rank).decode() for rank in range(4)]
    assert said == [f"{n} {n % 2} 4 {n // 2} {first} 0 {n}/4 {{}} a b\n" for n in range(4)]
    assert fleet.processes() == []


# Adds to a checkpoint in 6 steps over a gloo group; rank 3 fails at step 3 in its first lives.
TRAIN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group('gloo')
    rank, life = dist.get_rank(), pathlib.Path(os.environ['AWSDDP_RUN_DIR'], 'lives')
    latest = pathlib.Path(os.environ['AWSDDP_RUN_DIR'], 'latest.pt')
    state = [torch.load(latest) if rank == 0 and latest.exists() else {'step': 0, 'sum': torch.zeros(1)}]
    dist.broadcast_object_list(state)
    state = state[0]
    print('rank', rank, 'of', dist.get_world_size(), 'begins at step', state['step'], flush=True)
    while state['step'] < 6:
        one = torch.ones(1)
        dist.all_reduce(one)
        state = {'step': state['step'] + 1, 'sum': state['sum'] + one}
        if rank == 0:
            torch.save(state, f'{latest}.new'); os.replace(f'{latest}.new', latest)
        dist.barrier()
        lives = len(life.read_text()) if life.exists() else 0
        if rank == 3 and state['step'] == 3 + lives and lives < int(sys.argv[1]):
            life.write_text('x' * (lives + 1))
            raise ValueError(f'life {lives}')
    print('rank', rank, 'has', state['sum'].item(), flush=True)
    dist.barrier(); time.sleep(0.2)
    dist.destroy_process_group()

main()
"""


def test_failed_worker_is_restarted_and_training_goes_on_from_its_checkpoint(fleet: "Fleet") -> None:
    fleet.launch(TRAIN, max_restarts=3, args=("1",))
    job = fleet.wait(seconds=SECONDS)
    assert job.state == "succeeded", (job, fleet.log(0))
    assert [rank.exit_code for rank in job.ranks] == [0, 0, 0, 0]
    (one,) = job.restarts
    assert one.startswith("1 of 3: rank 3 @ node1: ValueError: life 0")
    log = fleet.log(3).decode()
    assert log.index("begins at step 0") < log.index("ValueError: life 0") < log.index("begins at step 3")
    assert "rank 3 has 24.0" in log
    assert fleet.processes() == []


def test_cause_is_the_exception_of_the_worker_that_failed_first(fleet: "Fleet") -> None:
    fleet.launch(TRAIN, launcher="torchrun", max_restarts=1, args=("2",))
    job = fleet.wait(seconds=SECONDS)
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.rank, job.cause.node) == (3, 1)
    # Torch aborts where gloo loses its peers while the exception ends the process.
    assert job.cause.exit_code in (1, -6)
    assert job.cause.explanation.startswith("ValueError: life 1")
    assert "ValueError: life 1" in "\n".join(job.cause.tail)
    assert [one.partition(": ")[2][:34] for one in job.restarts] == ["rank 3 @ node1: ValueError: life 0"]
    assert fleet.document(0)["cause"] == fleet.document(1)["cause"]
    assert fleet.processes() == []


def test_job_goes_on_with_min_nodes_and_its_ranks_keep_their_numbers(
    make_fleet: Callable[[int], "Fleet"], tmp_path: Path
) -> None:
    fleet = make_fleet(3)
    fleet.launch(
        "import os, pathlib, sys, time\n"
        "print('up', 'rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "while not pathlib.Path(os.environ['HOME'], 'end').exists(): time.sleep(0.1)\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['WORLD_SIZE'] == '6')\n",
        nnodes="1:3",
        max_restarts=2,
        heartbeat_timeout="5s",
    )
    wait_for_all(fleet)
    os.kill(fleet.document(1)["pid"], signal.SIGKILL)
    from tests.support.fleet import until

    until(lambda: fleet.supervisors(1) == [], seconds=30)
    assert fleet.document(0)["state"] == "running"
    for node in (0, 2):
        for rank in worker_pids(fleet, node):
            os.kill(rank, signal.SIGUSR1)  # as its lost peers would end it: unhandled
    until(lambda: fleet.log(0).count(b"up") == fleet.log(4).count(b"up") == 2, seconds=SECONDS)
    for home in fleet.homes:
        (home / "end").touch()
    job = fleet.wait(nodes=[0, 2], seconds=SECONDS)
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("succeeded", [0, 0, None, None, 0, 0])
    assert len(job.restarts) == 1
    merger = Merger({rank.rank: rank.node for rank in fleet.ranks}, folder=tmp_path, shown=[4])
    assert fleet.follow(merger, 2).splitlines() == [
        b"[rank 4 @ node2] up rank 4 of 6",
        b"[rank 4 @ node2] up rank 2 of 4",
    ]
    assert fleet.processes() == []


def test_without_the_first_node_or_with_fewer_than_min_the_job_fails(fleet: "Fleet") -> None:
    fleet.launch(SLEEP, nnodes="2:2", heartbeat_timeout="5s")
    wait_for_all(fleet)
    os.kill(fleet.document(1)["pid"], signal.SIGKILL)
    job = fleet.wait(seconds=60)
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.rank, job.cause.node, job.cause.kind) == (None, 1, "node_lost")
    assert fleet.processes() == []


def test_cancel_gives_ranks_the_grace_and_leaves_nothing(fleet: "Fleet") -> None:
    fleet.launch(
        "import os, signal, subprocess, sys, time\n"
        "sleep = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-c', sleep], start_new_session=True)\n"
        "def save(*_):\n    time.sleep(1.5); print('saved', flush=True); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save if os.environ['RANK'] != '3' else signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)\n",
        launcher="torchrun",
    )
    wait_for_all(fleet)
    answer = fleet.ask(1, messages.Cancel(job="job", grace=6))
    assert answer.state == "cancelled"
    job = fleet.wait()
    assert [rank.exit_code for rank in job.ranks] == [1, 1, 1, -9]
    assert [b"saved" in fleet.log(rank) for rank in range(4)] == [True, True, True, False]
    assert fleet.processes() == []


SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def wait_for_all(fleet: "Fleet") -> None:
    from tests.support.fleet import until

    until(fleet.up, seconds=SECONDS)


def worker_pids(fleet: "Fleet", node: int) -> list[int]:
    """Return the ranks that run on a node."""
    script = str(fleet.workdirs[node]).encode()
    found = []
    for pid in fleet.processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if line[1:2] == [b"job.py"] and os.fsencode(Path(f"/proc/{pid}/cwd").readlink()) == script:
                found.append(pid)
    return found
