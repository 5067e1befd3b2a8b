"""What the least policy allows, and what it denies, such as actions on the resources of others."""

import json
from typing import Any

import pytest

from awsddp.errors import ConfigError
from awsddp.local.iam import decide
from awsddp.plan.policy import least_policy, role_policy
from awsddp.settings.spec import (
    AccessSection,
    CapacitySection,
    ClusterSection,
    ClusterSpec,
    DataSection,
    JobSection,
    JobSpec,
)
from tests.support.iam import Need, allowed

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
    "ModifyInstancePlacement": "instance",
    "StartInstances": "instance",
    "StopInstances": "instance",
    "TerminateInstances": "instance",
}


def may(action: str, kind: str, context: dict[str, Any]) -> bool:
    resource = kind if kind.startswith("arn:") else f"arn:aws:ec2:us-east-1:123456789012:{kind}/x-1"
    action = action if ":" in action else f"ec2:{action}"
    return allowed(POLICY, Need(action, resource, {"aws:userid": ME, **context}))


def test_nodes_with_efa_may_leave_their_placement_group() -> None:
    spec = ClusterSpec(name="demo", cluster=ClusterSection(nodes=2), capacity=CapacitySection(efa=True))
    assert "ec2:ModifyInstancePlacement" in json.dumps(least_policy(spec))


@pytest.mark.parametrize("action", ENDS)
def test_a_user_may_delete_own_resources_and_no_others(action: str) -> None:
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
def test_a_user_may_change_only_the_shutdown_behaviour_of_own_instances(
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
def test_a_user_may_change_only_the_variable_tags_of_own_instances(
    action: str, context: dict[str, Any], is_allowed: bool
) -> None:
    assert may(action, "instance", context) is is_allowed


def test_nodes_get_the_configured_role_and_no_other_service_gets_it() -> None:
    role = "arn:aws:iam::123456789012:role/trainers"
    assert may("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"})
    assert not may("iam:PassRole", role, {"iam:PassedToService": "lambda.amazonaws.com"})
    assert not may("iam:PassRole", role, {})
    assert may("RunInstances", "instance", NEW | {"ec2:InstanceProfile": ROLE})
    assert not may("RunInstances", "instance", NEW | {"ec2:InstanceProfile": f"{ROLE}-admin"})


def test_launched_resources_have_the_tag_and_the_group_of_their_owner() -> None:
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


@pytest.mark.parametrize(("partition", "suffix"), [("aws-cn", ".cn"), ("aws-us-gov", "")])
def test_the_policy_is_valid_in_every_partition(partition: str, suffix: str) -> None:
    job = JobSpec(data=DATA.data, job=JobSection(save_to="s3://results/runs"))
    access = AccessSection(instance_profile="trainers", kms_key="alias/disks")
    policy = least_policy(ClusterSpec(name="demo", access=access), job)
    account = f"arn:{partition}:{{}}:{{}}:123456789012:{{}}"
    key = account.format("kms", "r-1", "key/1234")
    alias = {"kms:ResourceAliases": ["alias/disks"], "kms:ViaService": f"ec2.r-1.amazonaws.com{suffix}"}
    passed = {"iam:PassedToService": f"ec2.amazonaws.com{suffix}"}
    for need in (
        Need("ec2:TerminateInstances", account.format("ec2", "r-1", "instance/i-1"), MINE),
        Need("iam:PassRole", f"arn:{partition}:iam::123456789012:role/trainers", passed),
        Need("kms:Decrypt", key, alias),
        Need("s3:GetObject", f"arn:{partition}:s3:::results/runs/job/job.json"),
    ):
        assert allowed(policy, Need(need.action, need.resource, {"aws:userid": ME, **need.context})), need
    nodes = role_policy(ClusterSpec(name="demo"), job)
    assert allowed(nodes, Need("s3:PutObject", f"arn:{partition}:s3:::results/runs/job/node0/a"))


DATA = JobSpec(data=DataSection(sources=("s3://sets/imagenet", "./here", "hf://datasets/squad")))


@pytest.mark.parametrize("make_policy", [role_policy, least_policy])
@pytest.mark.parametrize(
    ("action", "resource", "prefix", "is_allowed"),
    [
        ("s3:GetObject", "sets/imagenet/train/1.tar", "", True),
        ("s3:GetObject", "sets/imagenet2/1.tar", "", False),
        ("s3:GetObject", "others/imagenet/1.tar", "", False),
        ("s3:PutObject", "sets/imagenet/1.tar", "", False),
        ("s3:DeleteObject", "sets/imagenet/1.tar", "", False),
        ("s3:ListBucket", "sets", "imagenet/", True),
        ("s3:ListBucket", "sets", "imagenet/train/", True),
        ("s3:ListBucket", "sets", "", False),
        ("s3:ListBucket", "sets", "other/", False),
    ],
)
def test_only_the_data_of_a_job_may_be_read_from_s3(
    make_policy: Any, action: str, resource: str, prefix: str, is_allowed: bool
) -> None:
    policy = make_policy(ClusterSpec(name="demo"), DATA)
    context = {"s3:prefix": prefix} if action == "s3:ListBucket" else {}
    decision = decide([json.dumps(policy)], action, f"arn:aws:s3:::{resource}", context)
    assert decision == ("allowed" if is_allowed else "implicitDeny")


