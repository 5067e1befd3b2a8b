"""logs: a job's lines, from its first on; with `follow` to its end, then its results are fetched."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Any

from awsddp.cluster import Job
from awsddp.errors import ConfigError, NotFoundError, UsageError
from awsddp.jobs.logs import Merger
from awsddp.report import node_name
from awsddp.spec import seconds
from awsddp.verbs.cluster import ClusterHandle, NoNodes
from awsddp.verbs.context import Context
from awsddp.verbs.results import job_at_home, job_result, results_dir, whole_at_home
from awsddp.verbs.watching import Watch


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Which lines are shown: of these ranks and nodes (empty: all), said `since`, those that match `grep`."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    since: str | None = None
    grep: str | None = None

    def of(self, job: Job) -> set[int]:
        """Return the ranks of a job that are shown. Raises NotFoundError for ranks and nodes it has not."""
        known = _nodes(job)
        missing = [f"rank {rank}" for rank in self.ranks if rank not in known]
        missing += [node_name(node) for node in self.nodes if node not in known.values()]
        if missing:
            raise NotFoundError(
                f"job {job.job} has no {', no '.join(missing)}",
                f"it has {len(known)} ranks, on {', '.join(map(node_name, sorted(set(known.values()))))}",
            )
        return {
            rank
            for rank, node in known.items()
            if (not self.ranks or rank in self.ranks) and (not self.nodes or node in self.nodes)
        }

    def filtered(self, on_lines: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return `on_lines`, given the matching lines alone. Raises UsageError for a pattern that is none."""
        if self.grep is None:
            return on_lines
        try:
            pattern = re.compile(self.grep.encode())
        except re.error as error:
            raise UsageError(
                f"--grep {self.grep}: invalid pattern", str(error), "escape it with \\"
            ) from error

        def only(data: bytes) -> None:
            kept = [line for line in data.splitlines(keepends=True) if pattern.search(line)]
            if kept:
                on_lines(b"".join(kept))

        return only


EVERYTHING = Shown()


def logs(
    ctx: Context,
    *,
    job: str | None,
    follow: bool,
    shown: Shown = EVERYTHING,
    on_lines: Callable[[bytes], None],
) -> dict[str, Any]:
    """Show the lines of a job, and return it as the `train` document.

    With `follow` to the job's end; then its results are fetched. A fetched job needs no node; a part that is
    missing is shown from the nodes that are reachable. Raises NotFoundError for an unknown job, NoNodes if no
    node is reachable, and what `ClusterHandle.finish` raises.
    """
    on_lines = shown.filtered(on_lines)
    since = None if shown.since is None else moment(shown.since, now=datetime.now()).timestamp()
    if job is not None and (kept := whole_at_home(ctx, job)):
        return _replay(ctx, kept, shown, since, on_lines)
    try:
        with ClusterHandle.partly_ready(ctx) as cluster, cluster.connect_reachable():
            chosen = cluster.job(job)
            ctx.folder.remember(chosen)
            merger = merger_of(ctx, chosen, shown.of(chosen), since=since)
            chosen = Watch(cluster, chosen, merger=merger, on_lines=on_lines, to_the_end=follow).run()
            if follow:
                return cluster.finish(chosen)
            for text in cluster.still_missing(chosen).values():
                ctx.say(text)
            ctx.folder.remember(chosen)
            return job_result(ctx, chosen)
    except (NotFoundError, NoNodes) as error:
        kept = job_at_home(ctx, job)
        if kept is None:
            raise
        ctx.say(f"{error.message}; job {kept.job} is shown from {results_dir(ctx, kept.job)}")
        return _replay(ctx, kept, shown, since, on_lines)


def _replay(
    ctx: Context, job: Job, shown: Shown, since: float | None, on_lines: Callable[[bytes], None]
) -> dict[str, Any]:
    """Show the lines of a job that were fetched."""
    merger = merger_of(ctx, job, shown.of(job), since=since)
    for lines in merger.replay():
        on_lines(lines)
    on_lines(merger.finish())
    return job_result(ctx, job)


def moment(text: str, *, now: datetime) -> datetime:
    """Return the moment that --since names, in local time: 10m ago, 14:30 (the last one), or a date and time.

    Raises UsageError.
    """
    try:
        return now - timedelta(seconds=seconds(text))
    except (ConfigError, OverflowError):
        pass
    try:
        clock = datetime.combine(now, time.fromisoformat(text))
        return clock if clock.timestamp() <= now.timestamp() else clock - timedelta(days=1)
    except ValueError:
        pass
    try:
        named = datetime.fromisoformat(text)
        named.timestamp()
        return named
    except (ValueError, OverflowError) as error:
        why = "neither a duration nor a time"
        raise UsageError(f"--since {text}: {why}", "", "use 10m, 2h, 14:30 or 2026-11-21T14:30") from error


def merger_of(
    ctx: Context, job: Job, shown: Collection[int] | None = None, *, since: float | None = None
) -> Merger:
    """Return what merges a job's logs: all ranks are written to files, those in `shown` are shown."""
    folder = results_dir(ctx, job.job) / "logs"
    return Merger(_nodes(job), folder=folder, job=job.job, shown=shown, since=since)


def _nodes(job: Job) -> dict[int, int]:
    return {rank.rank: rank.node for rank in job.ranks}
