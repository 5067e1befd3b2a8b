"""Placement groups, which moto lacks: made, listed by tag, refused while in use. They live in the back end.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html
"""

from __future__ import annotations

import uuid
from typing import Any

from moto.ec2.models.core import TaggedEC2Resource

from awsddp.local.requests import Refusal, Request


class PlacementGroup(TaggedEC2Resource):
    """One placement group. Nothing here is near or far."""

    strategy, state = "cluster", "available"

    def __init__(self, backend: Any, name: str, tags: dict[str, str]) -> None:
        self.ec2_backend, self.group_name = backend, name
        self.id = self.group_id = f"pg-{uuid.uuid4().hex[:17]}"
        self.add_tags(tags)


def create(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CreatePlacementGroup.

    :raises Refusal: there is one of this name.
    """
    groups, name = _groups(backend), request.asked.get("GroupName", "")
    if name in groups:
        raise Refusal("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    groups[name] = PlacementGroup(backend, name, request.tags("placement-group"))
    return {"PlacementGroup": groups[name]}


def describe(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribePlacementGroups."""
    groups = _groups(backend)
    found = [groups[name] for name in request.asked.get("GroupNames", groups) if name in groups]
    return {"PlacementGroups": request.select(found)}


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
