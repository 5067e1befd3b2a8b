"""What EC2 refuses and moto lets pass, checked before moto sees the request."""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.utils import get_service_model
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.iam.models import iam_backends

from awsddp.limits import USER_DATA_BYTES
from awsddp.local import quotas, reservations
from awsddp.local.requests import Refusal, Request
from awsddp.local.reservations import Reservation

PRIVATE_ADDRESS = re.compile(r"(NetworkInterface\.\d+\.)?PrivateIpAddress(es\.\d+\.PrivateIpAddress)?")


def check_launch(request: Request, backend: Any) -> None:
    """What RunInstances refuses.

    :raises Refusal: with EC2's code.
    """
    low, high = _count(request, "MinCount"), _count(request, "MaxCount")
    if low < 1 or high < low:
        raise Refusal(
            "InvalidParameterValue",
            f"Value ({low}) for parameter minCount is invalid. It must be at least 1 and at most maxCount "
            f"({high}).",
        )
    try:
        user_data = base64.b64decode("".join(request.parameters.get("UserData", "").split()), validate=True)
    except ValueError:
        raise Refusal("InvalidParameterValue", "Invalid BASE64 encoding of user data.") from None
    if len(user_data) > USER_DATA_BYTES:
        raise Refusal("InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES} bytes")
    image = _image(request, backend)
    key = request.parameters.get("KeyName")
    if key is not None and key not in backend.key_pairs:
        raise Refusal("InvalidKeyPair.NotFound", f"The key pair '{key}' does not exist")
    _check_profile(request)
    _check_interfaces(request)
    _check_disks(request, image)
    name = request.parameters.get("InstanceType", "m1.small")
    check_type(name, image, region=request.region, zone=wanted_zone(request, backend))


def check_capacity(request: Request, backend: Any) -> Reservation | None:
    """The reservation that a launch, whose subnet is known, goes into; one that goes into none is held
    against the quota.

    :raises Refusal: with EC2's code.
    """
    image = backend.amis.get(request.parameters.get("ImageId"))
    platform = "Windows" if image is not None and image.platform == "windows" else "Linux/UNIX"
    zone = wanted_zone(request, backend) or ""
    chosen = reservations.choose(request, backend, zone=zone, platform=platform)
    if chosen is None:
        spot = request.parameters.get("InstanceMarketOptions.MarketType") == "spot"
        name = request.parameters.get("InstanceType", "m1.small")
        quotas.check(backend, name, _count(request, "MaxCount"), spot=spot)
    return chosen


def check_subnet(request: Request, backend: Any, block: IPv4Network) -> None:
    """Subnets of a VPC of one's own that no host can be reached in.

    :param block: the addresses that are routed.
    :raises Refusal: UnsupportedOperation.
    """
    parameters = request.parameters.items()
    subnets = [_subnet(value, backend) for name, value in parameters if name.endswith("SubnetId")]
    interfaces = [
        backend.enis.get(value) for name, value in parameters if name.endswith("NetworkInterfaceId")
    ]
    subnets += [interface.subnet for interface in interfaces if interface is not None]
    for subnet in filter(None, subnets):
        if not IPv4Network(subnet.cidr_block).subnet_of(block):
            raise Refusal(
                "UnsupportedOperation",
                f"The local cloud routes {block} alone, and {subnet.id} is {subnet.cidr_block}: make the "
                "VPC and its subnets within it, or launch into the default VPC.",
            )


def check_addresses(request: Request, backend: Any) -> None:
    """Refuse private addresses that the subnet does not have, or that are in use.

    :raises Refusal: InvalidParameterValue, InvalidIPAddress.InUse, InvalidParameterCombination.
    """
    wanted = {name: text for name, text in request.parameters.items() if PRIVATE_ADDRESS.fullmatch(name)}
    if wanted and request.parameters.get("MaxCount", "1") != "1":
        raise Refusal("InvalidParameterCombination", "A private address is for one instance alone.")
    taken = {eni.private_ip_address for eni in backend.enis.values()}
    for name, text in wanted.items():
        stem = name[: name.index("PrivateIpAddress")]
        subnet = _subnet(request.parameters.get(f"{stem}SubnetId", ""), backend)
        with suppress(ValueError):
            if subnet is None or IPv4Address(text) in IPv4Network(subnet.cidr_block):
                if text in taken:
                    raise Refusal("InvalidIPAddress.InUse", f"Address {text} is in use.")
                continue
        raise Refusal(
            "InvalidParameterValue", f"Address {text} does not fall within the subnet's address range"
        )


def _subnet(subnet_id: str, backend: Any) -> Any:
    found = [subnets[subnet_id] for subnets in backend.subnets.values() if subnet_id in subnets]
    return found[0] if found else None


