"""Tags, names, descriptions, tokens and rules over EC2's limits (limits.py), which moto accepts."""

from __future__ import annotations

from typing import Any

from awsddp import limits
from awsddp.local.requests import Refusal, Request, invalid

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
    if any(len(one.get("Values", ())) > limits.FILTER_VALUES for one in request.asked.get("Filters", ())):
        raise Refusal(
            "FilterLimitExceeded",
            f"The maximum number of filter values specified on a single call is {limits.FILTER_VALUES}",
        )


def _check_texts(request: Request) -> None:
    for (action, name), most in _LENGTHS.items():
        text = request.parameters.get(name, "") if action == request.action else ""
        if len(text) > most:
            raise invalid(text, name, f"Length exceeds maximum of {most}.")
        if not text.isascii():
            raise invalid(text, name, "Character sets beyond ASCII are not supported.")
        if action == "CreateSecurityGroup" and not limits.GROUP_TEXT.fullmatch(text):
            raise invalid(text, name, "Valid characters are a-zA-Z0-9 and ._-:/()#,@[]+=&;{}!$*")
        if (action, name) == ("CreateSecurityGroup", "GroupName") and text.startswith("sg-"):
            raise invalid(text, name, "Group names may not be in the format sg-*.")
    token = request.parameters.get("ClientToken", "")
    if len(token) > limits.CLIENT_TOKEN or not token.isascii():
        raise invalid(token, "clientToken", f"It must be at most {limits.CLIENT_TOKEN} ASCII characters.")


def _check_tags(request: Request, backend: Any) -> None:
    asked = request.asked
    given = [one.get("Tags", ()) for one in (asked, *asked.get("TagSpecifications", ()))]
    for tags in given if request.action != "DeleteTags" else ():
        added = {tag.get("Key", ""): tag.get("Value", "") for tag in tags}
        for key, value in added.items():
            if fault := limits.tag_fault(key, value):
                code = "InvalidParameterValue" if key else "InvalidTagKey.Malformed"
                raise Refusal(code, f"Tag '{key[:200]}' is not valid: {fault}.")
        for resource in asked.get("Resources", [""]):
            if len(backend.tags.get(resource, {}).keys() | added) > limits.TAGS:
                raise Refusal(
                    "TagLimitExceeded", "The maximum number of Tags for a resource has been reached."
                )


def _check_rules(request: Request, backend: Any) -> None:
    """Count the rules that a group has and gets: one that names a group counts as IPv4 and as IPv6."""
    group = backend.get_security_group_from_id(request.asked.get("GroupId", ""))
    if group is None or not request.action.startswith("AuthorizeSecurityGroup"):
        return
    rules = group.ingress_rules if request.action.endswith("Ingress") else group.egress_rules
    permissions = request.asked.get("IpPermissions", ())
    for kind, key in (("IpRanges", "CidrIp"), ("Ipv6Ranges", "CidrIpv6")):
        count = sum(bool(rule.source_group or rule.ip_range.get(key)) for rule in rules)
        count += sum(len(one.get(kind, ())) + len(one.get("UserIdGroupPairs", ())) for one in permissions)
        if count > limits.RULES:
            raise Refusal(
                "RulesPerSecurityGroupLimitExceeded",
                "The maximum number of rules per security group has been reached.",
            )
