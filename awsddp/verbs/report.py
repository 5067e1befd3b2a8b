"""report: a job as a page, from the files of this machine; all jobs of all clusters as a table of pages."""

import contextlib
import os
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from awsddp import billing, page
from awsddp.cluster import Job, RankProgress, RankUsage
from awsddp.errors import ConfigError, NotFoundError
from awsddp.jobs import results
from awsddp.jobs.supervisor import metrics
from awsddp.nodes.results import PART
from awsddp.report import iso, json_lines
from awsddp.spec import NOT_SHOWN, option_words
from awsddp.state import Folder, write_private
from awsddp.timeline import timeline
from awsddp.verbs.advice import job_words
from awsddp.verbs.context import Context
from awsddp.verbs.ledger import Past, pasts
from awsddp.verbs.results import job_result, metrics_of, results_dir

PAGE = "report.html"
LOG_BYTES = 64 << 10
"""How much of the end of a rank's log is read for the page."""
LOG_LINES = 40
CALLS_CHARACTERS = 16 << 20
"""How much of a cluster's calls is read."""
_SIZE = ("cluster.nodes", "cluster.instance_type", "cluster.gpus")


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A job that this machine knows: its results directory, and its cluster where there is a ledger of it."""

    job: Job
    folder: Path
    past: Past | None


def report(ctx: Context, *, job: str, to: Path | None = None) -> dict[str, Any]:
    """Write the page of a job (runs/JOB/report.html, or `to`) and return its document.

    Nobody is asked: it shows what was fetched, the ledger of its cluster and the calls made for it. Raises
    NotFoundError for a job that this machine does not know, ConfigError where the page cannot be written.
    """
    found = [one for one in _known(ctx) if one.job.job == job]
    if not found:
        raise NotFoundError(
            f"no job {job}",
            f"searched {results_dir(ctx, 'x').parent}/ and the clusters of {ctx.home}",
            "awsddp report   # all jobs",
        )
    own = results_dir(ctx, job).absolute()
    chosen = next((one for one in found if one.folder == own), found[-1])
    return _write(ctx, chosen, to)


def reports(ctx: Context, *, to: Path | None = None) -> tuple[list[dict[str, Any]], Path]:
    """Write the page of every job, and one ($AWSDDP_HOME/report.html, or `to`) that links to them.

    Returns a row for each job, the oldest first, and that page. Pages that are newer than their job are kept.
    A job has no page ("") where its results directory is gone or cannot be written.
    """
    target = (to or ctx.home / PAGE).absolute()
    rows = []
    for known in sorted(_known(ctx), key=lambda one: one.job.started or ""):
        own, written = known.folder / PAGE, known.folder / "job.json"
        current = written.is_file() and own.is_file() and own.stat().st_mtime >= written.stat().st_mtime
        if not current and known.folder.is_dir():  # a folder that the user deleted stays away
            with contextlib.suppress(ConfigError):
                _write(ctx, known, None)
        job = known.job
        rows.append(
            {
                "job": job.job,
                "state": job.state,
                "cause": job.cause.kind if job.cause else None,
                "cluster": known.past.name if known.past else None,
                "instance_type": job.instance_type,
                "nodes": len(job.nodes),
                "world_size": job.world_size,
                "started": job.started,
                "ended": job.ended,
                "seconds": _seconds(job),
                "job_usd": _job_usd(job),
                "page": str(own) if own.is_file() else "",
            }
        )
    links = [
        row | {"href": quote(os.path.relpath(str(row["page"]), target.parent)) if row["page"] else ""}
        for row in rows
    ]
    write_private(target, page.jobs_page(links).encode())
    return rows, target


def _write(ctx: Context, known: _Known, to: Path | None) -> dict[str, Any]:
    """Write the page of a job and return its document."""
    target = (to or known.folder / PAGE).absolute()
    rows = [row for node in _nodes(known.job) for row in _node_rows(known, node)]
    document = _document(ctx, known, rows) | {"page": str(target)}
    write_private(target, page.job_page(document, rows).encode())
    return document


def _document(ctx: Context, known: _Known, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a job as the `report` document."""
    job, folder, past = known.job, known.folder, known.past
    now = datetime.now(UTC).replace(microsecond=0)
    progress = _progress(known)
    slowest = results.slowest_rank(progress)
    job = replace(job, progress=progress, slowest_rank=slowest, usage=_usage(known) or job.usage)
    files = [(str(path.relative_to(folder)), path.stat().st_size) for path in sorted(_files(folder))]
    began, steps = timeline(job, past.rows if past else (), _calls(past))
    last = metrics_of(folder / "node0" / "run" / "metrics.jsonl")
    return job_result(ctx, job, target=folder) | {
        "files": files,
        "metrics": last[-1] if last else None,
        "measures": {
            key: found for key in ("loss", "accuracy") if (found := page.extremes(rows, key)) is not None
        },
        "cluster": past.name if past else None,
        "target": _launched(past).get("target"),
        "region": _launched(past).get("region"),
        "seconds": _seconds(job),
        "timeline_from": iso(began),
        "timeline": [asdict(step) for step in steps],
        "costs": _costs(job, past, now),
        "made": iso(now),
        "excerpts": list(_excerpts(known, job.slowest_rank)),
        "again": _again(job, past),
    }


