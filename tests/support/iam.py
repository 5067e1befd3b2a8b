"""An evaluator of IAM policies, and the permissions that each call of EC2 and related services needs.

Modelled are Allow statements with wildcards, `${aws:userid}`, the operators of conditions that awsddp's
policy uses, and for each call the actions, resources and condition keys of AWS's reference:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html

Not modelled are Deny, NotAction, NotResource and Principal, boundaries, session and service control policies,
other partitions and accounts, and keys that no statement of awsddp's policy has.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends

from awsddp.local.ec2_http import Refusal, Request
from awsddp.local.emulator import USER
from awsddp.local.http_server import EndpointApp

ACCOUNT = "123456789012"
_FREE = ("GetCallerIdentity",)
_SPOT_ROLE = "spot.amazonaws.com/AWSServiceRoleForEC2Spot"
_QUOTA_ROLE = "servicequotas.amazonaws.com/AWSServiceRoleForServiceQuotas"
_MAKES = {
    "CreateSecurityGroup": "security-group",
    "ImportKeyPair": "key-pair",
    "CreatePlacementGroup": "placement-group",
}
# The parameters that name what a call changes or ends.
_NAMED = {
    "GroupId": "security-group",
    "KeyName": "key-pair",
    "GroupName": "placement-group",
    "VolumeId": "volume",
    "NetworkInterfaceId": "network-interface",
    "InstanceId": "instance",
}


_POLICY, _NEEDS = "policy.json", "needs.jsonl"


@dataclass(frozen=True)
class Need:
    """A permission that a call needs: an action on a resource, and the values for conditions."""

    action: str
    resource: str
    context: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def enforce_policy(policy: Mapping[str, Any], cloud: Path) -> Iterator[list[Need]]:
    """Enforce a policy on all calls to a cloud; afterwards the list has the permissions that they needed."""
    needed: list[Need] = []
    (cloud / _NEEDS).write_text("")
    (cloud / _POLICY).write_text(json.dumps(policy))
    try:
        yield needed
    finally:
        (cloud / _POLICY).unlink()
        needed += [Need(**json.loads(line)) for line in (cloud / _NEEDS).read_text().splitlines()]


def add_policy_check(take_fault: Callable[..., Any], cloud: Path) -> Callable[..., Any]:
    """Return `take_fault` preceded by a check that refuses what the policy in the daemon's folder denies."""

    def look(self: EndpointApp, request: Request) -> Any:
        if (cloud / _POLICY).exists():
            user = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].users[USER].id
            required = list(needs(request, self._backend(request), user_id=user))
            with (cloud / _NEEDS).open("a") as stream:
                stream.writelines(json.dumps(asdict(need)) + "\n" for need in required)
            policy = json.loads((cloud / _POLICY).read_text())
            if denied := [need for need in required if not allowed(policy, need)]:
                raise _denial(denied[0], user, ec2=request.service == "ec2")
        return take_fault(self, request)

    return look


def _denial(need: Need, user: str, *, ec2: bool) -> Refusal:
    return Refusal(
        "UnauthorizedOperation" if ec2 else "AccessDeniedException",
        f"You are not authorized to perform this operation. User: {user} is not authorized to perform: "
        f"{need.action} on resource: {need.resource} because no identity-based policy allows the "
        f"{need.action} action",
        status="403 Forbidden",
    )


def allowed(policy: Mapping[str, Any], need: Need) -> bool:
    """Return True if a statement allows it."""
    return any(_applies(statement, need) for statement in policy["Statement"])


def _applies(statement: Mapping[str, Any], need: Need) -> bool:
    assert statement["Effect"] == "Allow"
    return (
        any(fnmatchcase(need.action, action) for action in statement["Action"])
        and any(fnmatchcase(need.resource, resource) for resource in statement["Resource"])
        and all(
            _holds(operator, [expected] if isinstance(expected, str) else expected, key, need.context)
            for operator, pairs in statement.get("Condition", {}).items()
            for key, expected in pairs.items()
        )
    )


