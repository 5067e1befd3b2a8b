"""A job's outcome: the documents of its nodes merged into one Job, and the local job.json."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from awsddp.errors import ConfigError, NotFoundError
from awsddp.model.node_answers import NodeJob, RankLine
from awsddp.model.records import ACTIVE, MOST_LINES, Cause, JobRecord, RankProgress, Saving
from awsddp.util.format import iso

_MOST_CHARACTERS = 4000
_PACE = ("step", "steps_per_second")
_KEEPS_UP = 0.9
_BY_WEIGHT = ("running", "waiting", "failed", "cancelled", "interrupted", "succeeded")


def job_document(told: Mapping[int, NodeJob], *, results: str = "runs") -> JobRecord:
    """Return the job as its nodes know it, by node.

    One that speaks for the whole job is believed, a final one first; where the first node is lost, what the
    others saw counts. A rank is as its own node says. Raises NotFoundError where no node knows it.
    """
    if not told:
        raise NotFoundError("job not found on any node", "", "awsddp jobs")
    believed = min(told.values(), key=_weight)
    ended = {
        (node, rank.rank): rank
        for node, found in told.items()
        for rank in found.ranks
        if rank.exit_code is not None
    }
    ranks = [ended.get((rank.node, rank.rank), rank) for rank in believed.ranks]
    machines = {one.node: one for one in believed.nodes}
    for node, found in told.items():  # each for itself: no node may leave another out
        machines |= {one.node: one for one in found.nodes if one.node == node}
    started, ended_at = _times(believed.state, ranks)
    of_nodes = [found for _, found in sorted(told.items())] if believed.state == "running" else []
    progress = tuple(one for found in of_nodes for one in found.metrics)
    return JobRecord(
        **msgspec.structs.asdict(believed.facts),
        job=believed.job,
        state=believed.state,
        cause=believed.cause and worded(believed.cause, job=believed.job),
        ranks=tuple(rank.result for rank in ranks),
        nodes=tuple(machines[node] for node in sorted(machines)),
        home=f"{results}/{believed.job}",
        world_size=len(ranks),
        restarts=believed.restarts,
        started=started,
        ended=ended_at,
        progress=progress,
        slowest_rank=slowest_rank(progress),
        usage=tuple(one for found in of_nodes for one in found.samples),
        saving=_saving(told, lacking=machines.keys() - told.keys()),
    )


def _saving(told: Mapping[int, NodeJob], *, lacking: Collection[int]) -> Saving | None:
    """Return how far the results of the nodes that tell of it are in S3, None where none saves any."""
    found = [one.saving for one in told.values() if one.saving is not None]
    if not found:
        return None
    return Saving(
        files=sum(one.files for one in found),
        bytes=sum(one.bytes for one in found),
        pending_files=sum(one.pending_files for one in found),
        pending_bytes=sum(one.pending_bytes for one in found),
        error=next((one.error for one in found if one.error), ""),
        ended=len(found) == len(told) and all(one.ended for one in found),
        silent_s=max(one.silent_s for one in found),
        unasked=tuple(sorted(lacking)),
    )


def worded(cause: Cause, *, job: str) -> Cause:
    """Return a cause that a node sent, as it may be shown: `next` is made here, from its kind.

    A node sends the kind and what its rank said, not our advice. The explanation is one line, and each line
    of the tail is one, so that nothing of it stands at a margin. A kind that this awsddp does not know has no
    next step; nor has a cause to which the node gave none.
    """
    from awsddp.agent.diagnosis.causes import TABLE
    from awsddp.agent.diagnosis.job_causes import JOB_TABLE

    row = next((row for row in (*TABLE, *JOB_TABLE) if row.kind == cause.kind), None)
    return replace(
        cause,
        explanation=" ".join(cause.explanation.split())[:_MOST_CHARACTERS],
        next=row.next.format(job=job) if row is not None and cause.next else "",
        tail=tuple(line for text in cause.tail for line in text.split("\n"))[-MOST_LINES:],
    )


def slowest_rank(progress: Sequence[RankProgress]) -> int | None:
    """Return the rank that is furthest behind the best one in steps or steps per second, None within 10 %."""
    best = {key: max((getattr(one, key) or 0 for one in progress), default=0) for key in _PACE}

    def pace(one: RankProgress) -> float:
        known = [(getattr(one, key), best[key]) for key in _PACE if getattr(one, key) is not None]
        return min((value / most for value, most in known if most > 0), default=1.0)

    slowest = min(progress, key=pace, default=None)
    return slowest.rank if slowest is not None and pace(slowest) < _KEEPS_UP else None


def jobs(told: Mapping[int, Iterable[NodeJob]], *, results: str = "runs") -> tuple[JobRecord, ...]:
    """Return all jobs that the nodes know, oldest first."""
    found: dict[str, dict[int, NodeJob]] = {}
    for node, several in told.items():
        for one in several:
            found.setdefault(one.job, {})[node] = one
    ordered = sorted(found.values(), key=lambda nodes: min(one.created for one in nodes.values()))
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


def _weight(told: NodeJob) -> tuple[bool, bool, int]:
    return not told.complete, told.state in ACTIVE, _BY_WEIGHT.index(told.state)


def _times(state: str, ranks: Iterable[RankLine]) -> tuple[str | None, str | None]:
    """Return when the first rank started and, at the end of the job, when the last one ended."""
    begun = [(rank, rank.started) for rank in ranks if rank.started]
    ended = [started + rank.seconds for rank, started in begun if rank.exit_code is not None]
    return (
        _utc(min(started for _, started in begun)) if begun else None,
        _utc(max(ended)) if ended and state not in ACTIVE else None,
    )


def _utc(moment: float) -> str | None:
    return iso(datetime.fromtimestamp(moment, UTC))
