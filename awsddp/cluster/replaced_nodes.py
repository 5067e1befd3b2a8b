"""Jobs that run or wait without a node that was replaced."""

from collections.abc import Collection

from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import REACH_S, connect, told_jobs
from awsddp.session.context import LocatedCluster
from awsddp.session.next_steps import advised
from awsddp.util.format import node_name


def name_left_out(cluster: LocatedCluster) -> None:
    """Name the jobs that run or wait without a node that was replaced, and what starts them on all nodes.

    One that has begun continues from its checkpoint. Raises NodesFailed, NodeError.
    """
    session, living = cluster.session, {node.instance_id for node in cluster.nodes}
    left = {job.job: job for job in cluster.record.jobs if job.state in ACTIVE and _lost(job, living)}
    if not left:
        return
    with connect(cluster, deadline_s=REACH_S) as connected:
        known = {job.job: job for job in told_jobs(connected) if job.job in left}
    session.folder.remember(*known.values())
    for name, job in (left | known).items():
        what, ways = _ways_on(job, is_known=name in known)
        if ways:
            lost = ", ".join(_lost(job, living))
            session.say(what.format(name=name, lost=lost) + advised(session, ways, job=job))


def _lost(job: JobRecord, living: Collection[str]) -> list[str]:
    """Return the nodes of a job that are gone."""
    return [node_name(one.node) for one in job.nodes if one.instance_id not in living]


def _ways_on(job: JobRecord, *, is_known: bool) -> tuple[str, str]:
    """Return what becomes of a job without a node, and the commands that start it on all nodes; `is_known` is
    whether the nodes that are left know it.
    """
    cancel = [f"awsddp cancel {job.job}"] if is_known and job.state in ACTIVE else []
    if cancel and job.state == "running":
        what = "job {name} runs without {lost}, which was replaced; with it: "
        return what, " && ".join([*cancel, f"awsddp fetch {job.job}; awsddp train --resume {job.job}"])
    if job.state == "waiting" or (job.state in ("failed", "interrupted") and job.started is None):
        what = "job {name} waited for {lost}, which was replaced: "
        return what, " && ".join([*cancel, "awsddp train" if is_known else "awsddp train --after all"])
    return "", ""
