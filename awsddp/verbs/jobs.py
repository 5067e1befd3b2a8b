"""jobs: what runs and what ran on the cluster, as its nodes have it; kept for `status`."""

from typing import Any

from awsddp import report
from awsddp.cluster import Job
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context


def jobs(ctx: Context) -> list[dict[str, Any]]:
    """Return every job that the nodes know, oldest first, each as the `train` document.

    Nodes that cannot be asked are named. Raises NotFoundError, and NoNodes where none can.
    """
    return [report.job_document(job) for job in known_jobs(ctx)]


def known_jobs(ctx: Context) -> tuple[Job, ...]:
    """Return every job that the nodes know, oldest first. Raises as `jobs` does."""
    with ClusterHandle.partly_ready(ctx) as cluster, cluster.connect_reachable():
        known = cluster.jobs(partial=True)
        cluster.say_missing()
        ctx.folder.remember(*known)
        return known
