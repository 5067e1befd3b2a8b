"""cancel: end a job. Its ranks get a TERM, the grace to save what they have, then a KILL."""

from typing import Any

from awsddp.errors import NotFoundError
from awsddp.verbs import node_jobs
from awsddp.verbs.context import Context
from awsddp.verbs.node_jobs import choose_job, jobs_on
from awsddp.verbs.parts import connected, part, say_missing
from awsddp.verbs.results import job_result, remember


def cancel(ctx: Context, *, job: str | None = None) -> dict[str, Any]:
    """End a job (the last that runs by default) and return it as the `train` document.

    One that has ended already is returned as it is. Its results stay on the nodes until they are fetched.
    Nodes that cannot be asked are named: those that can end the job. Raises NotFoundError where no such job
    is, or none runs; NoNodes where no node can be asked.
    """
    with part(ctx) as cluster, connected(ctx, cluster) as fleet:
        known = jobs_on(ctx, fleet, partial=True)
        say_missing(ctx, cluster, fleet)
        running = [one for one in known if one.state == "running"]
        if job is None and not running:
            raise NotFoundError("no job runs on this cluster", "", "awsddp jobs   # those that ran")
        chosen = choose_job(known if job else running, job)
        if chosen.state == "running":
            ctx.say(f"ending job {chosen.job}: its ranks have {ctx.job.job.grace}")
            node_jobs.cancel(ctx, fleet, chosen.job)
            chosen = choose_job(jobs_on(ctx, fleet, partial=True), chosen.job)
        remember(ctx, chosen)
        return job_result(ctx, chosen)