def check_reservation(request: Request, backend: Any) -> None:
    """What CreateCapacityReservation refuses: reserved machines count against the quota, used or not.

    :raises Refusal: with EC2's code.
    """
    name, zone = request.parameters.get("InstanceType", ""), request.parameters.get("AvailabilityZone", "")
    if zone not in zones_offering(name, request.region):
        raise Refusal("Unsupported", f"The instance type {name} is not supported in {zone}.")
    quotas.check(backend, name, _count(request, "InstanceCount"))


def _count(request: Request, name: str) -> int:
    text = request.parameters.get(name, "1")
    if not text.isdigit():
        raise Refusal("InvalidParameterValue", f"Invalid value '{text}' for {name}.")
    return int(text)


def check_start(request: Request, backend: Any) -> None:
    """What StartInstances refuses: stopped machines need their reservation, or the quota, again.

    :raises Refusal: ReservationCapacityExceeded, VcpuLimitExceeded.
    """
    reservations.check_start(request, backend)
    for instance_id in request.listed("InstanceId"):
        instance = backend.get_instance_by_id(instance_id)
        if instance is not None and instance.state == "stopped" and not reservations.entered(instance):
            quotas.check(backend, instance.instance_type, 1)


def check_ids(request: Request) -> None:
    """Ids that cannot be ids.

    :raises Refusal: InvalidInstanceID.Malformed.
    """
    for instance_id in [*request.listed("InstanceId"), request.parameters.get("InstanceId", "i-00000000")]:
        if not re.fullmatch(r"i-([0-9a-f]{8}|[0-9a-f]{17})", instance_id):
            raise Refusal("InvalidInstanceID.Malformed", f'Invalid id: "{instance_id}"')


def check_tagged(request: Request, backend: Any) -> None:
    """Tags of things that are not there.

    :raises Refusal: as EC2 names what is missing.
    """
    groups = {group.id for groups in backend.groups.values() for group in groups.values()}
    for resource in request.listed("ResourceId"):
        if resource.startswith("i-") and backend.get_instance_by_id(resource) is None:
            raise Refusal("InvalidInstanceID.NotFound", f"The instance ID '{resource}' does not exist")
        if resource.startswith("sg-") and resource not in groups:
            raise Refusal("InvalidGroup.NotFound", f"The security group '{resource}' does not exist")


def check_unused(request: Request, backend: Any) -> None:
    """A subnet with interfaces, or a VPC with groups or a gateway of its own, cannot be deleted.

    :raises Refusal: DependencyViolation.
    """
    if subnet_id := request.parameters.get("SubnetId"):
        used = any(eni.subnet.id == subnet_id for eni in backend.enis.values())
        name = f"subnet '{subnet_id}'"
    else:
        vpc_id = request.parameters.get("VpcId", "")
        used = any(group.name != "default" for group in backend.groups.get(vpc_id, {}).values())
        used = used or any(
            gateway.vpc is not None and gateway.vpc.id == vpc_id
            for gateway in backend.internet_gateways.values()
        )
        name = f"vpc '{vpc_id}'"
    if used:
        raise Refusal("DependencyViolation", f"The {name} has dependencies and cannot be deleted.")


def _check_profile(request: Request) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_IamInstanceProfileSpecification.html"""
    known = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.values()
    for key, names in (("Name", {one.name for one in known}), ("Arn", {one.arn for one in known})):
        asked = request.parameters.get(f"IamInstanceProfile.{key}")
        if asked is not None and asked not in names:
            raise Refusal(
                "InvalidParameterValue",
                f"Value ({asked}) for parameter iamInstanceProfile.{key.lower()} is invalid. "
                f"Invalid IAM Instance Profile {'ARN' if key == 'Arn' else 'name'}",
            )


def _check_disks(request: Request, image: Any) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_EbsBlockDevice.html"""
    stems = [
        name[:-11]
        for name in request.parameters
        if re.fullmatch(r"BlockDeviceMapping\.\d+\.DeviceName", name)
    ]
    for stem in stems:
        size = request.parameters.get(f"{stem}.Ebs.VolumeSize")
        if (
            image is None
            or size is None
            or request.parameters[f"{stem}.DeviceName"] != image.root_device_name
        ):
            continue
        least = image.ebs_snapshot.volume.size
        if not size.isdigit() or int(size) < least:
            raise Refusal(
                "InvalidBlockDeviceMapping",
                f"Volume of size {size}GB is smaller than snapshot '{image.ebs_snapshot.id}', expect size>= "
                f"{least}GB",
            )


