"""jobs: the running and ended jobs, as the nodes report them; remembered for `status`."""

from typing import Any

from awsddp import report
from awsddp.cluster import Job
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context


def jobs(ctx: Context) -> list[dict[str, Any]]:
    """Return every job that the nodes know, oldest first, each as the `train` document.

    Unreachable nodes are named. Raises NotFoundError, and NoNodes if no node is reachable.
    """
    return [report.job_document(job) for job in known_jobs(ctx)]


def known_jobs(ctx: Context) -> tuple[Job, ...]:
    """Return every job that the nodes know, oldest first. Raises as `jobs` does."""
    with ClusterHandle.partly_ready(ctx) as cluster, cluster.connect_reachable():
        known = cluster.jobs(partial=True)
        cluster.say_missing()
        ctx.folder.remember(*known)
        return known
