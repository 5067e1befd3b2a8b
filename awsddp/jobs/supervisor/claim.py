"""The right to start a job: one client at a time, on whatever machine it is."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

from awsddp.jobs.supervisor.folder import CommandError

_POLL_SECONDS = 0.05


class Claim:
    """A lock of this node, held by this process, which lives as long as its client's connection."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, owner: str, *, wait_s: float, lease_s: int = 0) -> float:
        """Wait for the lock and hold it; with `lease_s` no longer than that, as a client can vanish.

        Return how long nobody has held it (s), 0.0 where it is held already. Raises CommandError that names
        the owner after `wait_s`.
        """
        if self._descriptor is not None:
            return 0.0
        path = Path.home() / ".awsddp" / "launch.lock"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(str(path), os.O_CREAT | os.O_RDWR, 0o600)
        end = time.monotonic() + wait_s
        while not _grab(descriptor):
            if time.monotonic() > end:
                why = "held by " + os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
                os.close(descriptor)
                raise CommandError("another client is starting a job on this node", why, kind="busy")
            time.sleep(_POLL_SECONDS)
        info = os.fstat(descriptor)
        free_s = time.time() - (info.st_mtime if info.st_size else 0.0)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
        self._descriptor = descriptor
        signal.signal(signal.SIGALRM, lambda *_: self.release())
        signal.alarm(lease_s)
        return free_s

    def release(self) -> None:
        """Give the lock back. A child that has inherited it holds it no longer, either."""
        if self._descriptor is not None:
            signal.alarm(0)
            os.utime(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


CLAIM = Claim()


def claim(request: dict[str, Any]) -> dict[str, Any]:
    """Take the lock for the client at the other end, until it launches or its connection ends.

    `free_s` is how long no other client has held it.
    """
    free_s = CLAIM.take(request["owner"], wait_s=request["wait_s"], lease_s=request["lease_s"])
    return {"claimed": True, "free_s": free_s}


def _grab(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
