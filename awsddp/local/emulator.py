"""moto's EC2, patched to behave like a cloud with real machines, and the storage of its state on the disk.

All patches are in `_patch`. With the patches, instances take time to change state, and they end when their
host has ended. Addresses are in the block that is really routed, and the images are Deep Learning AMIs.
"""

from __future__ import annotations

import copy
import ipaddress
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import moto
from moto.backends import get_backend
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2 import exceptions as ec2_exceptions
from moto.ec2 import utils as ec2_utils
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.elastic_network_interfaces import Attachment, NetworkInterface
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.models.security_groups import SecurityGroupBackend
from moto.ec2.models.subnets import Subnet
from moto.ec2.models.vpcs import VPCBackend
from moto.kms import models as kms_models

from awsddp.errors import LocalCloudError
from awsddp.local import offers
from awsddp.local.network import make_mac_address

BACKENDS: dict[str, Any] = {name: get_backend(name) for name in ("ec2", "iam", "kms", "sts")}
USER = "local"
STATES = ("pending", "running", "shutting-down", "terminated", "stopping", "stopped")
"""An instance's states, in the order of EC2's codes: 0, 16, 32 and so on."""
USER_SHUTDOWN = ("Client.UserInitiatedShutdown", "User initiated shutdown")
INSTANCE_SHUTDOWN = ("Client.InstanceInitiatedShutdown", "Instance initiated shutdown")
RECLAIMED = ("Server.SpotInstanceTermination", "Spot instance termination")
BROKEN = ("Server.InternalError", "Internal error on launch")

_original_init = Instance.__init__
_original_attachment = Attachment.__init__
_original_terminate = Instance.terminate
_original_endpoint = VPCBackend.create_vpc_endpoint
_original_disks: Any = vars(Ami)["block_device_mappings"].fget


class Emulator:
    """The cloud's records. Callers hold `lock` while they read or change records."""

    def __init__(self, block: ipaddress.IPv4Network, *, image_tags: dict[str, str]) -> None:
        self.lock = threading.RLock()
        _patch(block, image_tags)

    def backend(self, region: str) -> Any:
        """Return moto's EC2 back end for a region. The back end is created on first use.

        :raises KeyError: there is no such region.
        """
        return BACKENDS["ec2"][DEFAULT_ACCOUNT_ID][region]

    def instances(self) -> Iterator[Any]:
        """Yield all instances in all regions, including terminated ones."""
        for backend in list(BACKENDS["ec2"][DEFAULT_ACCOUNT_ID].values()):
            yield from backend.all_instances()

    def credentials(self) -> tuple[str, str]:
        """Return the access key id and secret of the account's first user, who is created on first use."""
        iam = BACKENDS["iam"][DEFAULT_ACCOUNT_ID]["aws"]
        if USER not in iam.users:
            user = iam.create_user("us-east-1", USER)
            user.id = f"AIDA{user.id.upper()[:17]}"
            iam.create_access_key(USER)
        key = iam.list_access_keys(USER)[0]
        return key.access_key_id, key.secret_access_key

    def drop_old_instances(self, *, older_than_s: float = 3600) -> bool:
        """Drop terminated instances that EC2 would no longer list; return True if there were any."""
        now, changed = datetime.now(UTC), False
        for backend in list(BACKENDS["ec2"][DEFAULT_ACCOUNT_ID].values()):
            for key, reservation in list(backend.reservations.items()):
                end_times = [getattr(instance, "ended", None) for instance in reservation.instances]
                if all(end and (now - end).total_seconds() > older_than_s for end in end_times):
                    del backend.reservations[key]
                    changed = True
        return changed


def set_state(instance: Any, name: str) -> None:
    instance._state.name, instance._state.code = name, 16 * STATES.index(name)


def set_reason(instance: Any, reason: tuple[str, str], detail: str = "") -> None:
    """Set the reason why an instance left `running`, as DescribeInstances shows it."""
    code, message = reason
    instance._reason = f"{message} ({datetime.now(UTC):%Y-%m-%d %H:%M:%S} GMT)"
    instance.state_reason = StateReason(f"{code}: {detail or message}", code)


def finish_stop(instance: Any) -> None:
    """Record that the instance's host is off, so that the instance is "stopped"."""
    for nic in instance.nics.values():
        nic.stop()
    set_state(instance, "stopped")


def finish_terminate(instance: Any) -> None:
    """Record that the instance's host is removed, and remove the instance's interfaces and volumes."""
    reason, state_reason = instance._reason, instance.state_reason
    _original_terminate(instance)
    instance._reason, instance.state_reason = reason, state_reason
    instance.ended = datetime.now(UTC)


