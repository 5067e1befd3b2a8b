"""A job's results on this machine: where they are, what they say of the job, and which are missing."""

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
from awsddp.model.records import ACTIVE, ENDED, MORE, JobRecord, RankProgress, widened
from awsddp.session.context import ConnectedCluster, Session
from awsddp.settings.values import s3_place
from awsddp.storage.checkpoints import newest_checkpoint
from awsddp.util.format import node_name


def missing(connected: ConnectedCluster, job: JobRecord) -> dict[int, str]:
    """Return why a node's part of a job cannot be fetched now, by the number that the node had."""
    reached = {connected.fleet.endpoints[node].instance_id for node in connected.fleet.holders(job)}
    living = {node.instance_id: node for node in (*connected.cluster.nodes, *connected.cluster.excluded)}
    reasons = {}
    for one in job.nodes:
        node, who = living.get(one.instance_id), f"{node_name(one.node)} ({one.instance_id})"
        if one.instance_id in reached:
            continue
        if node is None:
            reasons[one.node] = f"{who} is gone; {_lost(job)}"
        elif node.state in ENDED:
            fate = f"its part of job {job.job} is not here: who ended the node may have fetched it"
            fate = _lost(job) if job.job in node.unfetched else fate
            reasons[one.node] = f"{who} is {node.state}; {fate}"
        elif node.state != "running":
            reasons[one.node] = f"{who} is {node.state}; it holds its part of job {job.job}"
        else:
            failure = connected.fleet.failures.get(node.node)
            why = "it is being prepared" if failure is None else failure.summary
            reasons[one.node] = f"{who} holds its part of job {job.job}: {why}"
    return reasons


def _lost(job: JobRecord) -> str:
    """Return what remains of a lost node's part of a job."""
    if job.save_to is None:
        return f"its part of job {job.job} is lost"
    saved = f"of its part of job {job.job} there is what was saved to {job.save_to}/{job.job}"
    return f"{saved}: awsddp fetch {job.save_to}/{job.job}"


def still_missing(connected: ConnectedCluster, job: JobRecord) -> dict[int, str]:
    """Return why parts of a job cannot be fetched now, by node, unless they were fetched before."""
    return {} if is_fetched(connected.session.results / job.job, job) else missing(connected, job)


METRICS_CHARACTERS = 64 << 20
"""How much of a job's metrics is read."""
EVENTS_BYTES = 16 << 20
"""How much of an event file is read."""


def draw_loss(target: Path) -> None:
    """Draw the loss that rank 0 wrote down, where it did."""
    from awsddp.storage import loss_plot

    rows = metrics_of(target)
    data = f", {name}" if (name := _data(rows)) else ""
    plot = loss_plot.loss_plot(rows, title=f"training loss, {target.name}{data}")
    if plot is not None:
        (target / "loss.svg").write_text(plot, encoding="utf-8")


def metrics_of(target: Path, node: int = 0) -> list[dict[str, Any]]:
    """Return the metrics that a node's run folder holds; none where there are none."""
    file = target / f"node{node}" / "run" / "metrics.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace") as stream:
        return metric_rows.json_lines(stream.read(METRICS_CHARACTERS))


def loss_rows(target: Path, node: int) -> list[dict[str, Any]]:
    """Return a node's metrics; where they hold no loss, that of its TensorBoard event files."""
    from awsddp.storage import tensorboard

    rows = metrics_of(target, node)
    if metric_rows.last_value(rows, "loss") is None:
        for file in sorted((target / f"node{node}").rglob(f"{EVENTS}*")):
            with contextlib.suppress(OSError), file.open("rb") as stream:
                rows += tensorboard.event_rows(stream.read(EVENTS_BYTES))
    return rows


def ranks_of(job: JobRecord) -> dict[int, list[int]]:
    """Return the ranks of a job by node."""
    nodes = sorted({rank.node for rank in job.ranks})
    return {node: [rank.rank for rank in job.ranks if rank.node == node] for node in nodes}


def written_progress(folder: Path, job: JobRecord) -> tuple[RankProgress, ...]:
    """Return how far each rank is by the metrics that are in a folder of results."""
    from awsddp.agent import metrics

    return tuple(
        convert(one.to_json(), RankProgress)
        for node, ranks in ranks_of(job).items()
        for one in metrics.progress(folder / f"node{node}" / "run" / "metrics.jsonl", ranks)
    )


def reached(folder: Path, job: JobRecord) -> RankProgress:
    """Return how far a job is, or came: by its first rank of which its nodes tell, or else its results.

    Where that names no loss, the last one of its TensorBoard event files, and its step.
    """
    from awsddp.storage import tensorboard

    told = job.progress or written_progress(folder, job) or (RankProgress(rank=0),)
    first = next((one for one in told if one.loss is not None), told[0])
    for node in ranks_of(job) if first.loss is None else ():
        for file in sorted((folder / f"node{node}").rglob(f"{EVENTS}*"), reverse=True):
            with contextlib.suppress(OSError), file.open("rb") as stream:
                if rows := tensorboard.event_rows(tensorboard.both_ends(stream.read(EVENTS_BYTES))):
                    return replace(first, loss=rows[-1]["loss"], step=int(rows[-1]["step"]))
    return first