def _check_interfaces(request: Request) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html"""
    nics = {name.split(".")[1] for name in request.parameters if name.startswith("NetworkInterface.")}
    if nics and any(name.startswith(("SecurityGroup.", "SecurityGroupId.")) for name in request.parameters):
        raise Refusal(
            "InvalidParameterCombination",
            "Network interfaces and an instance-level security groups may not be specified on the same "
            "request",
        )
    public = [
        name
        for name in request.parameters
        if name.startswith("NetworkInterface.") and name.endswith(".AssociatePublicIpAddress")
    ]
    if len(nics) > 1 and any(request.parameters[name] == "true" for name in public):
        raise Refusal(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
            "interfaces.",
        )


def check_group_unused(request: Request, backend: Any) -> None:
    """A group that an interface, or a rule of another group, still needs cannot be deleted.

    :raises Refusal: DependencyViolation.
    """
    wanted = request.parameters.get("GroupId") or request.parameters.get("GroupName", "")
    for group in [group for groups in backend.groups.values() for group in groups.values()]:
        if wanted not in (group.id, group.name):
            continue
        used = [eni.id for eni in backend.enis.values() if group.id in {one.id for one in eni.group_set}]
        used += [
            other.id
            for others in backend.groups.values()
            for other in others.values()
            for rule in (*other.ingress_rules, *other.egress_rules)
            if other.id != group.id and rule.source_group.get("GroupId") == group.id
        ]
        if used:
            raise Refusal("DependencyViolation", f"resource {group.id} has a dependent object")


def check_interface_free(request: Request, backend: Any) -> None:
    """An interface of an instance cannot be deleted.

    :raises Refusal: InvalidNetworkInterface.InUse.
    """
    interface = backend.enis.get(request.parameters.get("NetworkInterfaceId", ""))
    if interface is not None and interface.instance is not None:
        raise Refusal(
            "InvalidNetworkInterface.InUse", f"Network interface '{interface.id}' is currently in use."
        )


def _image(request: Request, backend: Any) -> Any:
    image_id = request.parameters.get("ImageId")
    if image_id is None:
        raise Refusal("MissingParameter", "The request must contain the parameter ImageId")
    if not image_id.startswith("ami-"):
        raise Refusal("InvalidAMIID.Malformed", f'Invalid id: "{image_id}" (expecting "ami-...")')
    if image_id not in backend.amis:
        raise Refusal("InvalidAMIID.NotFound", f"The image id '[{image_id}]' does not exist")
    return backend.amis[image_id]


def check_type(name: str, image: Any, *, region: str, zone: str | None) -> None:
    """Refuse a type that EC2 does not have, not there, or not for this image.

    :raises Refusal: InvalidParameterValue, Unsupported.
    """
    if name not in INSTANCE_TYPES and name not in known_types():
        raise Refusal("InvalidParameterValue", f"Invalid value '{name}' for InstanceType.")
    offered = zones_offering(name, region)
    if not offered:
        raise Refusal(
            "Unsupported",
            "The requested configuration is currently not supported. "
            "Please check the documentation for supported configurations.",
        )
    if zone is not None and zone not in offered:
        raise Refusal(
            "Unsupported",
            f"Your requested instance type ({name}) is not supported in your requested Availability Zone "
            f"({zone}). "
            "Please retry your request by not specifying an Availability Zone or choosing "
            f"{', '.join(sorted(offered))}.",
        )
    supported = INSTANCE_TYPES[name]["ProcessorInfo"]["SupportedArchitectures"]
    if image is not None and image.architecture not in supported:
        raise Refusal(
            "InvalidParameterValue",
            f"The architecture '{','.join(supported)}' of the specified instance type does not match the "
            f"architecture '{image.architecture}' of the specified AMI. Specify an instance type and an AMI "
            "that have matching architectures, and try again.",
        )


def known_types() -> set[str]:
    """Every type that EC2's API has ever known by name, offered or not."""
    shape: Any = get_service_model("ec2").shape_for("InstanceType")
    return set(shape.enum)


def zones_offering(instance_type: str, region: str) -> set[str]:
    """The zones of a region where a type can be launched."""
    return {
        offer["Location"]
        for offer in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
        if offer["InstanceType"] == instance_type
    }


def wanted_zone(request: Request, backend: Any) -> str | None:
    """The zone a launch asks for, by a subnet or by name; None leaves it to EC2."""
    subnet_id = request.parameters.get("SubnetId") or request.parameters.get("NetworkInterface.1.SubnetId")
    if subnet_id:
        for subnets in backend.subnets.values():
            if subnet_id in subnets:
                return str(subnets[subnet_id].availability_zone)
        raise Refusal("InvalidSubnetID.NotFound", f"The subnet ID '{subnet_id}' does not exist")
    return request.parameters.get("Placement.AvailabilityZone")


def default_subnet(request: Request, backend: Any) -> str | None:
    """The default subnet of the wanted zone, else of the first zone that offers the type; None if none."""
    zone = wanted_zone(request, backend)
    offered = zones_offering(request.parameters.get("InstanceType", "m1.small"), request.region)
    for name, subnet in sorted(backend.get_default_subnets().items()):
        if name == zone or (zone is None and name in offered):
            return str(subnet.id)
    return None
