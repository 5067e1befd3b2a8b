"""cancel: end a job. Its ranks get a TERM, the grace to save what they have, then a KILL."""

from typing import Any

from awsddp.errors import NotFoundError
from awsddp.verbs.cluster import ClusterHandle, choose_job
from awsddp.verbs.context import Context
from awsddp.verbs.results import job_result


def cancel(ctx: Context, *, job: str | None = None) -> dict[str, Any]:
    """End a job (the last that runs by default) and return it as the `train` document.

    One that has ended already is returned as it is. Its results stay on the nodes until they are fetched.
    Nodes that cannot be asked are named: those that can end the job. Raises NotFoundError where no such job
    is, or none runs; NoNodes where no node can be asked.
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
