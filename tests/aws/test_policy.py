"""The least policy: every verb passes under it, nothing can be left out, and others' things stay safe."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from iam import USER_ID, Need, allowed
from moto_cloud import IDS, Cloud, Launcher, spec

from awsddp.aws.clusters import find_cluster
from awsddp.aws.facts import enabled_regions, gather
from awsddp.aws.instances import impaired, wait_running
from awsddp.aws.power import tag_expiry
from awsddp.aws.poweroff import keep_on_poweroff, release
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.aws.teardown import give_up, teardown
from awsddp.aws.waits import Clock
from awsddp.plan import make_plan
from awsddp.plan.policy import least_policy
from awsddp.spec import CapacitySection, ClusterSpec

Verbs = Callable[[ClusterSpec], None]
DEFAULT = spec()
SPOT = spec(spot=True)
UNKNOWN_TYPE = spec(instance_type="g7.48xlarge")
ALONE = replace(spec(nodes=1), capacity=CapacitySection(placement="none"))


@pytest.fixture
def verbs(aws: Aws, cloud: Cloud, clock: Clock, launcher: Launcher) -> Verbs:
    """Everything that verbs do in AWS, from the first look to the end, on one cluster."""

    def drive(asked: ClusterSpec) -> None:
        aws._identity  # noqa: B018  asked once for all tests
        for address in ("10.77.0.1", "10.77.0.2"):
            plan = make_plan(asked, gather(aws, asked, caller_address=address, target="local"))
            if address == "10.77.0.1":
                nodes = launcher(plan)
            else:
                launcher.access(plan)
        enabled_regions(aws)
        keys = [node.instance_id for node in nodes]
        told = launcher.events.append
        nodes = wait_running(aws, IDS["cluster_id"], len(keys), on_event=told, instance_ids=keys, clock=clock)
        assert impaired(aws, nodes) == frozenset()
        give_up(aws, nodes)
        tag_expiry(aws, nodes, datetime.now(UTC))
        keep_on_poweroff(aws, nodes, "train-1")
        release(aws, nodes, "train-1")
        aws.call("StopInstances", {"InstanceIds": keys})
        aws.call("StartInstances", {"InstanceIds": keys})
        left = aws.call("CreateVolume", {"Size": 1, "AvailabilityZone": nodes[0].zone, **owned("volume")})
        subnet = plan.zones[0].subnet
        aws.call("CreateNetworkInterface", {"SubnetId": subnet, **owned("network-interface")})
        assert left
        cluster = find_cluster(aws, "demo", aws.identity().user_id)
        assert cluster is not None
        ended = teardown(aws, cluster, on_event=launcher.events.append, clock=clock)
        if ended.leftovers:
            raise PermissionError(ended.leftovers)

    return drive


def owned(kind: str) -> dict[str, Any]:
    """Tags of something that an earlier fault left behind."""
    tags = {"awsddp:id": IDS["cluster_id"], "awsddp:cluster": "demo", "awsddp:owner": USER_ID}
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": pairs}]}


@pytest.mark.parametrize(
    "asked", [DEFAULT, SPOT, UNKNOWN_TYPE, ALONE], ids=["default", "spot", "type", "alone"]
)
def test_every_verb_passes_under_the_policy(cloud: Cloud, verbs: Verbs, asked: ClusterSpec) -> None:
    cloud.policy = least_policy(asked)
    verbs(asked)
    assert cloud.denied == []


def without_each_action(policy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, statement in enumerate(policy["Statement"]):
        for action in statement["Action"]:
            less = copy.deepcopy(policy)
            less["Statement"][index]["Action"].remove(action)
            yield f"{statement['Sid']} {action}", less


# Of other services, which moto does not hold to EC2's calls.
UNSEEN = ("iam:CreateServiceLinkedRole",)


def test_no_statement_and_no_action_can_be_left_out(cloud: Cloud, verbs: Verbs) -> None:
    cloud.policy = least_policy(SPOT)
    verbs(DEFAULT)
    verbs(SPOT)
    missing = []
    for name, less in without_each_action(least_policy(SPOT)):
        if name.split()[1] in UNSEEN:
            continue
        if all(allowed(less, need) for need in cloud.watched):
            missing.append(name)
    assert missing == []


def attacks() -> dict[str, Need]:
    """What must not be possible: others' resources, and resources that carry no or another's tag."""
    arn = "arn:aws:ec2:us-east-1:123456789012:{}/x".format
    theirs = {"aws:ResourceTag/awsddp:owner": "AIDASOMEBODYELSE"}
    mine = {"aws:ResourceTag/awsddp:owner": USER_ID}
    claimed = {"aws:RequestTag/awsddp:owner": USER_ID, "aws:TagKeys": ["awsddp:owner"]}
    return {
        "launch without a tag": Need("ec2:RunInstances", arn("instance"), {}),
        "launch as somebody else": Need(
            "ec2:RunInstances", arn("instance"), {"aws:RequestTag/awsddp:owner": "AIDASOMEBODYELSE"}
        ),
        "launch into their group": Need("ec2:RunInstances", arn("security-group"), theirs),
        "make a group without a tag": Need("ec2:CreateSecurityGroup", arn("security-group"), {}),
        "tag what is made as another's": Need(
            "ec2:CreateTags", arn("instance"), {"ec2:CreateAction": "RunInstances"}
        ),
        "claim their instance by a tag": Need("ec2:CreateTags", arn("instance"), {**theirs, **claimed}),
        "claim by a tag while making something else": Need(
            "ec2:CreateTags", arn("instance"), {**theirs, **claimed, "ec2:CreateAction": "CreateVolume"}
        ),
        "end their instance": Need("ec2:TerminateInstances", arn("instance"), theirs),
        "end an untagged instance": Need("ec2:TerminateInstances", arn("instance"), {}),
        "mark their instance": Need(
            "ec2:CreateTags", arn("instance"), {**theirs, "aws:TagKeys": ["awsddp:unfetched"]}
        ),
        "give an own instance away": Need(
            "ec2:CreateTags", arn("instance"), {**mine, "aws:TagKeys": ["awsddp:owner"]}
        ),
    }


def test_nothing_of_others_can_be_touched() -> None:
    policy = least_policy(SPOT)
    assert [name for name, need in attacks().items() if allowed(policy, need)] == []


def without_each_condition(policy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, statement in enumerate(policy["Statement"]):
        for operator, pairs in statement.get("Condition", {}).items():
            for key in pairs:
                less = copy.deepcopy(policy)
                del less["Statement"][index]["Condition"][operator][key]
                yield f"{statement['Sid']} {operator} {key}", less


def test_each_condition_keeps_something_out() -> None:
    idle = [
        name
        for name, less in without_each_condition(least_policy(SPOT))
        if "iam:" not in name and not any(allowed(less, need) for need in attacks().values())
    ]
    assert idle == []


def test_what_the_configuration_does_not_use_is_not_in_the_policy() -> None:
    plain = str(least_policy(ALONE))
    for word in ("Spot", 'PlacementGroup"', "CreatePlacementGroup", "DescribeRouteTables", "iam:", "kms:"):
        assert word not in plain
    assert "DescribeSpotPriceHistory" in str(least_policy(SPOT))


def test_a_denial_names_the_call(aws: Aws, cloud: Cloud) -> None:
    cloud.policy = {"Statement": []}
    with pytest.raises(Refused, match="permission denied: DescribeInstances"):
        aws.call("DescribeInstances", {})
