"""The clusters that this machine remembers, and whether a local cloud runs; from local files only."""

from datetime import UTC, datetime
from typing import Any

from awsddp import report
from awsddp.verbs import local
from awsddp.verbs.context import Context
from awsddp.verbs.jobs import jobs_of
from awsddp.verbs.ledger import pasts


def home(ctx: Context) -> dict[str, Any]:
    """Return the clusters that this machine remembers, as last seen, and whether a local cloud runs.

    No requests are sent: a cluster may have ended since, which `status` shows.
    """
    clusters = [
        {
            "cluster": past.name,
            "target": record.target.name,
            "region": record.target.region,
            "nodes": record.nodes,
            "instance_type": record.instance_type,
            "price_usd_per_hour": (bill := past.bill) and bill.price_usd_per_hour,
            "expires": report.iso(record.expires),
            "expired": record.expires < datetime.now(UTC),
            "jobs": [{"job": one.job.job, "state": one.job.state} for one in jobs_of(ctx, past)],
        }
        for past in pasts(ctx.home)
        if (record := past.record) is not None
    ]
    return {"clusters": clusters, "local_cloud": local.runs(ctx.home)}
