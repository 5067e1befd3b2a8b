"""The job whose checkpoint --resume takes."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent_client import job_reports
from awsddp.cli.command_line import COMMAND
from awsddp.cli.pages import job_page
from awsddp.errors import ConfigError, Interrupted
from awsddp.job import follow
from awsddp.job.checkpoint import find_checkpoint_to_resume, find_run_id
from awsddp.model.records import JobNode, JobRecord, JobState
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.storage.results_dir import make_job_result
from tests.support.resuming import NOTE, make_session

BUNDLED = "/home/ubuntu/awsddp/train/main.py"


@pytest.mark.parametrize(
    ("script", "expected"),
    [("train.py", "new"), ("./train.py", "new"), ("src/../train.py", "new"), (None, "bundled")],
)
def test_resume_last_takes_the_job_that_started_last_not_the_one_fetched_last(
    tmp_path: Path, script: str | None, expected: str
) -> None:
    jobs = [
        ("new", "train.py", "02"),
        ("old", "train.py", "01"),
        ("bundled", BUNDLED, "03"),
        ("no", "x.py", "04"),
    ]
    for mtime, (name, file, day) in enumerate(jobs):
        run = tmp_path / "runs" / name / "node0" / "run"
        run.mkdir(parents=True)
        (run / "a.pt").touch()
        started = f"2026-11-{day}T00:00:00Z"
        job = make_job(name, script=file, started=started, run_id="run-new" if name == "new" else None)
        path = tmp_path / "runs" / name / "job.json"
        path.write_bytes(job_reports.encode_job(job))
        os.utime(path, (mtime, mtime))
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "job.json").write_text("{")
    checkpoint = find_checkpoint_to_resume(make_session(tmp_path, script))
    assert checkpoint is not None
    assert checkpoint.job == expected
    assert checkpoint.run_id == (f"run-{expected}" if expected == "new" else find_run_id(make_job("bundled")))


def make_job(name: str, **more: Any) -> JobRecord:
    return JobRecord(job=name, state="failed", cause=None, ranks=(), home="", **more)


def test_the_run_of_a_job_without_a_run_id_is_the_same_in_all_copies_of_its_record() -> None:
    nodes = (JobNode(node=0, instance_id="i-1"),)
    old, again = make_job("a", nodes=nodes), make_job("a", nodes=nodes, started="2026-11-22T12:00:00Z")
    assert re.fullmatch("[0-9a-f]{16}", find_run_id(old))
    assert find_run_id(old) == find_run_id(again)
    assert find_run_id(make_job("a")) != find_run_id(old), "the same name on other nodes"
    assert find_run_id(make_job("a", run_id="first")) == "first"


def test_resume_last_without_a_script_needs_a_job_of_the_bundled_program(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no job of the bundled program has results here"):
        find_checkpoint_to_resume(make_session(tmp_path, None))


@pytest.mark.parametrize("state", ["failed", "cancelled", "interrupted", "succeeded"])
def test_the_page_of_a_job_names_its_checkpoint_and_how_to_resume_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: JobState,
) -> None:
    session = make_session(tmp_path, "train.py")
    monkeypatch.setattr(COMMAND, "session", session)
    run = tmp_path / "runs/unlucky/node1/run"
    run.mkdir(parents=True)
    (run / "step3.pt").touch()
    job = JobRecord(job="unlucky", state=state, cause=None, ranks=(), home="runs/unlucky", script="train.py")
    result = make_job_result(session, job)
    checkpoint = "runs/unlucky/node1/run/step3.pt"
    assert result["checkpoint"] == checkpoint
    job_page(result)
    advice = f"; continue from it: awsddp train --resume unlucky train.py{NOTE}"
    ending = "" if state == "succeeded" else advice
    assert f"  checkpoint: {checkpoint}{ending}" in capsys.readouterr().err


def test_a_job_that_ctrl_c_ended_names_the_command_that_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("add_argument('--resume')\n")
    run = tmp_path / "runs/stopped/node0/run"
    run.mkdir(parents=True)
    (run / "step3.pt").touch()
    job = JobRecord(
        job="stopped", state="cancelled", cause=None, ranks=(), home="runs/stopped", script="train.py"
    )
    located = LocatedCluster(session=make_session(tmp_path, "train.py"))
    fleet: Any = None
    connected = ConnectedCluster(cluster=located, fleet=fleet)
    outcomes = iter([KeyboardInterrupt(), job])

    class FakeFollower:
        def __init__(self, connected: ConnectedCluster, *_: object, **__: object) -> None:
            self.connected = connected

        def run(self) -> JobRecord:
            outcome = next(outcomes)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

    monkeypatch.setattr(follow, "JobFollower", FakeFollower)
    for name in ("make_merger", "end_ranks"):
        monkeypatch.setattr(follow, name, lambda *_, **__: None)
    monkeypatch.setattr(follow, "describe_cost", lambda _: "")
    monkeypatch.setattr(LocatedCluster, "record", None)
    monkeypatch.setattr(
        follow, "fetch_followed_job", lambda connected, job: make_job_result(connected.session, job)
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted) as error:
        follow.follow_to_end(connected, job, on_lines=lambda _: None)
    resume, down = error.value.next.splitlines()
    command = "awsddp train --resume stopped train.py -- --resume '{resume}'"
    assert resume == f"{command}   # continue from its checkpoint"
    assert down.startswith("awsddp down")
