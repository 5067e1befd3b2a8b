"""Placement groups, which moto lacks: made, listed by tag, refused while in use. They live in the back end.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from awsddp.local.requests import Refusal, Reply, Request

ACTIONS = frozenset({"CreatePlacementGroup", "DescribePlacementGroups", "DeletePlacementGroup"})


@dataclass
class PlacementGroup:
    """One placement group. Nothing here is near or far, so the strategy is only remembered."""

    name: str
    strategy: str
    id: str = field(default_factory=lambda: f"pg-{uuid.uuid4().hex[:17]}")
    tags: dict[str, str] = field(default_factory=dict)


def answer(request: Request, backend: Any) -> Reply:
    """The reply to one of ACTIONS.

    :raises Refusal: with EC2's code.
    """
    if request.parameters.get("DryRun") == "true":
        raise Refusal(
            "DryRunOperation",
            "Request would have succeeded, but DryRun flag is set.",
            status="412 Precondition Failed",
        )
    groups = _groups(backend)
    name = request.parameters.get("GroupName", "")
    if request.action == "DescribePlacementGroups":
        found = [group for group in groups.values() if _matches(request, group)]
        return _reply(request, f"<placementGroupSet>{''.join(map(_item, found))}</placementGroupSet>")
    if request.action == "CreatePlacementGroup":
        if name in groups:
            raise Refusal("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
        groups[name] = PlacementGroup(
            name, request.parameters.get("Strategy", "cluster"), tags=_tags(request)
        )
        return _reply(request, f"<placementGroup>{_inside(groups[name])}</placementGroup>")
    check_known(name, backend)
    if name in _used(backend):
        raise Refusal(
            "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted."
        )
    del groups[name]
    return _reply(request, "<return>true</return>")


def check_known(name: str, backend: Any) -> None:
    """What a launch into, or the end of, a group that is not there meets.

    :raises Refusal: InvalidPlacementGroup.Unknown.
    """
    if name and name not in _groups(backend):
        raise Refusal("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


def remember(request: Request, instances: list[Any]) -> None:
    """Keeps with new instances which placement group they were launched into."""
    for instance in instances:
        instance.placement.group_name = request.parameters.get("Placement.GroupName", "")


def _groups(backend: Any) -> dict[str, PlacementGroup]:
    found: dict[str, PlacementGroup] = backend.__dict__.setdefault("placement_groups", {})
    return found


def _used(backend: Any) -> set[str]:
    return {
        instance.placement.group_name
        for reservation in backend.reservations.values()
        for instance in reservation.instances
        if instance.state != "terminated"
    }


def _tags(request: Request) -> dict[str, str]:
    stem = "TagSpecification.1.Tag"
    keys = [name for name in request.parameters if name.startswith(stem) and name.endswith(".Key")]
    return {request.parameters[key]: request.parameters.get(key[:-3] + "Value", "") for key in keys}


def _matches(request: Request, group: PlacementGroup) -> bool:
    names = request.listed("GroupName")
    if names and group.name not in names:
        return False
    number = 1
    while name := request.parameters.get(f"Filter.{number}.Name"):
        values = request.listed(f"Filter.{number}.Value")
        if name == "tag-key":
            have: set[Any] = set(group.tags)
        elif name.startswith("tag:"):
            have = {group.tags.get(name[4:])}
        else:
            have = {getattr(group, name[6:], None)}
        if not have & set(values):
            return False
        number += 1
    return True


def _item(group: PlacementGroup) -> str:
    return f"<item>{_inside(group)}</item>"


def _inside(group: PlacementGroup) -> str:
    tags = "".join(
        f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>"
        for key, value in group.tags.items()
    )
    return (
        f"<groupName>{escape(group.name)}</groupName><groupId>{group.id}</groupId>"
        f"<strategy>{escape(group.strategy)}</strategy><state>available</state>"
        f"<tagSet>{tags}</tagSet>"
    )


def _reply(request: Request, inside: str) -> Reply:
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<{request.action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
        f"<requestId>{uuid.uuid4()}</requestId>{inside}</{request.action}Response>"
    )
    return "200 OK", [("Content-Type", "text/xml;charset=UTF-8")], body.encode()
