"""The clusters that this machine remembers, and whether a local cloud runs; from local files only."""

from datetime import UTC, datetime
from typing import Any

from awsddp import report
from awsddp.state import Folder
from awsddp.verbs import local
from awsddp.verbs.context import Context


def home(ctx: Context) -> dict[str, Any]:
    """Return the clusters that this machine remembers, as last seen, and whether a local cloud runs.

    No requests are sent: a cluster may have ended since, which `status` shows.
    """
    clusters = []
    for path in sorted((ctx.home / "clusters").glob("*")):
        record = Folder(ctx.home, path.name).read(newer=True)
        if record is not None:
            clusters.append(
                {
                    "cluster": path.name,
                    "target": record.target.name,
                    "region": record.target.region,
                    "nodes": record.nodes,
                    "instance_type": record.instance_type,
                    "price_usd_per_hour": record.price_usd_per_hour,
                    "expires": report.iso(record.expires),
                    "expired": record.expires < datetime.now(UTC),
                    "jobs": [{"job": job.job, "state": job.state} for job in record.jobs],
                }
            )
    return {"clusters": clusters, "local_cloud": local.runs(ctx.home)}
