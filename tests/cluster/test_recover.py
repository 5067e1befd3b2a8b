"""recover: the steps that continue a run, on nodes that are folders. Real machines are in tests/system."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws import instances, waits
from awsddp.aws.waits import Clock
from awsddp.cluster import recover as recover_module
from awsddp.cluster.recover import LOCK_PART, recover, train_and_recover
from awsddp.errors import CapacityError, ConfigError, NodeError
from awsddp.job.cancel import cancel
from awsddp.job.logs import logs
from awsddp.model.documents import JobDocument
from awsddp.model.records import JobRecord
from awsddp.nodes import rsync
from awsddp.session.context import Session
from tests.support.fleet import all_processes
from tests.support.folder_nodes import SLEEPS, World, start_script
from tests.support.waiting import until

DIES = "import sys; sys.exit(int(sys.argv[1]))\n"
GOES_ON = "import os; print(os.environ['AWSDDP_RUN_ID'], os.environ.get('AWSDDP_RESUME'))\n"
RESUMES = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
resume, run = parser.parse_args().resume, os.environ["AWSDDP_RUN_DIR"]
if run.endswith("w-1.2/run") and os.environ["RANK"] == "0":
    open(run + "/latest", "w").write("a checkpoint")
sys.exit(0 if resume else 75)
"""
WRITES = "import os; open(os.environ['AWSDDP_RUN_DIR'] + '/w.txt', 'w').write('x' * (1 << 20))\n"


@pytest.fixture
def ups(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Session]]:
    """The sessions with which `up` was called; it replaces node 1."""
    called: list[Session] = []

    def up(session: Session, **_: object) -> None:
        called.append(session)
        world.replace_node(1)

    monkeypatch.setattr(recover_module, "up", up)
    monkeypatch.setattr(instances, "list_impaired", lambda *_: frozenset())
    yield called


def run_to_end(world: World, script: str, **job: Any) -> JobRecord:
    job_record = start_script(world, script, **job)
    return logs(world.session(), job=job_record.job, follow=True, on_lines=lambda _: None)


def recover_in(world: World, **job: Any) -> JobDocument:
    return recover(world.session(**job), job=None, on_lines=lambda _: None)


def test_an_own_error_is_not_repeated(world: World, ups: list[Session]) -> None:
    failed = run_to_end(world, DIES.replace("sys.argv[1]", "'3'"))
    document = recover_in(world)
    assert (document.job, document.state, ups) == (failed.job, "failed", [])
    assert any("does not go on" in text for text in world.events)


def test_an_exit_code_of_the_user_goes_on_on_the_same_nodes(world: World, ups: list[Session]) -> None:
    failed = run_to_end(world, DIES.replace("sys.argv[1]", "'75'"), recover=1, recover_on=[75])
    (world.project / "w.py").write_text(GOES_ON)
    document = recover_in(world)
    assert (document.job, document.state, ups) == (f"{failed.job}.2", "succeeded", [])
    assert document.run_id == failed.run_id
    [recovery] = document.recoveries
    assert (recovery.job, recovery.kind, recovery.checkpoint) == (failed.job, "exit", None)
    stored = json.loads((world.project / "runs" / document.job / "job.json").read_bytes())
    assert stored["recoveries"][0]["job"] == failed.job


def test_a_job_of_another_project_or_cluster_is_refused(
    world: World, ups: list[Session], tmp_path: Path
) -> None:
    run_to_end(world, DIES.replace("sys.argv[1]", "'3'"))
    session = world.session()
    sync = replace(session.job_spec.sync, workdir=str(tmp_path / "other"))
    other = session.with_settings(job_spec=replace(session.job_spec, sync=sync))
    with pytest.raises(ConfigError, match="not a job of this project"):
        recover(other, job="w-1", on_lines=lambda _: None)
    with pytest.raises(ConfigError, match="ran on cluster default") as error:
        recover(replace(world.session(), name="second"), job="w-1", on_lines=lambda _: None)
    assert error.value.next == "awsddp -c default recover w-1"


def test_a_second_client_is_told_who_continues_the_run(world: World, ups: list[Session]) -> None:
    run_to_end(world, DIES.replace("sys.argv[1]", "'3'"))
    with (
        world.folder.lock("train", part=LOCK_PART),
        pytest.raises(ConfigError, match="in use") as error,
    ):
        recover_in(world)
    assert "`awsddp train`" in error.value.why