def _known(ctx: Context) -> Iterator[_Known]:
    """Yield the jobs of this machine's clusters, and those whose results are in the project's folder."""
    made = list(pasts(ctx.home))
    remembered = {
        (past.folder, job.job): job
        for past in made
        if (record := Folder(ctx.home, past.name).read(newer=True)) and past.folder.parent.name == "clusters"
        for job in record.jobs
    }
    folders: dict[Path, Past | None] = {
        Path(row["home"]): past
        for past in made
        for row in past.rows
        if row["event"] == "train" and "home" in row
    }
    for path in results_dir(ctx, "x").parent.absolute().glob("*/job.json"):
        folders.setdefault(path.parent, None)
    for folder, past in folders.items():
        job = _at_home(folder) or (remembered.get((past.folder, folder.name)) if past else None)
        if job is not None:
            ids = {one.instance_id for one in job.nodes}
            yield _Known(
                job=job,
                folder=folder,
                past=past or next((one for one in made if not ids.isdisjoint(one.instances)), None),
            )


def _at_home(folder: Path) -> Job | None:
    with contextlib.suppress(ConfigError, OSError):
        return results.decode((folder / "job.json").read_bytes())
    return None


def _nodes(job: Job) -> list[int]:
    return sorted({rank.node for rank in job.ranks})


def _metrics_file(known: _Known, node: int) -> Path:
    return known.folder / f"node{node}" / "run" / "metrics.jsonl"


def _node_rows(known: _Known, node: int) -> Iterator[dict[str, Any]]:
    """Yield the rows that the ranks of a node wrote; a row that names no rank is of its first one."""
    ranks = [rank.rank for rank in known.job.ranks if rank.node == node]
    for row in metrics_of(_metrics_file(known, node)):
        yield {"rank": ranks[0]} | row


def _progress(known: _Known) -> tuple[RankProgress, ...]:
    """Return how far the ranks came, by the same rule as `status` while the job runs."""
    found = []
    for node in _nodes(known.job):
        ranks = [rank.rank for rank in known.job.ranks if rank.node == node]
        found += metrics.progress(_metrics_file(known, node), ranks)
    return tuple(msgspec.convert(one, RankProgress) for one in found)


def _usage(known: _Known) -> tuple[RankUsage, ...]:
    """Return what the ranks used when their nodes last sampled it."""
    found: list[RankUsage] = []
    for node in _nodes(known.job):
        own = {rank.rank for rank in known.job.ranks if rank.node == node}
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            data = (known.folder / "logs" / f"samples{node}.json").read_bytes()
            sampled = msgspec.json.decode(data, type=dict[str, tuple[RankUsage, ...]])
            found += [one for one in sampled.get("ranks", ()) if one.rank in own]
    return tuple(found)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / PAGE]
    return [path for path in files if folder / PART not in path.parents]


def _calls(past: Past | None) -> list[dict[str, Any]]:
    file = past.folder / "calls.jsonl" if past else None
    if file is None or not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace") as stream:
        return json_lines(stream.read(CALLS_CHARACTERS))


def _launched(past: Past | None) -> Mapping[str, Any]:
    """Return the ledger's first row of a launch; an empty one where there is none."""
    rows = past.rows if past else []
    return next((row for row in rows if row["event"] == "launched"), {})


def _seconds(job: Job) -> float | None:
    """Return how long the job ran, by its record; until now for one that runs."""
    if job.started is None:
        return None
    ended = datetime.fromisoformat(job.ended) if job.ended else datetime.now(UTC)
    return max(0.0, (ended - datetime.fromisoformat(job.started)).total_seconds())


def _job_usd(job: Job) -> float | None:
    """Return what the job's nodes cost while it ran."""
    seconds, price = _seconds(job), job.price_usd_per_hour
    return None if seconds is None or price is None else round(seconds / 3600 * price, 4)


def _costs(job: Job, past: Past | None, now: datetime) -> dict[str, float | None] | None:
    """Return what the job and its whole cluster cost until now, by part, at list price."""
    bill = billing.account(past.rows, now) if past else None
    if bill is None:
        return None
    parts = {f"{part}_usd": usd for part, usd in bill.parts_usd.items()}
    return {"job_usd": _job_usd(job), **parts, "cluster_usd": bill.cost_usd}


def _excerpts(known: _Known, slowest: int | None) -> Iterator[dict[str, Any]]:
    """Yield the last lines of the rank that failed first, beside its cause, of the slowest, and the first."""
    ranks = {rank.rank: rank.node for rank in known.job.ranks}
    cause = known.job.cause
    failed = cause.rank if cause else None
    for rank in dict.fromkeys((failed, slowest, min(ranks, default=None))):
        if rank is None or rank not in ranks:
            continue
        lines = _last_lines(known.folder / "logs" / f"rank{rank}.log")
        if lines and not (rank == failed and cause and lines == list(cause.tail)):
            yield {"rank": rank, "node": ranks[rank], "lines": lines}


def _last_lines(log: Path) -> list[str]:
    if not log.is_file():
        return []
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_BYTES))
        text = stream.read(LOG_BYTES).decode("utf-8", "replace")
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return list(deque((line for line in lines if line), maxlen=LOG_LINES))


def _again(job: Job, past: Past | None) -> list[str]:
    """Return the commands that run the job again: its code, a cluster like its own, the job, the end."""
    launched = _launched(past)
    globals_ = [] if past is None or past.name == "default" else ["-c", past.name]
    up = ["awsddp", *globals_, "up", "--nodes", str(len(job.nodes))]
    up += ["--instance-type", job.instance_type] if job.instance_type else []
    up += ["--local"] if launched.get("target") == "local" else []
    for key, value in launched.get("asked", {}).items():
        up += option_words(key, value) if key not in (*_SIZE, *NOT_SHOWN) else []
    train = ["awsddp", *globals_, "train", *job_words(job)]
    code = [shlex.join(["git", "checkout", job.commit])] if job.commit else []
    return [*code, shlex.join(up), shlex.join(train), shlex.join(["awsddp", *globals_, "down"])]
