"""Faults on purpose: what goes wrong with calls of the API, or with a node."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from awsddp.errors import UsageError
from awsddp.local import cgroups
from awsddp.local.ec2_http import Refusal, kept
from awsddp.local.machine import write_json
from awsddp.local.nspawn import faketime
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
"""What `only` calls launches into a placement group, and starts of instances that are in one."""


class Faults:
    """The faults that are in force. Whoever uses it holds the emulator's lock.

    A fault's `operation` is one of the API, or the id of an instance that has it; `times`: how often it still
    strikes, None always; `only`: a word that the request holds; `heals_at`: when it ends by itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._faults = msgspec.json.decode(path.read_bytes(), type=list[Fault]) if path.exists() else []

    def act(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Adds one (`add`: its fields), or clears one or all (`clear`: an id or null); returns all in force.

        :raises UsageError: no such operation or effect.
        """
        known = [fault.id for fault in self._faults]
        if "add" in asked:
            self._keep([*self._faults, _checked(asked["add"], number=1 + max(known, default=0))])
        if "clear" in asked:
            wanted = asked["clear"]
            if wanted not in (None, *known):
                raise UsageError(f"fault not found: {wanted}", "", "awsddp local fault list")
            self._keep([fault for fault in self._faults if wanted not in (None, fault.id)])
        in_force: list[dict[str, Any]] = msgspec.to_builtins(self._in_force())
        return in_force

    def of(self, instance_id: str) -> frozenset[str]:
        """The faults that an instance has."""
        return frozenset(fault.effect for fault in self._in_force() if fault.operation == instance_id)

    def forget_nodes(self, living: set[str]) -> None:
        """Takes away the faults of instances that are not among these."""
        self._keep([one for one in self._faults if not names_node(one.operation) or one.operation in living])

    def hold(self, effect: str) -> bool:
        """Whether a fault of this effect is in force."""
        return any(fault.effect == effect for fault in self._faults)

    def strike(self, operation: str, words: tuple[str, ...]) -> Fault | None:
        """The first fault that hits this request, counted down; None if none does."""
        for fault in self._in_force():
            if fault.operation in ("*", operation) and fault.only in ("", *words):
                if fault.times is not None:
                    left = msgspec.structs.replace(fault, times=fault.times - 1)
                    rest = [left if one is fault else one for one in self._faults]
                    self._keep([one for one in rest if one.times != 0])
                return fault
        return None

    def _in_force(self) -> list[Fault]:
        now = time.time()
        self._keep([fault for fault in self._faults if fault.heals_at is None or fault.heals_at > now])
        return self._faults

    def _keep(self, faults: list[Fault]) -> None:
        if faults != self._faults:
            self._faults = faults
            write_json(self._path, msgspec.to_builtins(faults))


def refusal(fault: Fault, *, instance_type: str = "such", zone: str = "any zone") -> Refusal:
    """How a call is refused by a fault that names a code."""
    text = f"Refused by a fault of the local cloud ({fault.effect})."
    if fault.effect == "InsufficientInstanceCapacity":
        text = NO_CAPACITY.format(type=instance_type, zone=zone)
    return Refusal(fault.effect, text, status=STATUS.get(fault.effect, "400 Bad Request"))


def mark(backend: Any) -> None:
    """Notes when what is new in a region's back end was made."""
    for collection in _collections(backend):
        for thing in collection.values():
            if not hasattr(thing, "born"):
                thing.born = time.time()


@contextmanager
def unaware(backend: Any, *, younger_than_s: float) -> Iterator[None]:
    """Within it the region does not know what was made less than so many seconds ago."""
    limit = time.time() - younger_than_s
    hidden = []
    for collection in _collections(backend):
        young = {key: thing for key, thing in collection.items() if getattr(thing, "born", 0.0) > limit}
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
        kept(backend, "placement_groups"),
        *backend.groups.values(),
    ]


