"""`run` when its parts fail: the job's verdict is kept, and nobody else's job is ended."""

from dataclasses import replace
from typing import Any

import pytest

from awsddp import whole_run as verb
from awsddp.aws import waits
from awsddp.errors import AwsddpError, CloudError, InUse, NodeError
from awsddp.returns import JobDocument, RunDocument
from awsddp.whole_run import run_job as run
from tests.verbs.conftest import World

DONE = JobDocument(job="j", state="succeeded", cause=None, ranks=(), home="runs/j")


class Parts:
    """Stands in for the verbs that `run` is made of; an error is raised, anything else returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **outcomes: Any) -> None:
        self.called: list[str] = []
        for name in ("check", "up", "train", "down", "stop"):
            monkeypatch.setattr(verb, name, self._part(name, outcomes.get(name, DONE)))

    def _part(self, name: str, outcome: Any) -> Any:
        def part(*_: object, **__: object) -> Any:
            self.called.append(name)
            if isinstance(outcome, AwsddpError):
                raise outcome
            return outcome

        return part


def ran(world: World) -> RunDocument:
    return run(world.ctx(), confirm=lambda _: None, on_lines=lambda _: None)


def partly() -> NodeError:
    error = NodeError("job j succeeded, its results are not all fetched")
    error.result = DONE
    return error


def test_results_that_come_home_in_the_end_leave_the_verdict_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Parts(monkeypatch, train=partly())
    monkeypatch.setattr(verb, "whole_at_home", lambda ctx, name: name == "j")
    assert ran(world).train == replace(DONE, fetched=True)


def test_verdict_is_told_where_the_nodes_keep_the_results(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, train=partly(), down=NodeError("the results of j are not fetched"))
    with pytest.raises(
        NodeError, match=r"^the results of j are not fetched; the nodes were stopped"
    ) as error:
        ran(world)
    assert parts.called == ["check", "up", "train", "down", "stop"]
    assert (error.value.result.train, error.value.result.down) == (DONE, None)


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
    assert parts.called == ["check", "up", "train"]
