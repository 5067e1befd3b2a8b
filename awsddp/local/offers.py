"""Images, spot prices, quotas, capacity reservations, placement groups and launches in the local cloud.

moto has records of images and instances only. The other records are saved with moto's back end
(`ec2_http.get_records`).
"""

from __future__ import annotations

import base64
import hashlib
import re
import uuid
from collections import Counter
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from typing import Any

from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ec2.utils import parse_user_data

from awsddp.compat import types
from awsddp.compat.types import GPU_TYPES
from awsddp.local.ec2_http import Refusal, Request, get_records

OWNER = "898082745236"
ROOT_GIB = 75


# Each name ends with the build date, as on AWS.
IMAGES = (
    "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.13 (Ubuntu 26.04) 20260829",
    "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260705",
    "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
    "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Ubuntu 24.04) 20260517",
    "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.10 (Ubuntu 24.04) 20260301",
    "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.9 (Ubuntu 24.04) 20260317",
    "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.7 (Ubuntu 22.04) 20250602",
    "Deep Learning ARM64 AMI OSS Nvidia Driver GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
    "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260815",
)


def image_id(name: str, region: str) -> str:
    """Return an image's id. The id never changes, but is different in each region, as on AWS."""
    return "ami-" + hashlib.sha256(f"{region}/{name}".encode()).hexdigest()[:17]


def image_architecture(name: str) -> str:
    """Return EC2's name for an image's architecture."""
    return "arm64" if "ARM64" in name else "x86_64"


def list_image_parameters(region: str) -> dict[str, str]:
    """Return {name: image id} for the Systems Manager parameters that name the newest image of each kind."""
    parameters = {}
    for name in IMAGES:
        torch, ubuntu = re.findall(r"(?:PyTorch (\S+) )?\(Ubuntu (\S+)\)", name)[0]
        kind = f"oss-nvidia-driver-gpu-pytorch-{torch}" if torch else "base-oss-nvidia-driver-gpu"
        path = f"{image_architecture(name)}/{kind}-ubuntu-{ubuntu}/latest/ami-id"
        parameters[f"/aws/service/deeplearning/ami/{path}"] = image_id(name, region)
    return parameters