@pytest.mark.parametrize(
    ("action", "resource", "prefix", "nodes_may", "clients_may"),
    [
        ("s3:PutObject", "results/runs/job/node0/a", "", True, False),
        ("s3:GetObject", "results/runs/job/job.json", "", True, True),
        ("s3:AbortMultipartUpload", "results/runs/job/node0/a", "", True, True),
        ("s3:AbortMultipartUpload", "results/other/a", "", False, False),
        ("s3:DeleteObject", "results/runs/job/node0/a", "", False, False),
        ("s3:ListBucket", "results", "runs/", True, True),
        ("s3:ListBucket", "results", "", False, False),
        ("s3:ListBucketMultipartUploads", "results", "runs/", True, True),
    ],
)
def test_nodes_save_below_their_prefix_and_clients_read_it(
    action: str, resource: str, prefix: str, nodes_may: bool, clients_may: bool
) -> None:
    job = JobSpec(job=JobSection(save_to="s3://results/runs"))
    for make_policy, is_allowed in ((role_policy, nodes_may), (least_policy, clients_may)):
        policies = [json.dumps(make_policy(ClusterSpec(name="demo"), job))]
        decision = decide(policies, action, f"arn:aws:s3:::{resource}", {"s3:prefix": prefix})
        assert decision == ("allowed" if is_allowed else "implicitDeny")


@pytest.mark.parametrize(
    ("prefix", "literal", "others"),
    [
        ("r*", "r*", ["r", "rest", "r[*]", "r${*}"]),
        ("a?b", "a?b", ["axb", "ab", "a${?}b"]),
        ("${aws:userid}", "${aws:userid}", ["AIDAME", "${$}{aws:userid}"]),
        ("[ab]$1", "[ab]$1", ["a$1", "[ab]${$}1"]),
    ],
)
def test_wildcards_in_a_prefix_are_literal(prefix: str, literal: str, others: list[str]) -> None:
    job = JobSpec(
        job=JobSection(save_to=f"s3://results/{prefix}"),
        data=DataSection(sources=(f"in=s3://results/{prefix}",)),
    )
    for make_policy in (role_policy, least_policy):
        policies = [json.dumps(make_policy(ClusterSpec(name="demo"), job))]

        def may_in(name: str, policies: list[str] = policies) -> list[str]:
            key, bucket = f"arn:aws:s3:::results/{name}/job/job.json", "arn:aws:s3:::results"
            return [
                decide(policies, "s3:GetObject", key, {}),
                decide(policies, "s3:AbortMultipartUpload", key, {}),
                decide(policies, "s3:ListBucket", bucket, {"s3:prefix": f"{name}/job/"}),
            ]

        assert may_in(literal) == ["allowed"] * 3
        assert {decision for name in others for decision in may_in(name)} == {"implicitDeny"}


def test_a_wildcard_in_the_name_of_a_key_pair_is_literal() -> None:
    policy = least_policy(ClusterSpec(name="demo", access=AccessSection(key_file="~/.ssh/team-*.pem")))
    mine, other = (f"arn:aws:ec2:us-east-1:123456789012:key-pair/team-{name}" for name in ("*", "b"))
    assert decide([json.dumps(policy)], "ec2:RunInstances", mine, {}) == "allowed"
    assert decide([json.dumps(policy)], "ec2:RunInstances", other, {}) == "implicitDeny"


@pytest.mark.parametrize("action", ["s3:PutObject", "s3:DeleteObject"])
def test_a_client_may_write_only_the_data_folders_below_the_prefix(action: str) -> None:
    job = JobSpec(data=DATA.data, job=JobSection(save_to="s3://results/runs"))
    policy = json.dumps(least_policy(ClusterSpec(name="demo"), job))
    keys = ("results/runs/.data/0f/here/one", "results/runs/train-1/job.json", "sets/imagenet/1.tar")
    decisions = [decide([policy], action, f"arn:aws:s3:::{key}", {}) for key in keys]
    assert decisions == ["allowed", "implicitDeny", "implicitDeny"]


def test_nodes_that_do_not_use_s3_have_no_policy() -> None:
    with pytest.raises(ConfigError, match="the nodes need no rights"):
        role_policy(ClusterSpec(name="demo"), JobSpec())


def test_a_policy_for_an_encrypted_bucket_includes_the_key() -> None:
    spec = ClusterSpec(name="demo", access=AccessSection(kms_key="arn:aws:kms:us-east-1:1:key/a"))
    last = role_policy(spec, DATA)["Statement"][-1]
    assert (last["Action"], last["Resource"]) == (
        ["kms:GenerateDataKey", "kms:Decrypt"],
        ["arn:aws:kms:us-east-1:1:key/a"],
    )
