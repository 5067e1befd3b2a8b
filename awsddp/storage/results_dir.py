"""A job's local results folder, with the job's record, metrics, progress and missing parts."""

import contextlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import convert

from awsddp.agent.manifest import EVENTS
from awsddp.agent_client import job_reports
from awsddp.errors import AwsddpError, ConfigError
from awsddp.model import metric_rows
from awsddp.model.documents import JobDocument
from awsddp.model.records import ACTIVE, ENDED_STATES, OLDER_JOBS, JobRecord, RankProgress, merge_records
from awsddp.session.context import ConnectedCluster, Session
from awsddp.settings.values import parse_s3_uri
from awsddp.storage.checkpoints import find_newest_checkpoint
from awsddp.util.formatting import node_name


def find_missing_parts(connected: ConnectedCluster, job: JobRecord) -> dict[int, str]:
    """Return {node's number in the job: reason} for the parts of a job that cannot be fetched now."""
    connected_ids = {
        connected.fleet.endpoints[node].instance_id for node in connected.fleet.nodes_of_job(job)
    }
    existing = {node.instance_id: node for node in (*connected.cluster.nodes, *connected.cluster.excluded)}
    reasons = {}
    for job_node in job.nodes:
        node, label = (
            existing.get(job_node.instance_id),
            f"{node_name(job_node.node)} ({job_node.instance_id})",
        )
        if job_node.instance_id in connected_ids:
            continue
        if node is None:
            reasons[job_node.node] = f"{label} is gone; {_lost(job)}"
        elif node.state in ENDED_STATES:
            fate = f"its part of job {job.job} is not on this machine: another client may have fetched it"
            fate = _lost(job) if job.job in node.unfetched else fate
            reasons[job_node.node] = f"{label} is {node.state}; {fate}"
        elif node.state != "running":
            reasons[job_node.node] = f"{label} is {node.state}; it holds its part of job {job.job}"
        else:
            failure = connected.fleet.failures.get(node.node)
            why = "it is being prepared" if failure is None else failure.summary
            reasons[job_node.node] = f"{label} holds its part of job {job.job}: {why}"
    return reasons


def _lost(job: JobRecord) -> str:
    """Return a string that says whether a lost node's part of a job was saved, and how to fetch it."""
    if job.save_to is None:
        return f"its part of job {job.job} is lost"
    saved = f"the saved files of its part of job {job.job} are at {job.save_to}/{job.job}"
    return f"{saved}: awsddp fetch {job.save_to}/{job.job}"


def find_unfetched_parts(connected: ConnectedCluster, job: JobRecord) -> dict[int, str]:
    """Return {node's number in the job: reason} for the parts that cannot be fetched now, or {} if all are
    fetched."""
    return {} if is_fetched(connected.session.results / job.job, job) else find_missing_parts(connected, job)


MAX_METRICS_CHARACTERS = 64 << 20
"""The maximum number of characters read from a metrics file."""
MAX_EVENT_BYTES = 16 << 20
"""The maximum number of bytes read from an event file."""


def write_loss_plot(target: Path) -> None:
    """Write loss.svg with node 0's loss, if its metrics have a loss."""
    from awsddp.storage import loss_plot

    rows = read_metrics(target)
    data = f", {name}" if (name := _data_name(rows)) else ""
    plot = loss_plot.plot_loss(rows, title=f"training loss, {target.name}{data}")
    if plot is not None:
        (target / "loss.svg").write_text(plot, encoding="utf-8")


def read_metrics(target: Path, node: int = 0) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl in a node's run folder, or [] if there is no file."""
    file = target / f"node{node}" / "run" / "metrics.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace") as stream:
        return metric_rows.parse_json_lines(stream.read(MAX_METRICS_CHARACTERS))


