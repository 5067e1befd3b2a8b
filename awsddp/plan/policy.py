"""The least IAM policy for what a configuration uses, with conditions on tags. Pure.

Actions, their resources and condition keys:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
"""

from typing import Any

from awsddp import compat
from awsddp.spec import ClusterSpec

# Equal to the tag that is put on everything, under every kind of credentials, SSO too:
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html
OWNER = "${aws:userid}"
OWNER_TAG = "awsddp:owner"
# The tags that are changed after a resource was made.
CHANGED_TAGS = ("awsddp:expires", "awsddp:nodes", "awsddp:unfetched")

_READS = (
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceStatus",
    "ec2:DescribeInstances",
    "ec2:DescribeKeyPairs",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRegions",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumes",
    "pricing:GetProducts",
    "servicequotas:GetServiceQuota",
    "ssm:GetParameters",
)


def least_policy(spec: ClusterSpec) -> dict[str, Any]:
    """Return the policy document that allows every verb for clusters of this configuration, and no more.

    Whoever holds it ends and changes what carries their own `awsddp:owner`, and nothing of others.
    """
    return {"Version": "2012-10-17", "Statement": [*_launching(spec), *_owning(spec), *_extras(spec)]}


def _statement(name: str, actions: list[str], resources: list[str], **conditions: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}
    return made | ({"Condition": conditions} if conditions else {})


def _arn(kind: str, name: str = "*") -> str:
    return f"arn:aws:ec2:*:*:{kind}/{name}"


def _launching(spec: ClusterSpec) -> list[dict[str, Any]]:
    ours = {f"aws:RequestTag/{OWNER_TAG}": OWNER}
    spot = ["spot-instances-request"] if asks_spot(spec) else []
    launched = [_arn(kind) for kind in ("instance", "network-interface", "volume", *spot)]
    own_group = spec.network.security_group
    # A public image has no account, and its snapshots neither.
    given = ["arn:aws:ec2:*::image/*", "arn:aws:ec2:*::snapshot/*", _arn("image"), _arn("snapshot")]
    given.append(_arn("subnet", spec.network.subnet or "*"))
    if own_group:
        given.append(_arn("security-group", own_group))
    if spec.capacity.reservation:
        given.append(_arn("capacity-reservation", spec.capacity.reservation))
    placed = spec.capacity.placement
    if placed not in (None, "none", "cluster"):
        given.append(_arn("placement-group", placed))
    made = {}
    if spec.access.key:
        given.append(_arn("key-pair", spec.access.key))
    else:
        made["ImportKeyPair"] = "key-pair"
    if not own_group:
        made["CreateSecurityGroup"] = "security-group"
    if makes_placement_group(spec):
        made["CreatePlacementGroup"] = "placement-group"
    groups = [] if own_group else [_statement("InVpc", ["ec2:CreateSecurityGroup"], [_arn("vpc")])]
    return [
        _statement("Read", _reads(spec), ["*"]),
        _statement("Launch", ["ec2:RunInstances"], launched, StringEquals=ours),
        _statement("LaunchFrom", ["ec2:RunInstances"], given),
        *(_making(made) if made else ()),
        *groups,
        _statement(
            "TagWhatIsMade",
            ["ec2:CreateTags"],
            [*launched, *(_arn(kind) for kind in made.values())],
            StringEquals={**ours, "ec2:CreateAction": ["RunInstances", *made]},
        ),
    ]


def _making(made: dict[str, str]) -> list[dict[str, Any]]:
    """Return what allows to make things of these kinds, and to launch into one's own."""
    kinds = [_arn(kind) for kind in made.values()]
    return [
        _statement(
            "LaunchInto",
            ["ec2:RunInstances"],
            kinds,
            StringEquals={f"aws:ResourceTag/{OWNER_TAG}": OWNER},
        ),
        _statement(
            "Make",
            [f"ec2:{action}" for action in made],
            kinds,
            StringEquals={f"aws:RequestTag/{OWNER_TAG}": OWNER},
        ),
    ]


