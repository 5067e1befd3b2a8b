"""`run` if one of its verbs fails: the job's state is reported, and other jobs go on."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws import waits
from awsddp.cluster import run as run_module
from awsddp.cluster.run import run_job as run
from awsddp.errors import (
    AwsddpError,
    CloudError,
    ConfigError,
    Interrupted,
    InUse,
    NodeError,
    NotFoundError,
    UsageError,
)
from awsddp.job.script import check_script
from awsddp.model.documents import JobDocument, RunDocument
from tests.support.folder_nodes import World

DONE = JobDocument(job="j", state="succeeded", cause=None, ranks=(), home="runs/j")


class Parts:
    """Replaces the verbs that `run` calls; an outcome that is an error is raised, any other is returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **outcomes: Any) -> None:
        self.called: list[str] = []
        for name in ("check_job", "up", "train_job", "down", "stop"):
            monkeypatch.setattr(run_module, name, self._part(name, outcomes.get(name, DONE)))

    def _part(self, name: str, outcome: Any) -> Any:
        def call_part(*_: object, **__: object) -> Any:
            self.called.append(name)
            if isinstance(outcome, AwsddpError):
                raise outcome
            return outcome

        return call_part


def run_in(world: World) -> RunDocument:
    return run(world.session(), confirm=lambda _: None, on_lines=lambda _: None)


def make_error() -> NodeError:
    error = NodeError("job j succeeded, its results are not all fetched")
    error.result = DONE
    return error


def test_run_succeeds_if_the_results_are_fetched_in_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Parts(monkeypatch, train_job=make_error())
    monkeypatch.setattr(run_module, "find_fetched_job", lambda _, name: name == "j")
    assert run_in(world).train == replace(DONE, fetched=True)


def test_run_stops_the_nodes_and_reports_the_job_if_its_results_are_not_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, train_job=make_error(), down=NodeError("the results of j are not fetched"))
    with pytest.raises(
        NodeError, match=r"^the results of j are not fetched; the nodes were stopped"
    ) as error:
        run_in(world)
    assert parts.called == ["check_job", "up", "train_job", "down", "stop"]
    assert (error.value.result.train, error.value.result.down) == (DONE, None)


def test_run_stops_the_nodes_if_this_machine_cannot_write_the_results(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(
        monkeypatch,
        train_job=make_error(),
        down=ConfigError("cannot write runs/j", "No space left on device"),
    )
    with pytest.raises(ConfigError, match=r"^cannot write runs/j; the nodes were stopped") as error:
        run_in(world)
    assert parts.called[-1] == "stop"
    assert error.value.next == "awsddp up && awsddp down   # once this is corrected"


def test_run_does_not_retry_what_aws_refuses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Parts(monkeypatch, down=CloudError("AWS refuses TerminateInstances"))
    monkeypatch.setitem(vars(waits.CLOCK), "sleep", lambda seconds: pytest.fail("retried"))
    with pytest.raises(CloudError, match="TerminateInstances"):
        run_in(world)


def test_run_leaves_a_cluster_on_which_another_job_runs_unchanged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, train_job=InUse("job other runs on node0"))
    with pytest.raises(InUse):
        run_in(world)
    assert parts.called == ["check_job", "up", "train_job"]


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        ({"script": "nosuch.py"}, UsageError, "script not found: nosuch.py"),
        ({"script": "pkg.nosuch", "module": True}, UsageError, "module not found: pkg.nosuch"),
        ({"args": ["{nosuch}"]}, UsageError, "invalid placeholder {nosuch}"),
        ({"name": "last"}, UsageError, "job name 'last' is reserved"),
        ({"resume": "nosuch"}, ConfigError, "job nosuch has no checkpoint here"),
        ({"resume": "last"}, ConfigError, "no job of the bundled program has results here"),
        ({"after": "nosuch"}, NotFoundError, "no job nosuch on the nodes of this job"),
        ({"launcher": "nosuch"}, ConfigError, "nosuch"),
    ],
)
def test_run_refuses_an_invalid_job_before_it_calls_aws(
    world: World, monkeypatch: pytest.MonkeyPatch, job: dict[str, object], error: type[AwsddpError], text: str
) -> None:
    (world.project / "pkg").mkdir()
    (world.project / "pkg" / "__init__.py").touch()
    monkeypatch.setattr(run_module, "up", lambda *_, **__: pytest.fail("up was called"))
    session = replace(world.session(**job), home=world.project.parent / "new")
    with pytest.raises(error, match=re.escape(text)):
        run(session, confirm=lambda _: None, on_lines=lambda _: None)


@pytest.mark.parametrize(
    ("script", "hint"), [("tran.py", "train.py"), ("train", "train.py"), ("pkg/modle.py", "pkg/model.py")]
)
def test_a_missing_script_suggests_the_most_similar_one(tmp_path: Path, script: str, hint: str) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/model.py"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError) as error:
        check_script(tmp_path, script, module=False)
    assert error.value.next == f"did you mean {hint}?"


@pytest.mark.parametrize("jobs", [(), (DONE,)], ids=["no job", "a job"])
def test_an_interrupted_run_mentions_results_only_if_there_was_a_job(
    world: World, monkeypatch: pytest.MonkeyPatch, jobs: tuple[JobDocument, ...]
) -> None:
    parts = Parts(monkeypatch)

    def interrupt(*_: object, **__: object) -> None:
        for job in jobs:
            world.session().folder.save_jobs(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "up", interrupt)
    with pytest.raises(Interrupted) as error:
        run_in(world)
    assert (
        error.value.why
        == "the results of j that could be fetched are in runs/j; " * bool(jobs) + "nothing is left"
    )
    assert parts.called[-1] == "down"


def test_run_refuses_a_folder_that_cannot_be_synced_before_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.project / ".gitignore").write_text("!\n")
    monkeypatch.setattr(run_module, "up", lambda *_, **__: pytest.fail("up was called"))
    with pytest.raises(ConfigError, match=r"\.gitignore: not a gitignore pattern"):
        run_in(world)


@pytest.mark.parametrize("module", ["pkg.train", "pkg", "pkg.sub", "torch.distributed.run"])
def test_a_module_in_the_folder_or_possibly_on_the_nodes_is_accepted(tmp_path: Path, module: str) -> None:
    for name in ("pkg/__init__.py", "pkg/train.py", "pkg/sub/__main__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    check_script(tmp_path, module, module=True)
