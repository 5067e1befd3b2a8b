"""Merge the reports from a job's nodes into one JobRecord; encode and decode job.json."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from awsddp.errors import ConfigError, NotFoundError
from awsddp.model.node_answers import NodeJob, ReportedRank
from awsddp.model.records import ACTIVE, MAX_LINES, Cause, Hang, JobRecord, RankProgress, Saving
from awsddp.util.formatting import optional_utc

_MOST_CHARACTERS = 4000
_PACE = ("step", "steps_per_second")
_KEEPS_UP = 0.9
_STATE_ORDER = ("running", "waiting", "failed", "cancelled", "interrupted", "succeeded")


def merge_job(reports: Mapping[int, NodeJob], *, results: str = "runs") -> JobRecord:
    """Merge the reports on a job; `reports` maps each node to its report.

    The state is taken from a report on the whole job, preferably a final report. If the first node is lost,
    the state is taken from the other nodes. A rank's exit is taken from its own node's report. Raises
    NotFoundError if there is no report.
    """
    if not reports:
        raise NotFoundError("job not found on any node", "", "awsddp jobs")
    leading = min(reports.values(), key=_report_order)
    ended_ranks = {
        (node, rank.rank): rank
        for node, report in reports.items()
        for rank in report.ranks
        if rank.exit_code is not None
    }
    ranks = [ended_ranks.get((rank.node, rank.rank), rank) for rank in leading.ranks]
    machines = {machine.node: machine for machine in leading.nodes}
    for node, report in reports.items():  # each node adds only itself, so no node can omit another
        machines |= {machine.node: machine for machine in report.nodes if machine.node == node}
    started, ended_at = _times(leading.state, ranks)
    running = [report for _, report in sorted(reports.items())] if leading.state == "running" else []
    progress = tuple(metrics for report in running for metrics in report.metrics)
    return JobRecord(
        **msgspec.structs.asdict(leading.facts),
        job=leading.job,
        state=leading.state,
        cause=leading.cause and sanitize_cause(leading.cause, job=leading.job),
        ranks=tuple(rank.result for rank in ranks),
        nodes=tuple(machines[node] for node in sorted(machines)),
        home=f"{results}/{leading.job}",
        world_size=len(ranks),
        restarts=leading.restarts,
        started=started,
        ended=ended_at,
        progress=progress,
        slowest_rank=find_slowest_rank(progress),
        usage=tuple(sample for report in running for sample in report.samples),
        saving=_merge_uploads(reports, silent_nodes=machines.keys() - reports.keys()),
        hang=leading.hang and sanitize_hang(leading.hang) if leading.state == "running" else None,
    )


def sanitize_hang(hang: Hang) -> Hang:
    """Return what a node found about a silent job, reduced to lines that cannot look like awsddp's output."""
    text, place = (" ".join(words.split())[:_MOST_CHARACTERS] for words in (hang.text, hang.place))
    return replace(hang, text=text, place=place)


def _merge_uploads(reports: Mapping[int, NodeJob], *, silent_nodes: Collection[int]) -> Saving | None:
    """Merge the states of the nodes' uploads to S3. Return None if no node uploads results."""
    uploads = [report.saving for report in reports.values() if report.saving is not None]
    if not uploads:
        return None
    return Saving(
        files=sum(upload.files for upload in uploads),
        bytes=sum(upload.bytes for upload in uploads),
        pending_files=sum(upload.pending_files for upload in uploads),
        pending_bytes=sum(upload.pending_bytes for upload in uploads),
        error=next((upload.error for upload in uploads if upload.error), ""),
        ended=len(uploads) == len(reports) and all(upload.ended for upload in uploads),
        silent_s=max(upload.silent_s for upload in uploads),
        unasked=tuple(sorted(silent_nodes)),
    )


def sanitize_cause(cause: Cause, *, job: str) -> Cause:
    """Return a cause that a node sent, made safe to display.

    The node is untrusted, so `next` is looked up by `kind` in the table of causes. `next` is empty for an
    unknown kind, or if the node sent no next step. The explanation is reduced to one line, and the tail is
    split into lines, so that neither can look like awsddp's own output.
    """
    from awsddp.agent.diagnosis.causes import TABLE
    from awsddp.agent.diagnosis.job_causes import JOB_TABLE

    row = next((row for row in (*TABLE, *JOB_TABLE) if row.kind == cause.kind), None)
    return replace(
        cause,
        explanation=" ".join(cause.explanation.split())[:_MOST_CHARACTERS],
        next=row.next.format(job=job) if row is not None and cause.next else "",
        tail=tuple(line for text in cause.tail for line in text.split("\n"))[-MAX_LINES:],
    )


def find_slowest_rank(progress: Sequence[RankProgress]) -> int | None:
    """Return the rank that is furthest behind the best rank in steps or in steps per second.

    Return None if all ranks are within 10 % of the best.
    """
    best = {key: max((getattr(rank, key) or 0 for rank in progress), default=0) for key in _PACE}

    def pace(rank: RankProgress) -> float:
        values = [(getattr(rank, key), best[key]) for key in _PACE if getattr(rank, key) is not None]
        return min((value / most for value, most in values if most > 0), default=1.0)

    slowest = min(progress, key=pace, default=None)
    return slowest.rank if slowest is not None and pace(slowest) < _KEEPS_UP else None


def merge_jobs(reports: Mapping[int, Iterable[NodeJob]], *, results: str = "runs") -> tuple[JobRecord, ...]:
    """Merge the reports that each node sent on all jobs, and return the jobs, oldest first."""
    by_job: dict[str, dict[int, NodeJob]] = {}
    for node, node_jobs in reports.items():
        for job in node_jobs:
            by_job.setdefault(job.job, {})[node] = job
    ordered = sorted(
        by_job.values(), key=lambda job_reports: min(job.created for job in job_reports.values())
    )
    return tuple(merge_job(job_reports, results=results) for job_reports in ordered)


def encode_job(job: JobRecord) -> bytes:
    """Return a job encoded as job.json, which is also the JSON document that `train` prints."""
    return msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n"


def decode_job(data: bytes) -> JobRecord:
    """Return the job that a job.json's content describes. Raises ConfigError if the content is invalid."""
    try:
        return msgspec.json.decode(data, type=JobRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("job.json cannot be read", str(error), "awsddp fetch") from error


def _report_order(report: NodeJob) -> tuple[bool, bool, int]:
    """Return a sort key: reports on the whole job come first, then final reports, then others by state."""
    return not report.complete, report.state in ACTIVE, _STATE_ORDER.index(report.state)


def _times(state: str, ranks: Iterable[ReportedRank]) -> tuple[str | None, str | None]:
    """Return when the first rank started and, if the job has ended, when the last rank ended."""
    starts = [(rank, rank.started) for rank in ranks if rank.started]
    ends = [started + rank.seconds for rank, started in starts if rank.exit_code is not None]
    return (
        _utc(min(started for _, started in starts)) if starts else None,
        _utc(max(ends)) if ends and state not in ACTIVE else None,
    )


def _utc(moment: float) -> str | None:
    return optional_utc(datetime.fromtimestamp(moment, UTC))
