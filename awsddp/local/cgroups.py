"""Set limits on the nodes' cgroups, and find and kill the processes in them.

The nodes' cgroups are in the local cloud's own cgroup.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from awsddp.local.machine import CloudPaths

ROOT = Path("/sys/fs/cgroup")
CPU = ROOT / "cpu"
MEMORY = ("memory.max", "memory.limit_in_bytes")
"""The files that hold the memory limit in cgroup v2 and v1."""
MAX_PROCESSES = 8192
MEMORY_SHARE = 0.9
SLOW_CPU_US = (5_000, 100_000)
"""The CPU quota that all processes on a slow node share, and the quota's period, in microseconds."""
TIGHT_BYTES = 96 << 20
"""The memory that a node can use in addition to its current use if a fault makes it short of memory."""
_DIVIDE_LOCK = threading.Lock()
"""The lock that is held while the memory is divided. Without the lock, nodes that boot or end at the same
time would get unequal shares."""


def list_hierarchies() -> list[Path]:
    """Return the mounted cgroup trees that systemd and the limits need: one in cgroup v2, several in v1."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [ROOT / name for name in ("unified", "systemd", "memory", "pids") if (ROOT / name).is_dir()]


def _find_files(paths: CloudPaths, name: str, *file_names: str) -> list[Path]:
    """Return the existing files with these names in the cgroups called `name`."""
    folders = [tree / paths.cgroup / name for tree in list_hierarchies()]
    return [folder / file for folder in folders for file in file_names if (folder / file).exists()]


def create(paths: CloudPaths, instance_id: str) -> list[Path]:
    """Create a node's cgroups, set their limits, and return the cgroups' folders.

    All nodes together can use most of the machine's free memory in addition to what they already use, so that
    the machine itself never runs out of memory. Each node gets an equal share, because the kernel would
    otherwise kill one node's processes when another node uses too much memory.
    """
    created = []
    for tree in list_hierarchies():
        folder = tree / paths.cgroup / instance_id
        folder.mkdir(parents=True, exist_ok=True)
        if tree == ROOT:
            for parent in (ROOT, folder.parent):
                with suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+memory +pids")
        created.append(folder)
    with _DIVIDE_LOCK:
        limit = spare_bytes() + sum(_used_bytes(tree / paths.cgroup) for tree in list_hierarchies())
        for file in _find_files(paths, "", *MEMORY):
            file.write_text(str(limit))
            _divide_memory(file)
    for file in _find_files(paths, instance_id, "pids.max"):
        file.write_text(str(MAX_PROCESSES))
    return created


def _divide_memory(limit_file: Path) -> None:
    """Set each node's memory limit to its share of the limit in this file."""
    for node in _list_nodes(limit_file.parent):
        # A node that is ending may not have this file any more, and v1 refuses a limit below the memory in
        # use.
        with suppress(OSError):
            limit = max(_node_share(limit_file), _used_bytes(node) + TIGHT_BYTES)
            (node / limit_file.name).write_text(str(limit))


def _list_nodes(cloud: Path) -> list[Path]:
    """Return the cgroups of all nodes in one tree."""
    return [folder for folder in cloud.iterdir() if folder.is_dir()]


def _node_share(limit_file: Path) -> int:
    """Return each node's share, in bytes, of the limit in this file."""
    return int(limit_file.read_text()) // max(1, len(_list_nodes(limit_file.parent)))


def _used_bytes(folder: Path) -> int:
    """Return how many bytes a cgroup's processes use, or 0 in a tree that does not count memory."""
    with suppress(OSError):
        stat = (folder / "memory.stat").read_text()
        return sum(map(int, re.findall(r"^(?:anon|total_rss) (\d+)$", stat, re.MULTILINE)))
    return 0


def spare_bytes() -> int:
    """Return how many bytes of this machine's free memory the local cloud can use."""
    match = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(int(match[1]) * 1024 * MEMORY_SHARE) if match else 0


def list_processes(paths: CloudPaths, instance_id: str = "") -> set[int]:
    """Return the pids in a node's cgroups, or by default in the whole local cloud's cgroups."""
    pids: set[int] = set()
    # Every process is in every tree, so one tree is enough.
    for folder, _, files in os.walk(list_hierarchies()[0] / paths.cgroup / instance_id):
        if "cgroup.procs" in files:
            with suppress(OSError):
                pids.update(int(line) for line in Path(folder, "cgroup.procs").read_text().split())
    return pids


def can_freeze() -> bool:
    """Return True if this machine has cgroup v2, whose freezer does not block SIGKILL."""
    return any((tree / "cgroup.controllers").exists() for tree in list_hierarchies())


def set_frozen(paths: CloudPaths, instance_id: str, *, frozen: bool) -> None:
    """Freeze or thaw all of a node's processes. Signals except SIGKILL wait until the node is thawed."""
    for file in _find_files(paths, instance_id, "cgroup.freeze"):
        file.write_text(str(int(frozen)))


def limit_cpu(paths: CloudPaths, instance_id: str, *, slow: bool) -> None:
    """Limit the CPU time of a node's processes, or remove the limit.

    With cgroup v1, the node's CPU cgroup is created only when the limit is first set, because v1 gives each
    cgroup an equal share of the CPU time, however many processes the cgroup has.
    """
    quota, period = SLOW_CPU_US
    for parent in [folder for tree in list_hierarchies() for folder in (tree, tree / paths.cgroup) if slow]:
        with suppress(OSError):  # cgroup v1 has no such file
            (parent / "cgroup.subtree_control").write_text("+cpu")
    for file in _find_files(paths, instance_id, "cpu.max"):
        file.write_text(f"{quota if slow else 'max'} {period}")
        return
    folder = CPU / paths.cgroup / instance_id
    if slow:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_period_us").write_text(str(period))
    if folder.exists():
        (folder / "cpu.cfs_quota_us").write_text(str(quota if slow else -1))
    moved: set[int] = set()
    # Repeat until no process is left outside the CPU cgroup, because processes may start during the loop.
    while slow and (remaining := list_processes(paths, instance_id) - moved):
        for pid in remaining:
            with suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))
        moved |= remaining


def limit_memory(paths: CloudPaths, instance_id: str, *, tight: bool) -> None:
    """Limit a node's memory to a little more than the node uses (`tight`), or to the node's share."""
    for file in _find_files(paths, instance_id, *MEMORY):
        share = _node_share(file.parent.parent / file.name)
        file.write_text(str(_used_bytes(file.parent) + TIGHT_BYTES if tight else share))


def remove(paths: CloudPaths, instance_id: str = "", *, deadline_s: float = 10) -> bool:
    """Kill the processes in a node's cgroups (by default, in all nodes' cgroups), and remove the cgroups.

    Return False if any cgroup is left at the deadline. A cgroup stays busy for a moment after its last
    process ends. A removed node's memory is divided among the others.
    """
    deadline = time.monotonic() + deadline_s
    trees = [tree / paths.cgroup / instance_id for tree in (*list_hierarchies(), CPU)]
    while folders := [folder for tree in trees for folder, _, _ in os.walk(tree, topdown=False)]:
        if time.monotonic() > deadline:
            return False
        for pid in list_processes(paths, instance_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in folders:
            with suppress(OSError):
                Path(folder).rmdir()
        time.sleep(0.01)
    with _DIVIDE_LOCK:
        for file in _find_files(paths, "", *MEMORY):
            _divide_memory(file)
    return True
