"""Placement groups, which moto lacks: made, listed by tag, refused while in use. They live in the back end.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from awsddp.local.requests import Refusal, Request, tag_list


@dataclass
class PlacementGroup:
    """One placement group. Nothing here is near or far."""

    name: str
    id: str = field(default_factory=lambda: f"pg-{uuid.uuid4().hex[:17]}")
    tags: dict[str, str] = field(default_factory=dict)


def create(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CreatePlacementGroup.

    :raises Refusal: there is one of this name.
    """
    groups, name = _groups(backend), request.asked.get("GroupName", "")
    if name in groups:
        raise Refusal("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    groups[name] = PlacementGroup(name, tags=request.tags("placement-group"))
    return {"PlacementGroup": _shown(groups[name])}


def describe(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribePlacementGroups."""
    names = request.asked.get("GroupNames", ())
    found = [
        _shown(group)
        for group in _groups(backend).values()
        if (not names or group.name in names)
        and request.picks(group.tags, group_name=group.name, state="available")
    ]
    return {"PlacementGroups": found}


def delete(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DeletePlacementGroup.

    :raises Refusal: InvalidPlacementGroup.Unknown, InvalidPlacementGroup.InUse.
    """
    name = request.asked.get("GroupName", "")
    check_known(name, backend)
    if any(one.placement.group_name == name and one.state != "terminated" for one in backend.all_instances()):
        raise Refusal(
            "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted."
        )
    del _groups(backend)[name]
    return {}


def check_known(name: str, backend: Any) -> None:
    """What a launch into, or the end of, a group that is not there meets.

    :raises Refusal: InvalidPlacementGroup.Unknown.
    """
    if name not in _groups(backend):
        raise Refusal("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


def _groups(backend: Any) -> dict[str, PlacementGroup]:
    found: dict[str, PlacementGroup] = backend.__dict__.setdefault("placement_groups", {})
    return found


def _shown(group: PlacementGroup) -> dict[str, Any]:
    return {
        "GroupName": group.name,
        "GroupId": group.id,
        "Strategy": "cluster",
        "State": "available",
        "Tags": tag_list(group.tags),
    }
