"""Kill all processes of a host that has neither a cgroup nor a namespace.

A process belongs to the host if the host's mark is in the process's environment (AWSDDP_HOST) or in a file
name among its arguments. sshd is identified by such a file name, because sshd overwrites its environment. All
descendants of these processes belong to the host, too.

The daemon imports this file. A host that powers off runs the file with the system's python3:

    python3 bin/ending.py MARK
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def find_processes(mark: str) -> "dict[int, str]":
    """Return {pid: start time} for all processes, except this one, on hosts whose mark begins with `mark`."""
    processes = _list_processes()
    pids = {pid for pid in processes if pid != os.getpid() and has_mark(pid, mark)}
    while more := {pid for pid, (parent, _) in processes.items() if parent in pids} - pids - {os.getpid()}:
        pids |= more
    return {pid: processes[pid][1] for pid in pids}


def _list_processes() -> "dict[int, tuple[int, str]]":
    """Return each process's parent and start time in clock ticks."""
    processes = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            processes[int(process.name)] = int(fields[1]), fields[19]
    return processes


def has_mark(pid: int, mark: str) -> bool:
    """Return True if the process itself, rather than an ancestor, has a mark that begins with `mark`."""
    process = Path("/proc", str(pid))
    try:
        if f"/{mark}".encode() in (process / "cmdline").read_bytes():
            return True
        environ = (process / "environ").read_bytes().split(b"\0")
        return any(entry.startswith(f"AWSDDP_HOST={mark}".encode()) for entry in environ)
    except OSError:  # the process has ended, or is another user's
        return False


def kill_processes(mark: str, *, grace_s: float = 0.0, deadline_s: float = 10.0) -> bool:
    """Send the hosts' processes SIGTERM, and SIGKILL after `grace_s`; return False if any are left."""
    start = time.monotonic()
    targets: dict[int, str] = {}
    while True:
        matches = find_processes(mark)
        new = matches.keys() - targets.keys()
        targets.update(matches)
        alive = _list_processes()
        pids = [pid for pid, began in targets.items() if pid in alive and alive[pid][1] == began]
        waited_s = time.monotonic() - start
        if not pids or waited_s > deadline_s + grace_s:
            return not pids
        for pid in pids if waited_s >= grace_s else new:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL if waited_s >= grace_s else signal.SIGTERM)
        time.sleep(0.02)


if __name__ == "__main__":
    kill_processes(sys.argv[1], grace_s=2.0)
