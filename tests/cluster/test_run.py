"""`run` when its parts fail: the job's verdict is kept, and nobody else's job is ended."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws import waits
from awsddp.cluster import run as verb
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
    """Stands in for the verbs that `run` is made of; an error is raised, anything else returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **outcomes: Any) -> None:
        self.called: list[str] = []
        for name in ("check_job", "up", "train", "down", "stop"):
            monkeypatch.setattr(verb, name, self._part(name, outcomes.get(name, DONE)))

    def _part(self, name: str, outcome: Any) -> Any:
        def part(*_: object, **__: object) -> Any:
            self.called.append(name)
            if isinstance(outcome, AwsddpError):
                raise outcome
            return outcome

        return part


def ran(world: World) -> RunDocument:
    return run(world.session(), confirm=lambda _: None, on_lines=lambda _: None)


def partly() -> NodeError:
    error = NodeError("job j succeeded, its results are not all fetched")
    error.result = DONE
    return error


def test_results_that_come_home_in_the_end_leave_the_verdict_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Parts(monkeypatch, train=partly())
    monkeypatch.setattr(verb, "find_fetched_job", lambda _, name: name == "j")
    assert ran(world).train == replace(DONE, fetched=True)


def test_verdict_is_told_where_the_nodes_keep_the_results(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, train=partly(), down=NodeError("the results of j are not fetched"))
    with pytest.raises(
        NodeError, match=r"^the results of j are not fetched; the nodes were stopped"
    ) as error:
        ran(world)
    assert parts.called == ["check_job", "up", "train", "down", "stop"]
    assert (error.value.result.train, error.value.result.down) == (DONE, None)


def test_nodes_are_stopped_where_this_machine_cannot_keep_their_results(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(
        monkeypatch, train=partly(), down=ConfigError("cannot write runs/j", "No space left on device")
    )
    with pytest.raises(ConfigError, match=r"^cannot write runs/j; the nodes were stopped") as error:
        ran(world)
    assert parts.called[-1] == "stop"
    assert error.value.next == "awsddp up && awsddp down   # once this is corrected"


def test_what_aws_refuses_for_good_is_not_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Parts(monkeypatch, down=CloudError("AWS refuses TerminateInstances"))
    monkeypatch.setitem(vars(waits.CLOCK), "sleep", lambda seconds: pytest.fail("it is tried again"))
    with pytest.raises(CloudError, match="TerminateInstances"):
        ran(world)


def test_cluster_on_which_another_job_runs_is_left_as_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, train=InUse("job other runs on node0"))
    with pytest.raises(InUse):
        ran(world)
    assert parts.called == ["check_job", "up", "train"]


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        ({"script": "nosuch.py"}, UsageError, "script not found: nosuch.py"),
        ({"script": "pkg.nosuch", "module": True}, UsageError, "module not found: pkg.nosuch"),
        ({"args": ["{nosuch}"]}, UsageError, "invalid placeholder {nosuch}"),
        ({"name": "last"}, UsageError, "job name 'last' is reserved"),
        ({"resume": "nosuch"}, ConfigError, "job nosuch has no checkpoint here"),
        ({"resume": "last"}, ConfigError, "no job of the bundled program has results here"),
        ({"after": "nosuch"}, NotFoundError, "no job nosuch on the nodes of this one"),
        ({"launcher": "nosuch"}, ConfigError, "nosuch"),
    ],
)
def test_what_train_refuses_of_a_job_run_refuses_before_it_asks_aws_anything(
    world: World, monkeypatch: pytest.MonkeyPatch, job: dict[str, object], error: type[AwsddpError], text: str
) -> None:
    (world.project / "pkg").mkdir()
    (world.project / "pkg" / "__init__.py").touch()
    monkeypatch.setattr(verb, "up", lambda *_, **__: pytest.fail("up was called"))
    session = replace(world.session(**job), home=world.project.parent / "new")
    with pytest.raises(error, match=re.escape(text)):
        run(session, confirm=lambda _: None, on_lines=lambda _: None)


@pytest.mark.parametrize(
    ("typed", "meant"), [("tran.py", "train.py"), ("train", "train.py"), ("pkg/modle.py", "pkg/model.py")]
)
def test_script_that_is_not_there_names_the_one_that_is_most_like_it(
    tmp_path: Path, typed: str, meant: str
) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/model.py"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError) as refused:
        check_script(tmp_path, typed, module=False)
    assert refused.value.next == f"did you mean {meant}?"


@pytest.mark.parametrize("jobs", [(), (DONE,)], ids=["no job", "a job"])
def test_interrupted_run_speaks_of_results_only_where_there_was_a_job(
    world: World, monkeypatch: pytest.MonkeyPatch, jobs: tuple[JobDocument, ...]
) -> None:
    parts = Parts(monkeypatch)

    def interrupt(*_: object, **__: object) -> None:
        for job in jobs:
            world.session().folder.save_jobs(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "up", interrupt)
    with pytest.raises(Interrupted) as left:
        ran(world)
    assert left.value.why == "what could be fetched of j is in runs/j; " * bool(jobs) + "nothing is left"
    assert parts.called[-1] == "down"


def test_folder_that_cannot_be_sent_is_refused_before_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.project / ".gitignore").write_text("!\n")
    monkeypatch.setattr(verb, "up", lambda *_, **__: pytest.fail("up was called"))
    with pytest.raises(ConfigError, match=r"\.gitignore: not a gitignore pattern"):
        ran(world)


@pytest.mark.parametrize("module", ["pkg.train", "pkg", "pkg.sub", "torch.distributed.run"])
def test_module_that_is_there_or_may_be_on_the_nodes_is_no_mistake(tmp_path: Path, module: str) -> None:
    for name in ("pkg/__init__.py", "pkg/train.py", "pkg/sub/__main__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    check_script(tmp_path, module, module=True)
