"""The least IAM policy for what a configuration uses, with conditions on tags. Pure.

Actions, their resources and condition keys:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
"""

from typing import Any

from awsddp import compat
from awsddp.spec import SSM, ClusterSpec

# Equal to the tag that is put on everything, under every kind of credentials, SSO too:
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html
OWNER = "${aws:userid}"
OWNER_TAG = "awsddp:owner"
# The tags that are changed after a resource was made.
CHANGED_TAGS = ("awsddp:expires", "awsddp:nodes", "awsddp:unfetched")
# The roles that AWS makes in an account, by the service that is then used for the first time:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
# https://docs.aws.amazon.com/servicequotas/latest/userguide/using-service-linked-roles.html
_ROLES = {
    "servicequotas.amazonaws.com": "AWSServiceRoleForServiceQuotas",
    "spot.amazonaws.com": "AWSServiceRoleForEC2Spot",
}

_READS = (
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceStatus",
    "ec2:DescribeInstances",
    "ec2:DescribeKeyPairs",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRegions",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumes",
    "pricing:GetProducts",
    "servicequotas:GetServiceQuota",
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
    beside = [_arn(kind) for kind in ("network-interface", "volume", *spot)]
    made = {}
    if not spec.access.key:
        made["ImportKeyPair"] = "key-pair"
    if not spec.network.security_group:
        made["CreateSecurityGroup"] = "security-group"
    if makes_placement_group(spec):
        made["CreatePlacementGroup"] = "placement-group"
    group = [_statement("InVpc", ["ec2:CreateSecurityGroup"], [_arn("vpc")])]
    run = ["ec2:RunInstances"]
    return [
        _statement("Read", _reads(spec), ["*"]),
        *_image_parameters(spec.cluster.image),
        _statement("Launch", run, [_arn("instance")], StringEquals=ours, **_only_role(spec)),
        _statement("LaunchBeside", run, beside, StringEquals=ours),
        _statement("LaunchFrom", run, _given(spec)),
        *(_making(made) if made else ()),
        *(group if "CreateSecurityGroup" in made else ()),
        _statement(
            "TagWhatIsMade",
            ["ec2:CreateTags"],
            [_arn("instance"), *beside, *(_arn(kind) for kind in made.values())],
            StringEquals={**ours, "ec2:CreateAction": ["RunInstances", *made]},
        ),
    ]


def _given(spec: ClusterSpec) -> list[str]:
    """Return what is launched from or into and was there before."""
    given = ["arn:aws:ec2:*::image/*", _arn("subnet", spec.network.subnet or "*")]
    placed = spec.capacity.placement
    own = {
        "security-group": spec.network.security_group,
        "capacity-reservation": spec.capacity.reservation,
        "placement-group": placed if placed not in ("none", "cluster") else None,
        "key-pair": spec.access.key,
    }
    return given + [_arn(kind, name) for kind, name in own.items() if name]


def _image_parameters(image: str | None) -> list[dict[str, Any]]:
    """Return what allows to read the parameters of Systems Manager that name the image, and no other."""
    requested = (image or "").removeprefix("resolve:ssm:")
    names = compat.DLAMI_PARAMETERS if image is None else (requested,) if requested.startswith("/") else ()
    found = [f"arn:aws:ssm:*:*:parameter{name}" for name in names]
    return [_statement("ReadImageNames", ["ssm:GetParameters"], found)] if found else []


def _only_role(spec: ClusterSpec) -> dict[str, Any]:
    """Return the condition that no instance gets another role than the one that is named."""
    return {"ArnLike": {"ec2:InstanceProfile": _profiles(spec)}} if spec.access.instance_profile else {}


def _profiles(spec: ClusterSpec) -> list[str]:
    requested = spec.access.instance_profile or ""
    return [requested] if requested.startswith("arn:") else [f"arn:aws:iam::*:instance-profile/{requested}"]


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
    stops = [] if only_spot(spec) else ["StartInstances", "StopInstances"]
    ends = {
        "instance": [*stops, "TerminateInstances"],
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
        *(_poweroff(own) if stops else ()),
        _statement(
            "KeepTagsTrue",
            ["ec2:CreateTags", "ec2:DeleteTags"],
            [_arn("instance")],
            StringEquals=own,
            # Null: without keys DeleteTags takes all tags off, and "for all" would hold.
            **{"ForAllValues:StringEquals": {"aws:TagKeys": list(CHANGED_TAGS)}},
            Null={"aws:TagKeys": "false"},
        ),
    ]


def _poweroff(own: dict[str, str]) -> list[dict[str, Any]]:
    """Return what allows to change what a poweroff does to one's own instances, and no other attribute.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/iam-policy-structure.html#attribute-key
    "IfExists": it was never tried on AWS that the key comes with every form of the call.
    """
    named = {"ec2:Attribute": "instanceInitiatedShutdownBehavior"}
    return [
        _statement(
            "KeepDisksAtPoweroff",
            ["ec2:ModifyInstanceAttribute"],
            [_arn("instance")],
            StringEquals=own,
            StringEqualsIgnoreCaseIfExists=named,
        )
    ]


def _reads(spec: ClusterSpec) -> list[str]:
    more = []
    if any(
        name not in compat.GPU_TYPES for name in (spec.cluster.instance_type, *spec.capacity.types) if name
    ):
        more.append("ec2:DescribeInstanceTypes")
    if asks_spot(spec):
        more.append("ec2:DescribeSpotPriceHistory")
    if spec.capacity.reservation:
        more.append("ec2:DescribeCapacityReservations")
    return sorted((*_READS, *more))


def _extras(spec: ClusterSpec) -> list[dict[str, Any]]:
    """Return what quotas, spot, own roles and own keys need in other services."""
    services = [] if spec.capacity.reservation else ["servicequotas.amazonaws.com"]
    services += ["spot.amazonaws.com"] if asks_spot(spec) else []
    extras = []
    if not spec.capacity.reservation:  # what is reserved has its quota
        quotas = ["arn:aws:servicequotas:*:*:ec2/*"]
        extras.append(_statement("AskForQuota", ["servicequotas:RequestServiceQuotaIncrease"], quotas))
    if services:
        extras.append(
            _statement(
                "FirstUse",
                ["iam:CreateServiceLinkedRole"],
                [f"arn:aws:iam::*:role/aws-service-role/{name}/{_ROLES[name]}" for name in services],
                StringEquals={"iam:AWSServiceName": services},
            )
        )
    if spec.access.instance_profile:
        extras.append(
            _statement(
                "GiveTheNodesTheirRole",
                ["iam:PassRole"],
                ["arn:aws:iam::*:role/*"],
                StringEquals={"iam:PassedToService": "ec2.amazonaws.com"},
            )
        )
        extras.append(_statement("LookAtTheRole", ["iam:GetInstanceProfile"], _profiles(spec)))
    extras += _sessions() if spec.network.jump == SSM else []
    return extras + (_disk_key(spec.access.kms_key) if spec.access.kms_key else [])


def _sessions() -> list[dict[str, Any]]:
    """Return what SSH through Systems Manager needs: sessions with one's own nodes, for SSH only.

    https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-restrict-access-quickstart.html
    """
    own = ["arn:aws:ssm:*:*:session/${aws:userid}-*", "arn:aws:ssm:*:*:session/${aws:username}-*"]
    ending = ["ssm:ResumeSession", "ssm:TerminateSession", "ssmmessages:OpenDataChannel"]
    return [
        _statement(
            "SshToOwnNodes",
            ["ssm:StartSession"],
            [_arn("instance")],
            StringEquals={f"aws:ResourceTag/{OWNER_TAG}": OWNER},
            BoolIfExists={"ssm:SessionDocumentAccessCheck": "true"},
        ),
        _statement("SshOnly", ["ssm:StartSession"], ["arn:aws:ssm:*:*:document/AWS-StartSSHSession"]),
        _statement("OwnSessions", ending, own),
    ]


def _disk_key(requested: str) -> list[dict[str, Any]]:
    """Return what disks need that are encrypted with a key of one's own: an id, an alias, or the ARN of one.

    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
    A key is no resource by its alias, so that is a condition:
    https://docs.aws.amazon.com/kms/latest/developerguide/alias-authorization.html
    """
    place, _, alias = requested.rpartition("alias/")
    if alias != requested:
        keys = [f"{place or 'arn:aws:kms:*:*:'}key/*"]
        named = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": f"alias/{alias}"}}
    else:
        keys, named = [requested if requested.startswith("arn:") else f"arn:aws:kms:*:*:key/{requested}"], {}
    through = {"StringLike": {"kms:ViaService": "ec2.*.amazonaws.com"}}
    uses = ["GenerateDataKeyWithoutPlaintext", "Decrypt", "ReEncrypt*"]
    return [
        _statement("LookAtTheKey", ["kms:DescribeKey"], keys, **named),
        _statement("EncryptDisks", [f"kms:{use}" for use in uses], keys, **through, **named),
        _statement(
            "GrantTheKeyToEc2",
            ["kms:CreateGrant"],
            keys,
            Bool={"kms:GrantIsForAWSResource": "true"},
            **through,
            **named,
        ),
    ]


def asks_spot(spec: ClusterSpec) -> bool:
    """Whether spot instances may be requested."""
    return spec.cluster.spot or "spot" in spec.capacity.markets


def only_spot(spec: ClusterSpec) -> bool:
    """Whether only spot instances may be requested, which cannot be stopped."""
    return spec.cluster.spot if not spec.capacity.markets else set(spec.capacity.markets) == {"spot"}


def makes_placement_group(spec: ClusterSpec) -> bool:
    """Whether a placement group may be made."""
    placed = spec.capacity.placement
    return not spec.capacity.reservation and (
        placed == "cluster" or (placed is None and spec.cluster.nodes > 1)
    )
