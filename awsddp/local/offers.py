"""What the local cloud offers: images, spot prices, quotas, reservations, placement groups, and launches.

moto lacks all of these but the records of images and instances. What it lacks is kept in its back end
(`kept`).
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ec2.utils import parse_user_data

from awsddp.compat import types
from awsddp.compat.types import GPU_TYPES
from awsddp.local.requests import Refusal, Request, kept

OWNER = "898082745236"
ROOT_DEVICE = "/dev/sda1"
ROOT_GIB = 75


@dataclass(frozen=True)
class Image:
    """One image; `parameter` is the part of its SSM name after the architecture, "" if it has none."""

    name: str
    created: str
    parameter: str = ""
    architecture: str = "x86_64"

    def id(self, region: str) -> str:
        """Stable, and another one in each region, as on AWS."""
        return "ami-" + hashlib.sha256(f"{region}/{self.name}".encode()).hexdigest()[:17]

    def parameter_name(self) -> str:
        return f"/aws/service/deeplearning/ami/{self.architecture}/{self.parameter}/latest/ami-id"


def _pytorch(version: str, ubuntu: str, day: str, *, newest: bool = True, arm: bool = False) -> Image:
    stem = "Deep Learning ARM64 AMI OSS" if arm else "Deep Learning OSS"
    driver = "Nvidia Driver GPU" if arm else "Nvidia Driver AMI GPU"
    parameter = f"oss-nvidia-driver-gpu-pytorch-{version}-ubuntu-{ubuntu}" if newest else ""
    return Image(
        name=f"{stem} {driver} PyTorch {version} (Ubuntu {ubuntu}) {day}",
        created=f"{day[:4]}-{day[4:6]}-{day[6:]}T05:12:42.000Z",
        parameter=parameter,
        architecture="arm64" if arm else "x86_64",
    )


IMAGES = (
    _pytorch("2.12", "24.04", "20260822"),
    _pytorch("2.12", "24.04", "20260705", newest=False),
    _pytorch("2.11", "24.04", "20260517"),
    _pytorch("2.10", "24.04", "20260301"),
    _pytorch("2.9", "24.04", "20260317"),
    _pytorch("2.7", "22.04", "20250602"),
    _pytorch("2.12", "24.04", "20260822", arm=True),
    Image(
        name="Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260815",
        created="2026-08-15T04:02:11.000Z",
        parameter="base-oss-nvidia-driver-gpu-ubuntu-24.04",
    ),
)


def parameters(region: str) -> dict[str, str]:
    """The parameters of Systems Manager that name images, with their values."""
    return {image.parameter_name(): image.id(region) for image in IMAGES if image.parameter}


def image_parameters(request: Request, backend: Any) -> dict[str, Any]:
    """Answer GetParameter and GetParameters."""
    ids = parameters(request.region)
    names = request.asked.get("Names") or [request.asked.get("Name", "")]
    found = [{"Name": name, "Type": "String", "Value": ids[name]} for name in names if name in ids]
    if request.action == "GetParameter":
        return {"Parameter": found[0]}
    return {"Parameters": found, "InvalidParameters": [name for name in names if name not in ids]}


KEPT = timedelta(days=90)
# Relative prices of seven days, repeated: a budget that assumes the price of today is spent before its time.
DAYS = (1.0, 1.04, 0.97, 1.1, 0.93, 1.02, 0.95)
PRODUCT = "Linux/UNIX"  # of all images
SHARE = 0.42
# On-demand price of types without a listed one, from c5.large, m5.large and r5.large in us-east-1.
USD_PER_VCPU, USD_PER_GIB = 0.0348, 0.0033


def price_usd_per_hour(instance_type: str, zone: str, day: date) -> float:
    """Return the spot price of a type in a zone on a day in UTC. Zones differ by up to 10 % either way."""
    number = int(hashlib.sha256(f"{instance_type} {zone}".encode()).hexdigest()[:4], 16)
    share = SHARE * (0.9 + 0.2 * number / 0xFFFF)
    return _on_demand(instance_type) * share * DAYS[(day.toordinal() + number) % len(DAYS)]


def _on_demand(instance_type: str) -> float:
    listed = GPU_TYPES.get(instance_type)
    if listed is not None and listed.price_usd_per_hour is not None:
        return listed.price_usd_per_hour
    facts = INSTANCE_TYPES[instance_type]
    gib = facts["MemoryInfo"]["SizeInMiB"] / 1024
    gpus = sum(gpu["Count"] for gpu in facts.get("GpuInfo", {}).get("Gpus", []))
    return float(facts["VCpuInfo"]["DefaultVCpus"] * USD_PER_VCPU + gib * USD_PER_GIB + gpus)


def spot_prices(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribeSpotPriceHistory: the prices since a time, and those in force then, the newest first."""
    now = datetime.now(UTC)
    first = max(min(request.asked.get("StartTime", now - KEPT), now), now - KEPT).date()
    days = [now.date() - timedelta(days=back) for back in range((now.date() - first).days + 1)]
    names = request.asked.get("InstanceTypes", INSTANCE_TYPES)
    entries = [
        {
            "InstanceType": offer["InstanceType"],
            "ProductDescription": PRODUCT,
            "SpotPrice": f"{price_usd_per_hour(offer['InstanceType'], offer['Location'], day):.6f}",
            "Timestamp": datetime(day.year, day.month, day.day, tzinfo=UTC),
            "AvailabilityZone": offer["Location"],
        }
        for offer in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(request.region, [])
        if offer["InstanceType"] in names
        for day in days
    ]
    return {"SpotPriceHistory": entries}


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


