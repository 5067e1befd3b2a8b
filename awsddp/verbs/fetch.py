"""fetch: results home, verified; once they are, a poweroff may end the nodes again."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.cluster import Cluster
from awsddp.errors import AwsddpError, NodeError
from awsddp.report import money, node_name
from awsddp.state import Record
from awsddp.verbs.context import Context, Found
from awsddp.verbs.node_jobs import cancel, choose_job, jobs_on
from awsddp.verbs.nodes import Ready, connect, reach, ready
from awsddp.verbs.results import bring_home, place_of, remember

if TYPE_CHECKING:
    from awsddp.nodes.sync import Fetched

REACH_S = 60.0


def fetch(ctx: Context, *, job: str | None = None, to: Path | None = None) -> dict[str, Any]:
    """Bring the results of a job home (the last by default), and return the `fetch` document.

    Raises NotFoundError for a job that nobody knows, NodeError for nodes out of reach.
    """
    with ready(ctx) as cluster, reach(ctx, cluster) as fleet:
        chosen = choose_job(jobs_on(ctx, fleet), job)
        came = bring_home(ctx, cluster, fleet, chosen, to=to)
        remember(ctx, chosen)
        return _document(came, job=chosen.job, home=to or place_of(ctx, chosen.job))


def bring_home_all(ctx: Context, seen: Found, cluster: Cluster) -> None:
    """Before the nodes end: end what still runs on them, and fetch every job that is not home.

    Raises NodeError, naming the jobs, the price and the ways out, where results cannot be brought home.
    """
    owing = cluster.unfetched
    if not owing:
        return
    record = seen.record
    running = [node for node in cluster.live if node.state == "running"]
    if record is None or not ctx.folder.key.exists():
        raise _not_home(cluster, record, "this machine has no key to the nodes that hold them")
    if off := [f"{node_name(node.node)} is {node.state}" for node in cluster.live if node not in running]:
        raise _not_home(cluster, record, ", ".join(off))
    try:
        with connect(ctx, record, running, deadline_s=REACH_S) as fleet:
            whole = Ready(aws=seen.aws, record=record, nodes=tuple(running))
            for name in owing:
                _end_and_fetch(ctx, whole, fleet, name)
    except AwsddpError as error:
        raise _not_home(cluster, record, str(error)) from error


def _not_home(cluster: Cluster, record: Record | None, why: str) -> NodeError:
    ways = ["awsddp down --discard   # end the nodes, and lose what they hold"]
    bill = "meanwhile the nodes cost money"
    if all(node.state == "stopped" for node in cluster.live):
        ways.insert(0, "awsddp up   # start the nodes; then awsddp down")
        bill = "meanwhile only the disks cost"
    elif not any(node.spot for node in cluster.live):
        ways.append("awsddp stop   # or keep their disks")
    if record is not None and record.price_usd_per_hour is not None and "nodes" in bill:
        would = "would cost" if record.target.name == "local" else "cost"
        bill = f"meanwhile the nodes {would} {money(record.price_usd_per_hour)} an hour"
    message = f"the results of {', '.join(cluster.unfetched)} are not home"
    return NodeError(message, f"{why}\n{bill}", "\n".join(ways))


def _end_and_fetch(ctx: Context, cluster: Ready, fleet: Any, name: str) -> None:
    jobs = [job for job in jobs_on(ctx, fleet) if job.job == name]
    if not jobs:
        return
    if jobs[0].state == "running":
        ctx.say(f"ending job {name}, which still runs: its ranks have {ctx.job.job.grace}")
        cancel(ctx, fleet, name)
        jobs = [job for job in jobs_on(ctx, fleet) if job.job == name]
    ctx.say(f"bringing the results of {name} home from {', '.join(map(node_name, fleet.nodes))}")
    bring_home(ctx, cluster, fleet, jobs[0])


def _document(came: "dict[int, Fetched]", *, job: str, home: Path) -> dict[str, Any]:
    nodes = [{"node": node, "files": one.files, "bytes": one.bytes} for node, one in sorted(came.items())]
    return {"nodes": nodes, "job": job, "home": str(home)}
