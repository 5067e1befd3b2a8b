"""The key pair and the security group: reused, updated, and never those of others."""

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import tagged
from awsddp.aws.launch_resources import replace_ssh_sources
from awsddp.aws.plan_facts import gather_facts
from awsddp.aws.waits import Clock
from awsddp.errors import AwsddpError
from awsddp.plan.launch_plan import make_plan
from tests.support.moto_cloud import IDS, Cloud, Launcher, plan_for, spec


def test_existing_resources_are_reused_and_ssh_opens_for_the_current_address(
    aws: AwsClient, launcher: Launcher
) -> None:
    launcher(plan_for(aws))
    launcher(make_plan(spec(), gather_facts(aws, spec(), caller_address="10.77.0.2", target="local")))
    filters = tagged("awsddp:id", "0a1b2c3d")
    [group] = aws.paginate("DescribeSecurityGroups", {"Filters": filters}, "SecurityGroups")
    ranges = [item["CidrIp"] for rule in group["IpPermissions"] for item in rule["IpRanges"]]
    assert ranges == ["10.77.0.2/32"]
    assert sum(bool(rule["UserIdGroupPairs"]) for rule in group["IpPermissions"]) == 1
    assert len(aws.paginate("DescribeKeyPairs", {"Filters": filters}, "KeyPairs")) == 1


def test_a_group_with_the_clusters_name_without_its_id_is_refused(aws: AwsClient, launcher: Launcher) -> None:
    plan = plan_for(aws)
    vpc = plan.request("CreateSecurityGroup").parameters["VpcId"]
    aws.call("CreateSecurityGroup", {"GroupName": IDS["name"], "Description": "theirs", "VpcId": vpc})
    with pytest.raises(AwsddpError, match="not belong to this cluster"):
        launcher(plan)


def test_a_new_group_that_is_not_visible_yet_is_waited_for(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    cloud.fail("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound", "InvalidGroup.NotFound")
    cloud.fail("RunInstances", "InvalidGroup.NotFound")
    assert len(launcher(plan_for(aws))) == 2


DENIED = "UnauthorizedOperation"


def test_a_denial_is_retried_until_iam_sees_the_new_tags(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    cloud.fail("AuthorizeSecurityGroupIngress", DENIED, DENIED)
    cloud.fail("RunInstances", DENIED)
    nodes = launcher(plan_for(aws))
    cloud.fail("TerminateInstances", DENIED)
    aws.call("TerminateInstances", {"InstanceIds": [node.instance_id for node in nodes]})
    assert clock.monotonic() < 15
    assert [len(cloud.requests_of(name)) for name in ("RunInstances", "TerminateInstances")] == [2, 2]


def test_a_denial_is_final_fifteen_seconds_after_the_creation_of_its_resource(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    cloud.fail("RunInstances", *[DENIED] * 30)
    with pytest.raises(AwsddpError, match="permission denied"):
        launcher(plan_for(aws))
    assert 11 < clock.monotonic() < 20
    assert len(cloud.requests_of("RunInstances")) < 12


def test_a_denial_for_a_resource_of_others_is_final_at_once(
    aws: AwsClient, cloud: Cloud, clock: Clock
) -> None:
    cloud.fail("TerminateInstances", DENIED)
    with pytest.raises(AwsddpError, match="permission denied"):
        aws.call("TerminateInstances", {"InstanceIds": ["i-0123456789abcdef0"]})
    assert clock.monotonic() == 0


def test_a_group_that_aws_does_not_list_yet_is_waited_for_when_ssh_sources_change(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    launcher(plan_for(aws))
    filters = tagged("awsddp:id", "0a1b2c3d")
    [group] = aws.paginate("DescribeSecurityGroups", {"Filters": filters}, "SecurityGroups")
    for operation in (
        "AuthorizeSecurityGroupIngress",
        "DescribeSecurityGroups",
        "RevokeSecurityGroupIngress",
    ):
        cloud.fail(operation, "InvalidGroup.NotFound")
    replace_ssh_sources(aws, group["GroupId"], ("10.77.0.9/32",), on_event=lambda event: None)
    [group] = aws.paginate("DescribeSecurityGroups", {"Filters": filters}, "SecurityGroups")
    opened = [item["CidrIp"] for rule in group["IpPermissions"] for item in rule["IpRanges"]]
    assert opened == ["10.77.0.9/32"]