def read_metrics_with_loss(target: Path, node: int) -> list[dict[str, Any]]:
    """Return a node's metrics; if they have no loss, add the rows in the node's TensorBoard event files."""
    from awsddp.storage import tensorboard

    rows = read_metrics(target, node)
    if metric_rows.read_last_value(rows, "loss") is None:
        for file in sorted((target / f"node{node}").rglob(f"{EVENTS}*")):
            with contextlib.suppress(OSError), file.open("rb") as stream:
                rows += tensorboard.read_loss_rows(stream.read(MAX_EVENT_BYTES))
    return rows


def group_ranks_by_node(job: JobRecord) -> dict[int, list[int]]:
    """Return a dict that maps each of a job's nodes to its ranks."""
    nodes = sorted({rank.node for rank in job.ranks})
    return {node: [rank.rank for rank in job.ranks if rank.node == node] for node in nodes}


def read_progress(folder: Path, job: JobRecord) -> tuple[RankProgress, ...]:
    """Return each rank's progress from the metrics in a results folder."""
    from awsddp.agent import metrics

    return tuple(
        convert(rank_progress.to_json(), RankProgress)
        for node, ranks in group_ranks_by_node(job).items()
        for rank_progress in metrics.read_progress(folder / f"node{node}" / "run" / "metrics.jsonl", ranks)
    )


def get_job_progress(folder: Path, job: JobRecord) -> RankProgress:
    """Return a job's progress, which is the progress of the first rank with a loss.

    The progress is taken from the job's record or, if the record has none, from the results. If no rank has a
    loss, loss and step are taken from the last row of the TensorBoard event files.
    """
    from awsddp.storage import tensorboard

    progress = job.progress or read_progress(folder, job) or (RankProgress(rank=0),)
    first = next((rank for rank in progress if rank.loss is not None), progress[0])
    for node in group_ranks_by_node(job) if first.loss is None else ():
        for file in sorted((folder / f"node{node}").rglob(f"{EVENTS}*"), reverse=True):
            with contextlib.suppress(OSError), file.open("rb") as stream:
                if rows := tensorboard.read_loss_rows(tensorboard.cut_middle(stream.read(MAX_EVENT_BYTES))):
                    return replace(first, loss=rows[-1]["loss"], step=int(rows[-1]["step"]))
    return first


def _data_name(rows: list[dict[str, Any]]) -> str | None:
    """Return the data set that the metrics name: the real one, or data generated for a rehearsal."""
    return next((row["data"] for row in reversed(rows) if isinstance(row.get("data"), str)), None)


def make_job_result(session: Session, job: JobRecord, *, folder: Path | None = None) -> JobDocument:
    """Return a job's `train` document, with the loss and accuracy from its metrics.

    `folder` has the job's results. The default is the folder into which the results are fetched. In the
    document, `missing` has the nodes whose results are missing.
    """
    folder = folder or session.results / job.job
    recorded, rows = read_ended_job(folder), read_metrics(folder)
    accuracies = (
        metric_rows.read_last_value(read_metrics(folder, node), "accuracy")
        for node in group_ranks_by_node(job) or (0,)
    )
    checkpoint = find_newest_checkpoint(folder) if job.state not in ACTIVE else None
    return merge_records(
        JobDocument,
        job,
        get_job_progress(folder, job),
        accuracy=next((value for value in accuracies if value is not None), None),
        data=_data_name(rows),
        fetched=is_fetched(folder, job),
        checkpoint=f"{job.home}/{checkpoint.parts[0].relative_to(folder.resolve())}" if checkpoint else None,
        missing=recorded.missing if recorded is not None else job.missing,
    )


def read_job(folder: Path) -> JobRecord | None:
    """Return the job from job.json in a results folder, or None if the file is missing or damaged."""
    with contextlib.suppress(ConfigError, OSError):
        return job_reports.decode_job((folder / "job.json").read_bytes())
    return None


def read_ended_job(folder: Path) -> JobRecord | None:
    """Return the job from job.json in a results folder, or None if it had not ended when it was fetched."""
    job = read_job(folder)
    return job if job is not None and job.state not in ACTIVE else None


