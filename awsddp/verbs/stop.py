"""stop: the machines off, their disks kept. `up` starts them again."""

from collections.abc import Callable
from typing import Any

from awsddp.cluster import Cluster
from awsddp.errors import AwsddpError, ConfigError
from awsddp.report import Event, node_name
from awsddp.verbs.context import Context, Found, found
from awsddp.verbs.node_jobs import cancel, jobs_on
from awsddp.verbs.nodes import connect, living
from awsddp.verbs.results import remember
from awsddp.verbs.selecting import Ephemeral, refuse_ephemeral
from awsddp.verbs.status import cluster_document

REACH_S = 30.0


def stop(ctx: Context, *, confirm: Callable[[str], None]) -> dict[str, Any]:
    """Stop the cluster's machines and return it as the `status` document.

    A job that still runs is ended first, with its grace; results stay on the disks. `confirm` is asked before
    anything stops and raises to refuse. Raises NotFoundError, ConfigError for spot nodes, which cannot be
    stopped, CloudError, and NodeError for machines that do not stop and for results that a stop would lose.
    """
    from awsddp.aws.clusters import find_cluster
    from awsddp.aws.power import stop as stop_nodes

    with ctx.folder.lock("stop"), found(ctx) as seen:
        cluster = living(ctx, seen)
        assert seen is not None, "what lives was found"
        _refuse_spot(cluster)
        going = [node for node in cluster.live if node.state != "stopped"]
        if going:
            confirm(_what_stops(seen, cluster))
            _end_jobs(ctx, seen, cluster)
            names = {node.instance_id: node_name(node.node) for node in going}
            stop_nodes(
                seen.aws,
                going,
                on_event=lambda key, state: ctx.on_event(Event(f"{key} {state}", names.get(key))),
            )
            if seen.record is not None:
                ctx.folder.note("stopped", id=cluster.id, instances=sorted(names))
        after = find_cluster(seen.aws, ctx.spec.name, cluster.owner)
        return cluster_document(
            ctx, ctx.folder.read(), after, seen.aws, target=seen.target, looked=seen.looked
        )


def _refuse_spot(cluster: Cluster) -> None:
    spot = [node_name(node.node) for node in cluster.live if node.spot]
    if spot:
        raise ConfigError(
            f"{', '.join(spot)}: spot machines cannot be stopped",
            "AWS can only end what one launch bought on the spot market",
            "awsddp down   # bring results home, and end them",
        )


def _what_stops(seen: Found, cluster: Cluster) -> str:
    said = (
        f"Cluster {cluster.name}: {seen.machines(cluster)} will be stopped; their disks are kept, and cost."
    )
    if cluster.unfetched:
        said += f"\nThe results of {', '.join(cluster.unfetched)} stay on the disks."
    return said


def _end_jobs(ctx: Context, seen: Found, cluster: Cluster) -> None:
    """End what still runs, with its grace. Nodes out of reach are stopped all the same: disks are kept."""
    reachable = [node for node in cluster.live if node.state == "running" and node.address]
    if seen.record is None or not cluster.unfetched:
        return
    try:
        with connect(ctx, seen.record, reachable, deadline_s=REACH_S, partial=True) as fleet:
            known = jobs_on(ctx, fleet, partial=True)
            refuse_ephemeral(ctx, fleet, [job for job in known if job.job in cluster.unfetched])
            for job in known:
                if job.state == "running":
                    ctx.say(f"ending job {job.job}, which still runs: its ranks have {ctx.job.job.grace}")
                    cancel(ctx, fleet, job.job)
            remember(ctx, *jobs_on(ctx, fleet, partial=True))
    except Ephemeral:
        raise
    except AwsddpError as error:
        ctx.say(f"jobs could not be ended first: {error.message}")