def _checked(asked: dict[str, Any], *, number: int) -> Fault:
    """Return the fault that was asked for. Raises UsageError where it cannot be."""
    fields = {"times": None, "seconds": 5.0, "only": "", **asked}
    lasts_s = fields.pop("for_s", None)
    if lasts_s is not None and lasts_s <= 0:
        raise invalid("a fault lasts longer than nothing")
    heals_at = None if lasts_s is None else time.time() + lasts_s
    if names_node(asked["operation"]):
        return Fault(id=number, heals_at=heals_at, **fields)
    check_options(asked, {"times", "seconds", "only", "for_s"})
    fault = Fault(id=number, heals_at=heals_at, **fields)
    # Prices are asked for, too, though nobody answers here.
    operations = ["*", "GetProducts", *(name for rows in OPERATIONS.values() for name in rows)]
    if fault.operation not in operations:
        near = difflib.get_close_matches(fault.operation, operations, n=1)
        known = "it is one that the local cloud carries out, or *; or the id of an instance"
        raise invalid(f"unknown operation {fault.operation}", f"did you mean {near[0]}?" if near else known)
    if fault.effect not in CALL_EFFECTS and not CODE.fullmatch(fault.effect):
        known = f"it is one of {', '.join(CALL_EFFECTS)}, or a code of AWS such as RequestLimitExceeded"
        raise invalid(f"unknown fault {fault.effect}", known)
    if fault.seconds < 0 or (fault.times is not None and fault.times < 1):
        raise invalid("a fault's seconds and times are positive")
    return fault


LASTING = (
    *("cut", "one-way", "slow-network", "slow-cpu", "frozen"),
    *("full-disk", "oom", "clock", "hostkey"),
)
ONCE: dict[str, set[str]] = {"reboot": set(), "poweroff": set(), "reclaim": {"notice_s"}}
"""What happens once, with its options; what lasts takes `--for`."""
NOTICE_S = 120.0
"""How long before its end EC2 tells a spot instance that it is taken back."""


def names_node(operation: str) -> bool:
    """Whether a fault is of an instance, not of calls."""
    return operation.startswith("i-")


def check_node(asked: Mapping[str, Any], instances: Mapping[str, Any], *, mode: str) -> None:
    """Looks at a fault of a node before it is taken up.

    :param asked: the fields of the fault.
    :param instances: those of all regions by their ids, terminated ones too.
    :raises UsageError: no such instance or effect, choices that are for calls, a mode that cannot do it.
    """
    instance_id, effect = asked["operation"], asked["effect"]
    if effect not in (*LASTING, *ONCE):
        raise invalid(f"invalid fault of a node: {effect}", f"it is one of {', '.join((*LASTING, *ONCE))}")
    alive = [id for id, one in instances.items() if one.state not in ("shutting-down", "terminated")]
    if instance_id not in alive:
        known = ", ".join(alive) or "none: run awsddp up --local"
        raise invalid(f"instance not found: {instance_id}", f"the instances are {known}")
    check_options(asked, ONCE.get(effect, {"for_s"}))
    if effect in ONCE and instances[instance_id].state != "running":
        raise invalid(f"{instance_id} is {instances[instance_id].state}", f"{effect} is for a node that runs")
    if effect == "reclaim":
        if instances[instance_id].lifecycle != "spot":
            raise invalid(f"{instance_id} is not a spot instance", "create one: awsddp up --local --spot")
    elif mode != "nspawn":
        why = f"this local cloud runs in {mode} mode; as root: awsddp local stop, then awsddp local start"
        raise invalid(f"{effect} needs nodes that are machines of their own", why)
    elif effect == "frozen" and not cgroups.can_freeze():
        raise invalid("this machine cannot freeze a node", "it has no cgroup v2")
    elif effect == "clock" and faketime() is None:
        why = "Debian's package faketime is missing: apt-get install faketime"
        raise invalid("this machine cannot shift a node's clock", why)


def check_options(asked: Mapping[str, Any], possible: Set[str]) -> None:
    """Raise UsageError where a fault has an option that is not for it."""
    if more := sorted(set(asked) - possible - {"operation", "effect"}):
        option = more[0].removesuffix("_s")
        known = " and ".join(f"--{name.removesuffix('_s')}" for name in sorted(possible))
        raise invalid(f"--{option} is not for {asked['effect']}", f"it takes {known or 'no options'}")


def invalid(message: str, why: str = "") -> UsageError:
    """Return the error of a fault that cannot be."""
    return UsageError(message, why, "awsddp local fault add --help")
