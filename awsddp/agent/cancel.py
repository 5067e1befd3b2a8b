"""What a node does when a job is to end: by a client's wish, or as another node of it is lost."""

from __future__ import annotations

import os
import signal
import time

from awsddp.agent.diagnosis.job_causes import cause_of_node
from awsddp.agent.job_folder import Document, Ending, JobFolder, write_json
from awsddp.agent.messages import Cancel, Lost
from awsddp.agent.peers import report_lost

_CANCEL_SECONDS = 30.0  # beyond the grace, until everything must be gone
_LOST_SECONDS = 5.0


def cancel(request: Cancel) -> Document:
    """End a job that runs, and return its document when it has ended. One that has ended is left as it is.

    So is one that was not launched by `launch`, where that is given.
    """
    folder = JobFolder(request.job)
    document, launched = folder.document(), folder.request()
    if request.launch in (None, launched.launch):
        seconds = launched.grace if request.grace is None else request.grace
        cause = cause_of_node(launched, None, "cancelled")
        if not _end(folder, Ending(state="cancelled", grace=seconds, cause=cause)):
            return folder.document()
        end = time.monotonic() + seconds + _CANCEL_SECONDS
        while time.monotonic() < end and not document.final:
            time.sleep(0.05)
            document = folder.document()
    return document


def lost(request: Lost) -> dict[str, bool]:
    """Tell the first node that `node` is lost; without the first node this one ends its part of the job."""
    folder = JobFolder(request.job)
    launched, node, why, kind = folder.request(), request.node, request.why, request.kind
    if node != launched.first.node:
        return {"heard": report_lost(launched, node, why, kind=kind, seconds=_LOST_SECONDS)}
    return {"heard": _end(folder, Ending(state="failed", lost=why, kind=kind))}


def _end(folder: JobFolder, how: Ending) -> bool:
    """Have the supervisor of a job that runs end it, and return whether there is one."""
    document = folder.document()
    if document.final or document.pid is None:
        return False
    write_json(folder.cancel, how)
    try:
        os.kill(document.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True