def _owning(spec: ClusterSpec) -> list[dict[str, Any]]:
    own = {f"aws:ResourceTag/{OWNER_TAG}": OWNER}
    ends = {
        "instance": ["ModifyInstanceAttribute", "StartInstances", "StopInstances", "TerminateInstances"],
        "network-interface": ["DeleteNetworkInterface"],
        "volume": ["DeleteVolume"],
    }
    if not spec.access.key:
        ends["key-pair"] = ["DeleteKeyPair"]
    if not spec.network.security_group:
        ends["security-group"] = [
            "AuthorizeSecurityGroupEgress",
            "AuthorizeSecurityGroupIngress",
            "DeleteSecurityGroup",
            "RevokeSecurityGroupIngress",
        ]
    if makes_placement_group(spec):
        ends["placement-group"] = ["DeletePlacementGroup"]
    return [
        _statement(
            "ChangeAndEndWhatIsOurs",
            sorted(f"ec2:{action}" for actions in ends.values() for action in actions),
            [_arn(kind) for kind in sorted(ends)],
            StringEquals=own,
        ),
        _statement(
            "KeepTagsTrue",
            ["ec2:CreateTags", "ec2:DeleteTags"],
            [_arn("instance")],
            StringEquals=own,
            **{"ForAllValues:StringEquals": {"aws:TagKeys": list(CHANGED_TAGS)}},
        ),
    ]


def _reads(spec: ClusterSpec) -> list[str]:
    more = []
    if any(
        name not in compat.GPU_TYPES for name in (spec.cluster.instance_type, *spec.capacity.types) if name
    ):
        more.append("ec2:DescribeInstanceTypes")
    if asks_spot(spec):
        more.append("ec2:DescribeSpotPriceHistory")
    if spec.network.subnet:
        more.append("ec2:DescribeRouteTables")
    if spec.capacity.reservation:
        more.append("ec2:DescribeCapacityReservations")
    return sorted((*_READS, *more))


def _extras(spec: ClusterSpec) -> list[dict[str, Any]]:
    """Return what own roles, keys and spot need in other services."""
    extras = []
    if spec.access.instance_profile:
        extras.append(
            _statement(
                "GiveTheNodesTheirRole",
                ["iam:PassRole"],
                ["*"],
                StringEquals={"iam:PassedToService": "ec2.amazonaws.com"},
            )
        )
    if asks_spot(spec):
        extras.append(
            _statement(
                "FirstSpotRequest",
                ["iam:CreateServiceLinkedRole"],
                ["arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot"],
                StringEquals={"iam:AWSServiceName": "spot.amazonaws.com"},
            )
        )
    if spec.access.kms_key:
        key = spec.access.kms_key if spec.access.kms_key.startswith("arn:") else "arn:aws:kms:*:*:key/*"
        # https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
        actions = ["DescribeKey", "GenerateDataKeyWithoutPlaintext", "Decrypt", "ReEncrypt*"]
        extras += [
            _statement(
                "EncryptDisks",
                [f"kms:{action}" for action in actions],
                [key],
                StringLike={"kms:ViaService": "ec2.*.amazonaws.com"},
            ),
            _statement(
                "GrantTheKeyToEc2", ["kms:CreateGrant"], [key], Bool={"kms:GrantIsForAWSResource": "true"}
            ),
        ]
    return extras


def asks_spot(spec: ClusterSpec) -> bool:
    """Whether spot instances may be asked for."""
    return spec.cluster.spot or "spot" in spec.capacity.markets


def makes_placement_group(spec: ClusterSpec) -> bool:
    """Whether a placement group may be made."""
    placed = spec.capacity.placement
    return not spec.capacity.reservation and (
        placed == "cluster" or (placed is None and spec.cluster.nodes > 1)
    )
