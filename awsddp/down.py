"""down and stop: fetch what is owed, end or stop the machines, and return the cost. Works in every state."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from awsddp import report
from awsddp.billing import Bill
from awsddp.errors import AwsddpError, ConfigError, LeftoverError, NodeError, UsageError
from awsddp.fetch import fetch_all
from awsddp.known import end_job, jobs_of, told_jobs
from awsddp.ledger import bill_of, living
from awsddp.owed import Ephemeral, refuse_ephemeral
from awsddp.records import ACTIVE, Listed
from awsddp.report import node_name
from awsddp.results import is_owed
from awsddp.returns import ClusterDocument, DownDocument
from awsddp.search import end, look, reachable, refuse_sessions, require_live, wait_until_launches_show
from awsddp.state import Record
from awsddp.status import cluster_document

if TYPE_CHECKING:
    from awsddp.cluster import Cluster


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
    with cluster.folder.lock("down"), cluster.find(newer=True, whole=True) as cluster:
        record = cluster.known
        if cluster.gateway is not None:
            wait_until_launches_show(cluster)
        clusters = cluster.all_listed
        if not clusters:
            if record is not None:  # it ended by itself, at its expiry at the latest
                cluster.folder.note("ended", id=record.id, at=min(datetime.now(UTC), record.expires))
            _forget(cluster, record)
            refuse_sessions(cluster)
            return _document(cluster)
        live = [one for one in clusters if one.live]
        if known_only and any(record is None or one.id != record.id for one in live):
            raise UsageError(
                f"-y does not end cluster {live[0].name}, which this machine has no record of",
                "; ".join(f"{cluster.machines(one)}{_made(one)}" for one in live),
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
        bill_of(cluster, record, clusters[0], cluster.aws)
        terminated = _end(cluster, clusters)
        bill = bill_of(cluster, record, None)
        _forget(cluster, record, cluster_id=clusters[0].id)
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
            "awsddp down   # again; what is left may still cost money",
        )
    return tuple(terminated)


def _what_ends(cluster: "Cluster", listed: Listed, *, discard: bool) -> str:
    question = [f"Cluster {listed.name}: {cluster.machines(listed)}{_made(listed)} will be terminated."]
    for job in (one.job for one in jobs_of(cluster, living(cluster.folder))):
        if job.state in ACTIVE and is_owed(cluster, listed.unfetched, job):
            waits = job.state == "waiting"
            grace = "" if discard or waits else f" and has {cluster.job_spec.job.grace} to save"
            does = "waits" if waits else "still runs"
            question.append(f"Job {job.job} {does} (as last seen): it is ended{grace}.")
    if listed.unfetched:
        fate = "are lost" if discard else "are fetched first"
        question.append(f"The results of {', '.join(listed.unfetched)} {fate}.")
    return "\n".join(question)


def _made(cluster: Listed) -> str:
    """Return when a cluster was made, and on which machine, as far as its tags say."""
    host = cluster.host and f" on {cluster.host}"
    return f", made at {report.iso(cluster.created)}{host}," if cluster.created else ""


def _forget(cluster: "Cluster", record: Record | None, cluster_id: str | None = None) -> None:
    ended = record.id if record is not None else cluster_id
    if ended is None:
        return
    try:
        cluster.folder.retire(ended)
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


STOP_REACH_S = 30.0


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
                cluster.folder.publish(lambda prefix: "")
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
    machines, cost = cluster.machines(listed), "" if cluster.target.name == "local" else ", and cost"
    question = f"Cluster {listed.name}: {machines} will be stopped; their disks are kept{cost}."
    if listed.unfetched:
        question += f"\nThe results of {', '.join(listed.unfetched)} stay on the disks."
    return question


def _end_jobs(cluster: "Cluster", listed: Listed) -> None:
    """End the running jobs, with their grace. Unreachable nodes are stopped anyway: their disks are kept."""
    if cluster.known is None or not listed.unfetched:
        return
    try:
        with cluster.connect(reachable(listed.live), deadline_s=STOP_REACH_S, partial=True) as fleet:
            jobs = told_jobs(cluster, partial=True)
            refuse_ephemeral(cluster, fleet, [job for job in jobs if is_owed(cluster, listed.unfetched, job)])
            # The newest first: the end of a job starts one that waits for it.
            cluster.folder.remember(*[end_job(cluster, job) for job in reversed(jobs)])
    except Ephemeral:
        raise
    except AwsddpError as error:
        cluster.say(f"jobs could not be ended first: {error.message}")
