"""Ends all processes of a host that has neither a cgroup nor a namespace: they carry its mark.

A host's first process is started with AWSDDP_HOST in its environment, and all that it starts inherits it.
The daemon imports this; the host itself runs it as a file, with the system's python3, when its power goes:

    python3 ending.py MARK
"""

import os
import signal
import sys
import time
from pathlib import Path

NAME = b"AWSDDP_HOST="


def marked(mark: str) -> "dict[int, str]":
    """Returns the pids of the processes whose mark begins so, with the whole mark; never this one's."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        own = [entry[len(NAME) :].decode() for entry in environ if entry.startswith(NAME + mark.encode())]
        if own and int(process.name) != os.getpid():
            found[int(process.name)] = own[0]
    return found


def end(mark: str, *, grace_s: float = 0.0, deadline_s: float = 10.0) -> bool:
    """Ends what carries the mark: TERM, after `grace_s` KILL; false if something is left at the deadline."""
    began = time.monotonic()
    told = set()
    while left := marked(mark):
        waited = time.monotonic() - began
        if waited > deadline_s + grace_s:
            return False
        for pid in left:
            kill = signal.SIGKILL if waited >= grace_s else signal.SIGTERM
            if (pid, kill) not in told:
                told.add((pid, kill))
                try:
                    os.kill(pid, kill)
                except OSError:
                    continue
        time.sleep(0.02)
    return True


if __name__ == "__main__":
    end(sys.argv[1], grace_s=2.0)
