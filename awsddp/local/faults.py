"""Fault injection: errors and delays in API calls, and faults on nodes."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from awsddp.compat.types import GPU_TYPES
from awsddp.errors import UsageError
from awsddp.local import cgroups, image
from awsddp.local.ec2_http import Refusal, get_records
from awsddp.local.machine import write_json
from awsddp.local.nspawn import find_faketime
from awsddp.local.operations import OPERATIONS
from awsddp.model.documents import Fault

CALL_EFFECTS = ("delay", "late", "cut", "lost", "stale")
CODE = re.compile(r"[A-Z][A-Za-z0-9]+(\.[A-Za-z0-9]+)*")
_ERROR, _BUSY = "500 Internal Server Error", "503 Service Unavailable"
STATUS = {
    **dict.fromkeys(("InsufficientInstanceCapacity", "InternalError", "InternalFailure"), _ERROR),
    **dict.fromkeys(("RequestLimitExceeded", "ServiceUnavailable", "SlowDown", "Unavailable"), _BUSY),
    "UnauthorizedOperation": "403 Forbidden",
}
NO_CAPACITY = (
    "We currently do not have sufficient {type} capacity in the Availability Zone you requested ({zone}). "
    "Our system will be working on provisioning additional capacity."
)


PLACEMENT_GROUP = "placement-group"
"""The value of `only` that matches launches into a placement group, and starts of instances in a placement
group."""


class Faults:
    """Holds the active faults. Callers hold the emulator's lock.

    A fault's `operation` is an API operation, or the id of the instance that has the fault. `times` is the
    number of further calls that the fault affects (None: all). `only` is a parameter value that the request
    must have. `heals_at` is the time when the fault ends, or None.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._faults = msgspec.json.decode(path.read_bytes(), type=list[Fault]) if path.exists() else []

    def apply_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Add a fault (`add`: its fields) or clear faults (`clear`: a number, or null for all); return the
        active faults.

        :raises UsageError: there is no such operation, effect or fault.
        """
        numbers = [fault.id for fault in self._faults]
        if "add" in command:
            self._save([*self._faults, _make_fault(command["add"], number=1 + max(numbers, default=0))])
        if "clear" in command:
            number = command["clear"]
            if number not in (None, *numbers):
                raise UsageError(f"fault not found: {number}", "", "awsddp local fault list")
            self._save([fault for fault in self._faults if number not in (None, fault.id)])
        active: list[dict[str, Any]] = msgspec.to_builtins(self._list_active())
        return active

    def get_effects(self, instance_id: str) -> frozenset[str]:
        """Return the effects that an instance's active faults have."""
        return frozenset(fault.effect for fault in self._list_active() if fault.operation == instance_id)

    def remove_gone_nodes(self, living: set[str]) -> None:
        """Remove the faults of instances whose id is not among `living`."""
        self._save(
            [
                fault
                for fault in self._faults
                if not is_instance_id(fault.operation) or fault.operation in living
            ]
        )

    def has_effect(self, effect: str) -> bool:
        """Return True if a fault with this effect is active."""
        return any(fault.effect == effect for fault in self._faults)

    def take_fault(self, operation: str, values: tuple[str, ...]) -> Fault | None:
        """Return the first fault that affects this request, or None if there is no such fault. Decrement the
        fault's `times`.

        `values` are the request's values, which are compared with a fault's `only`.
        """
        for fault in self._list_active():
            if fault.operation in ("*", operation) and fault.only in ("", *values):
                if fault.times is not None:
                    counted = msgspec.structs.replace(fault, times=fault.times - 1)
                    faults = [counted if other is fault else other for other in self._faults]
                    self._save([other for other in faults if other.times != 0])
                return fault
        return None

    def _list_active(self) -> list[Fault]:
        now = time.time()
        self._save([fault for fault in self._faults if fault.heals_at is None or fault.heals_at > now])
        return self._faults

    def _save(self, faults: list[Fault]) -> None:
        if faults != self._faults:
            self._faults = faults
            write_json(self._path, msgspec.to_builtins(faults))


def make_refusal(fault: Fault, *, instance_type: str = "such", zone: str = "any zone") -> Refusal:
    """Return the error response for a fault whose effect is an error code."""
    text = f"Refused by a fault of the local cloud ({fault.effect})."
    if fault.effect == "InsufficientInstanceCapacity":
        text = NO_CAPACITY.format(type=instance_type, zone=zone)
    return Refusal(fault.effect, text, status=STATUS.get(fault.effect, "400 Bad Request"))


def set_creation_times(backend: Any) -> None:
    """Record when the new resources in a region's back end were created."""
    for collection in _collections(backend):
        for resource in collection.values():
            if not hasattr(resource, "born"):
                resource.born = time.time()


@contextmanager
def hide_new_resources(backend: Any, *, younger_than_s: float) -> Iterator[None]:
    """Within the context, hide a region's resources that were created less than `younger_than_s` ago."""
    limit = time.time() - younger_than_s
    hidden = []
    for collection in _collections(backend):
        young = {key: value for key, value in collection.items() if getattr(value, "born", 0.0) > limit}
        for key in young:
            collection.pop(key)
        hidden.append((collection, young))
    try:
        yield
    finally:
        for collection, young in hidden:
            collection.update(young)


def _collections(backend: Any) -> list[dict[str, Any]]:
    return [
        backend.reservations,
        backend.key_pairs,
        get_records(backend, "placement_groups"),
        *backend.groups.values(),
    ]


