"""How the processes of a job are ended, also after a pause of the agent."""

import signal
import subprocess
from pathlib import Path

import pytest

from awsddp.agent import processes
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.processes import Ranks
from tests.support.fleet import make_launch
from tests.support.one_process import PROCESS, REQUEST
from tests.support.waiting import until


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
