"""What the least policy allows, and what it denies: the acts that would harm others, or reach further."""

from typing import Any

import pytest

from awsddp.plan.policy import least_policy
from awsddp.spec import AccessSection, ClusterSpec
from tests.provisioning.iam import Need, allowed

ME, OTHER = "AIDAME", "AIDAOTHER"
POLICY = least_policy(ClusterSpec(name="demo", access=AccessSection(instance_profile="trainers")))
ROLE = "arn:aws:iam::123456789012:instance-profile/trainers"
MINE = {"aws:ResourceTag/awsddp:owner": ME}
THEIRS = {"aws:ResourceTag/awsddp:owner": OTHER}
NEW = {"aws:RequestTag/awsddp:owner": ME}
ATTRIBUTE = "instanceInitiatedShutdownBehavior"
ENDS = {
    "DeleteKeyPair": "key-pair",
    "DeleteNetworkInterface": "network-interface",
    "DeletePlacementGroup": "placement-group",
    "DeleteSecurityGroup": "security-group",
    "DeleteVolume": "volume",
    "StartInstances": "instance",
    "StopInstances": "instance",
    "TerminateInstances": "instance",
}


def may(action: str, kind: str, context: dict[str, Any]) -> bool:
    resource = kind if kind.startswith("arn:") else f"arn:aws:ec2:us-east-1:123456789012:{kind}/x-1"
    action = action if ":" in action else f"ec2:{action}"
    return allowed(POLICY, Need(action, resource, {"aws:userid": ME, **context}))


@pytest.mark.parametrize("action", ENDS)
def test_what_is_mine_i_may_end_and_what_is_not_i_may_not(action: str) -> None:
    assert may(action, ENDS[action], MINE)
    assert not may(action, ENDS[action], THEIRS)
    assert not may(action, ENDS[action], {})


@pytest.mark.parametrize(
    ("context", "is_allowed"),
    [
        (MINE | {"ec2:Attribute": ATTRIBUTE}, True),
        (MINE | {"ec2:Attribute": "InstanceInitiatedShutdownBehavior"}, True),
        (MINE | {"ec2:Attribute": "userData"}, False),
        (MINE | {"ec2:Attribute": "groupSet"}, False),
        (THEIRS | {"ec2:Attribute": ATTRIBUTE}, False),
    ],
)
def test_of_my_instances_attributes_i_may_change_what_a_poweroff_does(
    context: dict[str, Any], is_allowed: bool
) -> None:
    assert may("ModifyInstanceAttribute", "instance", context) is is_allowed


@pytest.mark.parametrize("action", ["CreateTags", "DeleteTags"])
@pytest.mark.parametrize(
    ("context", "is_allowed"),
    [
        (MINE | {"aws:TagKeys": ["awsddp:unfetched"]}, True),
        (THEIRS | {"aws:TagKeys": ["awsddp:unfetched"]}, False),
        (MINE | {"aws:TagKeys": ["awsddp:owner"]}, False),
        (MINE | {"aws:TagKeys": ["awsddp:unfetched", "team"]}, False),
        (MINE, False),  # DeleteTags without keys takes all of them off
    ],
)
def test_of_my_instances_tags_i_may_change_those_that_change_and_never_all(
    action: str, context: dict[str, Any], is_allowed: bool
) -> None:
    assert may(action, "instance", context) is is_allowed


def test_nodes_get_the_role_that_is_named_and_no_other_service_gets_one() -> None:
    role = "arn:aws:iam::123456789012:role/trainers"
    assert may("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"})
    assert not may("iam:PassRole", role, {"iam:PassedToService": "lambda.amazonaws.com"})
    assert not may("iam:PassRole", role, {})
    assert may("RunInstances", "instance", NEW | {"ec2:InstanceProfile": ROLE})
    assert not may("RunInstances", "instance", NEW | {"ec2:InstanceProfile": f"{ROLE}-admin"})


def test_what_is_launched_carries_my_name_and_goes_into_my_own_group() -> None:
    for kind in ("volume", "network-interface"):
        assert may("RunInstances", kind, NEW)
        assert not may("RunInstances", kind, {"aws:RequestTag/awsddp:owner": OTHER})
        assert not may("RunInstances", kind, {})
    assert may("RunInstances", "security-group", MINE)
    assert not may("RunInstances", "security-group", THEIRS)
    assert may("CreateSecurityGroup", "security-group", NEW)
    assert not may("CreateSecurityGroup", "security-group", {})
    assert may("CreateTags", "instance", NEW | {"ec2:CreateAction": "RunInstances"})
    assert not may("CreateTags", "instance", NEW | {"ec2:CreateAction": "CreateVolume"})
