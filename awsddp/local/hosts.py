"""What carries an instance: the contract that systemd-nspawn, loopback and records-only hosts keep."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MOMENT_S = 0.1  # how long a change of state takes where nothing boots


class Condition(Enum):
    """What a host is doing."""

    ABSENT = "absent"  # never made, or its machine went down under it: boot it
    STARTING = "starting"
    UP = "up"  # answers
    OFF = "off"  # powered off from inside, or on request
    RESTARTING = "restarting"  # rebooted from inside: boot it again
    BROKEN = "broken"  # could not be started; `Hosts.complaint` says why


@dataclass(frozen=True)
class HostSpec:
    """An instance as its host needs to know it. `rehearsal`: the type whose GPUs its torch is to pretend."""

    instance_id: str
    address: str
    prefix: int
    name: str
    user_data: bytes
    public_keys: tuple[str, ...]
    has_torch: bool
    disk_gib: int
    rehearsal: str | None = None


class Hosts(Protocol):
    """All hosts of a local cloud. Calls about one instance come one at a time; all may be repeated."""

    def boot(self, spec: HostSpec) -> None:
        """Makes the host if need be and starts it; returns before it answers."""

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        """Asks for an orderly power-off or reboot; returns at once."""

    def cut_power(self, instance_id: str) -> None:
        """Ends all of its processes now; its files stay."""

    def remove(self, instance_id: str) -> None:
        """Ends it and removes all that it was."""

    def condition(self, instance_id: str) -> Condition:
        """What it is doing."""

    def complaint(self, instance_id: str) -> str:
        """Why it is broken, in a line."""

    def console(self, instance_id: str) -> bytes:
        """What it wrote to its console since it was made."""

    def apply_rules(self, instance_id: str, ruleset: str) -> None:
        """Puts its security groups in force (nftables)."""

    def assign(self, instance_id: str, addresses: frozenset[str]) -> None:
        """Let it answer at these elastic IPs as well, and at no others; also when it boots later."""

    def suffer(self, instance_id: str, effects: frozenset[str]) -> bool:
        """Lets it have these faults of node_faults.py, and heals others; false while it has not booted."""

    def announce(self, names: dict[str, str]) -> None:
        """Tells every host the names of all: address to name."""

    def exits(self, instance_id: str) -> int | None:
        """A file descriptor that becomes readable when it ends (the caller closes it), or None."""


class NoHosts:
    """Records only: instances change state, each change taking its moment, and nothing boots."""

    def __init__(self) -> None:
        self._conditions: dict[str, tuple[Condition, float]] = {}

    def boot(self, spec: HostSpec) -> None:
        self._become(spec.instance_id, Condition.UP)

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        self._become(instance_id, Condition.UP if reboot else Condition.OFF)

    def cut_power(self, instance_id: str) -> None:
        self._become(instance_id, Condition.OFF)

    def remove(self, instance_id: str) -> None:
        time.sleep(MOMENT_S)
        self._conditions.pop(instance_id, None)

    def condition(self, instance_id: str) -> Condition:
        condition, since = self._conditions.get(instance_id, (Condition.ABSENT, 0.0))
        return condition if time.monotonic() >= since else Condition.STARTING

    def complaint(self, instance_id: str) -> str:
        return ""

    def console(self, instance_id: str) -> bytes:
        return b""

    def apply_rules(self, instance_id: str, ruleset: str) -> None:
        return None

    def assign(self, instance_id: str, addresses: frozenset[str]) -> None:
        return None

    def suffer(self, instance_id: str, effects: frozenset[str]) -> bool:
        return True

    def announce(self, names: dict[str, str]) -> None:
        return None

    def exits(self, instance_id: str) -> int | None:
        return None

    def _become(self, instance_id: str, condition: Condition) -> None:
        self._conditions[instance_id] = (condition, time.monotonic() + MOMENT_S)
