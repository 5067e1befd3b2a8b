"""Capacity reservations, which moto lacks: machines of a type held in a zone, taken by launches, given back.

They live in the back end; what is free is counted from the instances, so that nothing can disagree.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-using.html
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from xml.sax.saxutils import escape

from awsddp.local.requests import Refusal, Reply, Request, dry_run, ec2_reply, tag_set

ACTIONS = frozenset(
    {"CreateCapacityReservation", "DescribeCapacityReservations", "CancelCapacityReservation"}
)
ONLY = "capacity-reservations-only"
_ASKED = "CapacityReservationSpecification."
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
    tenancy: str = "default"
    ends: str = ""
    cancelled: bool = False
    id: str = field(default_factory=lambda: f"cr-{uuid.uuid4().hex[:17]}")
    created: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}")

    @property
    def state(self) -> str:
        """As EC2 names it."""
        if self.cancelled:
            return "cancelled"
        over = self.ends and datetime.fromisoformat(self.ends) < datetime.now(UTC)
        return "expired" if over else "active"

    def free(self, backend: Any) -> int:
        """How many machines it has left: stopped and terminated instances have given theirs back."""
        used = sum(one.state not in _OUT for one in _instances(backend) if entered(one) == self.id)
        return max(0, self.total - used) if self.state == "active" else 0


def answer(request: Request, backend: Any) -> Reply:
    """The reply to one of ACTIONS.

    :raises Refusal: with EC2's code.
    """
    if request.dry:
        raise dry_run()
    asked = request.parameters
    if request.action == "CreateCapacityReservation":
        made = Reservation(
            instance_type=asked.get("InstanceType", ""),
            platform=asked.get("InstancePlatform", ""),
            zone=asked.get("AvailabilityZone", ""),
            total=int(asked.get("InstanceCount", "1")),
            criteria=asked.get("InstanceMatchCriteria", "open"),
            tenancy=asked.get("Tenancy", "default"),
            ends=asked.get("EndDate", ""),
            tags=request.tags(),
        )
        held(backend)[made.id] = made
        inside = f"<capacityReservation>{_shown(made, backend)}</capacityReservation>"
    elif request.action == "DescribeCapacityReservations":
        ids = request.listed("CapacityReservationId")
        found = [_known(key, backend) for key in ids] or [
            one for one in held(backend).values() if _picked(request, one)
        ]
        items = "".join(f"<item>{_shown(one, backend)}</item>" for one in found)
        inside = f"<capacityReservationSet>{items}</capacityReservationSet>"
    else:
        _known(asked.get("CapacityReservationId", ""), backend).cancelled = True
        inside = "<return>true</return>"
    return ec2_reply(request, inside)


def entered(instance: Any) -> str | None:
    """The id of the reservation that an instance is in, or was in when it was stopped."""
    found: str | None = getattr(instance, "capacity_reservation_id", None)
    return found


def held(backend: Any) -> dict[str, Reservation]:
    """The reservations of a region, by id."""
    found: dict[str, Reservation] = backend.__dict__.setdefault("capacity_reservations", {})
    return found


def choose(request: Request, backend: Any, *, zone: str, platform: str) -> Reservation | None:
    """The reservation that a launch goes into: the one it names, else an open one with room for it all.

    :raises Refusal: the one it names, or every one where it wants no other machines, has no room or does not
        fit. EC2 tells these apart by no code: https://github.com/hashicorp/terraform-provider-aws/issues/32458
    """
    asked = request.parameters
    wanted = asked.get(f"{_ASKED}CapacityReservationTarget.CapacityReservationId")
    preference = asked.get(f"{_ASKED}CapacityReservationPreference", "open")
    market = "InstanceMarketOptions.MarketType" in asked
    if not wanted and (preference == "none" or market or asked.get("Placement.GroupName")):
        return None
    candidates = [_known(wanted, backend)] if wanted else held(backend).values()
    attributes = (asked.get("InstanceType"), zone, platform, asked.get("Placement.Tenancy", "default"))
    for one in candidates:
        fits = attributes == (one.instance_type, one.zone, one.platform, one.tenancy) and not market
        if (
            fits
            and (wanted or one.criteria == "open")
            and one.free(backend) >= int(asked.get("MaxCount", "1"))
        ):
            return one
    if wanted or preference == ONLY:
        raise _exceeded()
    return None


def remember(request: Request, instances: list[Any], chosen: Reservation | None) -> None:
    """Keeps with new instances the reservation they are in, and whether they asked for it by name."""
    targeted = f"{_ASKED}CapacityReservationTarget.CapacityReservationId" in request.parameters
    for instance in instances:
        if chosen is not None:
            instance.capacity_reservation_id = chosen.id
        if targeted and chosen is not None:
            target = {"CapacityReservationId": chosen.id}
            instance.capacity_reservation_specification = {"CapacityReservationTarget": target}


def check_start(request: Request, backend: Any) -> None:
    """Takes stopped instances back into their reservation; without room there they run outside of it.

    :raises Refusal: they asked for it by name.
    """
    stopped = [
        one
        for one in map(backend.get_instance_by_id, request.listed("InstanceId"))
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
    if not re.fullmatch(r"cr-[0-9a-f]{8,17}", key):
        raise Refusal("InvalidCapacityReservationId.Malformed", f'Invalid id: "{key}"')
    if key not in held(backend):
        raise Refusal(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation ID '{key}' does not exist"
        )
    return held(backend)[key]


def _instances(backend: Any) -> list[Any]:
    return [one for reservation in backend.reservations.values() for one in reservation.instances]


def _picked(request: Request, one: Reservation) -> bool:
    return request.picks(
        one.tags,
        instance_type=one.instance_type,
        availability_zone=one.zone,
        instance_platform=one.platform,
        instance_match_criteria=one.criteria,
        tenancy=one.tenancy,
        state=one.state,
    )


def _shown(one: Reservation, backend: Any) -> str:
    region = backend.region_name
    fields = {
        "capacityReservationId": one.id,
        "ownerId": backend.account_id,
        "capacityReservationArn": (
            f"arn:aws:ec2:{region}:{backend.account_id}:capacity-reservation/{one.id}"
        ),
        "instanceType": one.instance_type,
        "instancePlatform": one.platform,
        "availabilityZone": one.zone,
        "tenancy": one.tenancy,
        "totalInstanceCount": one.total,
        "availableInstanceCount": one.free(backend),
        "state": one.state,
        "startDate": one.created,
        **({"endDate": one.ends} if one.ends else {}),
        "endDateType": "limited" if one.ends else "unlimited",
        "instanceMatchCriteria": one.criteria,
        "createDate": one.created,
        "reservationType": "default",
    }
    return "".join(f"<{key}>{escape(str(value))}</{key}>" for key, value in fields.items()) + tag_set(
        one.tags
    )
