"""A cgroup for each node, under one for the local cloud: limits, and a sure way to find and end processes."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from awsddp.local.place import Place

ROOT = Path("/sys/fs/cgroup")
CPU = ROOT / "cpu"
DAEMON = "daemon"
MAX_PROCESSES = 8192
MEMORY_SHARE = 0.9
SLOW_CPU_US = (5_000, 100_000)
"""What the processes of a slow node get together: so many microseconds of CPU time in each period."""
TIGHT_BYTES = 96 << 20
"""How much a node that is short of memory may take beside what it has."""


def hierarchies() -> list[Path]:
    """The mounted trees that systemd and the limits need: one with cgroup v2, several with v1 or both."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [ROOT / name for name in ("unified", "systemd", "memory", "pids") if (ROOT / name).is_dir()]


def enter(place: Place) -> None:
    """Moves the daemon into a cgroup of its own and ends what a killed one left there: commands half done."""
    end(place, DAEMON)
    for folder in _folders(place, DAEMON):
        (folder / "cgroup.procs").write_text("0")


def leave(place: Place) -> None:
    """Moves the daemon, where it entered, back to the top, so that it can remove the rest."""
    for tree in hierarchies():
        if (tree / place.cgroup / DAEMON).exists():
            (tree / "cgroup.procs").write_text("0")


def make(place: Place, instance_id: str) -> list[Path]:
    """Makes a node's cgroups with their limits and returns them.

    All nodes together may take most of what the machine can spare now, so that it is never the machine that
    runs out; one alone may take all of that.
    """
    made = _folders(place, instance_id)
    memory = str(_room_bytes(place))
    for folder in made:
        for limited in (folder.parent, folder):
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (limited / name).exists():
                    (limited / name).write_text(memory)
        if (folder / "pids.max").exists():
            (folder / "pids.max").write_text(str(MAX_PROCESSES))
    return made


def _room_bytes(place: Place) -> int:
    """What this local cloud may have: most of what is free on the machine, and what it has already."""
    room = spare_bytes()
    for tree in hierarchies():
        with suppress(OSError):
            told = (tree / place.cgroup / "memory.stat").read_text()
            room += sum(int(own) for own in re.findall(r"^(?:anon|total_rss) (\d+)$", told, re.MULTILINE))
    return room


def spare_bytes() -> int:
    """Most of the memory that is free on this machine."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(int(found[1]) * 1024 * MEMORY_SHARE) if found else 0


def _folders(place: Place, name: str) -> list[Path]:
    made = []
    for tree in hierarchies():
        folder = tree / place.cgroup / name
        folder.mkdir(parents=True, exist_ok=True)
        if tree == ROOT:
            for parent in (ROOT, folder.parent):
                with suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+memory +pids")
        made.append(folder)
    return made


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
    """Lets nothing in a node's cgroups run, or all of it. Signals wait; SIGKILL ends it all the same."""
    for tree in hierarchies():
        if (switch := tree / place.cgroup / instance_id / "cgroup.freeze").exists():
            switch.write_text(str(int(frozen)))


def slow_down(place: Place, instance_id: str, *, slow: bool) -> None:
    """Limits the CPU time of all processes in a node's cgroups, or takes the limit away.

    With cgroup v1 the node has a cgroup for this only while it is slow: it would share the machine's CPUs by
    cgroup, not by process, from then on.
    """
    quota, period = SLOW_CPU_US
    for tree in hierarchies():
        switch = tree / place.cgroup / instance_id / "cpu.max"
        if slow and (tree / "cgroup.controllers").exists():
            for parent in (tree, tree / place.cgroup):
                with suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+cpu")
        if switch.exists():
            switch.write_text(f"{quota if slow else 'max'} {period}")
            return
    folder = CPU / place.cgroup / instance_id
    if slow:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
    if folder.exists():
        _move(place, instance_id, folder if slow else CPU)
    if not slow:
        _remove(folder, time.monotonic() + 1)


def _move(place: Place, instance_id: str, to: Path) -> None:
    """Moves all processes of a node to a cgroup; those that start meanwhile, too."""
    moved: set[int] = set()
    while left := processes(place, instance_id) - moved:
        for pid in left:
            with suppress(OSError):
                (to / "cgroup.procs").write_text(str(pid))
        moved |= left


def squeeze(place: Place, instance_id: str, *, tight: bool) -> None:
    """Limits a node's memory to little more than it has, or as it was."""
    for tree in hierarchies():
        folder = tree / place.cgroup / instance_id
        for name in ("memory.max", "memory.limit_in_bytes"):
            if not (folder / name).exists():
                continue
            usual = (folder.parent / name).read_text()
            if tight:
                told = (folder / "memory.stat").read_text()
                own = sum(int(one) for one in re.findall(r"^(?:anon|rss) (\d+)$", told, re.MULTILINE))
                (folder / name).write_text(str(own + TIGHT_BYTES))
            elif (folder / name).read_text() != usual:
                (folder / name).write_text(usual)


def end(place: Place, instance_id: str = "", *, deadline_s: float = 10) -> bool:
    """Kills what is in the cgroups and removes them; false if something was left at the deadline."""
    until = time.monotonic() + deadline_s
    while pids := processes(place, instance_id):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    removed = [_remove(tree / place.cgroup / instance_id, until) for tree in (*hierarchies(), CPU)]
    return all(removed)


def _remove(folder: Path, until: float) -> bool:
    """Removes a tree of cgroups; a cgroup stays busy for a moment after its last process is gone."""
    for name, _, _ in os.walk(folder, topdown=False):
        path = Path(name)
        while path.is_dir():
            try:
                path.rmdir()
            except OSError:
                if time.monotonic() > until:
                    return False
                time.sleep(0.01)
    return True