def _patch(block: ipaddress.IPv4Network, image_tags: dict[str, str]) -> None:
    changes: list[tuple[Any, str, Any]] = [
        (Instance, "__init__", _instance_init),
        # moto does not set this id. An instance keeps the id while it is stopped.
        (Instance, "capacity_reservation_id", None),
        (Attachment, "__init__", _attachment_init),
        (Instance, "terminate", _change_state("shutting-down", "pending", "running", "stopping", "stopped")),
        (Instance, "stop", _change_state("stopping", "pending", "running")),
        (Instance, "start", _start),
        (Instance, "reboot", _reboot),
        (NetworkInterface, "check_auto_public_ip", _set_public_ip),
        (Subnet, "get_available_subnet_ip", _allocate_subnet_ip),
        (AmiBackend, "_load_amis", lambda self: _load_images(self, image_tags)),
        (Ami, "block_device_mappings", property(_image_disks)),
        (VPCBackend, "create_vpc_endpoint", _create_endpoint),
        (VPCBackend, "create_default_vpc", lambda self: _create_default_vpc(self, block)),
        # moto counts IPv4 and IPv6 rules together, and it keeps the first rules of a request that it refuses.
        (SecurityGroupBackend, "_verify_group_will_respect_rule_count_limit", lambda *_, **__: None),
        (ec2_utils, "instance_value_in_filter_values", _matches_filter),
        (kms_models, "generate_private_key", lambda _: None),  # the key is unused and cannot be pickled
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)
    for prefix, kind in (("pg", "placement-group"), ("cr", "capacity-reservation")):
        ec2_utils.EC2_RESOURCE_TO_PREFIX[kind] = prefix
        ec2_utils.EC2_PREFIX_TO_RESOURCE[prefix] = kind


def _instance_init(self: Any, *args: Any, **kwargs: Any) -> None:
    _original_init(self, *args, **kwargs)
    set_state(self, "pending")
    self.reboot_wanted = False
    for nic in self.nics.values():
        nic.delete_on_termination = True
    self.nics[0].mac_address = make_mac_address(self.private_ip)
    if not self.security_groups:  # use the interface's groups, or the default group
        self.security_groups = list(self.nics[0].group_set)


def _attachment_init(self: Any, eni: Any) -> None:
    _original_attachment(self, eni)
    self.device_index = min(eni.device_index, 1)
    self.network_card_index = eni.device_index


def _change_state(state: str, *from_states: str) -> Callable[[Any], Any]:
    """Return a method that changes an instance in `from_states` to `state` and returns its old state."""

    def change(self: Any) -> Any:
        previous = copy.copy(self._state)
        if previous.name in from_states:
            set_state(self, state)
            set_reason(self, USER_SHUTDOWN)
        return previous

    return change


def _start(self: Any) -> Any:
    previous = copy.copy(self._state)
    if previous.name == "stopped":
        for nic in self.nics.values():
            nic.start()
        reservation = offers.get_reservations(self.ec2_backend).get(self.capacity_reservation_id)
        if reservation is not None and not reservation.available_instance_count:
            self.capacity_reservation_id = None  # the reservation is full
        set_state(self, "pending")
        self._reason, self.state_reason = "", StateReason()
    return previous


def _reboot(self: Any) -> None:
    self.reboot_wanted = True


def _set_public_ip(self: Any) -> None:
    """Set the public address to the private address, because the machine can reach the private address."""
    if str(self.public_ip_auto_assign).lower() == "true":
        self.public_ip = self.private_ip_address


def _allocate_subnet_ip(self: Any, instance: Any) -> str:
    """Assign the lowest free address and return it. A subnet's first four addresses and its last one are
    reserved, as on EC2.

    All VPCs share one network in the local cloud, so an address that is assigned in another subnet is not
    free.
    """
    backends = BACKENDS["ec2"][DEFAULT_ACCOUNT_ID].values()
    taken = {str(eni.private_ip_address) for backend in list(backends) for eni in list(backend.enis.values())}
    for address in list(self.cidr.hosts())[3:]:
        if str(address) not in taken | self._subnet_ips.keys() and address not in self._reserved_ips:
            self._subnet_ips[str(address)] = instance
            return str(address)
    raise ec2_exceptions.EC2ClientError(
        "InsufficientFreeAddressesInSubnet",
        f"There are not enough free addresses in subnet '{self.id}' to satisfy the requested number of "
        "instances.",
    )


def _matches_filter(value: Any, patterns: list[str]) -> bool:
    """Return True if an attribute of an instance matches a pattern; `*` and `?` are wildcards, as on EC2."""
    values = value if isinstance(value, list) else [value]
    return any(fnmatchcase(str(item), pattern) for item in values for pattern in patterns)


def _create_endpoint(self: Any, **options: Any) -> Any:
    """Create an endpoint. Its type has EC2's default, because moto cannot delete one without a type."""
    return _original_endpoint(self, **{**options, "endpoint_type": options.get("endpoint_type") or "Gateway"})


