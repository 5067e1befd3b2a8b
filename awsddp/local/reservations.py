"""Capacity reservations, which moto lacks: machines of a type held in a zone, taken by launches, given back.

They live in the back end; what is free is counted from the instances, so that nothing can disagree.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-using.html
"""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from awsddp.local.requests import Refusal, Request, tag_list

PLATFORM = "Linux/UNIX"  # of all images
_OUT = ("stopped", "terminated")


@dataclass
class Reservation:
    """Machines that are held. `criteria` is "open" (any fitting launch takes them) or "targeted"."""

    instance_type: str
    platform: str
    zone: str
    total: int
    criteria: str
    tags: dict[str, str]
    ends: datetime | None
    cancelled: bool = False
    id: str = field(default_factory=lambda: f"cr-{uuid.uuid4().hex[:17]}")

    @property
    def state(self) -> str:
        """As EC2 names it."""
        if self.cancelled:
            return "cancelled"
        return "expired" if self.ends and self.ends < datetime.now(UTC) else "active"

    def free(self, backend: Any) -> int:
        """How many machines it has left: stopped and terminated instances have given theirs back."""
        used = sum(one.state not in _OUT for one in backend.all_instances() if entered(one) == self.id)
        return max(0, self.total - used) if self.state == "active" else 0


def create(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CreateCapacityReservation."""
    asked = request.asked
    made = Reservation(
        instance_type=asked.get("InstanceType", ""),
        platform=asked.get("InstancePlatform", ""),
        zone=asked.get("AvailabilityZone", ""),
        total=asked.get("InstanceCount", 1),
        criteria=asked.get("InstanceMatchCriteria", "open"),
        ends=asked.get("EndDate"),
        tags=request.tags("capacity-reservation"),
    )
    held(backend)[made.id] = made
    return {"CapacityReservation": _shown(made, backend)}


def describe(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribeCapacityReservations.

    :raises Refusal: one that is asked for is not there.
    """
    ids = request.asked.get("CapacityReservationIds", ())
    known = [_known(key, backend) for key in ids] or held(backend).values()
    found = [_shown(one, backend) for one in known if request.picks(one.tags, state=one.state)]
    return {"CapacityReservations": found}


def cancel(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CancelCapacityReservation.

    :raises Refusal: it is not there.
    """
    _known(request.asked.get("CapacityReservationId", ""), backend).cancelled = True
    return {"Return": True}


def entered(instance: Any) -> str | None:
    """The id of the reservation that an instance is in, or was in when it was stopped."""
    found: str | None = getattr(instance, "capacity_reservation_id", None)
    return found


def held(backend: Any) -> dict[str, Reservation]:
    """The reservations of a region, by id."""
    found: dict[str, Reservation] = backend.__dict__.setdefault("capacity_reservations", {})
    return found


def wanted(request: Request) -> str | None:
    """The id of the reservation that a launch names."""
    specification = request.asked.get("CapacityReservationSpecification", {})
    found: str | None = specification.get("CapacityReservationTarget", {}).get("CapacityReservationId")
    return found


def choose(request: Request, backend: Any, *, zone: str) -> Reservation | None:
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
        fits = attributes == (one.instance_type, one.zone, one.platform) and not spot
        if fits and (named or one.criteria == "open") and one.free(backend) >= asked["MaxCount"]:
            return one
    if named:
        raise _exceeded()
    return None


def check_start(request: Request, backend: Any) -> None:
    """Takes stopped instances back into their reservation; without room there they run outside of it.

    :raises Refusal: they asked for it by name.
    """
    stopped = [
        one
        for one in map(backend.get_instance_by_id, request.asked.get("InstanceIds", ()))
        if one is not None and one.state == "stopped" and entered(one)
    ]
    for key, count in Counter(map(entered, stopped)).items():
        if key is None or held(backend)[key].free(backend) >= count:
            continue
        for instance in stopped:
            if entered(instance) == key:
                if hasattr(instance, "capacity_reservation_specification"):
                    raise _exceeded()
                instance.capacity_reservation_id = None


def _exceeded() -> Refusal:
    return Refusal(
        "ReservationCapacityExceeded",
        "The requested reservation does not have sufficient compatible and available capacity for this "
        "request.",
    )


def _known(key: str, backend: Any) -> Reservation:
    if key not in held(backend):
        raise Refusal(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation ID '{key}' does not exist"
        )
    return held(backend)[key]


def _shown(one: Reservation, backend: Any) -> dict[str, Any]:
    return {
        "CapacityReservationId": one.id,
        "InstanceType": one.instance_type,
        "InstancePlatform": one.platform,
        "AvailabilityZone": one.zone,
        "Tenancy": "default",
        "TotalInstanceCount": one.total,
        "AvailableInstanceCount": one.free(backend),
        "State": one.state,
        "EndDate": one.ends,
        "EndDateType": "limited" if one.ends else "unlimited",
        "InstanceMatchCriteria": one.criteria,
        "ReservationType": "default",
        "Tags": tag_list(one.tags),
    }
