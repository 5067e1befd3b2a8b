"""RunInstances: what EC2 refuses, what no node would have, and what moto lacks of a launch."""

from __future__ import annotations

import base64
import hashlib
import importlib
from datetime import UTC, datetime
from ipaddress import IPv4Network
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.exceptions import InvalidSecurityGroupNotFoundError
from moto.ec2.utils import parse_user_data
from moto.iam.models import iam_backends

from awsddp.limits import USER_DATA_BYTES
from awsddp.local import market, quotas, refusals, reservations
from awsddp.local.requests import Refusal, Request, invalid, kept, lacking
from awsddp.local.reservations import CapacityReservation

# What of a cloud-config hosts carry out: https://docs.cloud-init.io/en/latest/reference/modules.html
USER_DATA_KEYS = frozenset({"ssh_keys", "ssh_deletekeys", "ssh_pwauth", "write_files", "bootcmd", "runcmd"})
NOT_COMPARED = ("ClientToken", "DryRun")  # what may differ when a launch is sent again


def check(request: Request, backend: Any) -> None:
    """What RunInstances refuses; a launch that is sent again is not looked at again.

    :raises ServiceException: with EC2's code.
    """
    asked = request.asked
    if asked.get("ClientToken") in kept(backend, "launches"):
        return
    low, high = asked.get("MinCount", 1), asked.get("MaxCount", 1)
    if low < 1 or high < low:
        raise invalid(low, "minCount", f"It must be at least 1 and at most maxCount ({high}).")
    try:
        data = base64.b64decode("".join(asked.get("UserData", "").split()), validate=True)
    except ValueError:
        raise Refusal("InvalidParameterValue", "Invalid BASE64 encoding of user data.") from None
    if len(data) > USER_DATA_BYTES:
        raise Refusal("InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES} bytes")
    image = _image(request, backend)
    backend.describe_key_pairs([asked.get("KeyName")])
    _check_profile(asked.get("IamInstanceProfile", {}))
    _check_interfaces(asked, backend)
    _check_disks(asked.get("BlockDeviceMappings", ()), image)
    refusals.check_type(_type(request), image, region=request.region)
    subnet = subnet_of(request, backend)
    refusals.check_zone(_type(request), subnet.availability_zone, region=request.region)
    if group := asked.get("Placement", {}).get("GroupName"):
        reservations.check_group(group, backend)
    _check_price(request, subnet.availability_zone)
    if backend.tags[image.id].get("awsddp:hosts") != "none":
        _check_host(data, subnet, IPv4Network(backend.default_vpc.cidr_block))
    _reservation(request, backend)


def answer(request: Request, backend: Any) -> Any:
    """Answer a launch that was checked; a client token sent again gets the same instances again.

    :raises Refusal: IdempotentParameterMismatch, IdempotentInstanceTerminated.
    """
    asked, token, digest = request.asked, request.asked.get("ClientToken"), _digest(request)
    if token in kept(backend, "launches"):
        return _replay(digest, *kept(backend, "launches")[token])
    reservation, subnet = _reservation(request, backend), subnet_of(request, backend)
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
        instance_type=_type(request),
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


def _check_host(data: bytes, subnet: Any, block: IPv4Network) -> None:
    """What no host would have, where hosts boot. They are reached at addresses of the block alone.

    :raises Refusal: UnsupportedOperation, which names it.
    """
    missing = [f"{key} of the user data" for key in _cloud_config(data) if key not in USER_DATA_KEYS]
    if data and not data.startswith((b"#!", b"#cloud-config")):
        missing = ["user data that is neither a script nor a cloud-config"]
    if not IPv4Network(subnet.cidr_block).subnet_of(block):
        missing = [f"a launch into {subnet.cidr_block} ({subnet.id}): {block} alone is routed"]
    if missing:
        raise lacking(", ".join(missing))