def is_fetched(folder: Path, job: JobRecord) -> bool:
    """Return True if a folder has all of a job's results, fetched after the job ended.

    Results of a job with the same name on other instances do not count.
    """
    recorded = read_ended_job(folder)
    return recorded is not None and not recorded.missing and recorded.nodes == job.nodes


def refuse_other_job(session: Session, job: JobRecord, *, strict: bool = False) -> None:
    """Raise ConfigError if a job's results folder has the results of another job, which ran on other nodes.

    `strict` is for a job read from S3, because others may be able to write there: the job must name its
    instances, and its instances and S3 URI must match those of the job in the folder.
    """
    folder = session.results / job.job
    recorded = read_job(folder)
    instances = {node.instance_id for node in job.nodes}
    if strict and not instances:
        why = f"its record at {job.save_to} names no nodes: awsddp did not write it"
        show = f"aws s3 ls {job.save_to}/{job.job}/   # shows the objects; others may have write access"
        raise ConfigError(f"job {job.job} was not fetched", why, show)
    if recorded is None or not instances:
        return
    recorded_instances = {node.instance_id for node in recorded.nodes}
    if instances.isdisjoint(recorded_instances) or (strict and instances != recorded_instances):
        why = f"{folder} holds the results of an older job with the same name on other nodes"
    elif strict and _uri(recorded) != _uri(job):
        saved = f"was saved to {recorded.save_to}" if recorded.save_to else "was not saved to S3"
        why = f"{folder} holds the results of a job with the same name that {saved}"
    else:
        return
    command = shlex.join(["mv", str(folder), f"{folder}-older"])
    raise ConfigError(
        f"job {job.job} has no folder for its results", why, f"{command}   # then repeat the command"
    )


def _uri(job: JobRecord) -> tuple[str, str] | None:
    """Return the bucket and prefix in a job's `save_to`, or None if it is not set."""
    return None if job.save_to is None else parse_s3_uri(job.save_to)


def has_unfetched_results(session: Session, unfetched: Collection[str], job: JobRecord) -> bool:
    """Return True if nodes have unfetched results of a job, according to the names in their tags
    (`unfetched`).

    If the tags have no room for all names (OLDER_JOBS), a job counts as unfetched unless this machine has all
    its results.
    """
    if job.job in unfetched or OLDER_JOBS not in unfetched:
        return job.job in unfetched
    return not is_fetched(session.results / job.job, job)


def list_older_jobs(connected: ConnectedCluster, tagged: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the jobs that OLDER_JOBS represents, by instance id, for the connected nodes with this tag.

    For each node, these are all jobs that the node reports and whose results are not complete on this
    machine, even if another machine has fetched them.
    """
    from awsddp.agent import messages
    from awsddp.agent_client.calls import call_each_node

    fleet = connected.fleet
    instance_ids = {
        node: endpoint.instance_id for node, endpoint in fleet.endpoints.items() if node in fleet.nodes
    }
    requests = {
        node: messages.State() for node, key in instance_ids.items() if OLDER_JOBS in tagged.get(key, ())
    }
    answers = call_each_node(fleet, requests) if requests else {}
    return {
        instance_ids[node]: [
            job.job
            for job in answer.jobs
            if not is_fetched_from(connected.session, job.job, instance_ids[node])
        ]
        for node, answer in answers.items()
        if not isinstance(answer, AwsddpError)
    }


def is_fetched_from(session: Session, name: str, instance_id: str) -> bool:
    """Return True if the job `name` ran on this instance and all its results are fetched."""
    fetched = find_fetched_job(session, name)
    return fetched is not None and instance_id in {node.instance_id for node in fetched.nodes}


def find_fetched_job(session: Session, name: str) -> JobRecord | None:
    """Return the job with this name if all its results are fetched, or else None."""
    job = read_ended_job(session.results / name)
    return job if job is not None and not job.missing else None