class Call:
    """Holds a request and the facts that its checks and handlers need. Most of the facts are about
    launches."""

    def __init__(self, request: Request, backend: Any) -> None:
        self.request, self.backend = request, backend
        self.arguments = {"MinCount": 1, "MaxCount": 1, **request.arguments}
        self.type = str(self.arguments.get("InstanceType", "m1.small"))
        offerings = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(request.region, [])
        self.offered_zones = {row["Location"] for row in offerings if row["InstanceType"] == self.type}
        self.zones = ", ".join(sorted(self.offered_zones))
        self.nics: list[dict[str, Any]] = self.arguments.get("NetworkInterfaces", [])
        self.disks: list[dict[str, Any]] = self.arguments.get("BlockDeviceMappings", [])
        self.price = self.arguments.get("InstanceMarketOptions", {}).get("SpotOptions", {}).get("MaxPrice")
        self.group = self.arguments.get("GroupName") or self.arguments.get("Placement", {}).get("GroupName")
        self.quota = self.arguments.get("QuotaCode", "")
        self.groups = get_records(backend, "placement_groups")
        target = self.arguments.get("CapacityReservationSpecification", {}).get(
            "CapacityReservationTarget", {}
        )
        self.named_reservation: str | None = target.get("CapacityReservationId")
        self.user_data: bytes | None = None
        with suppress(ValueError):
            text = "".join(self.arguments.get("UserData", "").split())
            self.user_data = base64.b64decode(text, validate=True)

    @cached_property
    def image(self) -> Any:
        """Return a launch's image.

        :raises ServiceException: the image does not exist (InvalidAMIID.NotFound).
        """
        [image] = self.backend.describe_images(ami_ids=[self.arguments.get("ImageId", "")])
        return image

    @cached_property
    def subnet(self) -> Any:
        """Return a launch's subnet: the requested subnet, or a default one (in the requested zone).

        :raises ServiceException: the subnet does not exist (InvalidSubnetID.NotFound), or no default subnet
            fits (MissingInput).
        """
        if subnet_id := self.arguments.get("SubnetId") or [*self.nics, {}][0].get("SubnetId"):
            return self.backend.get_subnet(subnet_id)
        zone = self.arguments.get("Placement", {}).get("AvailabilityZone")
        for subnet_zone, subnet in sorted(self.backend.get_default_subnets().items()):
            if subnet_zone in ({zone} if zone else self.offered_zones):
                return subnet
        raise Refusal("MissingInput", "No default subnet can take this instance type. Specify a subnet.")

    @cached_property
    def zone(self) -> str:
        """Return the zone that a launch or a reservation is in."""
        return str(self.arguments.get("AvailabilityZone") or self.subnet.availability_zone)

    @property
    def requested_machines(self) -> tuple[str, str, bool]:
        """Return the type and the zone of the instances that the call launches or starts, and True if the
        instances are in a placement group.

        :raises ServiceException: an id does not exist.
        """
        if self.request.action == "RunInstances":
            return self.type, self.zone, bool(self.group)
        instances = self.backend.get_multi_instances_by_id(self.arguments.get("InstanceIds", ()))
        in_group = any(instance.placement.group_name for instance in instances)
        return instances[0].instance_type, instances[0].placement.zone, in_group

    @property
    def least_price(self) -> float:
        """Return the current spot price of the type, in USD per hour."""
        return price_usd_per_hour(self.type, self.zone, datetime.now(UTC).date())

    @property
    def reservation(self) -> CapacityReservation | None:
        """Return the capacity reservation that the launch uses: the named reservation or, if none is named,
        an open one. Return None if no such reservation matches the launch and has capacity for all of its
        instances."""
        reservation_id, reservations = self.named_reservation, get_reservations(self.backend)
        if "InstanceMarketOptions" in self.arguments or (not reservation_id and self.group):
            return None
        required = (self.type, self.zone, PRODUCT)
        for row in [reservations[reservation_id]] if reservation_id else reservations.values():
            matches = required == (row.instance_type, row.availability_zone, row.instance_platform)
            is_usable = reservation_id or row.instance_match_criteria == "open"
            if matches and is_usable and row.available_instance_count >= self.arguments["MaxCount"]:
                return row
        return None


def get_image_parameters(call: Call) -> dict[str, Any]:
    """Answer GetParameter and GetParameters."""
    ids = list_image_parameters(call.request.region)
    names = call.arguments.get("Names") or [call.arguments.get("Name", "")]
    rows = [{"Name": name, "Type": "String", "Value": ids[name]} for name in names if name in ids]
    if call.request.action == "GetParameter":
        return {"Parameter": rows[0]}
    return {"Parameters": rows, "InvalidParameters": [name for name in names if name not in ids]}


KEPT = timedelta(days=90)
# The relative prices on seven days; later weeks repeat these prices. The prices differ, so that a budget
# computed from today's price can run out early.
DAYS = (1.0, 1.04, 0.97, 1.1, 0.93, 1.02, 0.95)
PRODUCT = "Linux/UNIX"  # the product that all images have
SHARE = 0.42
# Rates for types without a price in compat/types.py, computed from the on-demand prices of c5.large, m5.large
# and r5.large in us-east-1.
USD_PER_VCPU, USD_PER_GIB = 0.0348, 0.0033


def price_usd_per_hour(instance_type: str, zone: str, day: date) -> float:
    """Return a type's spot price in a zone on a UTC day. In each zone, the price differs by up to 10 % from
    the type's mean price."""
    number = int(hashlib.sha256(f"{instance_type} {zone}".encode()).hexdigest()[:4], 16)
    share = SHARE * (0.9 + 0.2 * number / 0xFFFF)
    return _on_demand_price(instance_type) * share * DAYS[(day.toordinal() + number) % len(DAYS)]


