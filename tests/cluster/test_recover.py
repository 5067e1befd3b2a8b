"""recover: the steps that continue a run, on nodes that are folders. Real machines are in tests/system."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws import instances, waits
from awsddp.aws.waits import Clock
from awsddp.cluster import recover as recover_module
from awsddp.cluster.recover import LOCK_PART, recover, train_and_recover
from awsddp.errors import ConfigError, NodeError
from awsddp.job.logs import logs
from awsddp.model.documents import JobDocument
from awsddp.model.records import JobRecord
from awsddp.nodes import rsync
from awsddp.session.context import Session
from tests.support.folder_nodes import World, start_script
from tests.support.waiting import until

DIES = "import sys; sys.exit(int(sys.argv[1]))\n"
GOES_ON = "import os; print(os.environ['AWSDDP_RUN_ID'], os.environ.get('AWSDDP_RESUME'))\n"
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
