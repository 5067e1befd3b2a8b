"""A cgroup for each node, under one for the local cloud: limits, and a sure way to find and end processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from awsddp.local.machine import Place

ROOT = Path("/sys/fs/cgroup")
CPU = ROOT / "cpu"
MEMORY = ("memory.max", "memory.limit_in_bytes")
"""The limit of memory in cgroup v2 and v1."""
MAX_PROCESSES = 8192
MEMORY_SHARE = 0.9
SLOW_CPU_US = (5_000, 100_000)
"""What the processes of a slow node get together: so many microseconds of CPU time in each period."""
TIGHT_BYTES = 96 << 20
"""How much a node that is short of memory may take beside what it has."""
_SHARING = threading.Lock()
"""Held while the nodes get their shares: nodes that boot or end at once would leave unequal ones."""


def hierarchies() -> list[Path]:
    """The mounted trees that systemd and the limits need: one with cgroup v2, several with v1 or both."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [ROOT / name for name in ("unified", "systemd", "memory", "pids") if (ROOT / name).is_dir()]


def _switches(place: Place, name: str, *switches: str) -> list[Path]:
    """Return those of these files that the cgroups of this name have."""
    folders = [tree / place.cgroup / name for tree in hierarchies()]
    return [folder / switch for folder in folders for switch in switches if (folder / switch).exists()]


def make(place: Place, instance_id: str) -> list[Path]:
    """Make a node's cgroups with their limits and return them.

    All nodes together may take most of what the machine can spare now, and what they have already, so that it
    is never the machine that runs out; each may take an equal share of that, as otherwise the kernel ends
    what runs on one node for the memory that another one uses.
    """
    made = []
    for tree in hierarchies():
        folder = tree / place.cgroup / instance_id
        folder.mkdir(parents=True, exist_ok=True)
        if tree == ROOT:
            for parent in (ROOT, folder.parent):
                with suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+memory +pids")
        made.append(folder)
    with _SHARING:
        room = spare_bytes() + sum(_used_bytes(tree / place.cgroup) for tree in hierarchies())
        for switch in _switches(place, "", *MEMORY):
            switch.write_text(str(room))
            _share_out(switch)
    for switch in _switches(place, instance_id, "pids.max"):
        switch.write_text(str(MAX_PROCESSES))
    return made


def _share_out(switch: Path) -> None:
    """Give each node its share of the limit of all."""
    for node in _nodes(switch.parent):
        with suppress(OSError):  # v1: it has more, and nothing of it can be freed; or it is just ending
            (node / switch.name).write_text(str(max(_share(switch), _used_bytes(node) + TIGHT_BYTES)))


def _nodes(cloud: Path) -> list[Path]:
    """Return the cgroups of all nodes, in one tree."""
    return [folder for folder in cloud.iterdir() if folder.is_dir()]


def _share(switch: Path) -> int:
    """Return the memory of a node, by the limit of all."""
    return int(switch.read_text()) // max(1, len(_nodes(switch.parent)))


def _used_bytes(folder: Path) -> int:
    """Return the memory of a cgroup's processes; 0 in a tree that does not count it."""
    with suppress(OSError):
        shown = (folder / "memory.stat").read_text()
        return sum(int(own) for own in re.findall(r"^(?:anon|total_rss) (\d+)$", shown, re.MULTILINE))
    return 0


def spare_bytes() -> int:
    """Most of the memory that is free on this machine."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(int(found[1]) * 1024 * MEMORY_SHARE) if found else 0


def processes(place: Place, instance_id: str = "") -> set[int]:
    """The pids in a node's cgroups, or in those of the whole local cloud."""
    pids: set[int] = set()
    # Every process is in every tree, so one tells of all.
    for folder, _, files in os.walk(hierarchies()[0] / place.cgroup / instance_id):
        if "cgroup.procs" in files:
            with suppress(OSError):
                pids.update(int(line) for line in Path(folder, "cgroup.procs").read_text().split())
    return pids


def can_freeze() -> bool:
    """Whether this machine has cgroup v2, whose freezer lets a kill through."""
    return any((tree / "cgroup.controllers").exists() for tree in hierarchies())


def freeze(place: Place, instance_id: str, *, frozen: bool) -> None:
    """Let nothing in a node's cgroups run, or all of it. Signals wait; SIGKILL ends it all the same."""
    for switch in _switches(place, instance_id, "cgroup.freeze"):
        switch.write_text(str(int(frozen)))


def slow_down(place: Place, instance_id: str, *, slow: bool) -> None:
    """Limits the CPU time of all processes in a node's cgroups, or takes the limit away.

    With cgroup v1 the node has a cgroup for this only from then on: it shares the machine's CPUs by cgroup,
    not by process.
    """
    quota, period = SLOW_CPU_US
    for parent in [folder for tree in hierarchies() for folder in (tree, tree / place.cgroup) if slow]:
        with suppress(OSError):  # cgroup v1 has none
            (parent / "cgroup.subtree_control").write_text("+cpu")
    for switch in _switches(place, instance_id, "cpu.max"):
        switch.write_text(f"{quota if slow else 'max'} {period}")
        return
    folder = CPU / place.cgroup / instance_id
    if slow:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_period_us").write_text(str(period))
    if folder.exists():
        (folder / "cpu.cfs_quota_us").write_text(str(quota if slow else -1))
    moved: set[int] = set()
    while slow and (left := processes(place, instance_id) - moved):  # those that start meanwhile, too
        for pid in left:
            with suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))
        moved |= left


def squeeze(place: Place, instance_id: str, *, tight: bool) -> None:
    """Limit a node's memory to little more than it has, or to its share."""
    for switch in _switches(place, instance_id, *MEMORY):
        usual = _share(switch.parent.parent / switch.name)
        switch.write_text(str(_used_bytes(switch.parent) + TIGHT_BYTES if tight else usual))


def end(place: Place, instance_id: str = "", *, deadline_s: float = 10) -> bool:
    """Kills what is in the cgroups and removes them; false if something was left at the deadline.

    A cgroup stays busy for a moment after its last process is gone. What a node had goes to the others.
    """
    until = time.monotonic() + deadline_s
    trees = [tree / place.cgroup / instance_id for tree in (*hierarchies(), CPU)]
    while left := [folder for tree in trees for folder, _, _ in os.walk(tree, topdown=False)]:
        if time.monotonic() > until:
            return False
        for pid in processes(place, instance_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in left:
            with suppress(OSError):
                Path(folder).rmdir()
        time.sleep(0.01)
    with _SHARING:
        for switch in _switches(place, "", *MEMORY):
            _share_out(switch)
    return True
