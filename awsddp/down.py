"""down and stop: fetch what is owed, end or stop the machines, and return the cost. Works in every state."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from awsddp import report
from awsddp.billing import Bill
from awsddp.errors import AwsddpError, ConfigError, LeftoverError, NodeError, NoRegion, UsageError
from awsddp.fetch import Ephemeral, bring, refuse_ephemeral
from awsddp.known import bill_of, end_job, jobs_of
from awsddp.reach import OFF, reachable, told_jobs
from awsddp.records import ACTIVE, ENDED, MORE, JobRecord, Listed, Node, unfetched_jobs
from awsddp.report import money, node_name
from awsddp.results import is_fetched, is_home, is_owed, still_missing
from awsddp.returns import ClusterDocument, DownDocument
from awsddp.saved import in_bucket
from awsddp.saving import abort, wait_until_saved
from awsddp.search import end, look, machines, refuse_sessions, require_live, wait_until_launches_show
from awsddp.state import living
from awsddp.status import cluster_document

if TYPE_CHECKING:
    from awsddp.cluster import Cluster

STOP_REACH_S = 30.0
FETCH_REACH_S = 60.0


def down(
    cluster: "Cluster",
    *,
    discard: bool = False,
    known_only: bool = False,
    confirm: Callable[[str], None],
    lose: Callable[[NodeError], bool] = lambda error: False,
) -> DownDocument:
    """Terminate the cluster and return the `down` document. A cluster that does not exist is not an error.

    Unfetched results are fetched first, unless `discard`. With `known_only` a cluster that this machine has
    no record of is refused (UsageError). `confirm` is called before anything is terminated and raises to
    refuse; `lose` is called with the error if results cannot be fetched. Raises that NodeError unless
    `lose` returns True, NotFoundError where only another session of the caller's role has one,
    LeftoverError where something could not be terminated, CloudError where AWS does not answer.
    """
    try:
        return _down(cluster, discard=discard, known_only=known_only, confirm=confirm, lose=lose)
    except NoRegion as error:
        if not known_only:
            raise
        cluster.say(f"AWS was not searched: {error.message}")
        return _document(cluster)  # without a record, and -y ends only what has one


def _down(
    cluster: "Cluster",
    *,
    discard: bool,
    known_only: bool,
    confirm: Callable[[str], None],
    lose: Callable[[NodeError], bool],
) -> DownDocument:
    with cluster.folder.lock("down"), cluster.find(newer=True, whole=True) as cluster:
        record = cluster.known
        if cluster.gateway is not None:
            wait_until_launches_show(cluster)
        clusters = cluster.all_listed
        if not clusters:
            if record is not None:  # it ended by itself, at its expiry at the latest
                cluster.folder.note("ended", id=record.id, at=min(datetime.now(UTC), record.expires))
                _forget(cluster, record.id)
            refuse_sessions(cluster)
            return _document(cluster)
        live = [_owing(cluster, one) for one in clusters if one.live]
        if known_only and any(record is None or one.id != record.id for one in live):
            raise UsageError(
                f"-y does not end cluster {live[0].name}, which this machine has no record of",
                "; ".join(f"{machines(cluster, one)}{_made(one)}" for one in live),
                f"awsddp -c {live[0].name} down -y   # if that is what you want",
            )
        if live:
            confirm("\n".join(_what_ends(cluster, one, discard=discard) for one in live))
        for one in live if not discard else ():
            try:
                fetch_all(cluster, one)
            except NodeError as error:
                if not lose(error):
                    raise
        bill_of(cluster, clusters[0])
        terminated = _end(cluster, clusters)
        bill = bill_of(cluster, None)
        _forget(cluster, clusters[0].id if record is None else record.id)
        removed = sum(len(one.leftovers) for one in clusters)
        return _document(cluster, terminated=terminated, removed=removed, bill=bill)


def _end(cluster: "Cluster", clusters: Sequence[Listed]) -> tuple[str, ...]:
    """Terminate the clusters of this name, one per id, and return the terminated instances.

    Raises LeftoverError, after everything else is terminated.
    """
    terminated: list[str] = []
    left: list[str] = []
    for one in clusters:
        began = datetime.now(UTC)  # EC2 bills no instance that is shutting down
        ended = end(cluster, one)
        with contextlib.suppress(ConfigError):  # the end of the machines does not wait for a full disk here
            cluster.folder.note(
                "ended", id=one.id, at=began, terminated=ended.terminated, leftovers=ended.leftovers
            )
        terminated += ended.terminated
        left += ended.leftovers
    if left:
        raise LeftoverError(
            f"not everything of cluster {cluster.spec.name} could be terminated",
            f"left: {', '.join(left)}",
            "awsddp down   # again" + "; what is left may still cost money" * (cluster.target.name == "aws"),
        )
    return tuple(terminated)


def _owing(cluster: "Cluster", listed: Listed) -> Listed:
    """Return a cluster whose nodes owe what their tags name, without what is here, or in S3 where no node
    that runs holds it; and, of jobs whose nodes were released, what S3 does not hold any more.

    Of what is in S3, also of other jobs, the logs and metrics come here: no node will tell of them any more.
    A node that runs is asked first (`fetch_all`): others may write in S3, and its word counts.
    """
    record = cluster.known if cluster.known is not None and cluster.known.id == listed.id else None
    saved, lost = set(), list[JobRecord]()
    for job in record.jobs if record is not None else ():
        if is_fetched(cluster.results / job.job, job) or _is_held(listed, job):
            continue
        if in_bucket(cluster, job):
            cluster.say(f"the results of {job.job} are in {job.save_to}/{job.job}")
            saved.add(job.job)
        elif job.save_to is not None:
            lost.append(job)

    def owed(node: Node) -> tuple[str, ...]:
        released = (job.job for job in lost if node.instance_id in {one.instance_id for one in job.nodes})
        jobs = (job for job in dict.fromkeys((*node.unfetched, *released)) if job not in saved)
        return tuple(job for job in jobs if not is_home(cluster, job, node.instance_id))

    return replace(listed, nodes=tuple(replace(node, unfetched=owed(node)) for node in listed.nodes))


def _is_held(listed: Listed, job: JobRecord) -> bool:
    """Tell whether a node that AWS does not list as stopped or gone holds results of a job, by its tag."""
    ran_on = {one.instance_id for one in job.nodes}
    return any(
        node.state not in (*OFF, *ENDED) and not {job.job, MORE}.isdisjoint(node.unfetched)
        for node in listed.nodes
        if node.instance_id in ran_on
    )


def _what_ends(cluster: "Cluster", listed: Listed, *, discard: bool) -> str:
    question = [f"Cluster {listed.name}: {machines(cluster, listed)}{_made(listed)} will be terminated."]
    jobs = [one.job for one in jobs_of(cluster, living(cluster.folder))]
    for job in jobs:
        if job.state in ACTIVE and is_owed(cluster, listed.unfetched, job):
            waits = job.state == "waiting"
            grace = "" if discard or waits else f" and has {cluster.job_spec.job.grace} to save"
            does = "waits" if waits else "still runs"
            question.append(f"Job {job.job} {does} (as last seen): it is ended{grace}.")
    if listed.unfetched:
        saves = any(job.save_to is not None and job.job in listed.unfetched for job in jobs)
        fate = "are lost" if discard else "are fetched first" + ", unless S3 holds them" * saves
        question.append(f"The results of {', '.join(listed.unfetched)} {fate}.")
    return "\n".join(question)


def _made(cluster: Listed) -> str:
    """Return when a cluster was made, and on which machine, as far as its tags say."""
    host = cluster.host and f" on {cluster.host}"
    return f", made at {report.iso(cluster.created)}{host}," if cluster.created else ""


def _forget(cluster: "Cluster", cluster_id: str) -> None:
    abort(cluster, [one.job for one in jobs_of(cluster, living(cluster.folder))])
    try:
        cluster.folder.retire(cluster_id)
    except ConfigError as error:
        cluster.say(f"{error.message}: {error.why or error.next}")


def _document(
    cluster: "Cluster", *, terminated: tuple[str, ...] = (), removed: int = 0, bill: Bill | None = None
) -> DownDocument:
    return DownDocument(
        cluster=cluster.spec.name,
        state="absent",
        target=cluster.target.name,
        terminated=terminated,
        leftovers=(),
        removed=removed,
        cost_usd=bill.cost_usd if bill else None,
        looked=cluster.searched,
        ended=str(report.iso(datetime.now(UTC))),
    )


def stop(cluster: "Cluster", *, confirm: Callable[[str], None]) -> ClusterDocument:
    """Stop the cluster's instances and return it as the `status` document.

    A running job is ended first, with its grace; results stay on the disks. `confirm` is called first and
    raises to refuse. Raises NotFoundError, ConfigError for spot nodes, which cannot be stopped, CloudError,
    and NodeError for instances that do not stop and for results that a stop would lose.
    """
    from awsddp.aws.power import stop as stop_nodes

    with cluster.folder.lock("stop"), cluster.find() as cluster:
        listed = require_live(cluster)
        _refuse_spot(listed)
        going = [node for node in listed.live if node.state != "stopped"]
        if going:
            confirm(_what_stops(cluster, listed))
            _end_jobs(cluster, listed)
            stop_nodes(cluster.aws, going, on_event=cluster.on_event)
            if cluster.known is not None:
                cluster.folder.note(
                    "stopped", id=listed.id, instances=sorted(node.instance_id for node in going)
                )
                cluster.folder.publish(lambda *_: "")
        look(cluster)
        return cluster_document(cluster)


def _refuse_spot(cluster: Listed) -> None:
    spot = [node_name(node.node) for node in cluster.live if node.spot]
    if spot:
        raise ConfigError(
            f"{', '.join(spot)}: spot instances cannot be stopped",
            "AWS can only terminate one-time spot instances",
            "awsddp down   # fetch the results, then terminate them",
        )


def _what_stops(cluster: "Cluster", listed: Listed) -> str:
    cost = "" if cluster.target.name == "local" else ", and cost"
    what = f"Cluster {listed.name}: {machines(cluster, listed)}"
    question = f"{what} will be stopped; their disks are kept{cost}."
    if listed.unfetched:
        question += f"\nThe results of {', '.join(listed.unfetched)} stay on the disks."
    return question


def _end_jobs(cluster: "Cluster", listed: Listed) -> None:
    """End the running jobs, with their grace. Unreachable nodes are stopped anyway: their disks are kept."""
    if cluster.known is None or not listed.unfetched:
        return
    try:
        with cluster.connect(reachable(listed.live), deadline_s=STOP_REACH_S, partial=True):
            jobs = told_jobs(cluster, partial=True)
            refuse_ephemeral(cluster, [job for job in jobs if is_owed(cluster, listed.unfetched, job)])
            # The newest first: the end of a job starts one that waits for it.
            cluster.folder.remember(*[end_job(cluster, job) for job in reversed(jobs)])
    except Ephemeral:
        raise
    except AwsddpError as error:
        cluster.say(f"jobs could not be ended first: {error.message}")


def fetch_all(cluster: "Cluster", listed: Listed) -> None:
    """End the jobs that still run, and fetch all unfetched results, before the nodes are terminated.

    Results of a node that no longer exists are named. Raises NodeError, with the jobs, the price and the next
    steps, if results remain on nodes; ConfigError if this machine cannot keep them.
    """
    owing = [node for node in listed.live if node.unfetched]
    if not owing:
        return
    record = cluster.known if cluster.known is not None and cluster.known.id == listed.id else None
    if record is None or not cluster.folder.key.exists():
        raise _not_home(cluster, listed, owing, "this machine has no key for the nodes that hold them")
    cluster.use(reachable(listed.live), of=listed.live)
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


def _fetch_owed(cluster: "Cluster", saved: set[str]) -> dict[Node, str]:
    """Fetch the unfetched results of the running nodes; return the nodes that did not answer, and why.

    What is all in S3, by the word of the nodes that answer and by what this machine reads there, is not
    fetched, but its logs and metrics: it is added to `saved`.
    """
    names, owing = unfetched_jobs(cluster.nodes), [node for node in cluster.nodes if node.unfetched]
    with cluster.connect(deadline_s=FETCH_REACH_S, partial=True) as fleet:
        owed = [job for job in told_jobs(cluster, partial=True) if is_owed(cluster, names, job)]
        # The newest first: the end of a job starts one that waits for it.
        for job in reversed([end_job(cluster, job) for job in reversed(owed)]):
            if job.state in ACTIVE:
                raise NodeError(f"job {job.job} did not end")
            if job.save_to is not None and wait_until_saved(cluster, job):
                saved.add(job.job)
                continue
            nodes = ", ".join(map(node_name, fleet.nodes))
            cluster.say(f"fetching the results of {job.job} from {nodes} to {cluster.results / job.job}/")
            bring(cluster, job, waits=False)
            cluster.folder.remember(job)
            for text in still_missing(cluster, job).values():
                cluster.say(text)
        return {node: fleet.failures[node.node].summary for node in owing if node.node in fleet.failures}


def _not_home(cluster: "Cluster", listed: Listed, owing: list[Node], why: str) -> NodeError:
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
