"""What carries an instance: records, which `nspawn` and `loopback` override with hosts that boot."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from awsddp.local.place import Place

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
    name: str
    user_data: bytes
    public_keys: tuple[str, ...]
    has_torch: bool
    disk_gib: int
    rehearsal: str | None = None


class Hosts:
    """All hosts of a local cloud: records alone, whose states change after a moment.

    Calls about one instance come one at a time; all may be repeated.
    """

    ssh_port = 22

    def __init__(self, place: Place) -> None:
        self._place = place
        self._conditions: dict[str, tuple[Condition, float]] = {}

    def folder(self, instance_id: str) -> Path:
        """Return where it keeps its files."""
        return self._place.nodes / instance_id

    def boot(self, spec: HostSpec) -> None:
        """Make the host if need be and start it; returns before it answers."""
        self._become(spec.instance_id, Condition.UP)

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        """Ask for an orderly power-off or reboot; returns at once."""
        self._become(instance_id, Condition.UP if reboot else Condition.OFF)

    def cut_power(self, instance_id: str) -> None:
        """End all of its processes now; its files stay."""
        self._become(instance_id, Condition.OFF)

    def remove(self, instance_id: str) -> None:
        """End it and remove all that it was."""
        time.sleep(MOMENT_S)
        self._conditions.pop(instance_id, None)

    def condition(self, instance_id: str) -> Condition:
        """Return what it is doing."""
        condition, since = self._conditions.get(instance_id, (Condition.ABSENT, 0.0))
        return condition if time.monotonic() >= since else Condition.STARTING

    def complaint(self, instance_id: str) -> str:
        """Return why it is broken, in a line."""
        lines = self.console(instance_id)[-2000:].decode(errors="replace").splitlines()
        return lines[-1] if lines else "the host ended before it answered"

    def console(self, instance_id: str) -> bytes:
        """Return what it wrote to its console since it was made."""
        with suppress(FileNotFoundError):
            return (self.folder(instance_id) / "console.log").read_bytes()
        return b""

    def apply_rules(self, instance_id: str, ruleset: str) -> None:
        """Put its security groups in force (nftables)."""

    def suffer(self, instance_id: str, effects: frozenset[str]) -> bool:
        """Let it have these faults of node_faults.py, and heal others; false while it has not booted."""
        return True

    def announce(self, names: dict[str, str]) -> None:
        """Tell every host the names of all: address to name."""

    def _number(self, instance_id: str, name: str) -> int | None:
        """Return the number in one of its files, None where there is none."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.folder(instance_id) / name).read_text())
        return None

    def _become(self, instance_id: str, condition: Condition) -> None:
        self._conditions[instance_id] = (condition, time.monotonic() + MOMENT_S)
