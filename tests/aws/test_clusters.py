"""Resources with awsddp's tags in all regions: own clusters, those of others, orphans."""

from dataclasses import replace
from datetime import timedelta

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import Holding, RegionSearch, find_everywhere, find_in_region
from tests.support.moto_cloud import IDS, NOW, USER_ID, Cloud, Launcher, plan_for
from tests.support.owners import OTHER, ids, with_tags


def find_holdings(aws: AwsClient, **later: float) -> dict[str, Holding]:
    holdings = find_in_region(aws, owner=USER_ID, now=NOW + timedelta(**later))
    return {holding.cluster.id: holding for holding in holdings}


def test_clusters_are_own_or_of_others_or_orphans(aws: AwsClient, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    launcher(plan)
    launcher(with_tags(plan, owner=OTHER), ids=ids("bbbbbbbb"))
    launcher.access(plan, ids=ids("cccccccc"))
    holdings = find_holdings(aws)
    assert {key: (item.mine, item.orphan, len(item.cluster.live)) for key, item in holdings.items()} == {
        IDS["cluster_id"]: (True, False, 2),
        "bbbbbbbb": (False, False, 2),
        "cccccccc": (True, True, 0),
    }
    assert len(holdings["cccccccc"].cluster.leftovers) == 3
    assert holdings["cccccccc"].price_usd_per_hour == 0
    node_usd = 1.006 + 0.005 + 200 * 0.08 / 730
    assert holdings[IDS["cluster_id"]].price_usd_per_hour == pytest.approx(2 * node_usd, abs=1e-3)


def test_an_interface_that_a_launch_left_behind_is_an_orphan(aws: AwsClient, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    tags = {"awsddp:id": "dddddddd", "awsddp:cluster": "demo", "awsddp:owner": USER_ID}
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    tagged = [{"ResourceType": "network-interface", "Tags": pairs}]
    aws.call("CreateNetworkInterface", {"SubnetId": plan.subnets[0].id, "TagSpecifications": tagged})
    [holding] = find_holdings(aws).values()
    assert (holding.cluster.name, holding.orphan, len(holding.cluster.leftovers)) == ("demo", True, 1)


def test_an_expired_cluster_is_an_orphan_only_for_its_owner(aws: AwsClient, launcher: Launcher) -> None:
    plan = plan_for(aws, instance_type="g5.xlarge")
    launcher(plan)
    launcher(with_tags(plan, owner=OTHER), ids=ids("bbbbbbbb"))
    holdings = find_holdings(aws, hours=25)
    assert holdings[IDS["cluster_id"]].orphan
    assert not holdings["bbbbbbbb"].orphan


def test_a_stopped_cluster_is_no_orphan_and_costs_its_disks(aws: AwsClient, launcher: Launcher) -> None:
    nodes = launcher(plan_for(aws, instance_type="g5.xlarge"))
    aws.call("StopInstances", {"InstanceIds": [node.instance_id for node in nodes]})
    [holding] = find_holdings(aws).values()
    assert not holding.orphan
    assert holding.price_usd_per_hour == pytest.approx(2 * 200 * 0.08 / 730, abs=1e-3)


def test_an_unreadable_region_does_not_hide_the_others(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    launcher(plan_for(aws, instance_type="g5.xlarge"))
    denied = AwsClient(replace(cloud.target, region="eu-west-1"))
    cloud.fail("DescribeVolumes", "UnauthorizedOperation")

    def find(region: str) -> RegionSearch:
        clients = {"us-east-1": aws, "eu-west-1": denied}
        return find_everywhere(clients.__getitem__, [region], owner=USER_ID, now=NOW)

    assert find("eu-west-1").unread == ("eu-west-1: permission denied: DescribeVolumes in " + cloud.endpoint,)
    assert len(find("us-east-1").holdings) == 1
