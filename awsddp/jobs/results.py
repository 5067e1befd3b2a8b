"""A job's outcome: the documents of its nodes merged into one Job, and the local job.json."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from awsddp.answers import Facts
from awsddp.errors import ConfigError, NotFoundError
from awsddp.records import ACTIVE, Cause, JobRecord, RankProgress, RankUsage
from awsddp.report import iso

_MOST_CHARACTERS = 4000
_PACE = ("step", "steps_per_second")
_KEEPS_UP = 0.9
_BY_WEIGHT = ("running", "waiting", "failed", "cancelled", "interrupted", "succeeded")


def job_document(documents: Mapping[int, Mapping[str, Any]], *, results: str = "runs") -> JobRecord:
    """Return the job that its nodes' documents (by node) describe.

    One that speaks for the whole job is believed, a final one first; where the first node is lost, what the
    others saw counts. A rank is as its own node says. Raises NotFoundError where there is no document.
    """
    if not documents:
        raise NotFoundError("job not found on any node", "", "awsddp jobs")
    believed = min(documents.values(), key=_weight)
    ended = {
        (node, rank["rank"]): rank
        for node, found in documents.items()
        for rank in found["ranks"]
        if rank["exit_code"] is not None
    }
    ranks = [ended.get((rank["node"], rank["rank"]), rank) for rank in believed["ranks"]]
    machines = {one["node"]: one for one in believed.get("nodes", ())}
    for node, found in documents.items():  # each for itself: no node may leave another out
        machines |= {one["node"]: one for one in found.get("nodes", ()) if one["node"] == node}
    document = {
        **msgspec.structs.asdict(msgspec.convert(believed.get("facts", {}), Facts)),
        **{key: believed[key] for key in ("job", "state", "cause")},
        "ranks": ranks,
        "nodes": [machines[node] for node in sorted(machines)],
        "home": f"{results}/{believed['job']}",
        "world_size": len(ranks),
        "restarts": believed.get("restarts", ()),
        **_times(believed["state"], ranks),
    }
    job = msgspec.convert(document, JobRecord)
    if job.cause is not None:
        job = replace(job, cause=worded(job.cause, job=job.job))
    if job.state != "running":
        return job
    answers = [answer for _, answer in sorted(documents.items())]
    progress = tuple(
        msgspec.convert(one, RankProgress) for said in answers for one in said.get("metrics", ())
    )
    usage = tuple(msgspec.convert(one, RankUsage) for said in answers for one in said.get("samples", ()))
    return replace(job, progress=progress, slowest_rank=slowest_rank(progress), usage=usage)


def worded(cause: Cause, *, job: str) -> Cause:
    """Return a cause that a node sent, as it may be shown: `next` is made here, from its kind.

    A node sends the kind and what its rank said, not our advice. The explanation is one line, and each line
    of the tail is one, so that nothing of it stands at a margin. A kind that this awsddp does not know has no
    next step; nor has a cause to which the node gave none.
    """
    from awsddp.jobs.supervisor.causes import TABLE
    from awsddp.jobs.supervisor.job_causes import JOB_TABLE

    row = next((row for row in (*TABLE, *JOB_TABLE) if row.kind == cause.kind), None)
    return replace(
        cause,
        explanation=" ".join(cause.explanation.split())[:_MOST_CHARACTERS],
        next=row.next.format(job=job) if row is not None and cause.next else "",
        tail=tuple(line for text in cause.tail for line in text.splitlines() or [""]),
    )


def slowest_rank(progress: Sequence[RankProgress]) -> int | None:
    """Return the rank that is furthest behind the best one in steps or steps per second, None within 10 %."""
    best = {key: max((getattr(one, key) or 0 for one in progress), default=0) for key in _PACE}

    def pace(one: RankProgress) -> float:
        known = [(getattr(one, key), best[key]) for key in _PACE if getattr(one, key) is not None]
        return min((value / most for value, most in known if most > 0), default=1.0)

    slowest = min(progress, key=pace, default=None)
    return slowest.rank if slowest is not None and pace(slowest) < _KEEPS_UP else None


def jobs(
    documents: Mapping[int, Iterable[Mapping[str, Any]]], *, results: str = "runs"
) -> tuple[JobRecord, ...]:
    """Return all jobs, oldest first, that the nodes report: "jobs" in the answers to `state_request()`."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for node, several in documents.items():
        for document in several:
            found.setdefault(document["job"], {})[node] = document
    ordered = sorted(found.values(), key=lambda nodes: min(told["created"] for told in nodes.values()))
    return tuple(job_document(nodes, results=results) for nodes in ordered)


def encode(job: JobRecord) -> bytes:
    """Return job.json, the `train` document."""
    return msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n"


def decode(data: bytes) -> JobRecord:
    """Return the job of a job.json. Raises ConfigError where it is none."""
    try:
        return msgspec.json.decode(data, type=JobRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("job.json cannot be read", str(error), "awsddp fetch") from error


def _weight(document: Mapping[str, Any]) -> tuple[bool, bool, int]:
    final = document["state"] not in ACTIVE
    return not document["complete"], not final, _BY_WEIGHT.index(document["state"])


def _times(state: str, ranks: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return when the first rank started and, at the end of the job, when the last one ended."""
    begun = [rank for rank in ranks if rank.get("started")]
    ended = [rank["started"] + rank["seconds"] for rank in begun if rank["exit_code"] is not None]
    return {
        "started": _utc(min(rank["started"] for rank in begun)) if begun else None,
        "ended": _utc(max(ended)) if ended and state not in ACTIVE else None,
    }


def _utc(moment: float) -> str | None:
    return iso(datetime.fromtimestamp(moment, UTC))
