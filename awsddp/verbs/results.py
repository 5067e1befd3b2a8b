"""A job's results at home: fetched from its nodes, and what was written down there read again."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp import answers, report
from awsddp.answers import Manifest
from awsddp.cluster import Job
from awsddp.errors import ConfigError, NodeError
from awsddp.jobs import launchers, results
from awsddp.jobs.selection import NodeFile, exclude_patterns, name_at_home, over_limit
from awsddp.nodes.results import Fetched, Wanted
from awsddp.report import Event, amount, node_name, size_text
from awsddp.spec import size_of
from awsddp.verbs.context import Context
from awsddp.verbs.node_jobs import ask
from awsddp.verbs.nodes import Ready
from awsddp.verbs.parts import holders, missing

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet

FETCH_S = 600.0
"""How long another client of this machine may be at it, bringing the same results home."""
MANIFEST_S = 300.0
"""How long a node may take to list its results."""
HASHED_A_SECOND = 20e6
"""Bytes that the slowest disk of a node hashes in a second."""
NAMED = 10
"""How many files are named one by one."""


class Owed(NamedTuple):
    """What a job made and a node still holds: its path there, its size in bytes, and why."""

    node: int
    path: str
    size: int
    why: str


def place_of(ctx: Context, job: str) -> Path:
    """Return the folder at home that receives a job's results."""
    return Path(ctx.job.sync.workdir) / ctx.job.job.results / job


class Unfetched(NodeError):
    """A part of a job's results is still on the nodes; the rest is at home."""


def bring_home(
    ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, *, to: Path | None = None
) -> dict[int, Fetched]:
    """Fetch a job's results from its nodes, verified, and only then let the nodes forget that they owe them.

    Of the nodes those that can be asked now: the job that is written down beside says what is missing. One
    client at a time does so. Over job.results_limit `ctx.agree` decides. Raises Unfetched where something
    that the job made stays on the nodes, NodeError where a node does not send what it said, ConfigError where
    home has no room.
    """
    job = replace(job, missing=tuple(still_missing(ctx, cluster, fleet, job, to=to)))
    with ctx.folder.lock("fetch", part="results", wait_s=FETCH_S):
        remember(ctx, job)
        return _bring_home(ctx, cluster, fleet, job, to if to is not None else place_of(ctx, job.job))


def _bring_home(ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, target: Path) -> dict[int, Fetched]:
    from awsddp.aws.poweroff import release
    from awsddp.nodes.sync import WantedLink, pull

    used = holders(fleet, job)
    manifests = _manifests(ctx, fleet, job, used)
    files, links = name_at_home(manifests)
    files, excess = _within_limit(ctx, job, files, target)
    wanted, unreadable = _hashed(fleet, files, used)
    unreadable += _skipped(ctx, manifests)
    job = replace(job, missing=tuple(sorted({*job.missing, *(one.node for one in (*excess, *unreadable))})))
    came = pull(
        wanted,
        target,
        ssh_config=ctx.folder.ssh_config,
        links=[WantedLink(home=link.home, target=link.target) for link in links],
        also={"job.json": results.encode(job)},
        on_event=ctx.on_event,
    )
    _draw(target)
    if excess or unreadable:
        raise _unfetched(job, excess, unreadable)
    if job.state != "running":
        with tagging(ctx):
            release(cluster.aws, [node for node in cluster.nodes if node.node in used], job.job)
    return came


def _manifests(ctx: Context, fleet: "Fleet", job: Job, used: Sequence[int]) -> dict[int, Manifest]:
    request = launchers.manifest_request(
        job.job, outputs=ctx.job.job.outputs, exclude=exclude_patterns(ctx.job.job.exclude)
    )
    ranks = {node: [rank.rank for rank in job.ranks if rank.node == node] for node in used}
    told = ask(fleet, dict.fromkeys(used, request), timeout_s=MANIFEST_S)
    return {node: answers.manifest(answer, node=node, ranks=ranks[node]) for node, answer in told.items()}


def _within_limit(
    ctx: Context, job: Job, files: list[NodeFile], target: Path
) -> tuple[list[NodeFile], list[Owed]]:
    """Return what is fetched, and what exceeds job.results_limit, unless it is agreed to."""
    limit = ctx.job.job.results_limit

    def is_home(one: NodeFile) -> bool:
        try:
            return (target / one.home).lstat().st_size == one.file.size
        except OSError:
            return False

    excess = over_limit(files, size_of(limit), is_home=is_home)
    if not excess or ctx.agree(
        f"The results of {job.job} exceed job.results_limit ({limit}) by "
        f"{amount(len(excess), sum(one.file.size for one in excess))}.\nFetch all of it?"
    ):
        return files, []
    left_out = {(one.node, one.home) for one in excess}
    why = f"over job.results_limit ({limit}), the smaller files came first"
    return [one for one in files if (one.node, one.home) not in left_out], [
        Owed(one.node, one.file.path, one.file.size, why) for one in reversed(excess)
    ]


