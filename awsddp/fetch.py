"""fetch: results to this machine, verified; after that a poweroff may terminate the nodes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from awsddp.errors import AwsddpError, NodeError, NotFoundError
from awsddp.files import moved
from awsddp.known import end_job, jobs_of, told_job, told_jobs
from awsddp.ledger import bill_of, living
from awsddp.reconcile import Confirm
from awsddp.records import ACTIVE, MORE, JobRecord, Listed, Node, unfetched_jobs
from awsddp.report import money, node_name
from awsddp.results import bring, is_owed, results_dir, still_missing, whole_at_home
from awsddp.returns import FetchDocument
from awsddp.search import NoNodes, reachable
from awsddp.up import up

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.results import Fetched


def fetch(
    cluster: "Cluster",
    *,
    job: str | None = None,
    anew: bool = False,
    confirm: Confirm,
) -> FetchDocument:
    """Fetch the results of a job (the last by default), and return the `fetch` document.

    Results that are here already need no node, unless `anew`. Nodes that stopped with results are started
    after `confirm` (it raises to refuse); the document then has `started`. If a part is missing the rest is
    fetched, and NodeError is raised with the document as its `result`. Raises NotFoundError for an unknown
    job, NoNodes.
    """
    try:
        return _fetch(cluster, job, anew)
    except NoNodes as error:
        if not error.stopped or not {job, MORE} & {None, *error.stopped}:
            raise
    up(cluster, confirm=confirm)
    return structs.replace(_fetch(cluster, job, anew), started=True)


def _fetch(cluster: "Cluster", job: str | None, anew: bool) -> FetchDocument:
    last = job or next((one.job.job for one in reversed(jobs_of(cluster, living(cluster.folder)))), None)
    kept = whole_at_home(cluster, last) if last is not None and not anew else None
    try:
        with cluster.partly_ready() as cluster:
            if kept is not None and job not in (None, *cluster.unfetched):
                return _kept(cluster, kept)
            with cluster.connect_reachable():
                chosen = told_job(cluster, job)
                fetched = bring(cluster, chosen)
                cluster.folder.remember(chosen)
                lost = still_missing(cluster, chosen)
    except (NotFoundError, NoNodes) as none:
        if kept is None or (isinstance(none, NoNodes) and job is None and none.stopped):
            raise
        return _kept(cluster, kept)
    result = _document(cluster, fetched, chosen.job)
    if lost:
        why = "\n".join(lost.values())
        error = NodeError(f"a part of the results of {chosen.job} is missing", why, "awsddp status")
        error.result = result
        raise error
    return result


def _document(cluster: "Cluster", fetched: "Mapping[int, Fetched]", job: str) -> FetchDocument:
    return FetchDocument(nodes=moved(fetched), job=job, home=str(results_dir(cluster, job)))


def _kept(cluster: "Cluster", job: JobRecord) -> FetchDocument:
    cluster.say(f"the results of {job.job} are already fetched")
    return _document(cluster, {}, job.job)


FETCH_REACH_S = 60.0


def fetch_all(cluster: "Cluster", listed: Listed) -> None:
    """End the jobs that still run, and fetch all unfetched results, before the nodes are terminated.

    Results of a node that no longer exists are named. Raises NodeError, with the jobs, the price and the next
    steps, if results remain on nodes.
    """
    owing = [node for node in listed.live if node.unfetched]
    if not owing:
        return
    record = cluster.known if cluster.known is not None and cluster.known.id == listed.id else None
    if record is None or not cluster.folder.key.exists():
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


def _fetch_owed(cluster: "Cluster") -> dict[Node, str]:
    """Fetch the unfetched results of the running nodes; return the nodes that did not answer, and why."""
    with cluster.connect(deadline_s=FETCH_REACH_S, partial=True) as fleet:
        owed = [job for job in told_jobs(cluster, partial=True) if is_owed(cluster, cluster.unfetched, job)]
        # The newest first: the end of a job starts one that waits for it.
        for job in reversed([end_job(cluster, job) for job in reversed(owed)]):
            if job.state in ACTIVE:
                raise NodeError(f"job {job.job} did not end")
            nodes = ", ".join(map(node_name, fleet.nodes))
            cluster.say(f"fetching the results of {job.job} from {nodes} to {results_dir(cluster, job.job)}/")
            bring(cluster, job)
            cluster.folder.remember(job)
            for text in still_missing(cluster, job).values():
                cluster.say(text)
        owing = [node for node in cluster.nodes if node.unfetched]
        return {node: fleet.failures[node.node].summary for node in owing if node.node in fleet.failures}


def _not_home(cluster: "Cluster", listed: Listed, owing: list[Node], why: str) -> NodeError:
    """Return the error that names the unfetched jobs, what the nodes cost meanwhile, and the next steps."""
    stopped = [node_name(node.node) for node in owing if node.state in ("stopping", "stopped")]
    ways = [f"awsddp up   # start {', '.join(stopped)}; then awsddp down"] if stopped else []
    ways.append("awsddp down --discard   # terminate the nodes and lose what they hold")
    cost, rests = "the nodes cost money", all(node.state == "stopped" for node in listed.live)
    bill = bill_of(cluster, cluster.known, cluster.own, cluster.gateway)
    if rests:
        cost = "only the disks cost"
    elif bill is not None and bill.id == listed.id and bill.price_usd_per_hour is not None:
        would = "would cost" if bill.target == "local" else "cost"
        cost = f"the nodes {would} {money(bill.price_usd_per_hour)} per hour"
    if not rests and not any(node.spot for node in listed.live):
        ways.append("awsddp stop   # or stop them and keep their disks")
    jobs = ", ".join(unfetched_jobs(owing))
    return NodeError(f"the results of {jobs} are not fetched", f"{why}\nuntil then {cost}", "\n".join(ways))