def create_reservation(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CreateCapacityReservation."""
    made = CapacityReservation(backend, request.asked, request.tags("capacity-reservation"))
    held(backend)[made.id] = made
    return {"CapacityReservation": made}


def describe_reservations(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribeCapacityReservations."""
    ids = request.asked.get("CapacityReservationIds", held(backend))
    return {"CapacityReservations": request.select([held(backend)[key] for key in ids])}


def cancel_reservation(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CancelCapacityReservation."""
    held(backend)[request.asked["CapacityReservationId"]].cancelled = True
    return {"Return": True}


def held(backend: Any) -> dict[str, CapacityReservation]:
    """The reservations of a region, by id."""
    return kept(backend, "capacity_reservations")


def named_reservation(request: Request) -> str | None:
    """The id of the reservation that a launch names."""
    specification = request.asked.get("CapacityReservationSpecification", {})
    found: str | None = specification.get("CapacityReservationTarget", {}).get("CapacityReservationId")
    return found


def choose_reservation(request: Request, backend: Any, *, zone: str) -> CapacityReservation | None:
    """The reservation that a launch goes into, with room for it all: the one it names, else an open one."""
    asked, named = request.asked, named_reservation(request)
    if "InstanceMarketOptions" in asked or (not named and asked.get("Placement", {}).get("GroupName")):
        return None
    wanted = (asked.get("InstanceType"), zone, PRODUCT)
    for one in [held(backend)[named]] if named else held(backend).values():
        fits = wanted == (one.instance_type, one.availability_zone, one.instance_platform)
        is_for_it = named or one.instance_match_criteria == "open"
        if fits and is_for_it and one.available_instance_count >= asked["MaxCount"]:
            return one
    return None


class PlacementGroup(TaggedEC2Resource):
    """One placement group, which moto lacks, too. Nothing here is near or far."""

    strategy, state = "cluster", "available"

    def __init__(self, backend: Any, name: str, tags: dict[str, str]) -> None:
        self.ec2_backend, self.group_name = backend, name
        self.id = self.group_id = f"pg-{uuid.uuid4().hex[:17]}"
        self.add_tags(tags)


def create_group(request: Request, backend: Any) -> dict[str, Any]:
    """Answer CreatePlacementGroup."""
    groups, name = kept(backend, "placement_groups"), request.asked["GroupName"]
    groups[name] = PlacementGroup(backend, name, request.tags("placement-group"))
    return {"PlacementGroup": groups[name]}


def describe_groups(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribePlacementGroups."""
    groups = kept(backend, "placement_groups")
    found = [groups[name] for name in request.asked.get("GroupNames", groups) if name in groups]
    return {"PlacementGroups": request.select(found)}


def delete_group(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DeletePlacementGroup."""
    del kept(backend, "placement_groups")[request.asked["GroupName"]]
    return {}


VCPUS = 12288.0  # 64 of the largest machines: what the local cloud is asked to carry
RUNNING = ("pending", "running")
QUOTAS = dict(
    (
        *(types.QUOTA_P, types.QUOTA_G, types.QUOTA_STANDARD),
        *(types.SPOT_P5, types.SPOT_P, types.SPOT_G, types.SPOT_STANDARD),
    )
)
"""Codes and names: https://docs.aws.amazon.com/general/latest/gr/ec2-service.html"""


def quota_value(backend: Any, code: str) -> float:
    """The value of a quota in a region."""
    return float(kept(backend, "service_quotas").get(code, VCPUS))


def exceeded_limit(backend: Any, instance_type: str, count: int, *, spot: bool = False) -> float | None:
    """The quota that so many machines more would be over, in vCPUs; None where they fit."""
    quota = _quota(instance_type, spot=spot)
    if quota is None:
        return None
    used = sum(
        _vcpus(one.instance_type)
        for one in backend.all_instances()
        if one.state in RUNNING and quota == _quota(one.instance_type, spot=one.lifecycle == "spot")
    )
    used += sum(
        one.available_instance_count * _vcpus(one.instance_type)
        for one in held(backend).values()
        if quota == _quota(one.instance_type, spot=False)
    )
    limit = quota_value(backend, quota)
    return limit if used + count * _vcpus(instance_type) > limit else None


def _quota(instance_type: str, *, spot: bool) -> str | None:
    """The code of the quota that a type counts against, None if none is known."""
    found = types.quota_of(instance_type, "spot" if spot else "on-demand")
    return found[0] if found else None


def _vcpus(instance_type: str) -> int:
    """The vCPUs of a type; 0 of one that nobody knows."""
    return int(INSTANCE_TYPES.get(instance_type, {}).get("VCpuInfo", {}).get("DefaultVCpus", 0))


def quota(request: Request, backend: Any) -> dict[str, Any]:
    """Answer GetServiceQuota and RequestServiceQuotaIncrease. An increase is granted at once."""
    code = request.asked["QuotaCode"]
    known = {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": QUOTAS[code]}
    if request.action == "GetServiceQuota":
        return {"Quota": {**known, "Value": quota_value(backend, code), "Adjustable": True}}
    wanted = kept(backend, "service_quotas")[code] = float(request.asked["DesiredValue"])
    granted = {"Id": uuid.uuid4().hex, "Status": "APPROVED", "DesiredValue": wanted}
    return {"RequestedQuota": {**known, **granted}}


def zones_offering(instance_type: str, region: str) -> set[str]:
    """The zones of a region where a type can be launched."""
    return {
        offer["Location"]
        for offer in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
        if offer["InstanceType"] == instance_type
    }


NOT_COMPARED = ("ClientToken", "DryRun")  # what may differ when a launch is sent again


def launch(request: Request, backend: Any) -> Any:
    """Answer a launch that was checked; a client token sent again gets the same instances again.

    :raises Refusal: IdempotentParameterMismatch, IdempotentInstanceTerminated.
    """
    asked, token = request.asked, request.asked.get("ClientToken")
    compared = sorted((name, sent) for name, sent in request.parameters.items() if name not in NOT_COMPARED)
    digest = hashlib.sha256(repr(compared).encode()).hexdigest()
    if token in kept(backend, "launches"):
        return _replay(digest, *kept(backend, "launches")[token])
    subnet = subnet_of(request, backend)
    reservation = choose_reservation(request, backend, zone=subnet.availability_zone)
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
    fitting = {zone} if zone else zones_offering(type_of(request), request.region)
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
        if named_reservation(request):
            target = {"CapacityReservationId": chosen.id}
            instance.capacity_reservation_specification = {"CapacityReservationTarget": target}


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
