"""End a job when a client requests it, or when the job loses another node."""

from __future__ import annotations

import os
import signal
import time

from awsddp.agent.diagnosis.job_causes import cause_of_node
from awsddp.agent.job_folder import Document, Ending, JobFolder, write_json
from awsddp.agent.messages import Cancel, Lost
from awsddp.agent.peers import report_lost

_CANCEL_SECONDS = 30.0  # how long `cancel` waits for the job's end after the grace
_LOST_SECONDS = 5.0


def cancel(request: Cancel) -> Document:
    """End a running job, and return its document once it has ended.

    A job that has already ended is not changed. If the request has a `launch`, a job that was started by
    another launch is not changed either.
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
    """Report to the first node that `node` is lost; if `node` is the first node, end this node's ranks."""
    folder = JobFolder(request.job)
    launched, node, why, kind = folder.request(), request.node, request.why, request.kind
    if node != launched.first_node.node:
        return {"heard": report_lost(launched, node, why, kind=kind, seconds=_LOST_SECONDS)}
    return {"heard": _end(folder, Ending(state="failed", lost=why, kind=kind))}


def _end(folder: JobFolder, ending: Ending) -> bool:
    """Make a running job's agent end the job. Return False if no agent runs."""
    document = folder.document()
    if document.final or document.pid is None:
        return False
    write_json(folder.cancel, ending)
    try:
        os.kill(document.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True
