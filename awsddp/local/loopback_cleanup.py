"""Ends all processes of a host that has neither a cgroup nor a namespace.

They are: what carries the host's mark in its environment (AWSDDP_HOST) or in a file name among its arguments
(its sshd, which overwrites its environment), and all their descendants. The daemon imports this; the host
itself runs it as a file, with the system's python3, when its power goes:

    python3 bin/ending.py MARK
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def marked(mark: str) -> "dict[int, str]":
    """Returns the processes of all hosts whose mark begins so, with when each began; never this one."""
    living = _living()
    found = {pid for pid in living if pid != os.getpid() and carries(pid, mark)}
    while more := {pid for pid, (parent, _) in living.items() if parent in found} - found - {os.getpid()}:
        found |= more
    return {pid: living[pid][1] for pid in found}


def _living() -> "dict[int, tuple[int, str]]":
    """Returns the parent of each process, and when it began."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(process.name)] = int(fields[1]), fields[19]
    return found


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
    known: dict[int, str] = {}
    while True:
        found = marked(mark)
        new = found.keys() - known.keys()
        known.update(found)
        living = _living()
        left = [pid for pid, began in known.items() if pid in living and living[pid][1] == began]
        waited = time.monotonic() - first
        if not left or waited > deadline_s + grace_s:
            return not left
        for pid in left if waited >= grace_s else new:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL if waited >= grace_s else signal.SIGTERM)
        time.sleep(0.02)


if __name__ == "__main__":
    end(sys.argv[1], grace_s=2.0)
