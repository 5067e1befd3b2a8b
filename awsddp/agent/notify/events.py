"""Which events a job's node sends: a pure function of what the node knows about the job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from awsddp.agent.job_folder import Document
    from awsddp.agent.messages import Launch
    from awsddp.agent.shutdown import Shutdown

    Event = Mapping[str, Any]

FIELDS = ("id", "time", "event", "cluster", "job", "cause")
"""The fields of an event in the format "json"; an event also has a `text`."""
_MAX_CHARACTERS = 200
_OMITTED = str.maketrans(dict.fromkeys("<>&@`", " "))
"""Characters with a meaning in chats: `<!channel>` and `@everyone` notify people."""
_POWER_OFF = {
    "expires": "expires: its time or its budget is over",
    "reboot": "is rebooted",
    "poweroff": "is powered off",
}


class Order(NamedTuple):
    """What the client knows about the job's events.

    `budget_at` is the Unix time at which 80 % of the cluster's budget is spent, or None.
    """

    job: str
    cluster: str
    launch: str
    budget_at: float | None = None


class Facts(NamedTuple):
    """What a node knows about its job now.

    `request` is the job's launch request on this node, and `document` the node's document. `final` is True if
    the agent wrote the document as final. `unsaved` says why nothing is saved to S3 any more, or is "".
    """

    now: float
    request: Launch
    document: Document
    final: bool
    shutdown: Shutdown
    hang: Mapping[str, Any]
    unsaved: str


def make_event(
    name: str,
    text: str,
    *,
    key: str,
    cluster: str,
    job: str | None,
    now: float,
    cause: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an event. `key` identifies what happened, and gives the event its id on every machine."""
    import hashlib  # imported late, because only a process that makes events needs it

    return {
        "id": hashlib.sha256(f"{key} {name}".encode()).hexdigest()[:16],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "event": name,
        "cluster": cluster,
        "job": job,
        "cause": cause,
        "text": text,
    }


def find_events(order: Order, facts: Facts) -> list[Event]:
    """Return all events that this node sends, in the order in which they happen, with those of earlier calls.

    The first node sends the job's events. Every node sends that it saves nothing to S3 any more, and its own
    shutdown, except an expiry, which all nodes have at the same time. If the first node is lost, each other
    node returns the job's end.
    """
    document, is_first = facts.document, is_first_node(facts.request)
    events: list[Event] = []

    def add(name: str, text: str, detail: object = "", cause: Mapping[str, Any] | None = None) -> None:
        whole, key = f"job {order.job} on cluster {order.cluster} {text}", f"{order.launch} {detail}"
        about = {"key": key, "cluster": order.cluster, "job": order.job}
        events.append(make_event(name, whole, now=facts.now, cause=cause, **about))

    if is_first and order.budget_at is not None and facts.now >= order.budget_at:
        add("budget", "runs, and 80 % of the cluster's budget is spent")
    if is_first and facts.hang.get("state"):
        _add_hang(add, facts)
    if facts.unsaved:
        place = "" if is_first else f" from node{facts.request.node}"
        add("unsaved", f"saves nothing{place} to S3 any more: {facts.unsaved}", "" if is_first else place)
    if facts.shutdown.reason and (is_first or facts.shutdown.reason != "expires"):
        _add_shutdown(add, facts)
    if _reports_end(facts, is_first=is_first):
        cause = document.cause
        add("ended", describe_end(document), cause=summarize_cause(cause) if cause else None)
    return events


def _add_hang(add: Any, facts: Facts) -> None:
    hang = facts.hang
    rank, since = hang.get("rank"), hang.get("since")
    if hang["state"] == "hung" and facts.request.ends_when_hung:
        return  # the job ends by it, which is an event of its own
    if hang["state"] == "hung":
        text = "hangs" if rank is None else f"hangs: rank {rank} is behind"
        add("hung", text, since, {"kind": "hang", "explanation": text, "node": None, "rank": rank})
    else:
        add("silent", "is silent: no rank writes to its log", since)


def _add_shutdown(add: Any, facts: Facts) -> None:
    node, (reason, at) = facts.request.node, facts.shutdown
    if reason == "spot":
        name, kind = "spot_notice", "spot_interruption"
        text = f"AWS reclaims node{node}{f' at {at}' if at else ''}"
    else:
        kind = "expired" if reason == "expires" else "interrupted"
        name, text = "power_off", f"node{node} {_POWER_OFF.get(reason, 'is powered off')}"
    cause = {"kind": kind, "explanation": text, "node": node, "rank": None}
    add(name, f"is about to lose a node: {text}", "" if reason == "expires" else node, cause)


def is_first_node(request: Launch) -> bool:
    """Return True if the node is the job's first node."""
    return request.node == request.first_node.node


def _reports_end(facts: Facts, *, is_first: bool) -> bool:
    """Return True if the job has ended and this node must send that.

    The first node also sends the end of a job whose agent was killed. Another node does so if its agent ended
    the job without the first node.
    """
    return facts.document.final if is_first else facts.final and not facts.document.complete


def describe_end(document: Document) -> str:
    """Return how a job ended: its state and the cause without the ranks' own words."""
    cause = document.cause
    if cause is None or document.state == "succeeded":
        return document.state
    places = [] if cause.rank is None else [f"rank {cause.rank}"]
    places += [] if cause.node is None else [f"node{cause.node}"]
    place = f", {' on '.join(places)}" if places else ""
    return f"{document.state} ({cause.kind}{place}): {clean(cause.explanation)}"


def summarize_cause(cause: Any) -> dict[str, Any]:
    """Return a cause's fields in an event; the explanation ends before its first colon."""
    explanation = clean(cause.explanation)
    return {"kind": cause.kind, "explanation": explanation, "node": cause.node, "rank": cause.rank}


def clean(explanation: str) -> str:
    """Return the part of an explanation before its first colon, in one line, without special characters."""
    return make_plain(explanation.partition(":")[0])[:_MAX_CHARACTERS]


def make_plain(text: str) -> str:
    """Return text in one line, without characters that have a meaning in chats."""
    return " ".join(word for word in text.translate(_OMITTED).split() if word.isprintable())[:1000]