def test_an_error_after_the_start_of_the_first_job_is_the_error_of_the_run(
    world: World, ups: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job succeeds, but its results cannot be written; after three more attempts the run ends."""
    pauses: list[float] = []

    def refuse(*_: object, **__: object) -> None:
        raise NodeError("no space left on this machine")

    monkeypatch.setattr(rsync, "transfer", refuse)
    monkeypatch.setattr(waits, "CLOCK", Clock(sleep=pauses.append))
    (world.project / "w.py").write_text(WRITES)
    with pytest.raises(NodeError, match="no space left") as error:
        train_and_recover(world.session(script="w.py", recover=1), on_lines=lambda _: None)
    assert isinstance(error.value.result, JobDocument)
    assert (error.value.result.state, error.value.result.fetched) == ("succeeded", False)
    assert (ups, pauses) == ([], [20.0, 40.0])


def test_results_of_a_job_that_succeeded_are_fetched_although_they_are_in_s3(
    world: World, ups: list[Session]
) -> None:
    """Another command has removed the nodes' tags, as it does once all results are in S3."""
    started = start_script(world, WRITES, recover=1)
    until(lambda: world.homes.document(0, started.job)["state"] == "succeeded")
    world.tags.clear()
    document = recover_in(world)
    assert (document.job, document.state, document.fetched, ups) == (started.job, "succeeded", True, [])


def test_a_run_goes_on_with_the_files_as_they_are_now_and_that_is_reported(
    world: World, ups: list[Session]
) -> None:
    failed = run_to_end(world, DIES.replace("sys.argv[1]", "'75'"), recover=1, recover_on=[75])
    for name in ("w.py", "a.py", "b.py", "c.py"):
        (world.project / name).write_text(GOES_ON)
        os.utime(world.project / name, (time.time() + 5,) * 2)
    assert recover_in(world).state == "succeeded"
    files = "a.py, b.py, c.py and 1 other"
    assert f"changed since {failed.job} started, and sent as they are now: {files}" in world.events


def test_a_variable_that_is_not_set_is_refused_before_anything_is_launched(
    world: World, ups: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "hidden")
    overrides = {"recover": 1, "recover_on": [75]}
    script = DIES.replace("sys.argv[1]", "'75'")
    session = world.session(script="w.py", **overrides)
    env = replace(session.job_spec.env, secrets=("API_TOKEN",))
    monkeypatch.setattr(
        world, "session", lambda **_: session.with_settings(job_spec=replace(session.job_spec, env=env))
    )
    run_to_end(world, script)
    monkeypatch.delenv("API_TOKEN")
    world.set_state(1, "terminated")
    with pytest.raises(ConfigError, match="API_TOKEN not set"):
        recover_in(world)
    assert ups == []


@pytest.mark.parametrize("verb", ["down", "cancel"])
def test_a_run_that_the_user_ended_goes_on_only_by_hand(world: World, ups: list[Session], verb: str) -> None:
    failed = run_to_end(world, DIES.replace("sys.argv[1]", "'75'"), recover=1, recover_on=[75])
    (world.project / "w.py").write_text(GOES_ON)
    if verb == "cancel":
        cancel(world.session(), job=failed.job)
    else:
        world.folder.end_runs("down")
    document = recover(world.session(), job=None, on_lines=lambda _: None, detach=True)
    assert (document.job, document.state) == (failed.job, "failed")
    assert f"{failed.job} does not go on: `awsddp {verb}` ended the run" in world.events
    assert recover_in(world).job == f"{failed.job}.2"


def test_a_run_that_the_user_ends_during_a_pause_does_not_go_on(
    world: World, ups: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_end(world, DIES.replace("sys.argv[1]", "'75'"), recover=1, recover_on=[75])
    attempts: list[float] = []

    def refuse(*_: object, **__: object) -> None:
        attempts.append(0)
        raise CapacityError("no capacity")

    monkeypatch.setattr(recover_module, "up", refuse)
    monkeypatch.setattr(waits, "CLOCK", Clock(sleep=lambda _: world.folder.end_runs("down")))
    world.set_state(1, "terminated")
    document = recover_in(world)
    assert (document.job, document.state, len(attempts)) == ("w-1", "failed", 1)
    assert "w-1 does not go on: `awsddp down` ended the run" in world.events


def test_the_next_step_of_a_run_that_cannot_go_on_is_a_new_run(world: World, ups: list[Session]) -> None:
    job = start_script(world, SLEEPS, recover=1, heartbeat_timeout="5s")
    until(world.homes.ranks_are_up)
    for pid, environ, _ in all_processes():
        if f"HOME={world.homes.homes[1]}".encode() in environ.split(b"\0"):
            os.kill(pid, signal.SIGKILL)
    until(lambda: world.homes.document(0, job.job)["state"] == "failed")
    world.replace_node(1)
    world.folder.update(lambda record: replace(record, expires=datetime.now(UTC) + timedelta(seconds=100)))
    document = recover_in(world)
    assert document.cause is not None and document.cause.kind == "node_lost"
    assert document.cause.next.startswith("awsddp train ") and "--recover 1" in document.cause.next
    assert document.cause.next.endswith(" w.py   # a new run")


def test_cancel_of_a_runs_first_job_ends_the_job_that_continues_it(world: World, ups: list[Session]) -> None:
    failed = run_to_end(world, DIES.replace("sys.argv[1]", "'75'"), recover=1, recover_on=[75])
    (world.project / "w.py").write_text(SLEEPS)
    second = recover(world.session(), job=None, on_lines=lambda _: None, detach=True)
    assert (second.job, second.state) == (f"{failed.job}.2", "running")
    cancelled = cancel(world.session(), job=failed.job)
    assert (cancelled.job, cancelled.state) == (second.job, "cancelled")
    assert cancel(world.session(), job=failed.job).job == failed.job


def test_a_script_with_an_option_for_the_checkpoint_gets_it_once_there_is_one(
    world: World, ups: list[Session]
) -> None:
    first = run_to_end(world, RESUMES, recover=5, recover_on=[75])
    document = recover_in(world)
    assert (first.args, document.job, document.state) == ((), "w-1.3", "succeeded")
    assert document.args == ("--resume", "{resume}")
    last = document.recoveries[-1].checkpoint or ""
    assert (document.recoveries[0].checkpoint, Path(last).parts[-4:]) == (
        None,
        ("w-1.2", "node0", "run", "latest"),
    )
