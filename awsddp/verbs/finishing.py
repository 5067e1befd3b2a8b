"""The end of a job: what it came to is kept and told first, whatever becomes of its results."""

from typing import TYPE_CHECKING, Any

from awsddp.cluster import Job
from awsddp.errors import AwsddpError, NodeError
from awsddp.verbs.context import Context
from awsddp.verbs.nodes import Ready
from awsddp.verbs.results import bring_home, job_result, remember, still_missing

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet


def finish(ctx: Context, cluster: Ready, fleet: "Fleet", job: Job) -> dict[str, Any]:
    """Bring home the results of a job that was followed, and return it as the `train` document.

    An error that keeps results away carries that document as its `result`. A job that did not succeed has
    a reason of its own to fail: what is missing of its results is said alone.
    """
    try:
        remember(ctx, job)
        bring_home(ctx, cluster, fleet, job)
        lost = still_missing(ctx, cluster, fleet, job)
        if lost and job.state == "succeeded":
            raise NodeError("a part of its results is missing", "\n".join(lost.values()))
    except AwsddpError as error:
        raise _after_verdict(ctx, job, error) from error
    for text in lost.values():
        ctx.say(text)
    return job_result(ctx, job)


def _after_verdict(ctx: Context, job: Job, error: AwsddpError) -> AwsddpError:
    """Return the error as it is told after the job's own verdict."""
    error.result = job_result(ctx, job)
    where = "home, and on the nodes, too" if error.result["fetched"] else "not all home"
    error.message = f"job {job.job} {job.state}, its results are {where}: {error.message}"
    error.next = f"awsddp fetch --job {job.job}   # again" + (f"\n{error.next}" if error.next else "")
    return error
