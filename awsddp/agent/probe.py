"""What this node is like, and how it reaches the other nodes: for `doctor`, and before a job begins.

`probe` opens ports, `dial` connects to those of the other nodes. They stay open until another request comes,
so that a launch finds them free.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.agent.diagnosis.evidence import kernel_log, output
from awsddp.agent.job_folder import counters
from awsddp.agent.messages import Dial, Probe, Told

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTS: list[socket.socket] = []
_COMMAND_SECONDS = 15
_MOST_XIDS = 20
_CGROUPS = Path("/sys/fs/cgroup")
_XID = re.compile(r"NVRM: Xid \(PCI:[0-9A-Fa-f:.]+\): (\d+)")
_LINK = re.compile(r"^\s+Link \d+: <inactive>", re.MULTILINE)
# What makes a GPU unfit: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_BAD = {
    "remapped_row_failure": ("Yes", "row remapping failed"),
    "remapped_row_pending": ("Yes", "row remapping is pending: reboot"),
    "pending_retirement": ("Yes", "page retirement is pending: reboot"),
    "reset_required": ("Yes", "needs a reset"),
    "hw_slowdown": ("Active", "its clocks are held down (hw_slowdown)"),
    "hw_thermal_slowdown": ("Active", "its clocks are held down (hw_thermal_slowdown)"),
    "hw_power_brake_slowdown": ("Active", "its clocks are held down (hw_power_brake_slowdown)"),
    "sw_thermal_slowdown": ("Active", "its clocks are held down (sw_thermal_slowdown)"),
}
_REASON = re.compile("clocks_(event|throttle)_reason_")  # older drivers say throttle


def probe(request: Probe) -> Told:
    """Return what the node has; it listens at `address` from now on.

    The ports are those of the request, where they are free, and one more.
    """
    close()
    for port in (*request.ports, 0):
        try:
            PORTS.append(socket.create_server((request.address, port), backlog=1024))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    disk = os.statvfs(str(Path.home()))
    memory_free, memory_size = _memory()
    found = Told(
        ports=[sock.getsockname()[1] for sock in PORTS],
        gpus=_gpus(),
        disk_free=disk.f_bavail * disk.f_frsize,
        memory_free=memory_free,
        memory_size=memory_size,
        cpus=_cpus(),
        time=time.time(),
    )
    if request.thorough:
        _look_closer(found)
    return found


def close() -> None:
    """Close the ports."""
    while PORTS:
        PORTS.pop().close()


def dial(request: Dial) -> dict[str, list[tuple[int, int, str]]]:
    """Connect to each of `peers`, [node, address, port], all at once; return [node, port, why] for each.

    `why` is "" where a connection was made within `seconds`.
    """

    def connect(node: int, address: str, port: int) -> tuple[int, int, str]:
        try:
            socket.create_connection((address, port), timeout=request.seconds).close()
        except OSError as error:
            return node, port, error.strerror or f"no answer within {request.seconds:g} s"
        return node, port, ""

    with ThreadPoolExecutor(max_workers=len(request.peers) or 1) as pool:
        return {"dials": sorted(pool.map(lambda peer: connect(*peer), request.peers))}


def _look_closer(found: Told) -> None:
    """Add what takes some seconds with GPUs."""
    smi = output(["nvidia-smi", "-q", "-x"], seconds=_COMMAND_SECONDS)
    links = output(["nvidia-smi", "nvlink", "--status"], seconds=_COMMAND_SECONDS) if smi else ""
    kernel = kernel_log(0, seconds=_COMMAND_SECONDS) if smi else ""
    more = Told(
        kernel=os.uname().release,
        smi=gpus(smi) if smi else [],
        links_down=len(_LINK.findall(links or "")),
        xids=[*map(int, _XID.findall(kernel))][-_MOST_XIDS:],
    )
    found.take(more)


def _gpus() -> int | None:
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else None


def _memory() -> tuple[int, int]:
    """Return the bytes that a new process can have, and all that the node has, by its cgroups' limits."""
    known = counters(Path("/proc/meminfo"))
    free, size = known["MemAvailable"] * 1024, known["MemTotal"] * 1024
    versions = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, limit, used in _limits("memory", *versions):
        kept = counters(folder / "memory.stat").get("inactive_file", 0)
        free, size = min(free, max(0, limit - used + kept)), min(size, limit)
    return free, size


def _cpus() -> float:
    """Return how many CPUs the node's processes get, by its cgroups' limits."""
    count = float(os.cpu_count() or 1)
    for _, quota, period in _limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        count = min(count, quota / period) if quota > 0 else count
    return round(count, 2)


def _limits(controller: str, *versions: tuple[str, ...]) -> Iterator[tuple[Path, int, int]]:
    """Yield each cgroup of this process with a limit, and the two numbers in its files of either version."""
    for folder in _folders(controller):
        for names in versions:
            try:
                words = [word for name in names for word in (folder / name).read_text("ascii").split()]
                first, second = map(int, words)
            except (OSError, ValueError):  # of the other version, or "max"
                continue
            yield folder, first, second


def _folders(controller: str) -> list[Path]:
    """Return the cgroups that this process is in, of version 2, or of this controller of version 1."""
    found = []
    for line in Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = _CGROUPS / names if names else _CGROUPS
        found += [top / part.lstrip("/") for part in (path, *map(str, Path(path).parents))]
    return found


def gpus(said: str) -> list[Told]:
    """Return the GPUs in what `nvidia-smi -q -x` printed, [] where it cannot be read."""
    try:
        log = ET.fromstring(said)
    except ET.ParseError:
        return []
    return [_gpu(one) for one in log.findall("gpu")]


def _gpu(one: ET.Element) -> Told:
    """Return a GPU with its uncorrectable ECC errors since the driver was loaded, and its faults in words."""
    texts = {_REASON.sub("", part.tag): (part.text or "").strip() for part in one.iter()}
    counts = [part for part in one.iterfind("ecc_errors/volatile//*") if "uncorrectable" in part.tag]
    return Told(
        name=one.findtext("product_name", ""),
        memory_mib=_first(one.findtext("fb_memory_usage/total", "")),
        errors=sum(_first(part.text or "") for part in counts),
        faults=[words for tag, (bad, words) in _BAD.items() if texts.get(tag) == bad],
    )


def _first(text: str) -> int:
    word = (text.split() or [""])[0]
    return int(word) if word.isdigit() else 0
