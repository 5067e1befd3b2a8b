"""RunInstances: what EC2 refuses, what no node would have, and what moto lacks of a launch."""

from __future__ import annotations

import hashlib
from typing import Any

from moto.ec2.utils import parse_user_data

from awsddp.local import offers
from awsddp.local.offers import CapacityReservation
from awsddp.local.requests import Refusal, Request, kept

NOT_COMPARED = ("ClientToken", "DryRun")  # what may differ when a launch is sent again


def answer(request: Request, backend: Any) -> Any:
    """Answer a launch that was checked; a client token sent again gets the same instances again.

    :raises Refusal: IdempotentParameterMismatch, IdempotentInstanceTerminated.
    """
    asked, token, digest = request.asked, request.asked.get("ClientToken"), _digest(request)
    if token in kept(backend, "launches"):
        return _replay(digest, *kept(backend, "launches")[token])
    subnet = subnet_of(request, backend)
    reservation = offers.choose_reservation(request, backend, zone=subnet.availability_zone)
    nics = [
        {"SubnetId": subnet.id, **nic, "DeviceIndex": place}
        for place, nic in enumerate(asked.get("NetworkInterfaces", ()))
    ]
    if len(nics) > 1:
        nics[0]["AssociatePublicIpAddress"] = False
    launched = backend.run_instances(
        asked["ImageId"],
        asked.get("MaxCount", 1),
        parse_user_data(asked.get("UserData")),
        asked.get("SecurityGroups", []),
        instance_type=type_of(request),
        is_instance_type_default=False,
        region_name=request.region,
        subnet_id=subnet.id,
        key_name=asked.get("KeyName"),
        security_group_ids=asked.get("SecurityGroupIds", []),
        nics=nics,
        associate_public_ip=None,
        tags={kind: request.tags(kind) for kind in ("instance", "volume")},
        instance_market_options=asked.get("InstanceMarketOptions"),
        instance_initiated_shutdown_behavior=asked.get("InstanceInitiatedShutdownBehavior"),
        metadata_options=asked.get("MetadataOptions"),
        block_device_mappings=[_root_disk(request, backend)],
    )
    for instance in launched.instances:
        _complete(instance, request, backend, reservation)
    if token:
        kept(backend, "launches")[token] = (digest, launched)
    return launched


def type_of(request: Request) -> str:
    """The instance type that a call names."""
    return str(request.asked.get("InstanceType", "m1.small"))


def image_of(request: Request, backend: Any) -> Any:
    """The image of a launch.

    :raises ServiceException: InvalidAMIID.NotFound.
    """
    [image] = backend.describe_images(ami_ids=[request.asked.get("ImageId", "")])
    return image


def subnet_of(request: Request, backend: Any) -> Any:
    """The subnet of a launch: the one it names, else the default one of its zone or of the first that fits.

    :raises ServiceException: InvalidSubnetID.NotFound; MissingInput: no default subnet fits.
    """
    asked = request.asked
    if key := asked.get("SubnetId") or asked.get("NetworkInterfaces", [{}])[0].get("SubnetId"):
        return backend.get_subnet(key)
    zone = asked.get("Placement", {}).get("AvailabilityZone")
    fitting = {zone} if zone else offers.zones_offering(type_of(request), request.region)
    for name, subnet in sorted(backend.get_default_subnets().items()):
        if name in fitting:
            return subnet
    raise Refusal("MissingInput", "No default subnet can take this instance type. Specify a subnet.")


def _root_disk(request: Request, backend: Any) -> dict[str, Any]:
    """The root volume as moto wants it: that of the image, with what the launch asks for."""
    [root] = image_of(request, backend).block_device_mappings
    [mapping] = request.asked.get("BlockDeviceMappings", [{}])
    return {
        "DeviceName": root["DeviceName"],
        "Ebs": {**root["Ebs"], "SnapshotId": None, **mapping.get("Ebs", {})},
    }


def _complete(instance: Any, request: Request, backend: Any, chosen: CapacityReservation | None) -> None:
    """Give a new instance what moto drops of its launch."""
    asked = request.asked
    instance.placement.group_name = asked.get("Placement", {}).get("GroupName", "")
    for place, nic in instance.nics.items():
        nic.add_tags(request.tags("network-interface"))
        nic.interface_type = asked.get("NetworkInterfaces", [{}])[place].get("InterfaceType", "interface")
        if nic.interface_type == "efa-only":
            nic.private_ip_address, nic.private_ip_addresses = None, []
    if profile := asked.get("IamInstanceProfile"):
        backend.associate_iam_instance_profile(instance.id, profile.get("Name"), profile.get("Arn"))
    if chosen is not None:
        instance.capacity_reservation_id = chosen.id
        if offers.named_reservation(request):
            target = {"CapacityReservationId": chosen.id}
            instance.capacity_reservation_specification = {"CapacityReservationTarget": target}


def _digest(request: Request) -> str:
    compared = sorted((k, v) for k, v in request.parameters.items() if k not in NOT_COMPARED)
    return hashlib.sha256(repr(compared).encode()).hexdigest()


def _replay(digest: str, earlier: str, launched: Any) -> Any:
    if earlier != digest:
        raise Refusal(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in previous "
            "request(s).",
        )
    if all(one.state in ("shutting-down", "terminated") for one in launched.instances):
        raise Refusal(
            "IdempotentInstanceTerminated",
            "The instances launched with this client token have been terminated. Please use a new token.",
        )
    return launched
