"""RunInstances: what EC2 refuses, what no node would have, and what moto lacks of a launch."""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from ipaddress import IPv4Network
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends

from awsddp.limits import USER_DATA_BYTES
from awsddp.local import market, placement, quotas, refusals, reservations
from awsddp.local.requests import Refusal, Reply, Request, lacking
from awsddp.local.reservations import CapacityReservation

# What of a cloud-config hosts carry out: https://docs.cloud-init.io/en/latest/reference/modules.html
USER_DATA_KEYS = frozenset({"ssh_keys", "ssh_deletekeys", "ssh_pwauth", "write_files", "bootcmd", "runcmd"})
NOT_COMPARED = ("ClientToken", "DryRun")  # what may differ when a launch is sent again


@dataclass(frozen=True)
class Launch:
    """A launch that was answered: what was asked, what was said, and which instances it made."""

    digest: str
    reply: Reply
    instance_ids: frozenset[str]


class Launcher:
    """Launches instances. The caller holds the emulator's lock."""

    def __init__(self, block: IPv4Network | None, forward: Callable[[Request], Reply]) -> None:
        """
        :param block: the addresses at which hosts are reached; None where nothing boots.
        :param forward: sends a request to moto.
        """
        self._block = block
        self._forward = forward

    def check(self, request: Request, backend: Any) -> None:
        """What RunInstances refuses; a launch that is sent again is not looked at again.

        :raises Refusal: with EC2's code.
        """
        if not _earlier(request, backend):
            _check_launch(request, backend)
            self._check_host(request, backend)
            _chosen(request, backend)

    def answer(self, request: Request, backend: Any) -> Reply:
        """Return the reply to a launch that was checked; a client token sent again gets the same one again.

        :raises Refusal: IdempotentParameterMismatch, IdempotentInstanceTerminated.
        """
        if earlier := _earlier(request, backend):
            return _replay(earlier, _digest(request), backend)
        chosen = _chosen(request, backend)
        before = set(_instances(backend))
        reply = self._forward(_completed(request, backend))
        launched = {key: one for key, one in _instances(backend).items() if key not in before}
        for instance in launched.values():
            _complete(instance, request, backend, chosen)
        if launched and (token := request.asked.get("ClientToken")):
            _launches(backend)[token] = Launch(_digest(request), reply, frozenset(launched))
        return reply

    def _check_host(self, request: Request, backend: Any) -> None:
        """What no host would have, where hosts boot.

        :raises Refusal: UnsupportedOperation, which names it.
        """
        if self._block is None:
            return
        data = base64.b64decode("".join(request.asked.get("UserData", "").split()))
        missing = [f"{key} of the user data" for key in _cloud_config(data) if key not in USER_DATA_KEYS]
        if data and not data.startswith((b"#!", b"#cloud-config")):
            missing = ["user data that is neither a script nor a cloud-config"]
        subnet = _subnet(request, backend)
        if not IPv4Network(subnet.cidr_block).subnet_of(self._block):
            missing = [f"a launch into {subnet.cidr_block} ({subnet.id}): {self._block} alone is routed"]
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


def _check_launch(request: Request, backend: Any) -> None:
    asked = request.asked
    low, high = asked.get("MinCount", 1), asked.get("MaxCount", 1)
    if low < 1 or high < low:
        raise _invalid(low, "minCount", f"It must be at least 1 and at most maxCount ({high}).")
    try:
        data = base64.b64decode("".join(asked.get("UserData", "").split()), validate=True)
    except ValueError:
        raise Refusal("InvalidParameterValue", "Invalid BASE64 encoding of user data.") from None
    if len(data) > USER_DATA_BYTES:
        raise Refusal("InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES} bytes")
    image = _image(request, backend)
    backend.describe_key_pairs([asked.get("KeyName")])
    _check_profile(asked.get("IamInstanceProfile", {}))
    _check_interfaces(asked)
    _check_disks(asked.get("BlockDeviceMappings", ()), image)
    kind = asked.get("InstanceType", "m1.small")
    refusals.check_type(kind, image, region=request.region, zone=wanted_zone(request, backend))
    if group := asked.get("Placement", {}).get("GroupName"):
        placement.check_known(group, backend)
    _check_price(kind, asked, _subnet(request, backend).availability_zone)


