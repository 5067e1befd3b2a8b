"""What the local cloud offers: images, spot prices, quotas, reservations, placement groups, and launches.

moto lacks all of these but the records of images and instances. What it lacks is kept in its back end
(`kept`).
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
from awsddp.local.ec2_http import Refusal, Request, kept

OWNER = "898082745236"
ROOT_GIB = 75


# As on AWS each ends with the day when it was made; of two of a kind the newer one is the later one.
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
    """Return the id of an image: stable, and another one in each region, as on AWS."""
    return "ami-" + hashlib.sha256(f"{region}/{name}".encode()).hexdigest()[:17]


def architecture(name: str) -> str:
    """Return the architecture of an image, as EC2 names it."""
    return "arm64" if "ARM64" in name else "x86_64"


def parameters(region: str) -> dict[str, str]:
    """The parameters of Systems Manager that name the newest image of each kind, with their values."""
    found = {}
    for name in IMAGES:
        torch, ubuntu = re.findall(r"(?:PyTorch (\S+) )?\(Ubuntu (\S+)\)", name)[0]
        kind = f"oss-nvidia-driver-gpu-pytorch-{torch}" if torch else "base-oss-nvidia-driver-gpu"
        path = f"{architecture(name)}/{kind}-ubuntu-{ubuntu}/latest/ami-id"
        found[f"/aws/service/deeplearning/ami/{path}"] = image_id(name, region)
    return found


class Call:
    """A request, and what is looked at before it is carried out. Most of it is of launches."""

    def __init__(self, request: Request, backend: Any) -> None:
        self.request, self.backend = request, backend
        self.asked = {"MinCount": 1, "MaxCount": 1, **request.asked}
        self.type = str(self.asked.get("InstanceType", "m1.small"))
        zones = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(request.region, [])
        self.offered = {one["Location"] for one in zones if one["InstanceType"] == self.type}
        self.zones = ", ".join(sorted(self.offered))
        self.nics: list[dict[str, Any]] = self.asked.get("NetworkInterfaces", [])
        self.disks: list[dict[str, Any]] = self.asked.get("BlockDeviceMappings", [])
        self.price = self.asked.get("InstanceMarketOptions", {}).get("SpotOptions", {}).get("MaxPrice")
        self.group = self.asked.get("GroupName") or self.asked.get("Placement", {}).get("GroupName")
        self.quota = self.asked.get("QuotaCode", "")
        self.groups = kept(backend, "placement_groups")
        target = self.asked.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
        self.named_reservation: str | None = target.get("CapacityReservationId")
        self.user_data: bytes | None = None
        with suppress(ValueError):
            text = "".join(self.asked.get("UserData", "").split())
            self.user_data = base64.b64decode(text, validate=True)

    @cached_property
    def image(self) -> Any:
        """The image of a launch.

        :raises ServiceException: InvalidAMIID.NotFound.
        """
        [image] = self.backend.describe_images(ami_ids=[self.asked.get("ImageId", "")])
        return image

    @cached_property
    def subnet(self) -> Any:
        """The subnet of a launch: the one it names, else the default one of its zone or of one that fits.

        :raises ServiceException: InvalidSubnetID.NotFound; MissingInput: no default subnet fits.
        """
        if key := self.asked.get("SubnetId") or [*self.nics, {}][0].get("SubnetId"):
            return self.backend.get_subnet(key)
        zone = self.asked.get("Placement", {}).get("AvailabilityZone")
        for name, subnet in sorted(self.backend.get_default_subnets().items()):
            if name in ({zone} if zone else self.offered):
                return subnet
        raise Refusal("MissingInput", "No default subnet can take this instance type. Specify a subnet.")

    @cached_property
    def zone(self) -> str:
        """The zone of a launch or of a reservation."""
        return str(self.asked.get("AvailabilityZone") or self.subnet.availability_zone)

    @property
    def machines(self) -> tuple[str, str, bool]:
        """The type and the zone of the machines that a launch or a start needs, and if in a placement group.

        :raises ServiceException: an id that is not there.
        """
        if self.request.action == "RunInstances":
            return self.type, self.zone, bool(self.group)
        named = self.backend.get_multi_instances_by_id(self.asked.get("InstanceIds", ()))
        grouped = any(one.placement.group_name for one in named)
        return named[0].instance_type, named[0].placement.zone, grouped

    @property
    def least_price(self) -> float:
        """What a spot instance of the type costs now, in USD per hour."""
        return price_usd_per_hour(self.type, self.zone, datetime.now(UTC).date())

    @property
    def reservation(self) -> CapacityReservation | None:
        """The reservation that a launch goes into, with room for it all: the one named, else an open one."""
        named, known = self.named_reservation, held(self.backend)
        if "InstanceMarketOptions" in self.asked or (not named and self.group):
            return None
        wanted = (self.type, self.zone, PRODUCT)
        for one in [known[named]] if named else known.values():
            fits = wanted == (one.instance_type, one.availability_zone, one.instance_platform)
            is_for_it = named or one.instance_match_criteria == "open"
            if fits and is_for_it and one.available_instance_count >= self.asked["MaxCount"]:
                return one
        return None


def image_parameters(call: Call) -> dict[str, Any]:
    """Answer GetParameter and GetParameters."""
    ids = parameters(call.request.region)
    names = call.asked.get("Names") or [call.asked.get("Name", "")]
    found = [{"Name": name, "Type": "String", "Value": ids[name]} for name in names if name in ids]
    if call.request.action == "GetParameter":
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
    if (listed := GPU_TYPES.get(instance_type)) and listed.price_usd_per_hour is not None:
        return listed.price_usd_per_hour
    facts = INSTANCE_TYPES[instance_type]
    gib = facts["MemoryInfo"]["SizeInMiB"] / 1024
    gpus = sum(gpu["Count"] for gpu in facts.get("GpuInfo", {}).get("Gpus", []))
    return float(facts["VCpuInfo"]["DefaultVCpus"] * USD_PER_VCPU + gib * USD_PER_GIB + gpus)


def spot_prices(call: Call) -> dict[str, Any]:
    """Answer DescribeSpotPriceHistory: the prices since a time, and those in force then, the newest first."""
    now = datetime.now(UTC)
    first = max(min(call.asked.get("StartTime", now - KEPT), now), now - KEPT).date()
    days = [now.date() - timedelta(days=back) for back in range((now.date() - first).days + 1)]
    names = call.asked.get("InstanceTypes", INSTANCE_TYPES)
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


def create_reservation(call: Call) -> dict[str, Any]:
    """Answer CreateCapacityReservation."""
    made = CapacityReservation(call.backend, call.asked, call.request.tags("capacity-reservation"))
    held(call.backend)[made.id] = made
    return {"CapacityReservation": made}


def describe_reservations(call: Call) -> dict[str, Any]:
    """Answer DescribeCapacityReservations."""
    known = held(call.backend)
    found = [known[key] for key in call.asked.get("CapacityReservationIds", known)]
    return {"CapacityReservations": call.request.select(found)}


def cancel_reservation(call: Call) -> dict[str, Any]:
    """Answer CancelCapacityReservation."""
    held(call.backend)[call.asked["CapacityReservationId"]].cancelled = True
    return {"Return": True}


def held(backend: Any) -> dict[str, CapacityReservation]:
    """The reservations of a region, by id."""
    return kept(backend, "capacity_reservations")


class PlacementGroup(TaggedEC2Resource):
    """One placement group, which moto lacks, too. Nothing here is near or far: faults alone fill a group."""

    strategy, state = "cluster", "available"

    def __init__(self, backend: Any, name: str, tags: dict[str, str]) -> None:
        self.ec2_backend, self.group_name = backend, name
        self.id = self.group_id = f"pg-{uuid.uuid4().hex[:17]}"
        self.add_tags(tags)


def create_group(call: Call) -> dict[str, Any]:
    """Answer CreatePlacementGroup."""
    made = PlacementGroup(call.backend, call.group, call.request.tags("placement-group"))
    call.groups[call.group] = made
    return {"PlacementGroup": made}


def describe_groups(call: Call) -> dict[str, Any]:
    """Answer DescribePlacementGroups."""
    names = call.asked.get("GroupNames", call.groups)
    found = [call.groups[name] for name in names if name in call.groups]
    return {"PlacementGroups": call.request.select(found)}


def move(call: Call) -> dict[str, Any]:
    """Answer ModifyInstancePlacement: a stopped instance joins a placement group, or leaves its one."""
    call.backend.get_instance(call.asked["InstanceId"]).placement.group_name = call.group or ""
    return {"Return": True}


def delete_group(call: Call) -> dict[str, Any]:
    """Answer DeletePlacementGroup."""
    del call.groups[call.group]
    return {}


VCPUS = 12288.0  # 64 of the largest machines: what the local cloud is asked to carry
RUNNING = ("pending", "running")
_ON_DEMAND = (types.QUOTA_P, types.QUOTA_G, types.QUOTA_STANDARD)
QUOTAS = dict((*_ON_DEMAND, types.SPOT_P5, types.SPOT_P, types.SPOT_G, types.SPOT_STANDARD))
"""Codes and names: https://docs.aws.amazon.com/general/latest/gr/ec2-service.html"""


