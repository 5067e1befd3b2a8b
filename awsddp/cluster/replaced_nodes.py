"""Jobs that run or wait without a node that was replaced."""

from awsddp.model.records import ACTIVE
from awsddp.session.connect import REACH_S, connect, told_jobs
from awsddp.session.context import LocatedCluster
from awsddp.session.next_steps import advised
from awsddp.util.format import node_name


def name_left_out(cluster: LocatedCluster) -> None:
    """Name the jobs that run or wait without a node that was replaced, and what starts them on all nodes.

    One that has begun continues from its checkpoint. Raises NodesFailed, NodeError.
    """
    session = cluster.session
    living = {node.instance_id for node in cluster.nodes}
    left = {
        job.job: job
        for job in cluster.record.jobs
        if job.state in ACTIVE and not living.issuperset(one.instance_id for one in job.nodes)
    }
    if not left:
        return
    with connect(cluster, deadline_s=REACH_S) as connected:
        known = {job.job: job for job in told_jobs(connected) if job.job in left}
    session.folder.remember(*known.values())
    for name, job in (left | known).items():
        lost = ", ".join(node_name(one.node) for one in job.nodes if one.instance_id not in living)
        ends = [f"awsddp cancel {name}"] if name in known and job.state in ACTIVE else []
        if ends and job.state == "running":
            ways = " && ".join([*ends, f"awsddp fetch {name}; awsddp train --resume {name}"])
            session.say(
                f"job {name} runs without {lost}, which was replaced; with it: "
                f"{advised(session, ways, job=job)}"
            )
        elif job.state == "waiting" or (job.state in ("failed", "interrupted") and job.started is None):
            ways = " && ".join([*ends, "awsddp train" if name in known else "awsddp train --after all"])
            session.say(
                f"job {name} waited for {lost}, which was replaced: {advised(session, ways, job=job)}"
            )
