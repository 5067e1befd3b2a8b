"""Tags, names, descriptions, tokens and rules over EC2's limits (limits.py), which moto accepts."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from awsddp import limits
from awsddp.local.requests import Refusal, Request, under

_TAG = re.compile(r"((?:TagSpecifications?\.\d+\.)?Tag\.\d+)\.(Key|Value)")
_FILTER = re.compile(r"Filter\.\d+\.Value\.\d+")
_LENGTHS = {
    ("ImportKeyPair", "KeyName"): limits.KEY_NAME,
    ("CreateKeyPair", "KeyName"): limits.KEY_NAME,
    ("CreateSecurityGroup", "GroupName"): limits.GROUP_NAME,
    ("CreateSecurityGroup", "GroupDescription"): limits.GROUP_DESCRIPTION,
    ("CreatePlacementGroup", "GroupName"): limits.PLACEMENT_NAME,
}


def check(request: Request, backend: Any) -> None:
    """Refuse what is over a limit.

    :raises Refusal: InvalidParameterValue, InvalidTagKey.Malformed, TagLimitExceeded,
        RulesPerSecurityGroupLimitExceeded, FilterLimitExceeded.
    """
    _check_filters(request)
    if request.changes:
        _check_texts(request)
        _check_tags(request, backend)
        _check_rules(request, backend)


def _check_filters(request: Request) -> None:
    names = [name.rpartition(".")[0] for name in request.parameters if _FILTER.fullmatch(name)]
    if any(count > limits.FILTER_VALUES for count in Counter(names).values()):
        raise Refusal(
            "FilterLimitExceeded",
            f"The maximum number of filter values specified on a single call is {limits.FILTER_VALUES}",
        )


def _check_texts(request: Request) -> None:
    for (action, name), most in _LENGTHS.items():
        text = request.parameters.get(name, "") if action == request.action else ""
        if len(text) > most:
            raise _invalid(name, text, f"Length exceeds maximum of {most}.")
        if not text.isascii():
            raise _invalid(name, text, "Character sets beyond ASCII are not supported.")
        if action == "CreateSecurityGroup" and not limits.GROUP_TEXT.fullmatch(text):
            raise _invalid(name, text, "Valid characters are a-zA-Z0-9 and ._-:/()#,@[]+=&;{}!$*")
        if (action, name) == ("CreateSecurityGroup", "GroupName") and text.startswith("sg-"):
            raise _invalid(name, text, "Group names may not be in the format sg-*.")
    token = request.parameters.get("ClientToken", "")
    if len(token) > limits.CLIENT_TOKEN or not token.isascii():
        raise _invalid("ClientToken", token, f"It must be at most {limits.CLIENT_TOKEN} ASCII characters.")


def _check_tags(request: Request, backend: Any) -> None:
    added: dict[str, dict[str, str]] = {}
    names = map(_TAG.fullmatch, request.parameters if request.action != "DeleteTags" else ())
    for stem in dict.fromkeys(match[1] for match in names if match):
        key, value = (request.parameters.get(f"{stem}.{part}", "") for part in ("Key", "Value"))
        if fault := limits.tag_fault(key, value):
            code = "InvalidParameterValue" if key else "InvalidTagKey.Malformed"
            raise Refusal(code, f"Tag '{key[:200]}' is not valid: {fault}.")
        added.setdefault(stem.rpartition("Tag.")[0], {})[key] = value
    for tags in added.values():
        for resource in request.listed("ResourceId") or [""]:
            if len([key for key in {**backend.tags.get(resource, {}), **tags} if _counts(key)]) > limits.TAGS:
                raise Refusal(
                    "TagLimitExceeded", "The maximum number of Tags for a resource has been reached."
                )


def _counts(key: str) -> bool:
    return not key.startswith(limits.TAG_RESERVED)


def _check_rules(request: Request, backend: Any) -> None:
    match = re.fullmatch("AuthorizeSecurityGroup(Ingress|Egress)", request.action)
    if match is None:
        return
    group_id, name = request.parameters.get("GroupId"), request.parameters.get("GroupName")
    for group in (group for groups in backend.groups.values() for group in groups.values()):
        if group_id != group.id and (group_id is not None or name != group.name):
            continue
        rules = group.ingress_rules if match[1] == "Ingress" else group.egress_rules
        sources = [*map(_source, rules), *_requested(request)]
        for version in ("v4", "v6"):
            if len([one for one in sources if one in (version, "both")]) > limits.RULES:
                raise Refusal(
                    "RulesPerSecurityGroupLimitExceeded",
                    "The maximum number of rules per security group has been reached.",
                )


def _source(rule: Any) -> str:
    return "both" if rule.source_group else "v6" if rule.ip_range.get("CidrIpv6") else "v4"


def _requested(request: Request) -> list[str]:
    """Return for each rule that a request adds whether it counts as IPv4, as IPv6, or as both."""
    kinds = {
        r"\d+\.IpRanges\.\d+\.CidrIp": "v4",
        r"\d+\.Ipv6Ranges\.\d+\.CidrIpv6": "v6",
        r"\d+\.(Groups|UserIdGroupPairs)\.\d+\.Group(Id|Name)": "both",
    }
    names = list(under(request.parameters, "IpPermissions."))
    found = [kind for pattern, kind in kinds.items() for name in names if re.fullmatch(pattern, name)]
    return found + (["v4"] if "CidrIp" in request.parameters else [])


def _invalid(name: str, text: str, why: str) -> Refusal:
    name = f"{name[0].lower()}{name[1:]}" if name == "ClientToken" else name
    return Refusal("InvalidParameterValue", f"Value ({text[:300]}) for parameter {name} is invalid. {why}")