def _on_demand_price(instance_type: str) -> float:
    if (listed := GPU_TYPES.get(instance_type)) and listed.price_usd_per_hour is not None:
        return listed.price_usd_per_hour
    facts = INSTANCE_TYPES[instance_type]
    gib = facts["MemoryInfo"]["SizeInMiB"] / 1024
    gpus = sum(gpu["Count"] for gpu in facts.get("GpuInfo", {}).get("Gpus", []))
    return float(facts["VCpuInfo"]["DefaultVCpus"] * USD_PER_VCPU + gib * USD_PER_GIB + gpus)


def spot_prices(call: Call) -> dict[str, Any]:
    """Answer DescribeSpotPriceHistory with the prices valid at StartTime and later prices, newest first."""
    now = datetime.now(UTC)
    first = max(min(call.arguments.get("StartTime", now - KEPT), now), now - KEPT).date()
    days = [now.date() - timedelta(days=back) for back in range((now.date() - first).days + 1)]
    names = call.arguments.get("InstanceTypes", INSTANCE_TYPES)
    entries = [
        {
            "InstanceType": offer["InstanceType"],
            "ProductDescription": PRODUCT,
            "SpotPrice": f"{price_usd_per_hour(offer['InstanceType'], offer['Location'], day):.6f}",
            "Timestamp": datetime(day.year, day.month, day.day, tzinfo=UTC),
            "AvailabilityZone": offer["Location"],
        }
        for offer in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(call.request.region, [])
        if offer["InstanceType"] in names
        for day in days
    ]
    return {"SpotPriceHistory": entries}


_UNUSED = ("stopped", "terminated")