def _cloud_config(data: bytes) -> dict[str, Any]:
    """The keys of user data. What cannot be parsed is left to cloud-init, which complains in its place."""
    yaml: Any = importlib.import_module("yaml")  # comes with moto's server; it has no types
    try:
        found = yaml.safe_load(data) if data.startswith(b"#cloud-config") else None
    except (yaml.YAMLError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def _check_profile(asked: dict[str, str]) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_IamInstanceProfileSpecification.html"""
    known = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.values()
    for key, text in asked.items():
        if text not in {one.name if key == "Name" else one.arn for one in known}:
            what = "ARN" if key == "Arn" else "name"
            raise invalid(text, f"iamInstanceProfile.{key.lower()}", f"Invalid IAM Instance Profile {what}")


def _check_interfaces(asked: dict[str, Any], backend: Any) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html

    A node has one interface: what is EFA alone is no device of the network.
    """
    nics, groups = asked.get("NetworkInterfaces", ()), asked.get("SecurityGroupIds", [])
    if nics and (groups or asked.get("SecurityGroups")):
        raise Refusal(
            "InvalidParameterCombination",
            "Network interfaces and an instance-level security groups may not be specified on the same "
            "request",
        )
    if len(nics) > 1 and any(nic.get("AssociatePublicIpAddress") for nic in nics):
        raise Refusal(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
            "interfaces.",
        )
    if any(
        (nic.get("InterfaceType"), nic.get("NetworkCardIndex")) != ("efa-only", place)
        for place, nic in enumerate(nics)
        if place
    ):
        raise lacking("network interfaces beside the first, but an efa-only one of each further card")
    for group in (*groups, *(one for nic in nics for one in nic.get("Groups", ()))):
        if backend.get_security_group_from_id(group) is None:  # moto makes one of this id
            raise InvalidSecurityGroupNotFoundError(group)


def _check_disks(mappings: list[dict[str, Any]], image: Any) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_EbsBlockDevice.html"""
    least = image.ebs_snapshot.volume.size
    for mapping in mappings:
        if mapping.get("DeviceName") != image.root_device_name:
            raise lacking("more than one EBS volume (BlockDeviceMapping)")
        size = mapping.get("Ebs", {}).get("VolumeSize", least)
        if size < least:
            raise Refusal(
                "InvalidBlockDeviceMapping",
                f"Volume of size {size}GB is smaller than snapshot '{image.ebs_snapshot.id}', expect size>= "
                f"{least}GB",
            )


def _check_price(request: Request, zone: str) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html"""
    text = request.asked.get("InstanceMarketOptions", {}).get("SpotOptions", {}).get("MaxPrice")
    if text is None:
        return
    least = market.price_usd_per_hour(_type(request), zone, datetime.now(UTC).date())
    try:
        low = float(text) < least
    except ValueError:
        raise invalid(text, "price", "It is no number.") from None
    if low:
        raise Refusal(
            "SpotMaxPriceTooLow",
            f"Your Spot request price of {text} is lower than the minimum required Spot request fulfillment "
            f"price of {least:.6f}.",
        )


def _type(request: Request) -> str:
    return str(request.asked.get("InstanceType", "m1.small"))


def _image(request: Request, backend: Any) -> Any:
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
    fitting = {zone} if zone else refusals.zones_offering(_type(request), request.region)
    for name, subnet in sorted(backend.get_default_subnets().items()):
        if name in fitting:
            return subnet
    raise Refusal("MissingInput", "No default subnet can take this instance type. Specify a subnet.")


def _reservation(request: Request, backend: Any) -> CapacityReservation | None:
    """The reservation that a launch goes into; one that goes into none is held against the quota.

    :raises Refusal: with EC2's code.
    """
    zone = subnet_of(request, backend).availability_zone
    chosen = reservations.choose(request, backend, zone=zone)
    if chosen is None:
        spot = "InstanceMarketOptions" in request.asked
        quotas.check(backend, _type(request), request.asked.get("MaxCount", 1), spot=spot)
    return chosen


def _root_disk(request: Request, backend: Any) -> dict[str, Any]:
    """The root volume as moto wants it: that of the image, with what the launch asks for."""
    [root] = _image(request, backend).block_device_mappings
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
        if reservations.wanted(request):
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
