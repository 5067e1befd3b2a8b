"""Fetch unfetched results before nodes are terminated."""

from awsddp.errors import AwsddpError, ConfigError, NodeError
from awsddp.job.cancel import end_job
from awsddp.job.fetch import fetch_from_nodes
from awsddp.job.save_to_s3 import wait_until_saved
from awsddp.model.records import ACTIVE, ClusterListing, Node, list_unfetched_jobs
from awsddp.session.connect import OFF_STATES, connect, filter_reachable, list_jobs_on_nodes
from awsddp.session.context import LocatedCluster
from awsddp.session.cost import compute_bill
from awsddp.storage.results_dir import find_unfetched_parts, has_unfetched_results
from awsddp.util.formatting import money, node_name

FETCH_REACH_S = 60.0


def fetch_unfetched_results(cluster: LocatedCluster, listed: ClusterListing) -> None:
    """Before the nodes are terminated, end the running jobs and fetch all unfetched results.

    Reports results that were lost with a node. If results remain on nodes, raises NodeError with the jobs,
    the price and the next steps. Raises ConfigError if this machine cannot store the results.
    """
    holders = [node for node in listed.live if node.unfetched]
    if not holders:
        return
    record = (
        cluster.local_record
        if cluster.local_record is not None and cluster.local_record.id == listed.id
        else None
    )
    if record is None or not cluster.session.folder.key.exists():
        raise _not_fetched_error(
            cluster, listed, holders, "this machine has no key for the nodes that hold them"
        )
    cluster = cluster.with_nodes(filter_reachable(listed.live), all_nodes=listed.live)
    saved: set[str] = set()
    failures: dict[Node, str] = {}
    try:
        if cluster.nodes:
            failures = _fetch_from_running(cluster, saved)
    except ConfigError as error:
        # This machine or another command is the cause: do not advise the user to discard the results.
        jobs = ", ".join(list_unfetched_jobs(holders))
        message = f"no node is terminated: the results of {jobs} are not fetched"
        why = f"{error.message}\n{error.why}".strip()
        raise ConfigError(message, why, f"{error.next}\nawsddp down   # then".strip()) from error
    except AwsddpError as error:
        raise _not_fetched_error(cluster, listed, holders, str(error)) from error
    for node in holders:
        if node not in cluster.nodes and not (saved.issuperset(node.unfetched) and node.state in OFF_STATES):
            failures[node] = f"{node_name(node.node)} is {node.state}"
    if failures:
        raise _not_fetched_error(cluster, listed, list(failures), ", ".join(failures.values()))


def _fetch_from_running(cluster: LocatedCluster, saved: set[str]) -> dict[Node, str]:
    """Fetch the running nodes' unfetched results; return a dict that maps each silent node to the reason.

    If both the nodes and S3 report that all of a job's results are in S3, fetch only the job's logs and
    metrics, and add the job's name to `saved`.
    """
    session = cluster.session
    names, holders = list_unfetched_jobs(cluster.nodes), [node for node in cluster.nodes if node.unfetched]
    with connect(cluster, deadline_s=FETCH_REACH_S, partial=True) as connected:
        unfetched = [
            job
            for job in list_jobs_on_nodes(connected, partial=True)
            if has_unfetched_results(session, names, job)
        ]
        # End the newest job first, because the end of a job starts the job that waits for it.
        for job in reversed([end_job(connected, job) for job in reversed(unfetched)]):
            if job.state in ACTIVE:
                raise NodeError(f"job {job.job} did not end")
            if job.save_to is not None and wait_until_saved(connected, job):
                saved.add(job.job)
                continue
            nodes = ", ".join(map(node_name, connected.fleet.nodes))
            session.say(f"fetching the results of {job.job} from {nodes} to {session.results / job.job}/")
            fetch_from_nodes(connected, job, wait_for_uploads=False)
            session.folder.save_jobs(job)
            for text in find_unfetched_parts(connected, job).values():
                session.say(text)
        return {
            node: connected.fleet.failures[node.node].summary
            for node in holders
            if node.node in connected.fleet.failures
        }


def _not_fetched_error(
    cluster: LocatedCluster, listed: ClusterListing, nodes: list[Node], why: str
) -> NodeError:
    """Return the error with the unfetched jobs, their nodes' price, and the next steps."""
    stopped = [node_name(node.node) for node in nodes if node.state in OFF_STATES]
    next_steps = [f"awsddp up   # start {', '.join(stopped)}; then awsddp down"] if stopped else []
    next_steps.append("awsddp down --discard   # terminate the nodes and lose these results")
    cost, all_stopped = "the nodes cost money", all(node.state == "stopped" for node in listed.live)
    bill = compute_bill(cluster, cluster.own_listing)
    if all_stopped:
        cost = "only the disks cost"
    elif bill is not None and bill.id == listed.id and bill.price_usd_per_hour is not None:
        cost = f"the nodes cost {money(bill.price_usd_per_hour)} per hour"
    if not all_stopped and not any(node.spot for node in listed.live):
        next_steps.append("awsddp stop   # or stop them and keep their disks")
    jobs = ", ".join(list_unfetched_jobs(nodes))
    why += "" if cluster.target.name == "local" else f"\nuntil then {cost}"
    return NodeError(f"the results of {jobs} are not fetched", why, "\n".join(next_steps))
