"""Jobs under torch's elastic agent: real agents and real ranks on two or three nodes of this machine."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.agent_client.logs import Merger
from tests.support.elastic import SECONDS, wait_for_all
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]


def test_job_continues_with_min_nodes_and_its_ranks_keep_their_numbers(
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
    until(lambda: fleet.supervisors(1) == [], seconds=30)
    assert fleet.document(0)["state"] == "running"
    for node in (0, 2):
        for rank in list_worker_pids(fleet, node):
            os.kill(rank, signal.SIGUSR1)  # unhandled, as the loss of its peers
    until(lambda: fleet.log(0).count(b"up") == fleet.log(4).count(b"up") == 2, seconds=SECONDS)
    for home in fleet.homes:
        (home / "end").touch()
    job = fleet.wait(nodes=[0, 2], seconds=SECONDS)
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("succeeded", [0, 0, None, None, 0, 0])
    assert len(job.restarts) == 1
    merger = Merger({rank.rank: rank.node for rank in fleet.ranks}, folder=tmp_path, shown_ranks=[4])
    assert fleet.follow(merger, 2).splitlines() == [
        b"[rank 4 @ node2] up rank 4 of 6",
        b"[rank 4 @ node2] up rank 2 of 4",
    ]
    assert fleet.processes() == []


def test_job_fails_with_fewer_than_min_nodes(fleet: "Fleet") -> None:
    fleet.launch(SLEEP, nnodes="2:2", heartbeat_timeout="5s")
    wait_for_all(fleet)
    os.kill(fleet.document(1)["pid"], signal.SIGKILL)
    job = fleet.wait(seconds=60)
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.rank, job.cause.node, job.cause.kind) == (None, 1, "node_lost")
    assert fleet.processes() == []


SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def list_worker_pids(fleet: "Fleet", node: int) -> list[int]:
    """Return the process ids of the ranks that run on a node."""
    script = str(fleet.workdirs[node]).encode()
    pids = []
    for pid in fleet.processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has exited
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if line[1:2] == [b"job.py"] and os.fsencode(Path(f"/proc/{pid}/cwd").readlink()) == script:
                pids.append(pid)
    return pids
