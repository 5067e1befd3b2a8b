"""Report jobs that had a node replaced while they ran or waited."""

from collections.abc import Collection

from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import CONNECT_S, connect, list_jobs_on_nodes
from awsddp.session.context import LocatedCluster
from awsddp.session.next_steps import complete_commands
from awsddp.util.formatting import node_name


def report_jobs_without_replaced_nodes(cluster: LocatedCluster) -> None:
    """Report the jobs that had a node replaced while they ran or waited, and how to restart these jobs.

    A job that has started resumes from its checkpoint. Raises NodesFailed or NodeError.
    """
    session, live_ids = cluster.session, {node.instance_id for node in cluster.nodes}
    active = [job for job in cluster.record.jobs if job.state in ACTIVE]
    affected = {job.job: job for job in active if _replaced_nodes(job, live_ids)}
    if not affected:
        return
    with connect(cluster, deadline_s=CONNECT_S) as connected:
        reported = {job.job: job for job in list_jobs_on_nodes(connected) if job.job in affected}
    session.folder.save_jobs(*reported.values())
    for name, job in (affected | reported).items():
        sentence, commands = _restart_commands(job, is_known=name in reported)
        if commands:
            replaced = ", ".join(_replaced_nodes(job, live_ids))
            session.say(
                sentence.format(name=name, lost=replaced) + complete_commands(session, commands, job=job)
            )


def _replaced_nodes(job: JobRecord, live_ids: Collection[str]) -> list[str]:
    """Return the names of a job's nodes whose instances are gone."""
    return [node_name(node.node) for node in job.nodes if node.instance_id not in live_ids]


def _restart_commands(job: JobRecord, *, is_known: bool) -> tuple[str, str]:
    """Return a sentence about a job that lacks a node, and the commands that start it on all nodes.

    `is_known` is True if the remaining nodes report the job. The sentence and the
    commands are empty if there is nothing to do.
    """
    cancel = [f"awsddp cancel {job.job}"] if is_known and job.state in ACTIVE else []
    if cancel and job.state == "running":
        sentence = "job {name} runs without {lost}, which was replaced; to include it: "
        return sentence, " && ".join([*cancel, f"awsddp fetch {job.job}; awsddp train --resume {job.job}"])
    if job.state == "waiting" or (job.state in ("failed", "interrupted") and job.started is None):
        sentence = "job {name} waited for {lost}, which was replaced: "
        return sentence, " && ".join([*cancel, "awsddp train" if is_known else "awsddp train --after all"])
    return "", ""
