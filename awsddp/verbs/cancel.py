"""cancel: end a job: SIGTERM to its ranks, SIGKILL after the grace."""

from typing import Any

from awsddp.errors import NotFoundError
from awsddp.verbs.cluster import ClusterHandle, choose_job
from awsddp.verbs.context import Context
from awsddp.verbs.results import job_result


def cancel(ctx: Context, *, job: str | None = None) -> dict[str, Any]:
    """End a job (the last that runs by default) and return it as the `train` document.

    A job that has ended is returned as it is. Results stay on the nodes until they are fetched. Unreachable
    nodes are named; the others end the job. Raises NotFoundError for an unknown job, or if none runs; NoNodes
    if no node is reachable.
    """
    with ClusterHandle.partly_ready(ctx) as cluster, cluster.connect_reachable():
        jobs = cluster.jobs(partial=True)
        cluster.say_missing()
        running = [one for one in jobs if one.state == "running"]
        if job is None and not running:
            raise NotFoundError("no job is running on this cluster", "", "awsddp jobs   # ended jobs")
        ended = cluster.end_job(choose_job(jobs if job else running, job))
        ctx.folder.remember(ended)
        return job_result(ctx, ended)
