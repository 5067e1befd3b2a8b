"""Placement groups, which moto lacks: made, listed by tag, refused while in use. They live in the back end.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from awsddp.local.requests import Refusal, Reply, Request, dry_run, ec2_reply, tag_set

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
    if request.dry:
        raise dry_run()
    groups = _groups(backend)
    name = request.parameters.get("GroupName", "")
    if request.action == "DescribePlacementGroups":
        names = request.listed("GroupName")
        found = [
            group
            for group in groups.values()
            if (not names or group.name in names)
            and request.picks(
                group.tags,
                group_name=group.name,
                group_id=group.id,
                state="available",
                strategy=group.strategy,
            )
        ]
        return ec2_reply(request, f"<placementGroupSet>{''.join(map(_item, found))}</placementGroupSet>")
    if request.action == "CreatePlacementGroup":
        if name in groups:
            raise Refusal("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
        groups[name] = PlacementGroup(
            name, request.parameters.get("Strategy", "cluster"), tags=request.tags()
        )
        return ec2_reply(request, f"<placementGroup>{_inside(groups[name])}</placementGroup>")
    check_known(name, backend)
    if name in _used(backend):
        raise Refusal(
            "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted."
        )
    del groups[name]
    return ec2_reply(request, "<return>true</return>")


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


def _item(group: PlacementGroup) -> str:
    return f"<item>{_inside(group)}</item>"


def _inside(group: PlacementGroup) -> str:
    return (
        f"<groupName>{escape(group.name)}</groupName><groupId>{group.id}</groupId>"
        f"<strategy>{escape(group.strategy)}</strategy><state>available</state>"
        f"{tag_set(group.tags)}"
    )
