"""The shutdown of a node while jobs run: the reason that the node recorded, and the time that is left."""

from __future__ import annotations

import calendar
import time
from pathlib import Path
from typing import NamedTuple

from awsddp.agent.messages import MAX_SHUTDOWN_GRACE

_FILE = Path("/run/awsddp/shutdown")
_NOTICE_SECONDS = 120.0
_END_SECONDS = 5.0  # the agents need this time after the ranks' end to record how the job ended
_MAX_UPLOAD_SECONDS = 30.0


class Shutdown(NamedTuple):
    """Why a node shuts down.

    `reason` is "" if the node did not record a reason. `at` is the time of a spot reclaim, as EC2's metadata
    service reports it, or "".
    """

    reason: str
    at: str

    def seconds_left(self) -> float | None:
        """Return the time until the spot reclaim (s), or None if it is not known.

        It is at most 120 s, because EC2 gives no longer notice. A time that has passed is not known, because
        the node's clock may be wrong:
        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
        """
        try:
            reclaimed_at = calendar.timegm(time.strptime(self.at[:19], "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return None
        left_s = min(reclaimed_at - time.time(), _NOTICE_SECONDS)
        return left_s if left_s > _END_SECONDS else None


def read_shutdown(file: Path = _FILE) -> Shutdown:
    """Return why this node shuts down, as the node's watchdog recorded it in `file`."""
    try:
        reason, _, at = file.read_text(encoding="ascii", errors="replace").strip().partition(" ")
    except OSError:
        reason, at = "", ""
    return Shutdown(reason, at)


def grace_at_shutdown(grace: float, left_s: float | None, *, saves: bool) -> float:
    """Return the ranks' grace (s) on a node that shuts down.

    `grace` is the job's grace, and `left_s` is the time until a spot reclaim (None: not known). The ranks get
    all that is left. If the job `saves` its results to S3, the uploader's share is a quarter, at most 30 s,
    unless the job's grace is longer than the rest.
    """
    if left_s is None:
        return min(grace, MAX_SHUTDOWN_GRACE)
    usable_s = left_s - _END_SECONDS
    share_s = min(left_s / 4, _MAX_UPLOAD_SECONDS) if saves else 0.0
    return min(max(min(grace, usable_s), usable_s - share_s), MAX_SHUTDOWN_GRACE)
