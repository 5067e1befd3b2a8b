"""down: fetch what is not fetched, end the machines, and return the cost. Works in every state."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from awsddp.cluster.fetch_unfetched import fetch_all
from awsddp.errors import ConfigError, LeftoverError, NodeError, NoRegion, UsageError
from awsddp.job.registry import JobRegistry
from awsddp.job.save_to_s3 import abort
from awsddp.model.billing import Bill
from awsddp.model.documents import DownDocument
from awsddp.model.records import ACTIVE, ENDED, MORE, JobRecord, Listed, Node
from awsddp.session.connect import OFF
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.cost import bill_of
from awsddp.session.locate import end, find_cluster, machines, refuse_sessions, wait_until_launches_show
from awsddp.storage.results_dir import is_fetched, is_home, is_owed
from awsddp.storage.saved_job import in_bucket
from awsddp.util import format


def down(
    session: Session,
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
        return _down(session, discard=discard, known_only=known_only, confirm=confirm, lose=lose)
    except NoRegion as error:
        if not known_only:
            raise
        session.say(f"AWS was not searched: {error.message}")
        return _document(LocatedCluster(session=session))  # without a record, and -y ends only what has one


def _down(
    session: Session,
    *,
    discard: bool,
    known_only: bool,
    confirm: Callable[[str], None],
    lose: Callable[[NodeError], bool],
) -> DownDocument:
    with session.folder.lock("down"), find_cluster(session, newer=True, whole=True) as cluster:
        record = cluster.known
        if cluster.gateway is not None:
            cluster = wait_until_launches_show(cluster)
        clusters = cluster.all_listed
        if not clusters:
            if record is not None:  # it ended by itself, at its expiry at the latest
                session.folder.note("ended", id=record.id, at=min(datetime.now(UTC), record.expires))
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


def _end(cluster: LocatedCluster, clusters: Sequence[Listed]) -> tuple[str, ...]:
    """Terminate the clusters of this name, one per id, and return the terminated instances.

    Raises LeftoverError, after everything else is terminated.
    """
    terminated: list[str] = []
    left: list[str] = []
    for one in clusters:
        began = datetime.now(UTC)  # EC2 bills no instance that is shutting down
        ended = end(cluster, one)
        with contextlib.suppress(ConfigError):  # the end of the machines does not wait for a full disk here
            cluster.session.folder.note(
                "ended", id=one.id, at=began, terminated=ended.terminated, leftovers=ended.leftovers
            )
        terminated += ended.terminated
        left += ended.leftovers
    if left:
        raise LeftoverError(
            f"not everything of cluster {cluster.session.spec.name} could be terminated",
            f"left: {', '.join(left)}",
            "awsddp down   # again" + "; what is left may still cost money" * (cluster.target.name == "aws"),
        )
    return tuple(terminated)


def _owing(cluster: LocatedCluster, listed: Listed) -> Listed:
    """Return a cluster whose nodes owe what their tags name, without what is here, or in S3 where no node
    that runs holds it; and, of jobs whose nodes were released, what S3 does not hold any more.

    Of what is in S3, also of other jobs, the logs and metrics come here: no node will tell of them any more.
    A node that runs is asked first (`fetch_all`): others may write in S3, and its word counts.
    """
    session = cluster.session
    record = cluster.known if cluster.known is not None and cluster.known.id == listed.id else None
    saved, lost = set(), list[JobRecord]()
    for job in record.jobs if record is not None else ():
        if is_fetched(session.results / job.job, job) or _is_held(listed, job):
            continue
        if in_bucket(session, job):
            session.say(f"the results of {job.job} are in {job.save_to}/{job.job}")
            saved.add(job.job)
        elif job.save_to is not None:
            lost.append(job)

    def owed(node: Node) -> tuple[str, ...]:
        released = (job.job for job in lost if node.instance_id in {one.instance_id for one in job.nodes})
        jobs = (job for job in dict.fromkeys((*node.unfetched, *released)) if job not in saved)
        return tuple(job for job in jobs if not is_home(session, job, node.instance_id))

    return replace(listed, nodes=tuple(replace(node, unfetched=owed(node)) for node in listed.nodes))


def _is_held(listed: Listed, job: JobRecord) -> bool:
    """Tell whether a node that AWS does not list as stopped or gone holds results of a job, by its tag."""
    ran_on = {one.instance_id for one in job.nodes}
    return any(
        node.state not in (*OFF, *ENDED) and not {job.job, MORE}.isdisjoint(node.unfetched)
        for node in listed.nodes
        if node.instance_id in ran_on
    )


def _what_ends(cluster: LocatedCluster, listed: Listed, *, discard: bool) -> str:
    question = [f"Cluster {listed.name}: {machines(cluster, listed)}{_made(listed)} will be terminated."]
    jobs = [one.job for one in JobRegistry(cluster.session).own]
    for job in jobs:
        if job.state in ACTIVE and is_owed(cluster.session, listed.unfetched, job):
            waits = job.state == "waiting"
            grace = "" if discard or waits else f" and has {cluster.session.job_spec.job.grace} to save"
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
    return f", made at {format.iso(cluster.created)}{host}," if cluster.created else ""


def _forget(cluster: LocatedCluster, cluster_id: str) -> None:
    abort(cluster, [one.job for one in JobRegistry(cluster.session).own])
    try:
        cluster.session.folder.retire(cluster_id)
    except ConfigError as error:
        cluster.session.say(f"{error.message}: {error.why or error.next}")


def _document(
    cluster: LocatedCluster, *, terminated: tuple[str, ...] = (), removed: int = 0, bill: Bill | None = None
) -> DownDocument:
    return DownDocument(
        cluster=cluster.session.spec.name,
        state="absent",
        target=cluster.target.name,
        terminated=terminated,
        leftovers=(),
        removed=removed,
        cost_usd=bill.cost_usd if bill else None,
        looked=cluster.searched,
        ended=str(format.iso(datetime.now(UTC))),
    )
