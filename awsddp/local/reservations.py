"""Capacity reservations and placement groups, which moto lacks, kept in the back end.

A reservation holds machines of a type in a zone, taken by launches, given back; what is free is counted from
the instances, so that nothing can disagree. A group is refused its end while it is in use.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-using.html
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from moto.ec2.models.core import TaggedEC2Resource

from awsddp.local.requests import Refusal, Request, kept

PLATFORM = "Linux/UNIX"  # of all images
_OUT = ("stopped", "terminated")


class CapacityReservation(TaggedEC2Resource):
    """Machines that are held, as EC2 describes them. `asked`: the parameters of the call that made it.

    `instance_match_criteria` is "open" (any fitting launch takes them) or "targeted".
    """

    tenancy = reservation_type = "default"
    cancelled = False

    def __init__(self, backend: Any, asked: dict[str, Any], tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = f"cr-{uuid.uuid4().hex[:17]}"
        self.instance_type = asked.get("InstanceType", "")
        self.instance_platform = asked.get("InstancePlatform", "")
        self.availability_zone = asked.get("AvailabilityZone", "")
        self.total_instance_count = asked.get("InstanceCount", 1)
        self.instance_match_criteria = asked.get("InstanceMatchCriteria", "open")
        self.end_date: datetime | None = asked.get("EndDate")
        self.end_date_type = "limited" if self.end_date else "unlimited"
        self.add_tags(tags)

    @property
    def state(self) -> str:
        """As EC2 names it."""
        if self.cancelled:
            return "cancelled"
        return "expired" if self.end_date and self.end_date < datetime.now(UTC) else "active"

    @property
    def available_instance_count(self) -> int:
        """How many machines it has left: stopped and terminated instances have given theirs back."""
        inside = [one for one in self.ec2_backend.all_instances() if one.capacity_reservation_id == self.id]
        used = sum(one.state not in _OUT for one in inside)
        return max(0, self.total_instance_count - used) if self.state == "active" else 0


def create(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CreateCapacityReservation."""
    made = CapacityReservation(backend, request.asked, request.tags("capacity-reservation"))
    held(backend)[made.id] = made
    return {"CapacityReservation": made}


def describe(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribeCapacityReservations.

    :raises Refusal: one that is asked for is not there.
    """
    ids = request.asked.get("CapacityReservationIds", held(backend))
    return {"CapacityReservations": request.select([_known(key, backend) for key in ids])}


def cancel(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CancelCapacityReservation.

    :raises Refusal: it is not there.
    """
    _known(request.asked.get("CapacityReservationId", ""), backend).cancelled = True
    return {"Return": True}


def held(backend: Any) -> dict[str, CapacityReservation]:
    """The reservations of a region, by id."""
    return kept(backend, "capacity_reservations")


def wanted(request: Request) -> str | None:
    """The id of the reservation that a launch names."""
    specification = request.asked.get("CapacityReservationSpecification", {})
    found: str | None = specification.get("CapacityReservationTarget", {}).get("CapacityReservationId")
    return found


def choose(request: Request, backend: Any, *, zone: str) -> CapacityReservation | None:
    """The reservation that a launch goes into: the one it names, else an open one with room for it all.

    :raises Refusal: the one it names has no room or does not fit. EC2 tells these apart by no code:
        https://github.com/hashicorp/terraform-provider-aws/issues/32458
    """
    asked, named = request.asked, wanted(request)
    spot = "InstanceMarketOptions" in asked
    if not named and (spot or asked.get("Placement", {}).get("GroupName")):
        return None
    attributes = (asked.get("InstanceType"), zone, PLATFORM)
    for one in [_known(named, backend)] if named else held(backend).values():
        fits = attributes == (one.instance_type, one.availability_zone, one.instance_platform) and not spot
        if (
            fits
            and (named or one.instance_match_criteria == "open")
            and one.available_instance_count >= asked["MaxCount"]
        ):
            return one
    if named:
        raise exceeded()
    return None


def exceeded() -> Refusal:
    """What EC2 answers where a reservation has no room, or does not fit."""
    return Refusal(
        "ReservationCapacityExceeded",
        "The requested reservation does not have sufficient compatible and available capacity for this "
        "request.",
    )


def _known(key: str, backend: Any) -> CapacityReservation:
    if key not in held(backend):
        raise Refusal(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation ID '{key}' does not exist"
        )
    return held(backend)[key]


class PlacementGroup(TaggedEC2Resource):
    """One placement group, which moto lacks, too. Nothing here is near or far."""

    strategy, state = "cluster", "available"

    def __init__(self, backend: Any, name: str, tags: dict[str, str]) -> None:
        self.ec2_backend, self.group_name = backend, name
        self.id = self.group_id = f"pg-{uuid.uuid4().hex[:17]}"
        self.add_tags(tags)


def create_group(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CreatePlacementGroup.

    :raises Refusal: there is one of this name.
    """
    groups, name = kept(backend, "placement_groups"), request.asked.get("GroupName", "")
    if name in groups:
        raise Refusal("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    groups[name] = PlacementGroup(backend, name, request.tags("placement-group"))
    return {"PlacementGroup": groups[name]}


def describe_groups(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribePlacementGroups."""
    groups = kept(backend, "placement_groups")
    found = [groups[name] for name in request.asked.get("GroupNames", groups) if name in groups]
    return {"PlacementGroups": request.select(found)}


def delete_group(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DeletePlacementGroup.

    :raises Refusal: InvalidPlacementGroup.Unknown, InvalidPlacementGroup.InUse.
    """
    name = request.asked.get("GroupName", "")
    check_group(name, backend)
    if any(one.placement.group_name == name and one.state != "terminated" for one in backend.all_instances()):
        raise Refusal(
            "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted."
        )
    del kept(backend, "placement_groups")[name]
    return {}


def check_group(name: str, backend: Any) -> None:
    """What a launch into, or the end of, a group that is not there meets.

    :raises Refusal: InvalidPlacementGroup.Unknown.
    """
    if name not in kept(backend, "placement_groups"):
        raise Refusal("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
