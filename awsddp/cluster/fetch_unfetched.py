"""Fetching what nodes still hold before they are terminated or stopped."""

from awsddp.errors import AwsddpError, ConfigError, NodeError
from awsddp.job.cancel import end_job
from awsddp.job.fetch import bring
from awsddp.job.save_to_s3 import wait_until_saved
from awsddp.model.records import ACTIVE, Listed, Node, unfetched_jobs
from awsddp.session.connect import OFF, connect, reachable, told_jobs
from awsddp.session.context import LocatedCluster
from awsddp.session.cost import bill_of
from awsddp.storage.results_dir import is_owed, still_missing
from awsddp.util.format import money, node_name

FETCH_REACH_S = 60.0


def fetch_all(cluster: LocatedCluster, listed: Listed) -> None:
    """End the jobs that still run, and fetch all unfetched results, before the nodes are terminated.

    Results of a node that no longer exists are named. Raises NodeError, with the jobs, the price and the next
    steps, if results remain on nodes; ConfigError if this machine cannot keep them.
    """
    owing = [node for node in listed.live if node.unfetched]
    if not owing:
        return
    record = cluster.known if cluster.known is not None and cluster.known.id == listed.id else None
    if record is None or not cluster.session.folder.key.exists():
        raise _not_home(cluster, listed, owing, "this machine has no key for the nodes that hold them")
    cluster = cluster.with_nodes(reachable(listed.live), of=listed.live)
    saved: set[str] = set()
    left: dict[Node, str] = {}
    try:
        if cluster.nodes:
            left = _fetch_owed(cluster, saved)
    except ConfigError as error:  # of this machine, or another command's: nothing has to be lost for it
        jobs = ", ".join(unfetched_jobs(owing))
        message = f"no node is terminated: the results of {jobs} are not fetched"
        why = f"{error.message}\n{error.why}".strip()
        raise ConfigError(message, why, f"{error.next}\nawsddp down   # then".strip()) from error
    except AwsddpError as error:
        raise _not_home(cluster, listed, owing, str(error)) from error
    for node in owing:
        if node not in cluster.nodes and not (saved.issuperset(node.unfetched) and node.state in OFF):
            left[node] = f"{node_name(node.node)} is {node.state}"
    if left:
        raise _not_home(cluster, listed, list(left), ", ".join(left.values()))


def _fetch_owed(cluster: LocatedCluster, saved: set[str]) -> dict[Node, str]:
    """Fetch the unfetched results of the running nodes; return the nodes that did not answer, and why.

    What is all in S3, by the word of the nodes that answer and by what this machine reads there, is not
    fetched, but its logs and metrics: it is added to `saved`.
    """
    session = cluster.session
    names, owing = unfetched_jobs(cluster.nodes), [node for node in cluster.nodes if node.unfetched]
    with connect(cluster, deadline_s=FETCH_REACH_S, partial=True) as connected:
        owed = [job for job in told_jobs(connected, partial=True) if is_owed(session, names, job)]
        # The newest first: the end of a job starts one that waits for it.
        for job in reversed([end_job(connected, job) for job in reversed(owed)]):
            if job.state in ACTIVE:
                raise NodeError(f"job {job.job} did not end")
            if job.save_to is not None and wait_until_saved(connected, job):
                saved.add(job.job)
                continue
            nodes = ", ".join(map(node_name, connected.fleet.nodes))
            session.say(f"fetching the results of {job.job} from {nodes} to {session.results / job.job}/")
            bring(connected, job, waits=False)
            session.folder.remember(job)
            for text in still_missing(connected, job).values():
                session.say(text)
        return {
            node: connected.fleet.failures[node.node].summary
            for node in owing
            if node.node in connected.fleet.failures
        }


def _not_home(cluster: LocatedCluster, listed: Listed, owing: list[Node], why: str) -> NodeError:
    """Return the error that names the unfetched jobs, what the nodes cost meanwhile, and the next steps."""
    stopped = [node_name(node.node) for node in owing if node.state in ("stopping", "stopped")]
    ways = [f"awsddp up   # start {', '.join(stopped)}; then awsddp down"] if stopped else []
    ways.append("awsddp down --discard   # terminate the nodes and lose what they hold")
    cost, rests = "the nodes cost money", all(node.state == "stopped" for node in listed.live)
    bill = bill_of(cluster, cluster.own)
    if rests:
        cost = "only the disks cost"
    elif bill is not None and bill.id == listed.id and bill.price_usd_per_hour is not None:
        cost = f"the nodes cost {money(bill.price_usd_per_hour)} per hour"
    if not rests and not any(node.spot for node in listed.live):
        ways.append("awsddp stop   # or stop them and keep their disks")
    jobs = ", ".join(unfetched_jobs(owing))
    why += "" if cluster.target.name == "local" else f"\nuntil then {cost}"
    return NodeError(f"the results of {jobs} are not fetched", why, "\n".join(ways))
