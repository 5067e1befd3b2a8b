"""What carries our tags anywhere is found and told apart: clusters, those of others, orphans."""

from dataclasses import replace
from datetime import timedelta

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import Holding, RegionSearch, find_everywhere, find_in_region
from tests.support.moto_cloud import IDS, NOW, USER_ID, Cloud, Launcher, plan_for
from tests.support.owners import OTHER, ids, tagging


def holdings(aws: AwsClient, **later: float) -> dict[str, Holding]:
    found = find_in_region(aws, owner=USER_ID, now=NOW + timedelta(**later))
    return {one.cluster.id: one for one in found}


def test_everything_is_found_and_told_apart(aws: AwsClient, launcher: Launcher) -> None:
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


def test_an_interface_that_a_launch_left_behind_is_an_orphan(aws: AwsClient, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    tags = {"awsddp:id": "dddddddd", "awsddp:cluster": "demo", "awsddp:owner": USER_ID}
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    tagged = [{"ResourceType": "network-interface", "Tags": pairs}]
    aws.call("CreateNetworkInterface", {"SubnetId": plan.subnets[0].id, "TagSpecifications": tagged})
    [found] = holdings(aws).values()
    assert (found.cluster.name, found.orphan, len(found.cluster.leftovers)) == ("demo", True, 1)


def test_what_is_past_its_expiry_is_an_orphan_of_its_owner_alone(aws: AwsClient, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    launcher(plan)
    launcher(tagging(plan, owner=OTHER), ids=ids("bbbbbbbb"))
    found = holdings(aws, hours=25)
    assert found[IDS["cluster_id"]].orphan
    assert not found["bbbbbbbb"].orphan


def test_a_stopped_cluster_is_no_orphan_and_costs_its_disks(aws: AwsClient, launcher: Launcher) -> None:
    nodes = launcher(plan_for(aws, instance_type="g5.xlarge"))
    aws.call("StopInstances", {"InstanceIds": [node.instance_id for node in nodes]})
    [found] = holdings(aws).values()
    assert not found.orphan
    assert found.price_usd_per_hour == pytest.approx(2 * 200 * 0.08 / 730, abs=1e-3)


def test_a_region_that_refuses_does_not_hide_the_others(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    launcher(plan_for(aws, instance_type="g5.xlarge"))
    denied = AwsClient(replace(cloud.target, region="eu-west-1"))
    cloud.fail("DescribeVolumes", "UnauthorizedOperation")

    def look(region: str) -> RegionSearch:
        gateways = {"us-east-1": aws, "eu-west-1": denied}
        return find_everywhere(gateways.__getitem__, [region], owner=USER_ID, now=NOW)

    assert look("eu-west-1").unread == ("eu-west-1: permission denied: DescribeVolumes in " + cloud.endpoint,)
    assert len(look("us-east-1").holdings) == 1
