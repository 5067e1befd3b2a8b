"""report: write a job's HTML page."""

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
from awsddp.model.node_answers import PRIVATE_FOLDER
from awsddp.model.records import JobRecord, RankUsage, merge_records
from awsddp.session.context import Session
from awsddp.session.next_steps import job_options
from awsddp.settings.loader import KEYS_NOT_RECORDED
from awsddp.settings.spec import OptionValue
from awsddp.settings.verbs import command_arguments, script_arguments
from awsddp.state import ClusterHistory, write_private
from awsddp.storage.results_dir import (
    group_ranks_by_node,
    make_job_result,
    read_metrics_with_loss,
    read_progress,
)

PAGE = "report.html"
_SIZE = ("cluster.nodes", "cluster.instance_type", "cluster.gpus")


def write_report(session: Session, *, job: str | None = None) -> JobReport:
    """Write the page runs/JOB/report.html of a job (default: the last job), and return the job's document.

    Uses the fetched results and the cluster's ledger, and sends no requests. Raises NotFoundError if this
    machine does not know the job, or ConfigError if the page cannot be written.
    """
    from awsddp.job import report_page

    view = JobRegistry(session).require(job)
    target = (view.folder / PAGE).absolute()
    rows = list(_read_rows(view))
    document = _make_document(session, view, rows, target)
    write_private(target, report_page.render_job_page(document, rows).encode())
    return document


def _make_document(
    session: Session, view: JobView, rows: Sequence[Mapping[str, Any]], file: Path
) -> JobReport:
    """Return the `report` document of a job; `file` is its page."""
    from awsddp.job import report_page

    job, launched = view.job, view.history and view.history.launch_row
    progress = read_progress(view.folder, job)
    slowest = job_reports.find_slowest_rank(progress)
    job = replace(job, progress=progress, slowest_rank=slowest, usage=_read_usage(view) or job.usage)
    return merge_records(
        JobReport,
        replace(view, job=job).as_listed_job(),
        make_job_result(session, job, folder=view.folder),
        measures=report_page.summarize_metrics(rows),
        target=launched and launched.target,
        region=launched and launched.region,
        again=tuple(_rerun_commands(job, view.history)),
        page=str(file),
    )


def _read_rows(view: JobView) -> Iterator[dict[str, Any]]:
    """Yield the rows of all ranks' metrics. A row without a rank gets the first rank of its node."""
    for node, ranks in group_ranks_by_node(view.job).items():
        for row in read_metrics_with_loss(view.folder, node):
            yield {"rank": ranks[0]} | row


def _read_usage(view: JobView) -> tuple[RankUsage, ...]:
    """Return the ranks' last usage samples."""
    usage: list[RankUsage] = []
    for node, ranks in group_ranks_by_node(view.job).items():
        for folder in (PRIVATE_FOLDER, "logs/"):  # older versions of awsddp fetched the samples to logs/
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                data = (view.folder / f"{folder}samples{node}.json").read_bytes()
                samples = msgspec.json.decode(data, type=dict[str, tuple[RankUsage, ...]])
                usage += [sample for sample in samples.get("ranks", ()) if sample.rank in ranks]
                break
    return tuple(usage)


def _rerun_commands(job: JobRecord, history: ClusterHistory | None) -> list[str]:
    """Return the commands that run the job again: check out its code, then `up`, `train` and `down`."""
    launched = history and history.launch_row
    awsddp = ["awsddp"] if history is None or history.name == "default" else ["awsddp", "-c", history.name]
    target_options = ["--region", launched.region] if launched and launched.region else []
    target_options = ["--local"] if launched and launched.target == "local" else target_options
    up: dict[str, OptionValue] = {"cluster.nodes": len(job.nodes)}
    up |= {"cluster.instance_type": job.instance_type} if job.instance_type else {}
    settings = (launched and launched.asked) or {}
    up |= {key: value for key, value in settings.items() if key not in (*_SIZE, *KEYS_NOT_RECORDED)}
    lines = [["git", "checkout", job.commit]] if job.commit else []
    lines.append([*awsddp, *target_options, "up", *command_arguments("up", up)])
    job_settings = {
        key: value for key, value in job_options(job).items() if key not in up or up[key] != value
    }
    lines.append(
        [*awsddp, "train", *command_arguments("train", job_settings), *script_arguments(job_settings)]
    )
    return [shlex.join(line) for line in (*lines, [*awsddp, "down"])]
