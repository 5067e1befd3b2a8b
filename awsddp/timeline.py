"""When what happened to a job: from the first call to AWS to the last, by node. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from awsddp.cluster import Job
from awsddp.report import node_name

AWS, CLIENT = "AWS", "this machine"
_READS = ("Describe", "Get", "List")
_OF_CLIENT = {"train": "starts the job", "fetched": "fetches results", "stopped": "stops the nodes"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What AWS, this machine or a node did, in seconds since the first step; `end_s` is None for now."""

    who: str
    what: str
    start_s: float
    end_s: float | None
    error: str | None = None


@dataclass(frozen=True)
class _Span:
    who: str
    what: str
    start: datetime
    end: datetime | None
    error: str | None = None


def timeline(
    job: Job, rows: Sequence[Mapping[str, Any]], calls: Iterable[Mapping[str, Any]]
) -> tuple[datetime | None, list[Step]]:
    """Return when the first step of a job began, and its steps: those of AWS, this machine, and each node.

    `rows` are those of its cluster's ledger, `calls` those of calls.jsonl. Calls that only read are left out.
    """
    spans = [*_calls(calls), *_client(job, rows), *_nodes(job, rows)]
    first = min((span.start for span in spans), default=None)
    if first is None:
        return None, []
    return first, [
        Step(
            who=span.who,
            what=span.what,
            start_s=round((span.start - first).total_seconds(), 3),
            end_s=None if span.end is None else round((span.end - first).total_seconds(), 3),
            error=span.error,
        )
        for span in spans
    ]


def _calls(calls: Iterable[Mapping[str, Any]]) -> list[_Span]:
    spans = []
    for call in calls:
        name, at, seconds = call.get("operation"), call.get("at"), call.get("seconds")
        if isinstance(name, str) and isinstance(at, str) and isinstance(seconds, int | float):
            start = datetime.fromisoformat(at)
            error = call.get("error")
            end = start + timedelta(seconds=seconds)
            asks = name.startswith(_READS) or bool(call.get("parameters", {}).get("DryRun"))
            if not asks:
                spans.append(_Span(AWS, name, start, end, None if error is None else str(error)))
    return spans


def _client(job: Job, rows: Iterable[Mapping[str, Any]]) -> list[_Span]:
    spans = []
    for row in rows:
        what, at = _OF_CLIENT.get(row["event"]), datetime.fromisoformat(str(row["time"]))
        if what is not None and row.get("job", job.job) == job.job:
            spans.append(_Span(CLIENT, what, at, at))
    return spans


def _nodes(job: Job, rows: Iterable[Mapping[str, Any]]) -> list[_Span]:
    """Return for each node of the job: the times in which it booted, was ready, and ran the job's ranks."""
    ids = {one.instance_id: node_name(one.node) for one in job.nodes}
    begun: dict[str, tuple[str, datetime]] = {}
    spans = []

    def close(key: str, at: datetime) -> None:
        if key in begun:
            what, since = begun.pop(key)
            spans.append(_Span(ids[key], what, since, max(at, since)))

    for row in rows:
        event, at = row["event"], datetime.fromisoformat(str(row.get("at") or row["time"]))
        named = row.get("instances") or row.get("terminated") or ids
        for key in (key for key in ids if key in named):
            if event in ("launched", "started") and key not in begun:
                begun[key] = ("boots and is prepared", at)
            elif event == "ready" and begun.get(key, ("",))[0].startswith("boots"):
                close(key, at)
                begun[key] = ("is ready", at)
            elif event in ("stopped", "resized", "ended"):
                close(key, at)
    spans += [_Span(ids[key], what, since, None) for key, (what, since) in begun.items()]
    if job.started is None:
        return spans
    began = datetime.fromisoformat(job.started)
    for one in job.nodes:
        seconds = [rank.seconds for rank in job.ranks if rank.node == one.node]
        end = None if job.ended is None else began + timedelta(seconds=max(seconds, default=0.0))
        spans.append(_Span(node_name(one.node), "runs the job", began, end))
    return spans