def quota_value(backend: Any, code: str) -> float:
    """The value of a quota in a region."""
    return float(kept(backend, "service_quotas").get(code, VCPUS))


def exceeded_limit(
    backend: Any, instance_type: str, count: int, *, market: types.Market = "on-demand"
) -> float | None:
    """The quota that so many machines more would be over, in vCPUs; None where they fit."""
    quota = types.quota_of(instance_type, market)
    if quota is None:
        return None
    counts = Counter({instance_type: count})
    for one in backend.all_instances():
        if one.state in RUNNING and quota == types.quota_of(one.instance_type, one.lifecycle or "on-demand"):
            counts[one.instance_type] += 1
    for one in held(backend).values():
        if quota == types.quota_of(one.instance_type):
            counts[one.instance_type] += one.available_instance_count
    used = sum(
        INSTANCE_TYPES[name]["VCpuInfo"]["DefaultVCpus"] * number
        for name, number in counts.items()
        if name in INSTANCE_TYPES
    )
    limit = quota_value(backend, quota[0])
    return limit if used > limit else None


def quota(call: Call) -> dict[str, Any]:
    """Answer GetServiceQuota and RequestServiceQuotaIncrease. An increase is granted at once."""
    code = call.quota
    known = {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": QUOTAS[code]}
    if call.request.action == "GetServiceQuota":
        return {"Quota": {**known, "Value": quota_value(call.backend, code), "Adjustable": True}}
    wanted = kept(call.backend, "service_quotas")[code] = float(call.asked["DesiredValue"])
    granted = {"Id": uuid.uuid4().hex, "Status": "APPROVED", "DesiredValue": wanted}
    return {"RequestedQuota": {**known, **granted}}


NOT_COMPARED = ("ClientToken", "DryRun")  # what may differ when a launch is sent again


def launch(call: Call) -> Any:
    """Answer a launch that was checked; a client token sent again gets the same instances again.

    :raises Refusal: IdempotentParameterMismatch, IdempotentInstanceTerminated.
    """
    asked, launches, token = call.asked, kept(call.backend, "launches"), call.asked.get("ClientToken")
    compared = sorted(
        (name, sent) for name, sent in call.request.parameters.items() if name not in NOT_COMPARED
    )
    digest = hashlib.sha256(repr(compared).encode()).hexdigest()
    if token in launches:
        return _replay(digest, *launches[token])
    reservation = call.reservation
    nics = [{"SubnetId": call.subnet.id, **nic, "DeviceIndex": place} for place, nic in enumerate(call.nics)]
    if len(nics) > 1:
        nics[0]["AssociatePublicIpAddress"] = False
    launched = call.backend.run_instances(
        asked["ImageId"],
        asked["MaxCount"],
        parse_user_data(asked.get("UserData")),
        asked.get("SecurityGroups", []),
        instance_type=call.type,
        is_instance_type_default=False,
        region_name=call.request.region,
        subnet_id=call.subnet.id,
        key_name=asked.get("KeyName"),
        security_group_ids=asked.get("SecurityGroupIds", []),
        nics=nics,
        associate_public_ip=None,
        tags={kind: call.request.tags(kind) for kind in ("instance", "volume")},
        instance_market_options=asked.get("InstanceMarketOptions"),
        instance_initiated_shutdown_behavior=asked.get("InstanceInitiatedShutdownBehavior"),
        metadata_options=asked.get("MetadataOptions"),
        block_device_mappings=[_root_disk(call)],
    )
    for instance in launched.instances:
        _complete(instance, call, reservation)
    if token:
        launches[token] = (digest, launched)
    return launched


def _root_disk(call: Call) -> dict[str, Any]:
    """The root volume as moto wants it: that of the image, with what the launch asks for."""
    [root] = call.image.block_device_mappings
    [mapping] = call.disks or [{}]
    return {
        "DeviceName": root["DeviceName"],
        "Ebs": {**root["Ebs"], "SnapshotId": None, **mapping.get("Ebs", {})},
    }


def _complete(instance: Any, call: Call, chosen: CapacityReservation | None) -> None:
    """Give a new instance what moto drops of its launch."""
    asked = call.asked
    instance.placement.group_name = asked.get("Placement", {}).get("GroupName", "")
    for place, nic in instance.nics.items():
        nic.add_tags(call.request.tags("network-interface"))
        nic.interface_type = (call.nics or [{}])[place].get("InterfaceType", "interface")
        if nic.interface_type == "efa-only":
            nic.private_ip_address, nic.private_ip_addresses = None, []
    if profile := asked.get("IamInstanceProfile"):
        associate = call.backend.associate_iam_instance_profile
        associate(instance.id, profile.get("Name"), profile.get("Arn"))
    if chosen is not None:
        instance.capacity_reservation_id = chosen.id
        if call.named_reservation:
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
