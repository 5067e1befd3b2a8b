"""What verbs do in AWS that need machines beside, and documents of those that return something else."""

from typing import Any

from awsddp.aws import poweroff
from awsddp.errors import NodeError
from awsddp.verbs import everywhere
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context


def trained(ctx: Context, **choices: object) -> dict[str, Any]:
    """Do in AWS what `train` does there; what it does beside needs machines."""
    with ClusterHandle.ready(ctx) as cluster:
        poweroff.keep_on_poweroff(cluster.aws, cluster.nodes, "train-1")
    return {}


def fetched(ctx: Context) -> dict[str, Any]:
    """Do in AWS what `fetch` does there, once the results of the nodes that run are home."""
    with ClusterHandle.partly_ready(ctx) as cluster:
        poweroff.release(cluster.aws, cluster.nodes, "train-1")
        if any(node.unfetched for node in cluster.excluded):
            raise NodeError("a part of the results is missing")
    return {}


def status_all(ctx: Context) -> dict[str, Any]:
    """`status --all`, as a document."""
    return {"clusters": everywhere.status_all(ctx)}