def _hashed(
    fleet: "Fleet", files: list[NodeFile], used: Sequence[int]
) -> tuple[dict[int, list[Wanted]], list[Owed]]:
    """Return what is to be fetched, with its hashes; the nodes are asked for those that did not come yet."""
    unhashed = {node: [one for one in files if one.node == node and one.file.sha256 is None] for node in used}
    requests = {
        node: launchers.hashes_request([one.file.path for one in some])
        for node, some in unhashed.items()
        if some
    }
    slowest = max((sum(one.file.size for one in some) for some in unhashed.values()), default=0)
    told = ask(fleet, requests, timeout_s=MANIFEST_S + slowest / HASHED_A_SECOND)
    found = {
        (node, one.home): entry
        for node, answer in told.items()
        for one, entry in zip(unhashed[node], answers.hashes(answer), strict=True)
    }
    wanted: dict[int, list[Wanted]] = {node: [] for node in used}
    owed = []
    for one in files:
        entry = found.get((one.node, one.home))
        sha256 = one.file.sha256 if entry is None else entry.sha256
        if sha256 is None:
            why = entry.why if entry is not None else "it has no hash"
            owed.append(Owed(one.node, one.file.path, one.file.size, why))
            continue
        size = one.file.size if entry is None else entry.size
        wanted[one.node].append(
            Wanted(remote=one.file.path, home=one.home, size=size, sha256=sha256, data=one.file.data)
        )
    return wanted, owed


def _skipped(ctx: Context, manifests: Mapping[int, Manifest]) -> list[Owed]:
    """Name what stays on the nodes, count what job.exclude matches, and return what is still owed."""
    files = sum(one.excluded.files for one in manifests.values())
    if files:
        size = sum(one.excluded.size for one in manifests.values())
        ctx.say(f"{amount(files, size)}: matched by job.exclude, stays on the nodes")
    skipped = [(node, one) for node, manifest in manifests.items() for one in manifest.skipped]
    named = [(node, one) for node, one in skipped if not one.owed]
    for node, one in named[:NAMED]:
        ctx.on_event(Event(f"not fetched: {one.path}: {one.why}", node_name(node)))
    if len(named) > NAMED:
        ctx.say(f"not fetched: {len(named) - NAMED} more of the kind")
    return [Owed(node, one.path, one.size, one.why) for node, one in skipped if one.owed]


def _unfetched(job: Job, excess: Sequence[Owed], unreadable: Sequence[Owed]) -> Unfetched:
    owed = [*excess, *unreadable]
    lines = [f"{node_name(one.node)}: {one.path} ({size_text(one.size)}): {one.why}" for one in owed[:NAMED]]
    if len(owed) > NAMED:
        lines.append(f"and {len(owed) - NAMED} more")
    fetch = f"awsddp fetch --job {job.job}"
    ways = ["awsddp exec 'sudo chown -R $USER ~/awsddp/work'   # then fetch again"] if unreadable else []
    if excess:
        enough = math.ceil(sum(one.size for one in excess) / 1e9)
        ways += [
            f"{fetch} --output PATH   # one of them, or a folder",
            f"{fetch} -o job.results_limit={enough}GB   # all of them",
        ]
    return Unfetched(
        f"{amount(len(owed), sum(one.size for one in owed))} of the results of {job.job} are not home",
        "\n".join(lines),
        "\n".join([*ways, f"{fetch} -o 'job.exclude=[\"PATTERN\"]'   # leave them on the nodes"]),
    )


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
    return report.json_lines(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else []


def _data(rows: list[dict[str, Any]]) -> str | None:
    """Return what the program says it was tested on: the real set, or data made for a rehearsal."""
    return next((row["data"] for row in reversed(rows) if isinstance(row.get("data"), str)), None)


def job_result(ctx: Context, job: Job, *, target: Path | None = None) -> dict[str, Any]:
    """Return a job as the document of `train`, with the accuracy that its program wrote down.

    `fetched` tells whether its results are at home since it has ended.
    """
    rows = metrics(target if target is not None else place_of(ctx, job.job))
    found = {
        "accuracy": report.last_value(rows, "accuracy"),
        "data": _data(rows),
        "fetched": ended_at_home(ctx, job.job) is not None,
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
