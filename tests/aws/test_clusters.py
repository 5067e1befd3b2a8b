"""What carries our tags anywhere: clusters, others', orphans; and the end of orphans and of nothing else."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws import power
from awsddp.aws.client import Aws
from awsddp.aws.clusters import Everywhere, Holding, describe, find_clusters, find_everywhere, find_in
from awsddp.cluster import inventory
from awsddp.cluster.status import status
from awsddp.errors import Interrupted, LeftoverError
from awsddp.plan.records import LaunchPlan, names
from awsddp.session.context import Session
from awsddp.settings.loader import load
from tests.support.machine import On
from tests.support.moto_cloud import IDS, NOW, USER_ID, Cloud, Launcher, plan_for

OTHER = "AIDASOMEBODYELSE"


def ids(cluster_id: str) -> dict[str, str]:
    return names("demo", cluster_id)


def tagging(plan: LaunchPlan, **tags: str) -> LaunchPlan:
    """The plan with other values of our own tags: another owner's, or one that expires another time."""

    def put(value: Any) -> Any:
        match value:
            case {"Key": key} if key.removeprefix("awsddp:") in tags:
                return {"Key": key, "Value": tags[key.removeprefix("awsddp:")]}
            case dict():
                return {key: put(item) for key, item in value.items()}
            case list():
                return [put(item) for item in value]
        return value

    changed = tuple(replace(one, parameters=put(one.parameters)) for one in plan.requests)
    return replace(plan, requests=changed)


def holdings(aws: Aws, **later: float) -> dict[str, Holding]:
    found = find_in(aws, owner=USER_ID, now=NOW + timedelta(**later))
    return {one.cluster.id: one for one in found}


def test_everything_is_found_and_told_apart(aws: Aws, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    launcher(plan)
    launcher(tagging(plan, owner=OTHER), ids=ids("bbbbbbbb"))
    launcher.access(plan, ids=ids("cccccccc"))
    found = holdings(aws)
    assert {key: (one.mine, one.orphan, len(one.cluster.live)) for key, one in found.items()} == {
        IDS["cluster_id"]: (True, False, 2),
        "bbbbbbbb": (False, False, 2),
        "cccccccc": (True, True, 0),
    }
    assert len(found["cccccccc"].cluster.leftovers) == 3
    assert found["cccccccc"].price_usd_per_hour == 0
    each = 1.006 + 0.005 + 200 * 0.08 / 730
    assert found[IDS["cluster_id"]].price_usd_per_hour == pytest.approx(2 * each, abs=1e-3)


def test_an_interface_that_a_launch_left_behind_is_an_orphan(aws: Aws, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    tags = {"awsddp:id": "dddddddd", "awsddp:cluster": "demo", "awsddp:owner": USER_ID}
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    tagged = [{"ResourceType": "network-interface", "Tags": pairs}]
    aws.call("CreateNetworkInterface", {"SubnetId": plan.subnets[0].id, "TagSpecifications": tagged})
    [found] = holdings(aws).values()
    assert (found.cluster.name, found.orphan, len(found.cluster.leftovers)) == ("demo", True, 1)


def test_what_is_past_its_expiry_is_an_orphan_of_its_owner_alone(aws: Aws, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    launcher(plan)
    launcher(tagging(plan, owner=OTHER), ids=ids("bbbbbbbb"))
    found = holdings(aws, hours=25)
    assert found[IDS["cluster_id"]].orphan
    assert not found["bbbbbbbb"].orphan


def test_a_stopped_cluster_is_no_orphan_and_costs_its_disks(aws: Aws, launcher: Launcher) -> None:
    nodes = launcher(plan_for(aws, instance_type="g5.xlarge"))
    aws.call("StopInstances", {"InstanceIds": [node.instance_id for node in nodes]})
    [found] = holdings(aws).values()
    assert not found.orphan
    assert found.price_usd_per_hour == pytest.approx(2 * 200 * 0.08 / 730, abs=1e-3)


def test_a_region_that_refuses_does_not_hide_the_others(aws: Aws, cloud: Cloud, launcher: Launcher) -> None:
    launcher(plan_for(aws, instance_type="g5.xlarge"))
    denied = Aws(replace(cloud.target, region="eu-west-1"))
    cloud.fail("DescribeVolumes", "UnauthorizedOperation")

    def look(region: str) -> Everywhere:
        gateways = {"us-east-1": aws, "eu-west-1": denied}
        return find_everywhere(gateways.__getitem__, [region], owner=USER_ID, now=NOW)

    assert look("eu-west-1").unread == ("eu-west-1: permission denied: DescribeVolumes in " + cloud.endpoint,)
    assert len(look("us-east-1").holdings) == 1


@pytest.fixture
def ctx(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session of a verb whose region is the cloud's."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    spec, job = load("demo", environ={}, overrides={"cluster.region": "us-east-1"})
    return Session(name="demo", home=tmp_path, settings=(spec, job))


def test_orphans_are_listed_asked_for_and_ended_and_no_others(
    aws: Aws, launcher: Launcher, ctx: Session
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
    aws: Aws, launcher: Launcher, ctx: Session
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
    aws: Aws, cloud: Cloud, launcher: Launcher, ctx: Session
) -> None:
    launcher.access(plan_for(aws, instance_type="g5.xlarge"))
    cloud.fail("DeleteKeyPair", *["UnauthorizedOperation"] * 30)
    with pytest.raises(LeftoverError) as caught:
        inventory.down_orphans(ctx, confirm=lambda what: None)
    assert "key-" in caught.value.why


def test_status_without_a_cluster_searches_one_region(
    on: On, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    ctx = on("laptop").context(cluster__region=None)
    assert status(ctx)["state"] == "absent"
    assert cloud.sent("DescribeInstances") and not cloud.sent("DescribeRegions")
