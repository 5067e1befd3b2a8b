"""report: the page of a job."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from awsddp.agent_client import job_reports
from awsddp.job.registry import JobRegistry, JobView
from awsddp.model.documents import JobReport
from awsddp.model.node_answers import OURS
from awsddp.model.records import JobRecord, RankUsage, widened
from awsddp.session.context import Session
from awsddp.session.next_steps import job_options
from awsddp.settings.loader import NOT_SHOWN
from awsddp.settings.spec import Given
from awsddp.settings.verbs import command_words, script_words
from awsddp.state import Past, write_private
from awsddp.storage.results_dir import job_result, loss_rows, ranks_of, written_progress

PAGE = "report.html"
_SIZE = ("cluster.nodes", "cluster.instance_type", "cluster.gpus")


def write_report(session: Session, *, job: str | None = None) -> JobReport:
    """Write the page of a job, or the last one (runs/JOB/report.html), and return its document.

    No node gets a request: it shows what was fetched, and the ledger of its cluster. Raises NotFoundError for
    a job that this machine does not know, ConfigError where the page cannot be written.
    """
    from awsddp.job import report_page

    chosen = JobRegistry(session).require(job)
    target = (chosen.folder / PAGE).absolute()
    rows = list(_rows(chosen))
    found = _page_of(session, chosen, rows, target)
    write_private(target, report_page.job_page(found, rows).encode())
    return found


def _page_of(session: Session, found: JobView, rows: Sequence[Mapping[str, Any]], file: Path) -> JobReport:
    """Return a job as the `report` document; `file` is its page."""
    from awsddp.job import report_page

    job, launched = found.job, found.past and found.past.launched
    progress = written_progress(found.folder, job)
    slowest = job_reports.slowest_rank(progress)
    job = replace(job, progress=progress, slowest_rank=slowest, usage=_usage(found) or job.usage)
    return widened(
        JobReport,
        replace(found, job=job).listed(),
        job_result(session, job, folder=found.folder),
        measures=report_page.measures(rows),
        target=launched and launched.target,
        region=launched and launched.region,
        again=tuple(_again(job, found.past)),
        page=str(file),
    )


def _rows(found: JobView) -> Iterator[dict[str, Any]]:
    """Yield what the ranks wrote down; a row that names no rank is of the first one of its node."""
    for node, ranks in ranks_of(found.job).items():
        for row in loss_rows(found.folder, node):
            yield {"rank": ranks[0]} | row


def _usage(found: JobView) -> tuple[RankUsage, ...]:
    """Return what the ranks used when their nodes last sampled it."""
    used: list[RankUsage] = []
    for node, ranks in ranks_of(found.job).items():
        for place in (OURS, "logs/"):  # there an older awsddp fetched it
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                data = (found.folder / f"{place}samples{node}.json").read_bytes()
                sampled = msgspec.json.decode(data, type=dict[str, tuple[RankUsage, ...]])
                used += [one for one in sampled.get("ranks", ()) if one.rank in ranks]
                break
    return tuple(used)


def _again(job: JobRecord, past: Past | None) -> list[str]:
    """Return the commands that run the job again: its code, a cluster like its own, the job, the end."""
    launched = past and past.launched
    awsddp = ["awsddp"] if past is None or past.name == "default" else ["awsddp", "-c", past.name]
    place = ["--region", launched.region] if launched and launched.region else []
    place = ["--local"] if launched and launched.target == "local" else place
    up: dict[str, Given] = {"cluster.nodes": len(job.nodes)}
    up |= {"cluster.instance_type": job.instance_type} if job.instance_type else {}
    asked_for = (launched and launched.asked) or {}
    up |= {key: value for key, value in asked_for.items() if key not in (*_SIZE, *NOT_SHOWN)}
    lines = [["git", "checkout", job.commit]] if job.commit else []
    lines.append([*awsddp, *place, "up", *command_words("up", up)])
    asked = {key: value for key, value in job_options(job).items() if key not in up or up[key] != value}
    lines.append([*awsddp, "train", *command_words("train", asked), *script_words(asked)])
    return [shlex.join(line) for line in (*lines, [*awsddp, "down"])]
