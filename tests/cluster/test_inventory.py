"""Clusters of all regions and owners are listed; only orphans are terminated."""

from pathlib import Path

import pytest

from awsddp.aws import power
from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import describe, find_clusters
from awsddp.cluster import inventory
from awsddp.errors import Interrupted, LeftoverError
from awsddp.session.context import Session
from awsddp.settings.loader import load
from tests.support.moto_cloud import IDS, USER_ID, Cloud, Launcher, plan_for
from tests.support.owners import OTHER, ids, with_tags


@pytest.fixture
def session(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session in the region of the cloud."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    spec, job = load("demo", environ={}, overrides={"cluster.region": "us-east-1"})
    return Session(name="demo", home=tmp_path, settings=(spec, job))


def test_down_orphans_confirms_and_terminates_own_orphans_and_no_others(
    aws: AwsClient, launcher: Launcher, session: Session
) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    launcher(with_tags(plan, expires="2099-01-01T00:00:00Z"))
    past = "2001-01-01T00:00:00Z"
    launcher(with_tags(plan, expires=past), ids=ids("aaaaaaaa"))
    launcher(with_tags(plan, expires=past, owner=OTHER), ids=ids("bbbbbbbb"))
    launcher.access(plan, ids=ids("cccccccc"))
    before = {node.instance_id for node in describe(aws, [])}
    states = {row["id"]: (row["mine"], row["orphan"]) for row in inventory.status_all(session)}
    assert states == {
        IDS["cluster_id"]: (True, False),
        "aaaaaaaa": (True, True),
        "bbbbbbbb": (False, False),
        "cccccccc": (True, True),
    }

    def refuse(question: str) -> None:
        raise Interrupted(question)

    with pytest.raises(Interrupted) as error:
        inventory.down_orphans(session, confirm=refuse)
    assert "aaaaaaaa" in error.value.message
    assert "bbbbbbbb" not in error.value.message
    assert {node.instance_id for node in describe(aws, []) if node.state == "running"} == before

    ended = inventory.down_orphans(session, confirm=lambda question: None)
    assert len(ended["terminated"]) == 2
    assert {row["id"] for row in inventory.status_all(session)} == {IDS["cluster_id"], "bbbbbbbb"}
    assert len(find_clusters(aws, "demo", OTHER)[0].live) == 2
    assert inventory.down_orphans(session, confirm=refuse)["terminated"] == ()


def test_an_orphan_with_unfetched_results_is_kept_unless_they_are_discarded(
    aws: AwsClient, launcher: Launcher, session: Session
) -> None:
    expired = with_tags(plan_for(aws, instance_type="g5.xlarge"), expires="2001-01-01T00:00:00Z")
    launcher(expired, ids=ids("aaaaaaaa"))
    launcher(expired, ids=ids("bbbbbbbb"))
    unfetched = next(row for row in find_clusters(aws, "demo", USER_ID) if row.id == "aaaaaaaa")
    power.keep_on_poweroff(aws, unfetched.live, "train-1")
    prompts: list[str] = []
    with pytest.raises(LeftoverError, match=r"demo \(aaaaaaaa\): results of train-1") as error:
        inventory.down_orphans(session, confirm=prompts.append)
    assert "awsddp -c demo fetch train-1" in error.value.next
    assert "bbbbbbbb" in prompts[0]
    assert "aaaaaaaa" not in prompts[0]
    assert {row["id"] for row in inventory.status_all(session)} == {"aaaaaaaa"}
    assert inventory.down_orphans(session, discard=True, confirm=prompts.append)["clusters"] == ("aaaaaaaa",)
    assert inventory.status_all(session) == []


def test_an_orphan_that_cannot_be_terminated_is_reported_as_a_leftover(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, session: Session
) -> None:
    launcher.access(plan_for(aws, instance_type="g5.xlarge"))
    cloud.fail("DeleteKeyPair", *["UnauthorizedOperation"] * 30)
    with pytest.raises(LeftoverError) as error:
        inventory.down_orphans(session, confirm=lambda question: None)
    assert "key-" in error.value.why
