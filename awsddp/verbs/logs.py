"""logs: a job's lines, from its first on; with `follow` to its end, then its results are fetched."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from awsddp.errors import NotFoundError
from awsddp.jobs.logs import Merger, last_lines
from awsddp.records import JobRecord
from awsddp.report import node_name
from awsddp.verbs.cluster import ClusterHandle, NoNodes
from awsddp.verbs.context import Context
from awsddp.verbs.jobs import find_job
from awsddp.verbs.results import job_result, results_dir, saved_job, whole_at_home
from awsddp.verbs.watching import Watch


def logs(
    ctx: Context,
    *,
    job: str | None,
    follow: bool,
    ranks: Collection[int] = (),
    last: int | None = None,
    on_lines: Callable[[bytes], None],
) -> dict[str, Any]:
    """Show the lines of a job, of these `ranks` (none: all), and return it as the `train` document.

    `last` shows only so many of the lines so far. With `follow` to the job's end; then its results are
    fetched. A fetched job needs no node; a part that is missing is shown from the nodes that are reachable.
    Raises NotFoundError for an unknown job or rank, NoNodes if no node is reachable, and what
    `ClusterHandle.finish` raises.
    """
    if job is not None and (kept := whole_at_home(ctx, job)):
        return _replay(ctx, kept, ranks, last, on_lines)
    try:
        with ClusterHandle.partly_ready(ctx) as cluster, cluster.connect_reachable():
            chosen = cluster.job(job)
            ctx.folder.remember(chosen)
            merger = merger_of(ctx, chosen, _known(chosen, ranks))
            if last is not None:
                unseen, drop = merger_of(ctx, chosen, ()), lambda data: None
                chosen = Watch(cluster, chosen, merger=unseen, on_lines=drop, to_the_end=False).run()
                on_lines(last_lines(merger.replay() if follow else _pieces(merger), last))
            if follow or last is None:
                chosen = Watch(cluster, chosen, merger=merger, on_lines=on_lines, to_the_end=follow).run()
            if follow:
                return cluster.finish(chosen)
            for text in cluster.still_missing(chosen).values():
                ctx.say(text)
            ctx.folder.remember(chosen)
            return job_result(ctx, chosen)
    except (NotFoundError, NoNodes) as error:
        found = find_job(ctx, job)
        if found is None or saved_job(folder := results_dir(ctx, found.job.job)) is None:
            raise
        ctx.say(f"{error.message}; job {found.job.job} is shown from {folder}")
        return _replay(ctx, found.job, ranks, last, on_lines)


def _known(job: JobRecord, ranks: Collection[int]) -> Collection[int] | None:
    """Return the ranks of a job that are shown, None for all. Raises NotFoundError for ranks it has not."""
    missing = [f"rank {rank}" for rank in ranks if rank not in (known := _nodes(job))]
    if missing:
        nodes = ", ".join(map(node_name, sorted(set(known.values()))))
        raise NotFoundError(
            f"job {job.job} has no {', no '.join(missing)}", f"it has {len(known)} ranks, on {nodes}"
        )
    return ranks or None


def _replay(
    ctx: Context, job: JobRecord, ranks: Collection[int], last: int | None, on_lines: Callable[[bytes], None]
) -> dict[str, Any]:
    """Show the lines of a job that were fetched."""
    pieces = _pieces(merger_of(ctx, job, _known(job, ranks)))
    for lines in pieces if last is None else [last_lines(pieces, last)]:
        on_lines(lines)
    return job_result(ctx, job)


def _pieces(merger: Merger) -> Iterator[bytes]:
    yield from merger.replay()
    yield merger.finish()


def merger_of(ctx: Context, job: JobRecord, shown: Collection[int] | None = None) -> Merger:
    """Return what merges a job's logs: all ranks are written to files, those in `shown` are shown."""
    return Merger(_nodes(job), folder=results_dir(ctx, job.job) / "logs", job=job.job, shown=shown)


def _nodes(job: JobRecord) -> dict[int, int]:
    return {rank.rank: rank.node for rank in job.ranks}
