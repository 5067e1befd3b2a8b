"""Check this node's hardware and its connections to other nodes, for `doctor` and before a launch.

`probe` opens ports, and `dial` connects to the ports of other nodes. The next request other than these two
closes the ports, so that a launch can use them.
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

from awsddp.agent.diagnosis.evidence import read_kernel_log, run_command
from awsddp.agent.job_folder import read_counters
from awsddp.agent.messages import Dial, Probe, Response
from awsddp.agent.shutdown import read_shutdown

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTS: list[socket.socket] = []
_COMMAND_SECONDS = 15
_MOST_XIDS = 20
_CGROUPS = Path("/sys/fs/cgroup")
_XID = re.compile(r"NVRM: Xid \(PCI:[0-9A-Fa-f:.]+\): (\d+)")
_LINK = re.compile(r"^\s+Link \d+: <inactive>", re.MULTILINE)
# GPU faults: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_BAD = {
    "remapped_row_failure": ("Yes", "row remapping failed"),
    "remapped_row_pending": ("Yes", "row remapping is pending: reboot"),
    "pending_retirement": ("Yes", "page retirement is pending: reboot"),
    "reset_required": ("Yes", "needs a reset"),
    "hw_slowdown": ("Active", "its clocks are throttled (hw_slowdown)"),
    "hw_thermal_slowdown": ("Active", "its clocks are throttled (hw_thermal_slowdown)"),
    "hw_power_brake_slowdown": ("Active", "its clocks are throttled (hw_power_brake_slowdown)"),
    "sw_thermal_slowdown": ("Active", "its clocks are throttled (sw_thermal_slowdown)"),
}
_REASON = re.compile("clocks_(event|throttle)_reason_")  # older drivers write "throttle"


def probe(request: Probe) -> Response:
    """Return the node's hardware and load. Listen at `address` on the free `ports` and one more port."""
    close()
    for port in (*request.ports, 0):
        try:
            PORTS.append(socket.create_server((request.address, port), backlog=1024))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    disk = os.statvfs(str(Path.home()))
    memory_free, memory_size = _memory()
    response = Response(
        ports=[sock.getsockname()[1] for sock in PORTS],
        gpus=_gpus(),
        disk_free=disk.f_bavail * disk.f_frsize,
        memory_free=memory_free,
        memory_size=memory_size,
        cpus=_cpus(),
        time=time.time(),
        shutdown=read_shutdown().reason[:100],
    )
    if request.thorough:
        _add_thorough_checks(response)
    return response


def close() -> None:
    """Close the ports."""
    while PORTS:
        PORTS.pop().close()


def dial(request: Dial) -> dict[str, list[tuple[int, int, str]]]:
    """Connect to all `peers` (node, address, port) in parallel, and return (node, port, why) for each peer.

    `why` is "" if the connection was established within `seconds`.
    """

    def connect(node: int, address: str, port: int) -> tuple[int, int, str]:
        try:
            socket.create_connection((address, port), timeout=request.seconds).close()
        except OSError as error:
            return node, port, error.strerror or f"no answer within {request.seconds:g} s"
        return node, port, ""

    with ThreadPoolExecutor(max_workers=len(request.peers) or 1) as pool:
        return {"dials": sorted(pool.map(lambda peer: connect(*peer), request.peers))}


def _add_thorough_checks(response: Response) -> None:
    """Add the checks that take some seconds on nodes with GPUs."""
    smi = run_command(["nvidia-smi", "-q", "-x"], seconds=_COMMAND_SECONDS)
    links = run_command(["nvidia-smi", "nvlink", "--status"], seconds=_COMMAND_SECONDS) if smi else ""
    kernel = read_kernel_log(0, seconds=_COMMAND_SECONDS) if smi else ""
    details = Response(
        kernel=os.uname().release,
        smi=parse_gpus(smi) if smi else [],
        links_down=len(_LINK.findall(links or "")),
        xids=[*map(int, _XID.findall(kernel))][-_MOST_XIDS:],
    )
    response.update(details)


def _gpus() -> int | None:
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else None


def _memory() -> tuple[int, int]:
    """Return the free and the total memory (bytes) that cgroup limits allow processes to use."""
    meminfo = read_counters(Path("/proc/meminfo"))
    free, size = meminfo["MemAvailable"] * 1024, meminfo["MemTotal"] * 1024
    versions = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, limit, used in _limits("memory", *versions):
        cache = read_counters(folder / "memory.stat").get("inactive_file", 0)
        free, size = min(free, max(0, limit - used + cache)), min(size, limit)
    return free, size


def _cpus() -> float:
    """Return the number of CPUs that cgroup limits allow processes to use."""
    count = float(os.cpu_count() or 1)
    for _, quota, period in _limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        count = min(count, quota / period) if quota > 0 else count
    return round(count, 2)


def _limits(controller: str, *versions: tuple[str, ...]) -> Iterator[tuple[Path, int, int]]:
    """For each cgroup of this process that has a limit, yield its folder and the two numbers in its files.

    `versions` has the names of these files in each version of cgroups.
    """
    for folder in _folders(controller):
        for names in versions:
            try:
                numbers = [text for name in names for text in (folder / name).read_text("ascii").split()]
                first, second = map(int, numbers)
            except (OSError, ValueError):  # the other version of cgroups, or the limit "max"
                continue
            yield folder, first, second


def _folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroups, or in version 1 only the folders of `controller`."""
    folders = []
    for line in Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = _CGROUPS / names if names else _CGROUPS
        folders += [top / part.lstrip("/") for part in (path, *map(str, Path(path).parents))]
    return folders


def parse_gpus(xml: str) -> list[Response]:
    """Return the GPUs that `nvidia-smi -q -x` lists, or [] if its output is not valid XML."""
    try:
        log = ET.fromstring(xml)
    except ET.ParseError:
        return []
    return [_gpu(element) for element in log.findall("gpu")]


def _gpu(element: ET.Element) -> Response:
    """Return a GPU's name, memory, faults as text, and number of uncorrectable ECC errors."""
    values = {_REASON.sub("", child.tag): (child.text or "").strip() for child in element.iter()}
    counts = [child for child in element.iterfind("ecc_errors/volatile//*") if "uncorrectable" in child.tag]
    return Response(
        name=element.findtext("product_name", ""),
        memory_mib=_parse_first_number(element.findtext("fb_memory_usage/total", "")),
        errors=sum(_parse_first_number(child.text or "") for child in counts),
        faults=[fault for tag, (bad, fault) in _BAD.items() if values.get(tag) == bad],
    )


def _parse_first_number(text: str) -> int:
    first = (text.split() or [""])[0]
    return int(first) if first.isdigit() else 0