def _data(rows: list[dict[str, Any]]) -> str | None:
    """Return what the program says it was tested on: the real set, or data made for a rehearsal."""
    return next((row["data"] for row in reversed(rows) if isinstance(row.get("data"), str)), None)


def job_result(session: Session, job: JobRecord, *, folder: Path | None = None) -> JobDocument:
    """Return a job as the document of `train`, with the loss and the accuracy that its program wrote down.

    `folder` holds its results (None: the one that receives them). `missing` names the nodes whose results are
    missing.
    """
    folder = folder or session.results / job.job
    kept, rows = ended_job(folder), metrics_of(folder)
    accuracies = (
        metric_rows.last_value(metrics_of(folder, node), "accuracy") for node in ranks_of(job) or (0,)
    )
    saved = newest_checkpoint(folder) if job.state not in ACTIVE else None
    return widened(
        JobDocument,
        job,
        reached(folder, job),
        accuracy=next((one for one in accuracies if one is not None), None),
        data=_data(rows),
        fetched=is_fetched(folder, job),
        checkpoint=f"{job.home}/{saved.parts[0].relative_to(folder.resolve())}" if saved else None,
        missing=kept.missing if kept is not None else job.missing,
    )


def saved_job(folder: Path) -> JobRecord | None:
    """Return the job whose results are in a folder; None where its job.json is missing or torn."""
    with contextlib.suppress(ConfigError, OSError):
        return job_reports.decode((folder / "job.json").read_bytes())
    return None


def ended_job(folder: Path) -> JobRecord | None:
    """Return the job whose results are in a folder if they were fetched after it had ended."""
    job = saved_job(folder)
    return job if job is not None and job.state not in ACTIVE else None


def is_fetched(folder: Path, job: JobRecord) -> bool:
    """Tell whether a folder holds all results of a job, fetched after it had ended.

    The results of another job of its name, on other machines, do not count.
    """
    kept = ended_job(folder)
    return kept is not None and not kept.missing and kept.nodes == job.nodes


def refuse_another(session: Session, job: JobRecord, *, strict: bool = False) -> None:
    """Raise ConfigError where the folder of a job's results holds those of another one, of other machines.

    `strict` is for a job that was read from a place in S3, where others may write: it must name its machines,
    and they and its place must be those of the job in the folder.
    """
    folder = session.results / job.job
    kept = saved_job(folder)
    machines = {one.instance_id for one in job.nodes}
    if strict and not machines:
        why = f"what {job.save_to} says of it has no nodes, as awsddp never writes it"
        look = f"aws s3 ls {job.save_to}/{job.job}/   # others than the nodes may write there"
        raise ConfigError(f"job {job.job} is not brought here", why, look)
    if kept is None or not machines:
        return
    known = {one.instance_id for one in kept.nodes}
    if machines.isdisjoint(known) or (strict and machines != known):
        why = f"{folder} holds the results of an older job of that name, of another cluster"
    elif strict and _place(kept) != _place(job):
        saved = f"was saved to {kept.save_to}" if kept.save_to else "was not saved to S3"
        why = f"{folder} holds the results of a job of that name that {saved}"
    else:
        return
    again = shlex.join(["mv", str(folder), f"{folder}-older"])
    raise ConfigError(f"job {job.job} has no folder for its results", why, f"{again}   # then again")


def _place(job: JobRecord) -> tuple[str, str] | None:
    """Return bucket and prefix where the results of a job are saved."""
    return None if job.save_to is None else s3_place(job.save_to)


def is_owed(session: Session, unfetched: Collection[str], job: JobRecord) -> bool:
    """Tell whether the nodes hold results of a job that are not fetched, by their tags (`unfetched`).

    A job that the tags may only count, and not name, is owed unless all of it is here.
    """
    if job.job in unfetched or MORE not in unfetched:
        return job.job in unfetched
    return not is_fetched(session.results / job.job, job)


def older_jobs(connected: ConnectedCluster, tagged: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return what MORE stands for on each connected node that is tagged with it, by instance id.

    These are all jobs that the node lists and that are not whole here: also those that another machine has
    fetched, as nothing says so.
    """
    from awsddp.agent import messages
    from awsddp.agent_client.calls import answers_of

    fleet = connected.fleet
    keys = {node: one.instance_id for node, one in fleet.endpoints.items() if node in fleet.nodes}
    wishes = {node: messages.State() for node, key in keys.items() if MORE in tagged.get(key, ())}
    answers = answers_of(fleet, wishes) if wishes else {}
    return {
        keys[node]: [one.job for one in answer.jobs if not is_home(connected.session, one.job, keys[node])]
        for node, answer in answers.items()
        if not isinstance(answer, AwsddpError)
    }


def is_home(session: Session, name: str, instance_id: str) -> bool:
    """Tell whether a job of this instance is whole here; another instance's may have its name."""
    kept = whole_at_home(session, name)
    return kept is not None and instance_id in {one.instance_id for one in kept.nodes}


def whole_at_home(session: Session, name: str) -> JobRecord | None:
    """Return the job of this name if all its results were fetched."""
    job = ended_job(session.results / name)
    return job if job is not None and not job.missing else None
