"""report: a job as a page, from the files of this machine."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from awsddp import page
from awsddp.errors import NotFoundError
from awsddp.jobs import results
from awsddp.jobs.supervisor import metrics
from awsddp.records import JobRecord, RankProgress, RankUsage
from awsddp.spec import NOT_SHOWN
from awsddp.state import write_private
from awsddp.verbs.advice import command_words, job_options, script_words
from awsddp.verbs.context import Context
from awsddp.verbs.jobs import FoundJob, find_job
from awsddp.verbs.ledger import Past
from awsddp.verbs.results import job_result, loss_rows, results_dir

PAGE = "report.html"
_SIZE = ("cluster.nodes", "cluster.instance_type", "cluster.gpus")


def report(ctx: Context, *, job: str | None = None) -> dict[str, Any]:
    """Write the page of a job, or the last one (runs/JOB/report.html), and return its document.

    No node gets a request: it shows what was fetched, and the ledger of its cluster. Raises NotFoundError for
    a job that this machine does not know, ConfigError where the page cannot be written.
    """
    chosen = find_job(ctx, job)
    if chosen is None:
        what = f"no job {job}" if job else "no jobs have run from this machine"
        where = f"searched {results_dir(ctx, 'x').parent}/ and the clusters of {ctx.home}"
        raise NotFoundError(what, where, "awsddp jobs   # all jobs")
    target = (chosen.folder / PAGE).absolute()
    rows = list(_rows(chosen))
    document = _document(ctx, chosen, rows) | {"page": str(target)}
    write_private(target, page.job_page(document, rows).encode())
    return document


def _document(ctx: Context, found: FoundJob, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a job as the `report` document."""
    job, launched = found.job, found.past.launched if found.past else {}
    progress = tuple(
        msgspec.convert(one, RankProgress)
        for node, ranks in _ranks(job).items()
        for one in metrics.progress(found.folder / f"node{node}" / "run" / "metrics.jsonl", ranks)
    )
    slowest = results.slowest_rank(progress)
    job = replace(job, progress=progress, slowest_rank=slowest, usage=_usage(found) or job.usage)
    return (
        job_result(ctx, job, folder=found.folder)
        | replace(found, job=job).document()
        | {
            "measures": page.measures(rows),
            "target": launched.get("target"),
            "region": launched.get("region"),
            "again": _again(job, found.past),
        }
    )


def _ranks(job: JobRecord) -> dict[int, list[int]]:
    """Return the ranks of a job by node."""
    nodes = sorted({rank.node for rank in job.ranks})
    return {node: [rank.rank for rank in job.ranks if rank.node == node] for node in nodes}


def _rows(found: FoundJob) -> Iterator[dict[str, Any]]:
    """Yield what the ranks wrote down; a row that names no rank is of the first one of its node."""
    for node, ranks in _ranks(found.job).items():
        for row in loss_rows(found.folder, node):
            yield {"rank": ranks[0]} | row


def _usage(found: FoundJob) -> tuple[RankUsage, ...]:
    """Return what the ranks used when their nodes last sampled it."""
    used: list[RankUsage] = []
    for node, ranks in _ranks(found.job).items():
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            data = (found.folder / "logs" / f"samples{node}.json").read_bytes()
            sampled = msgspec.json.decode(data, type=dict[str, tuple[RankUsage, ...]])
            used += [one for one in sampled.get("ranks", ()) if one.rank in ranks]
    return tuple(used)


def _again(job: JobRecord, past: Past | None) -> list[str]:
    """Return the commands that run the job again: its code, a cluster like its own, the job, the end."""
    launched = past.launched if past else {}
    awsddp = ["awsddp"] if past is None or past.name == "default" else ["awsddp", "-c", past.name]
    place = ["--region", launched["region"]] if launched.get("region") else []
    place = ["--local"] if launched.get("target") == "local" else place
    up: dict[str, object] = {"cluster.nodes": len(job.nodes)}
    up |= {"cluster.instance_type": job.instance_type} if job.instance_type else {}
    up |= {key: value for key, value in launched.get("asked", {}).items() if key not in (*_SIZE, *NOT_SHOWN)}
    lines = [["git", "checkout", job.commit]] if job.commit else []
    lines.append([*awsddp, *place, "up", *command_words("up", up)])
    asked = job_options(job)
    lines.append([*awsddp, "train", *command_words("train", asked), *script_words(asked)])
    return [shlex.join(line) for line in (*lines, [*awsddp, "down"])]
