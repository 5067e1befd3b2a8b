"""A job's results at home: fetched from its nodes, and what was written down there read again."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp import report
from awsddp.cluster import Job
from awsddp.errors import ConfigError
from awsddp.jobs import results
from awsddp.nodes.results import Fetched
from awsddp.verbs.context import Context
from awsddp.verbs.costs import note_fetched
from awsddp.verbs.nodes import Ready
from awsddp.verbs.parts import holders, missing
from awsddp.verbs.selecting import Unfetched, select, unfetched

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet

FETCH_S = 600.0
"""How long another client of this machine may be at it, bringing the same results home."""

METRICS_CHARACTERS = 64 << 20
"""How much of a job's metrics is read."""


def place_of(ctx: Context, job: str) -> Path:
    """Return the folder at home that receives a job's results."""
    return Path(ctx.job.sync.workdir) / ctx.job.job.results / job


def bring_home(
    ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, *, to: Path | None = None
) -> dict[int, Fetched]:
    """Fetch a job's results from its nodes, verified, and only then let the nodes forget that they owe them.

    Of the nodes those that can be asked now: the job that is written down beside says what is missing. One
    client at a time does so. Over job.results_limit `ctx.agree` decides. Raises Unfetched where something
    that the job made stays on the nodes, NodeError where a node does not send what it said, ConfigError where
    home has no room.
    """
    lost = still_missing(ctx, cluster, fleet, job, to=to)
    job = replace(job, missing=tuple(lost))
    with ctx.folder.lock("fetch", part="results", wait_s=FETCH_S):
        remember(ctx, job)
        try:
            return _bring_home(ctx, cluster, fleet, job, to if to is not None else place_of(ctx, job.job))
        except Unfetched as error:
            error.why = "\n".join((error.why, *lost.values()))
            raise


def _bring_home(ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, target: Path) -> dict[int, Fetched]:
    from awsddp.aws.poweroff import release
    from awsddp.nodes.sync import pull

    used = holders(fleet, job)
    selected = select(ctx, fleet, job, used, target)
    job = replace(job, missing=tuple(sorted({*job.missing, *(one.node for one in selected.owed)})))
    came = pull(
        selected.wanted,
        target,
        ssh_config=ctx.folder.ssh_config,
        links=selected.links,
        also={"job.json": results.encode(job)},
        on_event=ctx.on_event,
    )
    note_fetched(ctx, cluster.record, sum(one.bytes for one in came.values()))
    _draw(target)
    if selected.owed:
        raise unfetched(job, selected)
    if job.state != "running":
        with tagging(ctx):
            release(cluster.aws, [node for node in cluster.nodes if node.node in used], job.job)
    return came


def tagging(ctx: Context) -> AbstractContextManager[None]:
    """Hold the tags that name jobs, which are read, changed and written back, against another client here."""
    return ctx.folder.lock("train", part="tags", wait_s=FETCH_S)


def _draw(target: Path) -> None:
    """Draw the loss that rank 0 wrote down, where it did."""
    rows = metrics(target)
    data = f", {name}" if (name := _data(rows)) else ""
    plot = report.loss_plot(rows, title=f"training loss, {target.name}{data}")
    if plot is not None:
        (target / "loss.svg").write_text(plot, encoding="utf-8")


def metrics(target: Path) -> list[dict[str, Any]]:
    """Return the metrics that the first node's run folder holds; none where there are none."""
    file = target / "node0" / "run" / "metrics.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace") as stream:
        return report.json_lines(stream.read(METRICS_CHARACTERS))


def _data(rows: list[dict[str, Any]]) -> str | None:
    """Return what the program says it was tested on: the real set, or data made for a rehearsal."""
    return next((row["data"] for row in reversed(rows) if isinstance(row.get("data"), str)), None)


def job_result(ctx: Context, job: Job, *, target: Path | None = None) -> dict[str, Any]:
    """Return a job as the document of `train`, with the accuracy that its program wrote down.

    `fetched` tells whether all its results are at home since it has ended; else `missing` names the nodes
    of those that are not, where some are.
    """
    kept = ended_at_home(ctx, job.job)
    rows = metrics(target if target is not None else place_of(ctx, job.job))
    found = {
        "accuracy": report.last_value(rows, "accuracy"),
        "data": _data(rows),
        "fetched": kept is not None and not kept.missing,
        "missing": list(kept.missing if kept is not None else job.missing),
    }
    return report.job_document(job) | found


def job_at_home(ctx: Context, name: str | None) -> Job | None:
    """Return a job whose results are at home: of this name, or the newest."""
    folder = place_of(ctx, "x").parent
    found = sorted(folder.glob("*/job.json"), key=lambda path: path.stat().st_mtime)
    named = [path for path in found if name is None or path.parent.name == name]
    return results.decode(named[-1].read_bytes()) if named else None


def ended_at_home(ctx: Context, name: str) -> Job | None:
    """Return the job of this name if its results came home after it had ended."""
    with contextlib.suppress(ConfigError):  # what cannot be read is fetched again
        job = job_at_home(ctx, name)
        return job if job is not None and job.state != "running" else None
    return None


def whole_at_home(ctx: Context, name: str) -> Job | None:
    """Return the job of this name if nothing of it is missing at home."""
    job = ended_at_home(ctx, name)
    return job if job is not None and not job.missing else None


def still_missing(
    ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, *, to: Path | None = None
) -> dict[int, str]:
    """Return why parts of a job cannot be had now, by node, unless they are at home already."""
    kept = whole_at_home(ctx, job.job) if to is None else None
    return {} if kept is not None and kept.nodes == job.nodes else missing(cluster, fleet, job)


def remember(ctx: Context, *jobs: Job) -> None:
    """Keep jobs as last seen in the folder, for `status`, and when those that run were seen."""
    record = ctx.folder.read()
    if record is not None:
        new = {job.job for job in jobs}
        others = tuple(one for one in record.jobs if one.job not in new)
        if (after := (*others, *jobs)) != record.jobs:
            ctx.folder.write(replace(record, jobs=after))
        seen = {name: moment for name, moment in ctx.folder.seen().items() if name not in new}
        now = datetime.now(UTC)
        ctx.folder.write_seen(seen | {job.job: now for job in jobs if job.state == "running"})
