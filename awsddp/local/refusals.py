"""What EC2 refuses and moto lets pass, checked before moto sees the request. Launches: launches.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

from moto.core.utils import get_service_model
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from awsddp.local import quotas, reservations
from awsddp.local.requests import Refusal, Request


def check_reservation(request: Request, backend: Any) -> None:
    """What CreateCapacityReservation refuses: reserved machines count against the quota, used or not.

    :raises Refusal: with EC2's code.
    """
    name, zone = request.asked.get("InstanceType", ""), request.asked.get("AvailabilityZone", "")
    check_zone(name, zone, region=request.region)
    quotas.check(backend, name, request.asked.get("InstanceCount", 1))


def check_start(request: Request, backend: Any) -> None:
    """What StartInstances refuses: stopped machines need their reservation, or the quota, again.

    Those that did not ask for their reservation by name run outside of it where it has no room.

    :raises Refusal: ReservationCapacityExceeded, VcpuLimitExceeded.
    """
    named = backend.get_multi_instances_by_id(request.asked.get("InstanceIds", ()))
    stopped = [one for one in named if one.state == "stopped"]
    outside = [one for one in stopped if one.capacity_reservation_id is None]
    for key, count in Counter(one.capacity_reservation_id for one in stopped).items():
        if key is None or reservations.held(backend)[key].available_instance_count >= count:
            continue
        inside = [one for one in stopped if one.capacity_reservation_id == key]
        if any(hasattr(one, "capacity_reservation_specification") for one in inside):
            raise reservations.exceeded()
        outside += inside
    for name, count in Counter(one.instance_type for one in outside).items():
        quotas.check(backend, name, count)
    for instance in () if request.dry else outside:
        instance.capacity_reservation_id = None


def check_tagged(request: Request, backend: Any) -> None:
    """Tags of instances that are not there.

    :raises ServiceException: InvalidInstanceID.NotFound.
    """
    named = [one for one in request.asked.get("Resources", ()) if one.startswith("i-")]
    backend.get_multi_instances_by_id(named)


def check_unused(request: Request, backend: Any) -> None:
    """A subnet with interfaces, or a VPC with groups or a gateway of its own, cannot be deleted.

    :raises Refusal: DependencyViolation.
    """
    subnet_id, vpc_id = request.asked.get("SubnetId"), request.asked.get("VpcId", "")
    users = [one for one in backend.enis.values() if one.subnet.id == subnet_id]
    users += backend.describe_internet_gateways(filters={"attachment.vpc-id": [vpc_id]})
    users += [one for one in backend.groups.get(vpc_id, {}).values() if one.name != "default"]
    if users:
        name = f"subnet '{subnet_id}'" if subnet_id else f"vpc '{vpc_id}'"
        raise Refusal("DependencyViolation", f"The {name} has dependencies and cannot be deleted.")


def check_group_unused(request: Request, backend: Any) -> None:
    """A group that an interface, or a rule of another group, still needs cannot be deleted.

    :raises Refusal: DependencyViolation.
    """
    wanted = request.asked.get("GroupId", "")
    users = {group.id for eni in backend.enis.values() for group in eni.group_set}
    users |= {
        rule.source_group.get("GroupId")
        for group in backend.describe_security_groups()
        for rule in (*group.ingress_rules, *group.egress_rules)
        if group.id != wanted
    }
    if wanted in users:
        raise Refusal("DependencyViolation", f"resource {wanted} has a dependent object")


def check_interface_free(request: Request, backend: Any) -> None:
    """An interface of an instance cannot be deleted.

    :raises Refusal: InvalidNetworkInterface.InUse.
    """
    interface = backend.enis.get(request.asked.get("NetworkInterfaceId", ""))
    if interface is not None and interface.instance is not None:
        raise Refusal(
            "InvalidNetworkInterface.InUse", f"Network interface '{interface.id}' is currently in use."
        )


def check_type(name: str, image: Any, *, region: str) -> None:
    """Refuse a type that EC2 does not have, not in this region, or not for this image.

    :raises Refusal: InvalidParameterValue, Unsupported.
    """
    shape: Any = get_service_model("ec2").shape_for("InstanceType")
    if name not in shape.enum:
        raise Refusal("InvalidParameterValue", f"Invalid value '{name}' for InstanceType.")
    if not zones_offering(name, region):
        raise Refusal(
            "Unsupported",
            "The requested configuration is currently not supported. "
            "Please check the documentation for supported configurations.",
        )
    supported = INSTANCE_TYPES[name]["ProcessorInfo"]["SupportedArchitectures"]
    if image.architecture not in supported:
        raise Refusal(
            "InvalidParameterValue",
            f"The architecture '{','.join(supported)}' of the specified instance type does not match the "
            f"architecture '{image.architecture}' of the specified AMI. Specify an instance type and an AMI "
            "that have matching architectures, and try again.",
        )


def check_zone(name: str, zone: str, *, region: str) -> None:
    """Refuse a type that its zone does not offer.

    :raises Refusal: Unsupported.
    """
    if zone not in (offered := zones_offering(name, region)):
        raise Refusal(
            "Unsupported",
            f"Your requested instance type ({name}) is not supported in your requested Availability Zone "
            f"({zone}). Please retry your request by not specifying an Availability Zone or choosing "
            f"{', '.join(sorted(offered))}.",
        )


def zones_offering(instance_type: str, region: str) -> set[str]:
    """The zones of a region where a type can be launched."""
    return {
        offer["Location"]
        for offer in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
        if offer["InstanceType"] == instance_type
    }