def _check_profile(asked: dict[str, str]) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_IamInstanceProfileSpecification.html"""
    known = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.values()
    for key, text in asked.items():
        if text not in {one.name if key == "Name" else one.arn for one in known}:
            what = "ARN" if key == "Arn" else "name"
            raise _invalid(text, f"iamInstanceProfile.{key.lower()}", f"Invalid IAM Instance Profile {what}")


def _check_interfaces(asked: dict[str, Any]) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html

    A node has one interface: what is EFA alone is no device of the network.
    """
    nics = asked.get("NetworkInterfaces", ())
    if nics and (asked.get("SecurityGroupIds") or asked.get("SecurityGroups")):
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
    further = [(place, nic) for place, nic in enumerate(nics) if place]
    if any(
        (nic.get("InterfaceType"), nic.get("NetworkCardIndex")) != ("efa-only", place)
        for place, nic in further
    ):
        raise lacking("network interfaces beside the first, but an efa-only one of each further card")


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


def _check_price(kind: str, asked: dict[str, Any], zone: str) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html"""
    text = asked.get("InstanceMarketOptions", {}).get("SpotOptions", {}).get("MaxPrice")
    if text is None:
        return
    least = market.price_usd_per_hour(kind, zone, datetime.now(UTC).date())
    try:
        low = float(text) < least
    except ValueError:
        raise _invalid(text, "price", "It is no number.") from None
    if low:
        raise Refusal(
            "SpotMaxPriceTooLow",
            f"Your Spot request price of {text} is lower than the minimum required Spot request fulfillment "
            f"price of {least:.6f}.",
        )


def _image(request: Request, backend: Any) -> Any:
    image_id = request.asked.get("ImageId")
    if image_id is None:
        raise Refusal("MissingParameter", "The request must contain the parameter ImageId")
    [image] = backend.describe_images(ami_ids=[image_id])
    return image


def wanted_zone(request: Request, backend: Any) -> str | None:
    """The zone a launch asks for, by a subnet or by name; None leaves it to EC2.

    :raises ServiceException: InvalidSubnetID.NotFound.
    """
    subnet = _named_subnet(request, backend)
    named: str | None = request.asked.get("Placement", {}).get("AvailabilityZone")
    return named if subnet is None else str(subnet.availability_zone)


def _subnet(request: Request, backend: Any) -> Any:
    """The subnet of a launch: the one it names, else the default one of its zone or of the first that fits.

    :raises Refusal: MissingInput: no default subnet fits.
    """
    if subnet := _named_subnet(request, backend):
        return subnet
    zone = wanted_zone(request, backend)
    kind = request.asked.get("InstanceType", "m1.small")
    fitting = {zone} if zone else refusals.zones_offering(kind, request.region)
    for name, subnet in sorted(backend.get_default_subnets().items()):
        if name in fitting:
            return subnet
    raise Refusal("MissingInput", "No default subnet can take this instance type. Specify a subnet.")


def _named_subnet(request: Request, backend: Any) -> Any:
    asked = request.asked
    key = asked.get("SubnetId") or asked.get("NetworkInterfaces", [{}])[0].get("SubnetId")
    return backend.get_subnet(key) if key else None


def _chosen(request: Request, backend: Any) -> CapacityReservation | None:
    """The reservation that a launch goes into; one that goes into none is held against the quota.

    :raises Refusal: with EC2's code.
    """
    asked = request.asked
    chosen = reservations.choose(request, backend, zone=_subnet(request, backend).availability_zone)
    if chosen is None:
        kind, spot = asked.get("InstanceType", "m1.small"), "InstanceMarketOptions" in asked
        quotas.check(backend, kind, asked.get("MaxCount", 1), spot=spot)
    return chosen


def _completed(request: Request, backend: Any) -> Request:
    """The launch as moto wants it: with a subnet for each interface, all instances, and the root volume."""
    asked, subnet = request.asked, _subnet(request, backend)
    given = {name: text for name, text in request.parameters.items() if "BlockDeviceMapping" not in name}
    given["MinCount"] = str(asked.get("MaxCount", 1))  # moto launches MinCount
    nics = asked.get("NetworkInterfaces", ())
    given |= {f"NetworkInterface.{place + 1}.DeviceIndex": str(place) for place, _ in enumerate(nics)}
    for stem in [f"NetworkInterface.{place + 1}." for place, _ in enumerate(nics)] or [""]:
        given.setdefault(f"{stem}SubnetId", subnet.id)
    if len(nics) > 1:
        given["NetworkInterface.1.AssociatePublicIpAddress"] = "false"
    [root] = _image(request, backend).block_device_mappings
    [mapping] = asked.get("BlockDeviceMappings", [{}])
    given["BlockDeviceMapping.1.DeviceName"] = root["DeviceName"]
    disk = {key: value for key, value in root["Ebs"].items() if key != "SnapshotId"} | mapping.get("Ebs", {})
    for key, value in disk.items():
        given[f"BlockDeviceMapping.1.Ebs.{key}"] = (
            str(value).lower() if isinstance(value, bool) else str(value)
        )
    return replace(request, parameters=given)


def _complete(instance: Any, request: Request, backend: Any, chosen: CapacityReservation | None) -> None:
    """Give a new instance what moto drops of its launch, or gives to the first one alone."""
    asked = request.asked
    instance.placement.group_name = asked.get("Placement", {}).get("GroupName", "")
    for place, nic in instance.nics.items():
        nic.add_tags(request.tags("network-interface"))
        nic.interface_type = asked.get("NetworkInterfaces", [{}])[place].get("InterfaceType", "interface")
        if nic.interface_type == "efa-only":
            nic.private_ip_address, nic.private_ip_addresses = None, []
    profile = asked.get("IamInstanceProfile")
    if profile and instance.id not in backend.iam_instance_profile_associations:
        backend.associate_iam_instance_profile(
            instance.id,
            iam_instance_profile_name=profile.get("Name"),
            iam_instance_profile_arn=profile.get("Arn"),
        )
    if chosen is not None:
        instance.capacity_reservation_id = chosen.id
        if reservations.wanted(request):
            target = {"CapacityReservationId": chosen.id}
            instance.capacity_reservation_specification = {"CapacityReservationTarget": target}


def _instances(backend: Any) -> dict[str, Any]:
    return {one.id: one for one in backend.all_instances()}


def _launches(backend: Any) -> dict[str, Launch]:
    """The launches of a region by their client tokens, kept in its back end."""
    found: dict[str, Launch] = backend.__dict__.setdefault("launches", {})
    return found


def _earlier(request: Request, backend: Any) -> Launch | None:
    return _launches(backend).get(request.asked.get("ClientToken", ""))


def _digest(request: Request) -> str:
    compared = sorted((k, v) for k, v in request.parameters.items() if k not in NOT_COMPARED)
    return hashlib.sha256(repr(compared).encode()).hexdigest()


def _replay(earlier: Launch, digest: str, backend: Any) -> Reply:
    if earlier.digest != digest:
        raise Refusal(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in previous "
            "request(s).",
        )
    ended = ("shutting-down", "terminated")
    alive = {key for key, one in _instances(backend).items() if one.state not in ended}
    if not alive & earlier.instance_ids:
        raise Refusal(
            "IdempotentInstanceTerminated",
            "The instances launched with this client token have been terminated. Please use a new token.",
        )
    return earlier.reply


def _invalid(value: object, name: str, why: str) -> Refusal:
    return Refusal("InvalidParameterValue", f"Value ({value}) for parameter {name} is invalid. {why}")
