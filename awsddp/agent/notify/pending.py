"""What a node knows about its job's events, and the events that a client sends instead of the node."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from awsddp.agent.job_folder import Document, JobFolder, read_json, try_lock
from awsddp.agent.messages import Response
from awsddp.agent.notify.events import FIELDS, Facts, Order, find_events, is_first_node
from awsddp.agent.notify.outbox import Outbox
from awsddp.agent.shutdown import read_shutdown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from awsddp.agent.messages import TakeEvent

_FAILING_S = 30.0
"""How long a node must have failed to send an event before a client sends it. After the job's end, a client
does not wait."""


def outbox_of(folder: JobFolder) -> Outbox:
    """Return a job's events on this node."""
    return Outbox(folder.path / "events.json")


def read_facts(folder: JobFolder, unsaved: str = "") -> Facts:
    """Return what this node knows about the job. `unsaved` says why nothing is saved any more.

    Raises CommandError if the job's folder is gone.
    """
    request, document = folder.request(), folder.document()
    stored = read_json(folder.state) or {}
    return Facts(
        now=time.time(),
        request=request,
        document=document,
        final=bool(stored) and Document.from_json(stored).final,
        shutdown=read_shutdown(),
        hang=stored.get("hang") or {},
        unsaved=unsaved,
    )


def max_requests(facts: Facts, event: Mapping[str, Any]) -> int:
    """Return how many requests this node may send for an event, so that all nodes send at most two.

    Another node that has lost the first node sends the job's end, too. The first node therefore sends a
    second request only if all other nodes know that the job has ended.
    """
    if event["event"] != "ended" or len(facts.request.nodes) == 1:
        return 2
    return 2 if is_first_node(facts.request) and facts.document.acknowledged else 1


def takeevent(request: TakeEvent) -> Response:
    """Record the outcome of the client's last request, and return an event that the client may send now.

    Such an event is counted as sent. `left` is the number of events that are neither delivered nor given up.
    """
    folder = JobFolder(request.job)
    outbox = outbox_of(folder)
    if request.settled is not None:
        outbox.settle(*request.settled)
    written = read_json(folder.path / "notify.json")
    if written is None:
        return Response(event=None, left=0)
    facts, is_running = read_facts(folder), _is_notifier_running(folder)
    if not is_running or is_first_node(facts.request):  # its notifier may not have found the newest event yet
        outbox.add(find_events(Order(*written["order"]), facts))
    for row in outbox.open_events():
        is_given = not (is_running and written["sends"]) or _is_failing(row, facts)
        if is_given and outbox.claim(row["id"], most=max_requests(facts, row)):
            event = {name: row[name] for name in (*FIELDS, "text")}
            return Response(event=event, left=len(outbox.open_events()))
        if is_running:  # the order of the events is kept
            break
    return Response(event=None, left=len(outbox.open_events()))


def _is_failing(row: Mapping[str, Any], facts: Facts) -> bool:
    """Return True if the node has failed to send an event for so long that a client sends it."""
    since, limit_s = row["failing_since"], 0.0 if facts.document.final else _FAILING_S
    return since is not None and facts.now - since >= limit_s


def lock_notifier(folder: JobFolder) -> int | None:
    """Lock the job's notifier; return the lock's descriptor, or None if another notifier has the lock."""
    return try_lock(folder.path / "notify.lock")


def _is_notifier_running(folder: JobFolder) -> bool:
    descriptor = lock_notifier(folder)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None
