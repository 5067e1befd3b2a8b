"""stop: stop the instances, keep their disks. `up` starts them again."""

from collections.abc import Callable
from typing import Any

from awsddp.errors import AwsddpError, ConfigError
from awsddp.records import Listed
from awsddp.report import node_name
from awsddp.verbs.cluster import ClusterHandle, reachable
from awsddp.verbs.context import Context
from awsddp.verbs.results import is_owed
from awsddp.verbs.selecting import Ephemeral, refuse_ephemeral
from awsddp.verbs.status import cluster_document

REACH_S = 30.0


def stop(ctx: Context, *, confirm: Callable[[str], None]) -> dict[str, Any]:
    """Stop the cluster's instances and return it as the `status` document.

    A running job is ended first, with its grace; results stay on the disks. `confirm` is called first and
    raises to refuse. Raises NotFoundError, ConfigError for spot nodes, which cannot be stopped, CloudError,
    and NodeError for instances that do not stop and for results that a stop would lose.
    """
    from awsddp.aws.power import stop as stop_nodes

    with ctx.folder.lock("stop"), ClusterHandle.find(ctx) as cluster:
        listed = cluster.require_live()
        _refuse_spot(listed)
        going = [node for node in listed.live if node.state != "stopped"]
        if going:
            confirm(_what_stops(cluster, listed))
            _end_jobs(cluster, listed)
            stop_nodes(cluster.aws, going, on_event=ctx.on_event)
            if cluster.known is not None:
                ctx.folder.note("stopped", id=listed.id, instances=sorted(node.instance_id for node in going))
                ctx.folder.publish(lambda prefix: "")
        cluster.look()
        return cluster_document(cluster)


def _refuse_spot(cluster: Listed) -> None:
    spot = [node_name(node.node) for node in cluster.live if node.spot]
    if spot:
        raise ConfigError(
            f"{', '.join(spot)}: spot instances cannot be stopped",
            "AWS can only terminate one-time spot instances",
            "awsddp down   # fetch the results, then terminate them",
        )


def _what_stops(cluster: ClusterHandle, listed: Listed) -> str:
    machines, cost = cluster.machines(listed), "" if cluster.target.name == "local" else ", and cost"
    question = f"Cluster {listed.name}: {machines} will be stopped; their disks are kept{cost}."
    if listed.unfetched:
        question += f"\nThe results of {', '.join(listed.unfetched)} stay on the disks."
    return question


def _end_jobs(cluster: ClusterHandle, listed: Listed) -> None:
    """End the running jobs, with their grace. Unreachable nodes are stopped anyway: their disks are kept."""
    ctx = cluster.ctx
    if cluster.known is None or not listed.unfetched:
        return
    try:
        with cluster.connect(reachable(listed.live), deadline_s=REACH_S, partial=True) as fleet:
            jobs = cluster.jobs(partial=True)
            refuse_ephemeral(ctx, fleet, [job for job in jobs if is_owed(ctx, listed.unfetched, job)])
            # The newest first: the end of a job starts one that waits for it.
            ctx.folder.remember(*[cluster.end_job(job) for job in reversed(jobs)])
    except Ephemeral:
        raise
    except AwsddpError as error:
        ctx.say(f"jobs could not be ended first: {error.message}")