def _holds(operator: str, expected: list[str], key: str, context: Mapping[str, Any]) -> bool:
    values = [text.replace("${aws:userid}", context["aws:userid"]) for text in expected]
    have = context.get(key)
    match operator:
        case "Null":
            return ("true" if have is None else "false") in values
        case "ForAllValues:StringEquals":
            return all(text in values for text in have or ())
        case "ForAnyValue:StringEquals":
            return any(text in values for text in have or ())
        case "StringEqualsIgnoreCaseIfExists":
            return have is None or have.lower() in {text.lower() for text in values}
        case "StringEquals" | "Bool":
            return have in values
        case "StringLike" | "ArnLike":
            return have is not None and any(fnmatchcase(have, pattern) for pattern in values)
    raise AssertionError(operator)


def needs(request: Request, backend: Any, *, user_id: str) -> Iterator[Need]:
    """Yield every permission that a call needs, from the resources that it names and their tags."""
    for action, resource, context in _needs(request, backend):
        yield Need(action, resource, {**context, "aws:userid": user_id})


def _needs(request: Request, backend: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    operation, form = request.action, request.parameters
    action = f"{request.service}:{operation}"
    if operation in _FREE:
        return
    if request.service != "ec2":
        yield from _elsewhere(action, form or json.loads(request.body))
        return
    if not request.is_mutating:
        yield action, "*", {}
        return
    made = dict(_tag_specifications(form))
    if operation == "RunInstances":
        yield from _launch(action, form, made, backend)
    elif operation in _MAKES:
        kind = _MAKES[operation]
        yield action, _arn(kind, "new"), _requested(made.get(kind, {}))
        if operation == "CreateSecurityGroup":
            yield action, _arn("vpc", form["VpcId"]), {}
    else:
        tags = {form[f"{name}Key"]: form.get(f"{name}Value", "") for name in _numbered(form, "Tag")}
        for kind, key in _targets(form):
            changed = {"ec2:Attribute": form["Attribute"]} if "Attribute" in form else {}
            yield action, _arn(kind, key), _requested(tags) | _tagged(kind, key, backend) | changed
    for kind, tags in made.items():
        yield "ec2:CreateTags", _arn(kind, "new"), {**_requested(tags), "ec2:CreateAction": operation}


def _elsewhere(action: str, parameters: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the permissions that calls of other services need."""
    match action:
        case "ssm:GetParameters":
            for name in parameters["Names"]:
                owner = "" if name.startswith("/aws/service/") else ACCOUNT
                yield action, f"arn:aws:ssm:us-east-1:{owner}:parameter{name}", {}
        case "iam:GetInstanceProfile":
            profiles = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles
            arns = [row.arn for row in profiles.values() if row.name == parameters["InstanceProfileName"]]
            yield action, arns[0], {}
        case "iam:SimulatePrincipalPolicy":
            yield action, parameters["PolicySourceArn"], {}
        case "kms:DescribeKey":
            yield action, *_disk_key(parameters["KeyId"])
        case "servicequotas:RequestServiceQuotaIncrease":
            quota = f"{parameters['ServiceCode']}/{parameters['QuotaCode']}"
            yield action, f"arn:aws:servicequotas:us-east-1:{ACCOUNT}:{quota}", {}
            yield _first_use(_QUOTA_ROLE)
        case _:
            yield action, "*", {}


def _first_use(role: str) -> tuple[str, str, dict[str, Any]]:
    """Return the permission for the first use of a service in an account; here each account is new."""
    arn = f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/{role}"
    return "iam:CreateServiceLinkedRole", arn, {"iam:AWSServiceName": role.partition("/")[0]}


def _launch(
    action: str, form: dict[str, str], made: dict[str, dict[str, str]], backend: Any
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    spot = form.get("InstanceMarketOptions.MarketType") == "spot"
    profile = form.get("IamInstanceProfile.Name"), form.get("IamInstanceProfile.Arn")
    arn = profile[1] or f"arn:aws:iam::{ACCOUNT}:instance-profile/{profile[0]}"
    with_role = {"ec2:InstanceProfile": arn} if any(profile) else {}
    yield action, _arn("instance", "new"), _requested(made.get("instance", {})) | with_role
    for kind in ("volume", "network-interface", *(["spot-instances-request"] if spot else [])):
        yield action, _arn(kind, "new"), _requested(made.get(kind, {}))
    yield action, f"arn:aws:ec2:us-east-1::image/{form['ImageId']}", {}
    for kind, key in _used(form):
        yield action, _arn(kind, key), _tagged(kind, key, backend)
    if with_role:
        yield "iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/any", {"iam:PassedToService": "ec2.amazonaws.com"}
    if spot:
        yield _first_use(_SPOT_ROLE)
    for name in _numbered(form, "BlockDeviceMapping"):
        if key := form.get(f"{name}Ebs.KmsKeyId"):
            yield from _encrypt(key)


def _used(form: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield kind and id of the existing resources that a launch uses."""
    nics = _numbered(form, "NetworkInterface")
    subnets = {form[f"{nic}SubnetId"] for nic in nics}
    groups = {
        form.get(f"{nic}SecurityGroupId.1", "default") for nic in nics
    }  # the VPC's default group if none is named
    yield from (("subnet", key) for key in subnets)
    yield from (("security-group", key) for key in groups)
    for kind, name in (
        ("key-pair", "KeyName"),
        ("placement-group", "Placement.GroupName"),
        (
            "capacity-reservation",
            "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId",
        ),
    ):
        if name in form:
            yield kind, form[name]


def _disk_key(key: str) -> tuple[str, dict[str, Any]]:
    """Return the ARN of a KMS key and its aliases. Here each key has the alias by which a call names it."""
    key_id = "from-an-alias" if "alias/" in key else key.rpartition("key/")[2]
    aliases = [f"alias/{key.rpartition('alias/')[2]}"]
    return f"arn:aws:kms:us-east-1:{ACCOUNT}:key/{key_id}", {"kms:ResourceAliases": aliases}


def _encrypt(key: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the permissions for disks with a customer-managed key.

    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
    """
    arn, named = _disk_key(key)
    context = {"kms:ViaService": "ec2.us-east-1.amazonaws.com", **named}
    for action in (
        "GenerateDataKeyWithoutPlaintext",
        "Decrypt",
        "ReEncryptFrom",
        "ReEncryptTo",
    ):
        yield f"kms:{action}", arn, context
    yield "kms:CreateGrant", arn, {**context, "kms:GrantIsForAWSResource": "true"}


def _targets(form: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield kind and id of the resources that a call changes or ends."""
    yield from ((kind, form[name]) for name, kind in _NAMED.items() if form.get(name))
    for stem in ("InstanceId", "ResourceId"):
        for name in _numbered(form, stem):
            yield "instance", form[name.rstrip(".")]


def _numbered(form: Mapping[str, str], stem: str) -> list[str]:
    """Return the prefixes of a numbered list of a form: "Tag.1.", "Tag.2."."""
    names: list[str] = []
    while any(
        name.startswith(f"{stem}.{len(names) + 1}.") or name == f"{stem}.{len(names) + 1}" for name in form
    ):
        names.append(f"{stem}.{len(names) + 1}.")
    return names


def _tag_specifications(form: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    for stem in _numbered(form, "TagSpecification"):
        tags = {form[f"{name}Key"]: form.get(f"{name}Value", "") for name in _numbered(form, f"{stem}Tag")}
        yield form[f"{stem}ResourceType"], tags


def _requested(tags: Mapping[str, str]) -> dict[str, Any]:
    conditions = {f"aws:RequestTag/{key}": value for key, value in tags.items()}
    return conditions | ({"aws:TagKeys": list(tags)} if tags else {})


def _tagged(kind: str, key: str, backend: Any) -> dict[str, Any]:
    """Return the tags of a resource, as keys of conditions."""
    named = {"placement-group": getattr(backend, "placement_groups", {}), "key-pair": backend.key_pairs}
    resource = named.get(kind, {}).get(key)
    tags = backend.tags.get(resource.id if resource else key, {})
    return {f"aws:ResourceTag/{name}": value for name, value in dict(tags).items()}


def _arn(kind: str, key: str) -> str:
    return f"arn:aws:ec2:us-east-1:{ACCOUNT}:{kind}/{key}"
