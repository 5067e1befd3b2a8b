"""down: fetch unfetched results, terminate the cluster in any state, and return its cost."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from awsddp.cluster.fetch_unfetched import fetch_unfetched_results
from awsddp.errors import ConfigError, LeftoverError, NodeError, NoRegion, UsageError
from awsddp.job.registry import JobRegistry
from awsddp.job.save_to_s3 import abort_uploads
from awsddp.model.billing import Bill
from awsddp.model.documents import DownDocument
from awsddp.model.records import ACTIVE, ENDED_STATES, OLDER_JOBS, ClusterListing, JobRecord, Node
from awsddp.session.connect import OFF_STATES
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.cost import compute_bill
from awsddp.session.locate import (
    describe_nodes,
    find_cluster,
    refuse_other_sessions,
    terminate,
    wait_until_launched_listed,
)
from awsddp.storage.results_dir import has_unfetched_results, is_fetched, is_fetched_from
from awsddp.storage.saved_job import verify_in_s3
from awsddp.util import formatting


def down(
    session: Session,
    *,
    discard: bool = False,
    known_only: bool = False,
    confirm: Callable[[str], None],
    lose: Callable[[NodeError], bool] = lambda error: False,
    ends_runs: bool = True,
) -> DownDocument:
    """Terminate the cluster and return the `down` document. A cluster that does not exist is not an error.

    With `ends_runs`, no client continues the runs of this cluster after that.

    Unfetched results are fetched first, unless `discard` is set. With `known_only`, a cluster without a
    record on this machine is refused (UsageError). `confirm` is called before anything is terminated and
    raises an exception to refuse. If results cannot be fetched, `lose` is called with the NodeError, which is
    then raised unless `lose` returns True. Raises NotFoundError if only another session of the user's role
    has a cluster with this name, LeftoverError if something could not be terminated, or CloudError if AWS
    does not answer.
    """
    try:
        return _down(
            session,
            discard=discard,
            known_only=known_only,
            confirm=confirm,
            lose=lose,
            end_runs=partial(session.folder.end_runs, "down") if ends_runs else lambda: None,
        )
    except NoRegion as error:
        if not known_only:
            raise
        session.say(f"AWS was not searched: {error.message}")
        return _document(
            LocatedCluster(session=session)
        )  # with `known_only`, nothing can be terminated without a record


def _down(
    session: Session,
    *,
    discard: bool,
    known_only: bool,
    confirm: Callable[[str], None],
    lose: Callable[[NodeError], bool],
    end_runs: Callable[[], None],
) -> DownDocument:
    with session.folder.lock("down"), find_cluster(session, ignore_newer=True, all_resources=True) as cluster:
        record = cluster.local_record
        if cluster.aws_client is not None:
            cluster = wait_until_launched_listed(cluster)
        clusters = cluster.all_listings
        if not clusters:
            with contextlib.suppress(ConfigError):  # a full disk must not stop `down`
                end_runs()
            if record is not None:  # the nodes terminated themselves, at their expiry at the latest
                session.folder.append_event("ended", id=record.id, at=min(datetime.now(UTC), record.expires))
                _forget(cluster, record.id)
            refuse_other_sessions(cluster)
            return _document(cluster)
        live = [_with_unfetched(cluster, listing) for listing in clusters if listing.live]
        if known_only and any(record is None or listing.id != record.id for listing in live):
            raise UsageError(
                f"-y does not end cluster {live[0].name}, of which this machine has no record",
                "; ".join(
                    f"{describe_nodes(cluster, listing)}{_describe_creation(listing)}" for listing in live
                ),
                f"awsddp -c {live[0].name} down -y   # if that is what you want",
            )
        if live:
            confirm("\n".join(_question(cluster, listing, discard=discard) for listing in live))
        with contextlib.suppress(ConfigError):
            end_runs()
        for listing in live if not discard else ():
            try:
                fetch_unfetched_results(cluster, listing)
            except NodeError as error:
                if not lose(error):
                    raise
        compute_bill(cluster, clusters[0])
        terminated = _terminate(cluster, clusters)
        bill = compute_bill(cluster, None)
        _forget(cluster, clusters[0].id if record is None else record.id)
        removed = sum(len(listing.leftovers) for listing in clusters)
        return _document(cluster, terminated=terminated, removed=removed, bill=bill)


def _terminate(cluster: LocatedCluster, clusters: Sequence[ClusterListing]) -> tuple[str, ...]:
    """Terminate all clusters with this name (each has its own id), and return the terminated instances.

    If something cannot be terminated, terminates everything else and then raises LeftoverError.
    """
    terminated: list[str] = []
    leftovers: list[str] = []
    for listing in clusters:
        began = datetime.now(UTC)  # EC2 does not bill an instance while it shuts down
        teardown = terminate(cluster, listing)
        with contextlib.suppress(ConfigError):  # a full disk must not stop the termination
            cluster.session.folder.append_event(
                "ended", id=listing.id, at=began, terminated=teardown.terminated, leftovers=teardown.leftovers
            )
        terminated += teardown.terminated
        leftovers += teardown.leftovers
    if leftovers:
        raise LeftoverError(
            f"not everything of cluster {cluster.session.spec.name} could be terminated",
            f"left: {', '.join(leftovers)}",
            "awsddp down   # again" + "; what is left may still cost money" * (cluster.target.name == "aws"),
        )
    return tuple(terminated)


def _with_unfetched(cluster: LocatedCluster, listed: ClusterListing) -> ClusterListing:
    """Return the listing with the jobs that are still unfetched on each node.

    These are the jobs in the node's tags, and released jobs whose results are no longer in S3. Jobs whose
    results are already fetched are left out. If the node is not running, jobs whose results are in S3 are
    left out too. The logs and metrics of these jobs are downloaded, because no node will report them later.
    For jobs on running nodes, S3 is not checked here. Others can write to the bucket, so
    `fetch_unfetched_results` requires a report from the node.
    """
    session = cluster.session
    record = (
        cluster.local_record
        if cluster.local_record is not None and cluster.local_record.id == listed.id
        else None
    )
    saved, not_saved = set(), list[JobRecord]()
    for job in record.jobs if record is not None else ():
        if is_fetched(session.results / job.job, job) or _is_on_running_node(listed, job):
            continue
        if verify_in_s3(session, job):
            session.say(f"the results of {job.job} are in {job.save_to}/{job.job}")
            saved.add(job.job)
        elif job.save_to is not None:
            not_saved.append(job)

    def unfetched_on(node: Node) -> tuple[str, ...]:
        released = (job.job for job in not_saved if node.instance_id in _instance_ids(job))
        names = (name for name in dict.fromkeys((*node.unfetched, *released)) if name not in saved)
        return tuple(name for name in names if not is_fetched_from(session, name, node.instance_id))

    return replace(listed, nodes=tuple(replace(node, unfetched=unfetched_on(node)) for node in listed.nodes))


def _instance_ids(job: JobRecord) -> set[str]:
    """Return the instances on which a job ran."""
    return {node.instance_id for node in job.nodes}


def _is_on_running_node(listed: ClusterListing, job: JobRecord) -> bool:
    """Return True if the tag of a starting or running node lists the job as unfetched."""
    ran_on = _instance_ids(job)
    return any(
        node.state not in (*OFF_STATES, *ENDED_STATES)
        and not {job.job, OLDER_JOBS}.isdisjoint(node.unfetched)
        for node in listed.nodes
        if node.instance_id in ran_on
    )


def _question(cluster: LocatedCluster, listed: ClusterListing, *, discard: bool) -> str:
    nodes = f"{describe_nodes(cluster, listed)}{_describe_creation(listed)}"
    lines = [f"Cluster {listed.name}: {nodes} will be terminated."]
    jobs = [job.job for job in JobRegistry(cluster.session).own_jobs]
    for job in jobs:
        if job.state in ACTIVE and has_unfetched_results(cluster.session, listed.unfetched, job):
            is_waiting = job.state == "waiting"
            grace = cluster.session.job_spec.job.grace
            to_save = "" if discard or is_waiting else f", with {grace} to save a checkpoint"
            lines.append(f"Job {job.job} was {job.state} when last seen. It will be stopped{to_save}.")
    if listed.unfetched:
        saves = any(job.save_to is not None and job.job in listed.unfetched for job in jobs)
        fate = "are lost" if discard else "are fetched first" + ", unless S3 holds them" * saves
        lines.append(f"The results of {', '.join(listed.unfetched)} {fate}.")
    return "\n".join(lines)


def _describe_creation(cluster: ClusterListing) -> str:
    """Return a string that says when and on which machine a cluster was created, if its tags record that."""
    host = cluster.host and f" on {cluster.host}"
    return f", created at {formatting.optional_utc(cluster.created)}{host}," if cluster.created else ""


def _forget(cluster: LocatedCluster, cluster_id: str) -> None:
    abort_uploads(cluster, [job.job for job in JobRegistry(cluster.session).own_jobs])
    try:
        cluster.session.folder.archive(cluster_id)
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
        looked=cluster.searched_places,
        ended=str(formatting.optional_utc(datetime.now(UTC))),
    )