def _make_fault(options: dict[str, Any], *, number: int) -> Fault:
    """Return the fault with these fields and options. Raises UsageError if any of them is invalid."""
    fields = {"times": None, "seconds": 5.0, "only": "", **options}
    lasts_s = fields.pop("for_s", None)
    if lasts_s is not None and lasts_s <= 0:
        raise invalid_fault_error("the duration of a fault must be positive")
    heals_at = None if lasts_s is None else time.time() + lasts_s
    if is_instance_id(options["operation"]):
        return Fault(id=number, heals_at=heals_at, **fields)
    check_options(options, {"times", "seconds", "only", "for_s"})
    fault = Fault(id=number, heals_at=heals_at, **fields)
    # GetProducts is valid too, because awsddp requests prices, although the local cloud has no price service.
    operations = ["*", "GetProducts", *(name for rows in OPERATIONS.values() for name in rows)]
    if fault.operation not in operations:
        similar = difflib.get_close_matches(fault.operation, operations, n=1)
        why = "use an operation that the local cloud carries out, * for all, or an instance id"
        why = f"did you mean {similar[0]}?" if similar else why
        raise invalid_fault_error(f"unknown operation {fault.operation}", why)
    if fault.effect not in CALL_EFFECTS and not CODE.fullmatch(fault.effect):
        why = f"use one of {', '.join(CALL_EFFECTS)}, or an AWS error code such as RequestLimitExceeded"
        raise invalid_fault_error(f"unknown fault {fault.effect}", why)
    if fault.seconds < 0 or (fault.times is not None and fault.times < 1):
        raise invalid_fault_error("the seconds and times of a fault must be positive")
    return fault


LASTING_EFFECTS = (
    *("cut", "one-way", "slow-network", "slow-cpu", "frozen"),
    *("full-disk", "oom", "clock", "hostkey"),
)
ONE_TIME_EFFECTS: dict[str, set[str]] = {
    "reboot": set(),
    "poweroff": set(),
    "xid": set(),
    "reclaim": {"notice_s"},
}
"""The effects that happen once, with their options. A lasting effect's only option is `--for`."""
NOTICE_S = 120.0
"""The time in seconds from the spot notice to the spot reclaim (the default for `notice_s`)."""


def is_instance_id(operation: str) -> bool:
    """Return True if a fault's operation is an instance id. Such a fault affects a node instead of API
    calls."""
    return operation.startswith("i-")


def check_node_fault(options: Mapping[str, Any], instances: Mapping[str, Any], *, mode: str) -> None:
    """Check a node fault before it is added.

    :param options: the fault's fields.
    :param instances: all regions' instances by id, including terminated ones.
    :raises UsageError: there is no such instance or effect, an option is valid only for API calls, or the
        local cloud's mode does not support this effect.
    """
    instance_id, effect = options["operation"], options["effect"]
    if effect not in (*LASTING_EFFECTS, *ONE_TIME_EFFECTS):
        raise invalid_fault_error(
            f"invalid fault for a node: {effect}",
            f"use one of {', '.join((*LASTING_EFFECTS, *ONE_TIME_EFFECTS))}",
        )
    ids = [key for key, row in instances.items() if row.state not in ("shutting-down", "terminated")]
    if instance_id not in ids:
        valid = ", ".join(ids) or "none: run awsddp up --local"
        raise invalid_fault_error(f"instance not found: {instance_id}", f"the instances are {valid}")
    check_options(options, ONE_TIME_EFFECTS.get(effect, {"for_s"}))
    if effect in ONE_TIME_EFFECTS and instances[instance_id].state != "running":
        raise invalid_fault_error(
            f"{instance_id} is {instances[instance_id].state}", f"{effect} requires a running node"
        )
    if effect == "reclaim":
        if instances[instance_id].lifecycle != "spot":
            raise invalid_fault_error(
                f"{instance_id} is not a spot instance", "create one: awsddp up --local --spot"
            )
    elif mode != "nspawn":
        why = f"this local cloud runs in {mode} mode; as root: awsddp local stop, then awsddp local start"
        raise invalid_fault_error(f"{effect} requires nodes that run in systemd-nspawn", why)
    elif effect == "frozen" and not cgroups.can_freeze():
        raise invalid_fault_error("this machine cannot freeze a node", "it has no cgroup v2")
    elif effect == "xid" and image.get_rehearsed_type(instances[instance_id]) not in GPU_TYPES:
        why = "its type has no GPUs, or the cluster was created with local.gpus=off"
        raise invalid_fault_error(f"{instance_id} has no simulated GPUs", why)
    elif effect == "clock" and find_faketime() is None:
        why = "Debian's package faketime is missing: apt-get install faketime"
        raise invalid_fault_error("this machine cannot shift a node's clock", why)


def check_options(options: Mapping[str, Any], valid: Set[str]) -> None:
    """Raise UsageError if a fault has an option that its effect does not take."""
    if invalid_names := sorted(set(options) - valid - {"operation", "effect"}):
        option = invalid_names[0].removesuffix("_s")
        flags = " and ".join(f"--{name.removesuffix('_s')}" for name in sorted(valid))
        raise invalid_fault_error(
            f"--{option} is not for {options['effect']}", f"it takes {flags or 'no options'}"
        )


def invalid_fault_error(message: str, why: str = "") -> UsageError:
    """Return the error for an invalid fault."""
    return UsageError(message, why, "awsddp local fault add --help")
