"""A small evaluator of IAM policies: Allow statements, and the conditions that awsddp's own policy uses.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

USER_ID = "AKIAIOSFODNN7EXAMPLE"
_SERVICES = {
    "GetParameters": "ssm",
    "GetServiceQuota": "servicequotas",
    "GetProducts": "pricing",
    "RequestServiceQuotaIncrease": "servicequotas",
}
_FREE = ("GetCallerIdentity",)
_MAKES = {
    "CreateSecurityGroup": "security-group",
    "ImportKeyPair": "key-pair",
    "CreatePlacementGroup": "placement-group",
}


@dataclass(frozen=True)
class Need:
    """One permission that a call needs: an action on a resource, and what the conditions are held against."""

    action: str
    resource: str
    context: Mapping[str, Any] = field(default_factory=dict)


def allowed(policy: dict[str, Any], need: Need) -> bool:
    """Whether some statement allows it."""
    return any(_applies(statement, need) for statement in policy["Statement"])


def _applies(statement: dict[str, Any], need: Need) -> bool:
    assert statement["Effect"] == "Allow"
    return (
        any(fnmatchcase(need.action, action) for action in statement["Action"])
        and any(fnmatchcase(need.resource, resource) for resource in statement["Resource"])
        and all(
            _holds(operator, key, expected, need.context)
            for operator, pairs in statement.get("Condition", {}).items()
            for key, expected in pairs.items()
        )
    )


def _holds(operator: str, key: str, expected: Any, context: Mapping[str, Any]) -> bool:
    texts = [expected] if isinstance(expected, str) else expected
    values = [text.replace("${aws:userid}", USER_ID) for text in texts]
    if operator == "ForAllValues:StringEquals":
        return all(have in values for have in context.get(key, ()))
    assert operator == "StringEquals", operator
    return context.get(key) in values


def needs(operation: str, form: dict[str, str], backend: Any) -> Iterator[Need]:
    """Yield every permission that a call as it was received needs."""
    if operation in _FREE:
        return
    service = _SERVICES.get(operation, "ec2")
    action = f"{service}:{operation}"
    if operation.startswith(("Describe", "Get", "List", "Request")):
        yield Need(action, "*")
        return
    made = dict(_tag_specifications(form))
    if operation == "RunInstances":
        yield from _launch(action, form, made, backend)
    elif operation in _MAKES:
        kind = _MAKES[operation]
        yield Need(action, _arn(kind, "new"), _requested(made.get(kind, {})))
        if operation == "CreateSecurityGroup":
            yield Need(action, _arn("vpc", form["VpcId"]))
    else:
        tags = {form[f"{name}Key"]: form.get(f"{name}Value", "") for name in _numbered(form, "Tag")}
        for kind, key in _targets(operation, form):
            context = _requested(tags) | _resource(_tags(kind, key, backend))
            yield Need(action, _arn(kind, key), context)
    for kind, tags in made.items():
        yield Need("ec2:CreateTags", _arn(kind, "new"), {**_requested(tags), "ec2:CreateAction": operation})


def _launch(
    action: str, form: dict[str, str], made: dict[str, dict[str, str]], backend: Any
) -> Iterator[Need]:
    spot = ["spot-instances-request"] if form.get("InstanceMarketOptions.MarketType") == "spot" else []
    for kind in ("instance", "volume", "network-interface", *spot):
        yield Need(action, _arn(kind, "new"), _requested(made.get(kind, {})))
    yield Need(action, f"arn:aws:ec2:us-east-1::image/{form['ImageId']}")
    yield Need(action, _arn("subnet", form["NetworkInterface.1.SubnetId"]))
    used = [
        ("security-group", form.get("NetworkInterface.1.SecurityGroupId.1")),
        ("key-pair", form.get("KeyName")),
        ("placement-group", form.get("Placement.GroupName")),
    ]
    for kind, key in used:
        if key:
            yield Need(action, _arn(kind, key), _resource(_tags(kind, key, backend)))


def _targets(operation: str, form: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield kind and id of what a call changes or ends."""
    for name, kind in (
        ("GroupId", "security-group"),
        ("KeyName", "key-pair"),
        ("GroupName", "placement-group"),
        ("VolumeId", "volume"),
        ("NetworkInterfaceId", "network-interface"),
        ("InstanceId", "instance"),
    ):
        if name in form:
            yield kind, form[name]
    for stem in ("InstanceId", "ResourceId"):
        for name in _numbered(form, stem):
            yield "instance", form[name.rstrip(".")]


def _numbered(form: Mapping[str, str], stem: str) -> list[str]:
    """Return the prefixes of a numbered list of a form: "Tag.1.", "Tag.2."."""
    found = []
    number = 1
    while any(key == f"{stem}.{number}" or key.startswith(f"{stem}.{number}.") for key in form):
        found.append(f"{stem}.{number}.")
        number += 1
    return found


def _tag_specifications(form: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    for stem in _numbered(form, "TagSpecification"):
        tags = {form[f"{name}Key"]: form.get(f"{name}Value", "") for name in _numbered(form, f"{stem}Tag")}
        yield form[f"{stem}ResourceType"], tags


def _tags(kind: str, key: str, backend: Any) -> dict[str, str]:
    if kind == "placement-group":
        group = getattr(backend, "placement_groups", {}).get(key)
        return dict(group.tags) if group else {}
    if kind == "key-pair":
        pair = backend.key_pairs.get(key)
        return dict(backend.tags.get(pair.id, {})) if pair else {}
    return dict(backend.tags.get(key, {}))


def _requested(tags: Mapping[str, str]) -> dict[str, Any]:
    return {**{f"aws:RequestTag/{key}": value for key, value in tags.items()}, "aws:TagKeys": list(tags)}


def _resource(tags: Mapping[str, str]) -> dict[str, Any]:
    return {f"aws:ResourceTag/{key}": value for key, value in tags.items()}


def _arn(kind: str, key: str) -> str:
    return f"arn:aws:ec2:us-east-1:123456789012:{kind}/{key}"
