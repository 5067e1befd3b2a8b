"""Ends all processes of a host that has neither a cgroup nor a namespace.

They are: what carries the host's mark in its environment (AWSDDP_HOST) or in a file name among its arguments
(its sshd, which overwrites its environment), and all their descendants. The daemon imports this; the host
itself runs it as a file, with the system's python3, when its power goes:

    python3 ending.py MARK
"""

import os
import signal
import sys
import time
from pathlib import Path


def marked(mark: str) -> "dict[int, str]":
    """Returns the processes of all hosts whose mark begins so, with when each began; never this one."""
    parents, began = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(process.name)
        parents[pid], began[pid] = int(fields[1]), fields[19]
    found = {pid for pid in parents if pid != os.getpid() and carries(pid, mark)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found - {os.getpid()}:
        found |= more
    return {pid: began[pid] for pid in found}


def carries(pid: int, mark: str) -> bool:
    """Tells whether a process is itself of such a host."""
    process = Path("/proc", str(pid))
    try:
        if f"/{mark}".encode() in (process / "cmdline").read_bytes():
            return True
        environ = (process / "environ").read_bytes().split(b"\0")
        return any(entry.startswith(f"AWSDDP_HOST={mark}".encode()) for entry in environ)
    except OSError:  # gone, or another user's
        return False


def end(mark: str, *, grace_s: float = 0.0, deadline_s: float = 10.0) -> bool:
    """Ends what carries the mark: TERM, after `grace_s` KILL; false if something is left at the deadline."""
    first = time.monotonic()
    known = {}
    told = set()
    while True:
        known.update(marked(mark))
        left = [pid for pid, began in known.items() if _lives(pid, began)]
        waited = time.monotonic() - first
        if not left or waited > deadline_s + grace_s:
            return not left
        for pid in left:
            kill = signal.SIGKILL if waited >= grace_s else signal.SIGTERM
            if (pid, kill) not in told:
                told.add((pid, kill))
                try:
                    os.kill(pid, kill)
                except OSError:
                    continue
        time.sleep(0.02)


def _lives(pid: int, began: str) -> bool:
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == began and fields[0] != "Z"


if __name__ == "__main__":
    end(sys.argv[1], grace_s=2.0)