def _create_default_vpc(self: Any, block: ipaddress.IPv4Network) -> Any:
    """Create a default VPC with a default subnet in each zone. Each zone in each region has its own /24."""
    vpc = self.create_vpc(cidr_block=str(block), is_default=True)
    networks = list(block.subnets(new_prefix=24))
    all_zones = [zone.name for zones in RegionsAndZonesBackend.zones.values() for zone in zones]
    for zone in self.describe_availability_zones():
        self.create_subnet(vpc.id, str(networks[all_zones.index(zone.name)]), availability_zone=zone.name)
    add_default_route(self, vpc)
    return vpc


def add_default_route(backend: Any, vpc: Any) -> None:
    """Give a VPC an internet gateway and a default route to the gateway, like those of EC2's default VPC.

    https://docs.aws.amazon.com/vpc/latest/userguide/default-vpc-components.html
    """
    gateway = backend.create_internet_gateway()
    backend.attach_internet_gateway(gateway.id, vpc.id)
    main = next(table for table in backend.route_tables.values() if table.vpc_id == vpc.id)
    backend.create_route(main.id, "0.0.0.0/0", gateway_id=gateway.id)


def _load_images(self: Any, tags: dict[str, str]) -> None:
    for name in offers.IMAGES:
        ami: Any = Ami(
            self,
            offers.image_id(name, self.region_name),
            name=name,
            owner_id=offers.OWNER,
            owner_alias="amazon",
            public=True,
            architecture=offers.image_architecture(name),
            creation_date=datetime.strptime(name[-8:], "%Y%m%d"),
            root_device_type="ebs",
            tags={"awsddp:gpus": "rehearsed", "awsddp:internet": "none", **tags},
        )
        ami.ebs_snapshot.volume.size = offers.ROOT_GIB
        ami.ena_support = True
        self.amis[ami.id] = ami


def _image_disks(self: Any) -> list[dict[str, Any]]:
    [disk] = _original_disks(self)
    disk["Ebs"] |= {"VolumeSize": offers.ROOT_GIB, "DeleteOnTermination": True, "VolumeType": "gp3"}
    return [disk]


MAX_PAST_STATES = 1000


@dataclass
class Store:
    """Stores the pickled state in one file. Past states stay in memory while `keeps_history` returns True."""

    path: Path
    live_mark: Path
    keeps_history: Callable[[], bool]
    _past: list[tuple[float, bytes]] = field(default_factory=list)

    @contextmanager
    def show_past(self, region: str, *, seconds: float) -> Iterator[None]:
        """Within the context, EC2 shows the region as it was `seconds` ago, or in the oldest saved state."""
        states = [data for moment, data in self._past if moment <= time.time() - seconds]
        data = [self._past[0][1], *states][-1]
        regions = BACKENDS["ec2"][DEFAULT_ACCOUNT_ID]
        current = regions[region]
        past = pickle.loads(data)["backends"]["ec2"].get((DEFAULT_ACCOUNT_ID, region), current)
        dict.__setitem__(regions, region, past)
        try:
            yield
        finally:
            dict.__setitem__(regions, region, current)

    def load(self) -> None:
        """Load the saved state into moto, if there is one.

        :raises LocalCloudError: the file cannot be read, or another version of moto wrote it.
        """
        if not self.path.exists():
            return
        why = ""
        try:
            saved = pickle.loads(self.path.read_bytes())
            if saved["moto"] != moto.__version__:
                why = f"it was made with moto {saved['moto']}, and moto {moto.__version__} is installed"
        except Exception as error:  # a truncated or foreign pickle can raise any exception
            why = f"{self.path} cannot be read: {type(error).__name__}: {error}"
        if why:
            stop = "awsddp local stop   # this ends all instances"
            raise LocalCloudError("the local cloud's state cannot be used", why=why, next_step=stop)
        for service, regions in saved["backends"].items():
            for (account, region), backend in regions.items():
                dict.__setitem__(BACKENDS[service][account], region, backend)

    def save(self) -> None:
        """Write the state to the disk and sync it, so that a later power cut loses nothing."""
        data = self._pickled()
        self._past = [*(self._past[-MAX_PAST_STATES:] if self.keeps_history() else ()), (time.time(), data)]
        backends: list[Any] = [backend for _, _, backend in BACKENDS["ec2"].iter_backends()]
        if alive := any(row.state != "terminated" for backend in backends for row in backend.all_instances()):
            self.live_mark.touch()
        new = self.path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path)
        if not alive:
            self.live_mark.unlink(missing_ok=True)

    def _pickled(self) -> bytes:
        regions = {
            service: {(account, region): backend for account, region, backend in backends.iter_backends()}
            for service, backends in BACKENDS.items()
        }
        return pickle.dumps({"moto": moto.__version__, "backends": regions}, pickle.HIGHEST_PROTOCOL)

    def count_backends(self) -> int:
        """Return the number of EC2 back ends. The number shows whether a call created a back end, which even
        a read call can do in a new region."""
        return sum(1 for _ in BACKENDS["ec2"].iter_backends())
