"""Clusters of all regions and owners are listed; orphans are ended, and nothing else."""

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
from tests.support.owners import OTHER, ids, tagging


@pytest.fixture
def ctx(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session of a verb whose region is the cloud's."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    spec, job = load("demo", environ={}, overrides={"cluster.region": "us-east-1"})
    return Session(name="demo", home=tmp_path, settings=(spec, job))


def test_orphans_are_listed_asked_for_and_ended_and_no_others(
    aws: AwsClient, launcher: Launcher, ctx: Session
) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    launcher(tagging(plan, expires="2099-01-01T00:00:00Z"))
    past = "2001-01-01T00:00:00Z"
    launcher(tagging(plan, expires=past), ids=ids("aaaaaaaa"))
    launcher(tagging(plan, expires=past, owner=OTHER), ids=ids("bbbbbbbb"))
    launcher.access(plan, ids=ids("cccccccc"))
    before = {node.instance_id for node in describe(aws, [])}
    states = {one["id"]: (one["mine"], one["orphan"]) for one in inventory.status_all(ctx)}
    assert states == {
        IDS["cluster_id"]: (True, False),
        "aaaaaaaa": (True, True),
        "bbbbbbbb": (False, False),
        "cccccccc": (True, True),
    }

    def refuse(what: str) -> None:
        raise Interrupted(what)

    with pytest.raises(Interrupted) as caught:
        inventory.down_orphans(ctx, confirm=refuse)
    assert "aaaaaaaa" in caught.value.message
    assert "bbbbbbbb" not in caught.value.message
    assert {node.instance_id for node in describe(aws, []) if node.state == "running"} == before

    ended = inventory.down_orphans(ctx, confirm=lambda what: None)
    assert len(ended["terminated"]) == 2
    assert {one["id"] for one in inventory.status_all(ctx)} == {IDS["cluster_id"], "bbbbbbbb"}
    assert len(find_clusters(aws, "demo", OTHER)[0].live) == 2
    assert inventory.down_orphans(ctx, confirm=refuse)["terminated"] == ()


def test_orphan_with_results_is_kept_unless_they_are_discarded(
    aws: AwsClient, launcher: Launcher, ctx: Session
) -> None:
    past = tagging(plan_for(aws, instance_type="g5.xlarge"), expires="2001-01-01T00:00:00Z")
    launcher(past, ids=ids("aaaaaaaa"))
    launcher(past, ids=ids("bbbbbbbb"))
    owing = next(one for one in find_clusters(aws, "demo", USER_ID) if one.id == "aaaaaaaa")
    power.keep_on_poweroff(aws, owing.live, "train-1")
    asked: list[str] = []
    with pytest.raises(LeftoverError, match=r"demo \(aaaaaaaa\): results of train-1") as kept:
        inventory.down_orphans(ctx, confirm=asked.append)
    assert "awsddp -c demo fetch train-1" in kept.value.next
    assert "bbbbbbbb" in asked[0]
    assert "aaaaaaaa" not in asked[0]
    assert {one["id"] for one in inventory.status_all(ctx)} == {"aaaaaaaa"}
    assert inventory.down_orphans(ctx, discard=True, confirm=asked.append)["clusters"] == ("aaaaaaaa",)
    assert inventory.status_all(ctx) == []


def test_an_orphan_that_cannot_be_ended_is_a_leftover(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, ctx: Session
) -> None:
    launcher.access(plan_for(aws, instance_type="g5.xlarge"))
    cloud.fail("DeleteKeyPair", *["UnauthorizedOperation"] * 30)
    with pytest.raises(LeftoverError) as caught:
        inventory.down_orphans(ctx, confirm=lambda what: None)
    assert "key-" in caught.value.why
