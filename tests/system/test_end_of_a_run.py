"""A `run` whose job ends while AWS fails: it retries, and names the instances that it could not terminate."""

from typing import Any

import pytest

from awsddp.cluster import run
from awsddp.model.documents import JobDocument
from awsddp.session.context import Session
from tests.support.acts import run_fetch, run_train
from tests.support.local_cloud import add_fault
from tests.support.world import World, agree


@pytest.mark.parametrize(
    ("fails_s", "code"),
    [(30, 0), *(pytest.param(*case, marks=pytest.mark.prove) for case in ((300, 0), (7200, 4)))],
)
def test_run_terminates_its_nodes_or_names_them(world: World, fails_s: float, code: int) -> None:
    cloud = world.cloud.info

    def run_until_aws_fails(session: Session, **_: Any) -> JobDocument:
        run_train(session)
        run_fetch(session)
        add_fault(cloud, "*", "InternalError", for_s=fails_s)
        return JobDocument(job="train-1", state="succeeded", cause=None, ranks=(), home="runs/train-1")

    def run_that_job(session: Session) -> dict[str, Any]:
        run.train_job, run.check_job = run_until_aws_fails, lambda session, **_: None  # type: ignore[assignment]
        return run.run_job(session, confirm=agree, on_lines=lambda lines: None)

    began = world.clock.read()
    ended = world.run(run_that_job)
    assert ended.code == code, ended.text
    if code == 0:
        assert (len(ended.document["down"]["terminated"]), world.cloud.live_instances()) == (2, [])
        return
    assert run.END_S <= world.clock.read() - began < 2 * run.END_S
    assert "2 x g5.xlarge may run in us-east-1, at $" in ended.text
    world.cloud.clear_faults()
    assert all(instance["InstanceId"] in ended.text for instance in world.cloud.live_instances()), ended.text
    assert "awsddp down   # then end them" in ended.text
