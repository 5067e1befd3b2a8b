"""fetch: results to this machine, verified; after that a poweroff may terminate the nodes."""

from typing import Any

from awsddp.errors import AwsddpError, NodeError, NotFoundError
from awsddp.records import ACTIVE, MORE, JobRecord, Listed, Node, unfetched_jobs
from awsddp.report import money, node_name
from awsddp.verbs.cluster import ClusterHandle, NoNodes, reachable
from awsddp.verbs.context import Context
from awsddp.verbs.converging import Confirm
from awsddp.verbs.jobs import jobs_of
from awsddp.verbs.ledger import bill_of, living
from awsddp.verbs.results import is_owed, results_dir, whole_at_home
from awsddp.verbs.sync import document
from awsddp.verbs.up import up

REACH_S = 60.0


def fetch(
    ctx: Context,
    *,
    job: str | None = None,
    anew: bool = False,
    confirm: Confirm,
) -> dict[str, Any]:
    """Fetch the results of a job (the last by default), and return the `fetch` document.

    Results that are here already need no node, unless `anew`. Nodes that stopped with results are started
    after `confirm` (it raises to refuse); the document then has `started`. If a part is missing the rest is
    fetched, and NodeError is raised with the document as its `result`. Raises NotFoundError for an unknown
    job, NoNodes.
    """
    try:
        return _fetch(ctx, job, anew)
    except NoNodes as error:
        if not error.stopped or not {job, MORE} & {None, *error.stopped}:
            raise
    up(ctx, confirm=confirm)
    return {**_fetch(ctx, job, anew), "started": True}


def _fetch(ctx: Context, job: str | None, anew: bool) -> dict[str, Any]:
    last = job or next((one.job.job for one in reversed(jobs_of(ctx, living(ctx.folder)))), None)
    kept = whole_at_home(ctx, last) if last is not None and not anew else None
    try:
        with ClusterHandle.partly_ready(ctx) as cluster:
            if kept is not None and job not in (None, *cluster.unfetched):
                return _kept(ctx, kept)
            with cluster.connect_reachable():
                chosen = cluster.job(job)
                fetched = cluster.fetch(chosen)
                ctx.folder.remember(chosen)
                lost = cluster.still_missing(chosen)
    except (NotFoundError, NoNodes) as none:
        if kept is None or (isinstance(none, NoNodes) and job is None and none.stopped):
            raise
        return _kept(ctx, kept)
    result = document(fetched, job=chosen.job, home=str(results_dir(ctx, chosen.job)))
    if lost:
        why = "\n".join(lost.values())
        error = NodeError(f"a part of the results of {chosen.job} is missing", why, "awsddp status")
        error.result = result
        raise error
    return result


def _kept(ctx: Context, job: JobRecord) -> dict[str, Any]:
    ctx.say(f"the results of {job.job} are already fetched")
    return document({}, job=job.job, home=str(results_dir(ctx, job.job)))


def fetch_all(cluster: ClusterHandle, listed: Listed) -> None:
    """End the jobs that still run, and fetch all unfetched results, before the nodes are terminated.

    Results of a node that no longer exists are named. Raises NodeError, with the jobs, the price and the next
    steps, if results remain on nodes.
    """
    owing = [node for node in listed.live if node.unfetched]
    if not owing:
        return
    record = cluster.known if cluster.known is not None and cluster.known.id == listed.id else None
    if record is None or not cluster.ctx.folder.key.exists():
        raise _not_home(cluster, listed, owing, "this machine has no key for the nodes that hold them")
    cluster.use(reachable(listed.live), of=listed.live)
    left = {node: f"{node_name(node.node)} is {node.state}" for node in owing if node not in cluster.nodes}
    try:
        if cluster.nodes:
            left |= _fetch_owed(cluster)
    except AwsddpError as error:
        raise _not_home(cluster, listed, owing, str(error)) from error
    if left:
        raise _not_home(cluster, listed, list(left), ", ".join(left.values()))


def _fetch_owed(cluster: ClusterHandle) -> dict[Node, str]:
    """Fetch the unfetched results of the running nodes; return the nodes that did not answer, and why."""
    ctx = cluster.ctx
    with cluster.connect(deadline_s=REACH_S, partial=True) as fleet:
        owed = [job for job in cluster.jobs(partial=True) if is_owed(ctx, cluster.unfetched, job)]
        # The newest first: the end of a job starts one that waits for it.
        for job in reversed([cluster.end_job(job) for job in reversed(owed)]):
            if job.state in ACTIVE:
                raise NodeError(f"job {job.job} did not end")
            nodes = ", ".join(map(node_name, fleet.nodes))
            ctx.say(f"fetching the results of {job.job} from {nodes} to {results_dir(ctx, job.job)}/")
            cluster.fetch(job)
            ctx.folder.remember(job)
            for text in cluster.still_missing(job).values():
                ctx.say(text)
        owing = [node for node in cluster.nodes if node.unfetched]
        return {node: fleet.failures[node.node].summary for node in owing if node.node in fleet.failures}


def _not_home(cluster: ClusterHandle, listed: Listed, owing: list[Node], why: str) -> NodeError:
    """Return the error that names the unfetched jobs, what the nodes cost meanwhile, and the next steps."""
    stopped = [node_name(node.node) for node in owing if node.state in ("stopping", "stopped")]
    ways = [f"awsddp up   # start {', '.join(stopped)}; then awsddp down"] if stopped else []
    ways.append("awsddp down --discard   # terminate the nodes and lose what they hold")
    cost, rests = "the nodes cost money", all(node.state == "stopped" for node in listed.live)
    bill = bill_of(cluster.ctx, cluster.known, cluster.own, cluster.gateway)
    if rests:
        cost = "only the disks cost"
    elif bill is not None and bill.id == listed.id and bill.price_usd_per_hour is not None:
        would = "would cost" if bill.target == "local" else "cost"
        cost = f"the nodes {would} {money(bill.price_usd_per_hour)} per hour"
    if not rests and not any(node.spot for node in listed.live):
        ways.append("awsddp stop   # or stop them and keep their disks")
    jobs = ", ".join(unfetched_jobs(owing))
    return NodeError(f"the results of {jobs} are not fetched", f"{why}\nuntil then {cost}", "\n".join(ways))
