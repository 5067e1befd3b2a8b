"""What this node is like, and how it reaches the other nodes: for `doctor`, and before a job begins.

`probe` opens ports, `dial` connects to those of the other nodes, `send` and `receive` measure one connection.
The ports stay open until another request comes, so that a launch finds them free.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import select
import socket
import time
from pathlib import Path
from typing import Any

PORTS: list[socket.socket] = []
_CHUNK = bytes(256 << 10)
_CPU_SECONDS = 0.25
_COMMAND_SECONDS = 15
_MOST_XIDS = 20
_CGROUPS = Path("/sys/fs/cgroup")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")
_LINK = re.compile(r"^\s+Link \d+: <inactive>", re.MULTILINE)


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the node has; `ports` are those that it listens on at `address` from now on.

    They are `ports` of the request, where they are free, and one more. Bytes, Unix time; `gpus` counts what
    the driver sees (None: no driver). With `thorough` more takes a second, with GPUs some seconds.
    """
    close()
    for port in (*request["ports"], 0):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((request["address"], port))
            sock.listen(1024)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        PORTS.append(sock)
    disk = os.statvfs(str(Path.home()))
    found = {
        "ports": [sock.getsockname()[1] for sock in PORTS],
        "gpus": _gpus(),
        "disk_free": disk.f_bavail * disk.f_frsize,
        "memory_free": _memory()[0],
        "memory_size": _memory()[1],
        "cpus": _cpus(),
        "time": time.time(),
    }
    return {**found, **_thorough()} if request["thorough"] else found


def close() -> None:
    """Close the ports."""
    while PORTS:
        PORTS.pop().close()


def dial(request: dict[str, Any]) -> dict[str, Any]:
    """Connect to each of `peers`, [node, address, port], all at once; return [node, port, why] for each.

    `why` is "" where a connection was made within `seconds`.
    """
    poll = select.poll()
    pending: dict[int, tuple[socket.socket, int, int]] = {}
    found = []
    for node, address, port in request["peers"]:
        sock = socket.socket()
        sock.setblocking(False)
        code = sock.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            pending[sock.fileno()] = (sock, node, port)
            poll.register(sock, select.POLLOUT)
        else:
            found.append([node, port, os.strerror(code) if code else ""])
            sock.close()
    end = time.monotonic() + request["seconds"]
    while pending and (left := end - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            sock, node, port = pending.pop(descriptor)
            poll.unregister(descriptor)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            found.append([node, port, os.strerror(code) if code else ""])
            sock.close()
    for sock, node, port in pending.values():
        found.append([node, port, f"no answer within {request['seconds']:g} s"])
        sock.close()
    return {"dials": sorted(found)}


def send(request: dict[str, Any]) -> dict[str, Any]:
    """Send zeros to `port` of `address` for `seconds`, over one connection; return how many `bytes`."""
    sent, end = 0, time.monotonic() + request["seconds"]
    try:
        with socket.create_connection((request["address"], request["port"]), timeout=2.0) as sock:
            while (left := end - time.monotonic()) > 0:
                sock.settimeout(left)
                sent += sock.send(_CHUNK)
    except OSError:
        pass  # what came through counts
    return {"bytes": sent}


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Take one connection on the last port and read it to its end; return `bytes`, and `seconds` it took."""
    listener, received, began = PORTS[-1], 0, 0.0
    end = time.monotonic() + request["seconds"] + 2.0
    room = bytearray(1 << 20)
    last = began
    listener.settimeout(max(0.01, end - time.monotonic()))
    try:
        sock = _last(listener)
        with sock:
            began = last = time.monotonic()
            while (left := end - time.monotonic()) > 0:
                sock.settimeout(left)
                count = sock.recv_into(room)
                if not count:
                    break
                received, last = received + count, time.monotonic()
    except OSError:
        pass
    return {"bytes": received, "seconds": round(last - began, 6)}


def _last(listener: socket.socket) -> socket.socket:
    """Return the first connection that says something: those of `dial` were closed before they were taken."""
    while True:
        sock, _ = listener.accept()
        sock.settimeout(listener.gettimeout())
        if sock.recv(1, socket.MSG_PEEK):
            return sock
        sock.close()


def text(request: dict[str, Any]) -> dict[str, Any]:
    """Return `count` texts of a million characters: how fast they come is what the client measures."""
    return {"texts": ["0" * 1_000_000] * request["count"]}


def _thorough() -> dict[str, Any]:
    from awsddp.jobs.supervisor.diagnose import kernel_log, output
    from awsddp.jobs.supervisor.smi import gpus

    smi = output(["nvidia-smi", "-q", "-x"], seconds=_COMMAND_SECONDS)
    links = output(["nvidia-smi", "nvlink", "--status"], seconds=_COMMAND_SECONDS) if smi else ""
    kernel = kernel_log(0, seconds=_COMMAND_SECONDS) if smi else ""
    return {
        "kernel": os.uname().release,
        "smi": gpus(smi) if smi else [],
        "links_down": len(_LINK.findall(links or "")),
        "xids": [[bus, int(number)] for bus, number in _XID.findall(kernel)][-_MOST_XIDS:],
        "speed": _speed(),
    }


def _gpus() -> int | None:
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else None


def _speed() -> float:
    """Return how many MB/s one process hashes: wall time, so that a slowed or busy CPU shows."""
    block, count, began = bytes(256 << 10), 0, time.monotonic()
    while time.monotonic() - began < _CPU_SECONDS:
        hashlib.sha256(block).digest()
        count += 1
    return round(count * len(block) / 1e6 / (time.monotonic() - began), 3)


def _memory() -> tuple[int, int]:
    """Return the bytes that a new process can have, and all that the node has, by its cgroups' limits."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free, size = known["MemAvailable"], known["MemTotal"]
    for folder in _folders("memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            kept = _statistics(folder).get("inactive_file", 0)
            free, size = min(free, max(0, limit - used + kept)), min(size, limit)
    return free, size


def _cpus() -> float:
    """Return how many CPUs the node's processes get, by its cgroups' limits."""
    count = float(os.cpu_count() or 1)
    for folder in _folders("cpu"):
        quota = _number(folder / "cpu.max", folder / "cpu.cfs_quota_us")
        if quota is not None and quota > 0:
            period = _number(folder / "cpu.cfs_period_us")
            if period is None:
                period = int((folder / "cpu.max").read_text(encoding="ascii").split()[1])
            count = min(count, quota / period)
    return round(count, 2)


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


def _number(*paths: Path) -> int | None:
    """Return the number in the first file that has one; "max" is none."""
    for path in paths:
        try:
            return int(path.read_text(encoding="ascii").split()[0])
        except (OSError, ValueError):
            continue
    return None


def _statistics(folder: Path) -> dict[str, int]:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in map(str.split, lines)}