class CapacityReservation(TaggedEC2Resource):
    """A capacity reservation, as EC2 describes it. `arguments` are the arguments of the call that created it.

    `instance_match_criteria` is "open" (used by any launch that matches) or "targeted".
    """

    tenancy = reservation_type = "default"
    cancelled = False

    def __init__(self, backend: Any, arguments: dict[str, Any], tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = f"cr-{uuid.uuid4().hex[:17]}"
        self.instance_type = arguments.get("InstanceType", "")
        self.instance_platform = arguments.get("InstancePlatform", "")
        self.availability_zone = arguments.get("AvailabilityZone", "")
        self.total_instance_count = arguments.get("InstanceCount", 1)
        self.instance_match_criteria = arguments.get("InstanceMatchCriteria", "open")
        self.end_date: datetime | None = arguments.get("EndDate")
        self.end_date_type = "limited" if self.end_date else "unlimited"
        self.add_tags(tags)

    @property
    def state(self) -> str:
        """Return EC2's name for the state."""
        if self.cancelled:
            return "cancelled"
        return "expired" if self.end_date and self.end_date < datetime.now(UTC) else "active"

    @property
    def available_instance_count(self) -> int:
        """Return how many more instances the reservation has room for; stopped and terminated instances use
        no capacity."""
        instances = self.ec2_backend.all_instances()
        states = [row.state for row in instances if row.capacity_reservation_id == self.id]
        used = sum(state not in _UNUSED for state in states)
        return max(0, self.total_instance_count - used) if self.state == "active" else 0


def create_reservation(call: Call) -> dict[str, Any]:
    """Answer CreateCapacityReservation."""
    reservation = CapacityReservation(call.backend, call.arguments, call.request.tags("capacity-reservation"))
    get_reservations(call.backend)[reservation.id] = reservation
    return {"CapacityReservation": reservation}


def describe_reservations(call: Call) -> dict[str, Any]:
    """Answer DescribeCapacityReservations."""
    reservations = get_reservations(call.backend)
    rows = [reservations[key] for key in call.arguments.get("CapacityReservationIds", reservations)]
    return {"CapacityReservations": call.request.select(rows)}


def cancel_reservation(call: Call) -> dict[str, Any]:
    """Answer CancelCapacityReservation."""
    get_reservations(call.backend)[call.arguments["CapacityReservationId"]].cancelled = True
    return {"Return": True}


def get_reservations(backend: Any) -> dict[str, CapacityReservation]:
    """Return {id: reservation} for a region."""
    return get_records(backend, "capacity_reservations")


class PlacementGroup(TaggedEC2Resource):
    """A placement group. In the local cloud a group has no effect, and only a fault makes it full."""

    strategy, state = "cluster", "available"

    def __init__(self, backend: Any, name: str, tags: dict[str, str]) -> None:
        self.ec2_backend, self.group_name = backend, name
        self.id = self.group_id = f"pg-{uuid.uuid4().hex[:17]}"
        self.add_tags(tags)


def create_placement_group(call: Call) -> dict[str, Any]:
    """Answer CreatePlacementGroup."""
    group = PlacementGroup(call.backend, call.group, call.request.tags("placement-group"))
    call.groups[call.group] = group
    return {"PlacementGroup": group}


def describe_placement_groups(call: Call) -> dict[str, Any]:
    """Answer DescribePlacementGroups."""
    names = call.arguments.get("GroupNames", call.groups)
    groups = [call.groups[name] for name in names if name in call.groups]
    return {"PlacementGroups": call.request.select(groups)}


def modify_placement(call: Call) -> dict[str, Any]:
    """Answer ModifyInstancePlacement: make a stopped instance join or leave a placement group."""
    call.backend.get_instance(call.arguments["InstanceId"]).placement.group_name = call.group or ""
    return {"Return": True}


def delete_placement_group(call: Call) -> dict[str, Any]:
    """Answer DeletePlacementGroup."""
    del call.groups[call.group]
    return {}


VCPUS = 12288.0  # the default value for quotas, which is enough for 64 of the largest machines
RUNNING = ("pending", "running")
_ON_DEMAND = (types.QUOTA_P, types.QUOTA_G, types.QUOTA_STANDARD)
QUOTAS = dict((*_ON_DEMAND, types.SPOT_P5, types.SPOT_P, types.SPOT_G, types.SPOT_STANDARD))
"""Quota names by code: https://docs.aws.amazon.com/general/latest/gr/ec2-service.html"""


def get_quota_value(backend: Any, code: str) -> float:
    """Return a quota's value in a region."""
    return float(get_records(backend, "service_quotas").get(code, VCPUS))


def find_exceeded_quota(
    backend: Any, instance_type: str, count: int, *, market: types.Market = "on-demand"
) -> float | None:
    """Return the quota, in vCPUs, that `count` more instances would exceed, or None if the quota allows
    them."""
    quota = types.find_quota(instance_type, market)
    if quota is None:
        return None
    counts = Counter({instance_type: count})
    for row in backend.all_instances():
        if row.state in RUNNING and quota == types.find_quota(
            row.instance_type, row.lifecycle or "on-demand"
        ):
            counts[row.instance_type] += 1
    for reservation in get_reservations(backend).values():
        if quota == types.find_quota(reservation.instance_type):
            counts[reservation.instance_type] += reservation.available_instance_count
    used = sum(
        INSTANCE_TYPES[name]["VCpuInfo"]["DefaultVCpus"] * type_count
        for name, type_count in counts.items()
        if name in INSTANCE_TYPES
    )
    limit = get_quota_value(backend, quota[0])
    return limit if used > limit else None


def handle_quota(call: Call) -> dict[str, Any]:
    """Answer GetServiceQuota and RequestServiceQuotaIncrease. An increase is granted immediately."""
    code = call.quota
    names = {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": QUOTAS[code]}
    if call.request.action == "GetServiceQuota":
        return {"Quota": {**names, "Value": get_quota_value(call.backend, code), "Adjustable": True}}
    value = get_records(call.backend, "service_quotas")[code] = float(call.arguments["DesiredValue"])
    request = {"Id": uuid.uuid4().hex, "Status": "APPROVED", "DesiredValue": value}
    return {"RequestedQuota": {**names, **request}}


NOT_COMPARED = ("ClientToken", "DryRun")  # parameters that can differ when a launch is repeated


def launch(call: Call) -> Any:
    """Launch the instances that a checked call requests; a repeated client token returns the same instances.

    :raises Refusal: the token was used with other parameters (IdempotentParameterMismatch), or its instances
        are terminated (IdempotentInstanceTerminated).
    """
    arguments, launches, token = (
        call.arguments,
        get_records(call.backend, "launches"),
        call.arguments.get("ClientToken"),
    )
    compared = sorted(item for item in call.request.parameters.items() if item[0] not in NOT_COMPARED)
    digest = hashlib.sha256(repr(compared).encode()).hexdigest()
    if token in launches:
        return _replay(digest, *launches[token])
    reservation = call.reservation
    nics = [{"SubnetId": call.subnet.id, **nic, "DeviceIndex": index} for index, nic in enumerate(call.nics)]
    if len(nics) > 1:
        nics[0]["AssociatePublicIpAddress"] = False
    launched = call.backend.run_instances(
        arguments["ImageId"],
        arguments["MaxCount"],
        parse_user_data(arguments.get("UserData")),
        arguments.get("SecurityGroups", []),
        instance_type=call.type,
        is_instance_type_default=False,
        region_name=call.request.region,
        subnet_id=call.subnet.id,
        key_name=arguments.get("KeyName"),
        security_group_ids=arguments.get("SecurityGroupIds", []),
        nics=nics,
        associate_public_ip=None,
        tags={kind: call.request.tags(kind) for kind in ("instance", "volume")},
        instance_market_options=arguments.get("InstanceMarketOptions"),
        instance_initiated_shutdown_behavior=arguments.get("InstanceInitiatedShutdownBehavior"),
        metadata_options=arguments.get("MetadataOptions"),
        block_device_mappings=[_root_disk(call)],
    )
    for instance in launched.instances:
        _set_details(instance, call, reservation)
    if token:
        launches[token] = (digest, launched)
    return launched


def _root_disk(call: Call) -> dict[str, Any]:
    """Return the image's root volume, with the launch's settings, in moto's format."""
    [root] = call.image.block_device_mappings
    [mapping] = call.disks or [{}]
    return {
        "DeviceName": root["DeviceName"],
        "Ebs": {**root["Ebs"], "SnapshotId": None, **mapping.get("Ebs", {})},
    }


def _set_details(instance: Any, call: Call, reservation: CapacityReservation | None) -> None:
    """Set the launch details that moto ignores."""
    arguments = call.arguments
    instance.placement.group_name = arguments.get("Placement", {}).get("GroupName", "")
    for index, nic in instance.nics.items():
        nic.add_tags(call.request.tags("network-interface"))
        nic.interface_type = (call.nics or [{}])[index].get("InterfaceType", "interface")
        if nic.interface_type == "efa-only":
            nic.private_ip_address, nic.private_ip_addresses = None, []
    if profile := arguments.get("IamInstanceProfile"):
        associate = call.backend.associate_iam_instance_profile
        associate(instance.id, profile.get("Name"), profile.get("Arn"))
    if reservation is not None:
        instance.capacity_reservation_id = reservation.id
        if call.named_reservation:
            target = {"CapacityReservationId": reservation.id}
            instance.capacity_reservation_specification = {"CapacityReservationTarget": target}


def _replay(digest: str, earlier_digest: str, launched: Any) -> Any:
    if earlier_digest != digest:
        raise Refusal(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in previous "
            "request(s).",
        )
    if all(row.state in ("shutting-down", "terminated") for row in launched.instances):
        raise Refusal(
            "IdempotentInstanceTerminated",
            "The instances launched with this client token have been terminated. Please use a new token.",
        )
    return launched
