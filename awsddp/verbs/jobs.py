"""jobs: what runs and what ran on the cluster, as its nodes know it; kept for `status`."""

from typing import Any

from awsddp import report
from awsddp.verbs.context import Context
from awsddp.verbs.node_jobs import jobs_on
from awsddp.verbs.parts import connected, part, say_missing
from awsddp.verbs.results import remember


def jobs(ctx: Context) -> list[dict[str, Any]]:
    """Return every job that the nodes know, oldest first, each as the `train` document.

    Nodes that cannot be asked are named. Raises NotFoundError, and NoNodes where none can.
    """
    with part(ctx) as cluster, connected(ctx, cluster) as fleet:
        known = jobs_on(ctx, fleet, partial=True)
        say_missing(ctx, cluster, fleet)
        remember(ctx, *known)
        return [report.job_document(job) for job in known]
