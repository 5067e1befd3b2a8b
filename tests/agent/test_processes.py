"""How the processes of a job are ended, also after a pause of the agent."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.agent import processes
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.processes import Ranks
from tests.support.fleet import make_launch
from tests.support.one_process import PROCESS, REQUEST
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_later_stop_does_not_lengthen_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(processes, "descendants", lambda: [child.pid] if child.poll() is None else [])
    ranks = Ranks(REQUEST, JobFolder("job", tmp_path))
    ranks.stop(0)
    ranks.stop(60)
    until(ranks.finish_stop, seconds=5)
    assert child.returncode == -9  # killed at once, without a SIGTERM


def test_agent_that_was_paused_past_the_grace_kills_and_reaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder("job", tmp_path)
    folder.logs.mkdir()
    sleeper = {**PROCESS, "argv": ["/bin/sleep", "60"], "log": "rank0.log"}
    ranks = Ranks(make_launch(processes=[sleeper], workdir=str(tmp_path)), folder)
    monkeypatch.setattr(
        processes, "descendants", lambda: [rank.child.pid for rank in ranks.alive if rank.child]
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the rank inherits it
    ranks.start()
    signal.signal(signal.SIGTERM, before)
    ranks.stop(-3600)  # as if an hour had passed
    while not ranks.finish_stop():
        ranks.reap()
    assert ranks.reports[0].exit_code == -9


def test_failed_gpu_is_the_cause_of_the_error_of_nccl_that_ended_the_job(fleet: "Fleet") -> None:
    """Rank 0 fails first, by NCCL; rank 2, whose GPU failed, is then stopped."""
    tools = fleet.top / "tools"
    tools.mkdir()
    (tools / "dmesg").write_text('#!/bin/sh\ncat "$HOME/kernel.log"\n')
    (tools / "dmesg").chmod(0o755)
    fleet.environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    line = f"[{time.monotonic():12.6f}] NVRM: Xid (PCI:0000:00:1e): 79, GPU has fallen off the bus.\n"
    (fleet.homes[1] / "kernel.log").write_text(line)
    job = fleet.run(
        "import os, time\n"
        "if os.environ['RANK'] != '0': time.sleep(600)\n"
        "raise RuntimeError('NCCL error: unhandled system error, ncclSystemError')\n",
        grace="1s",
    )
    assert job.cause is not None
    assert (job.cause.kind, job.cause.node, job.cause.instance_id) == ("xid", 1, job.nodes[1].instance_id)
    assert job.cause.rank in (2, 3), "both may use the GPU"
