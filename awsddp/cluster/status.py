"""status: a cluster's nodes with their cost and expiry from AWS, and its jobs as last seen."""

import contextlib
import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from awsddp.errors import AwsddpError
from awsddp.job.lives import report_missing_checkpoints
from awsddp.job.registry import JobRegistry
from awsddp.job.release import release_saved_jobs, release_unlaunched_jobs
from awsddp.model import cluster_state
from awsddp.model.documents import ClusterDocument, NodeState
from awsddp.model.records import ACTIVE, OLDER_JOBS, ClusterListing, ClusterState, JobRecord, merge_records
from awsddp.session.connect import connect, filter_reachable, list_jobs_on_nodes
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.session.cost import compute_bill
from awsddp.session.locate import find_cluster, refuse_other_sessions
from awsddp.state import Record
from awsddp.util import formatting

ASK_S = 5.0
"""How long connecting to a node may take before a running job is shown as last seen."""

# The watchdog ignores connections from the ports in this file, so this login does not count as use.
_READ_IDLE = (
    'set -- $SSH_CONNECTION; echo "$2" | sudo -n tee -a /run/awsddp/asked > /dev/null; cat /run/awsddp/left'
)


def status(session: Session, *, ask_nodes: bool = False) -> ClusterDocument:
    """Return the cluster as the `status` document; a cluster that is not found is "absent".

    If there is no record, only the running local cloud and one region are searched; `status_all` searches
    every region. With `ask_nodes`, the document has each node's `idle_left_s`, which the node's watchdog
    counts. `idle_left_s` is None if the node does not answer within ASK_S. Raises CloudError if AWS does not
    answer, or NotFoundError if another session of the user's role has a cluster with this name.
    """
    with find_cluster(session, ignore_newer=True, all_regions=False) as cluster:
        cluster, reported_jobs = refresh_jobs(cluster)
        document = make_cluster_document(cluster, reported_jobs)
        if document.state == "absent":
            refuse_other_sessions(cluster)
        if ask_nodes and cluster.own_listing is not None:
            idle_left = _idle_left(cluster)
            for node in document.nodes:
                node.idle_left_s = idle_left.get(node.node)
        return document


def _idle_left(cluster: LocatedCluster) -> dict[int, int]:
    """Return {node number: seconds left of its idle time}. Nodes that do not answer are omitted."""
    outputs: dict[int, bytes] = {}

    def receive(node: int, data: bytes) -> None:
        outputs[node] = outputs.get(node, b"") + data[:99]

    with contextlib.suppress(AwsddpError), _connect_prepared(cluster) as connected:
        request = (("sh", "-c", _READ_IDLE), b"")
        connected.fleet.stream(dict.fromkeys(connected.fleet.nodes, request), receive, silent_after_s=ASK_S)
    return {node: int(output) for node, output in outputs.items() if re.fullmatch(rb"\d{1,9}\n", output)}


def _connect_prepared(cluster: LocatedCluster) -> "AbstractContextManager[ConnectedCluster]":
    """Connect to the reachable nodes that this machine has prepared."""
    live = cluster.own_listing.live if cluster.own_listing else ()
    prepared = [node for node in filter_reachable(live) if cluster.record.is_prepared(node)]
    return connect(cluster.with_nodes(prepared, all_nodes=live), deadline_s=ASK_S, partial=True)


def refresh_jobs(cluster: LocatedCluster) -> "tuple[LocatedCluster, tuple[JobRecord, ...]]":
    """Record the state of jobs that were running or uploading to S3 when last seen.

    Returns the cluster and the jobs that its nodes report, or no jobs if no request is needed or no node
    answers.
    """
    record = cluster.local_record
    reported: tuple[JobRecord, ...] = ()
    if record is None or cluster.own_listing is None or not _is_due(cluster, record.jobs):
        return cluster, reported
    with contextlib.suppress(AwsddpError), _connect_prepared(cluster) as connected:
        reported = list_jobs_on_nodes(connected, partial=True)
        cluster.session.folder.save_jobs(*reported)
        release_saved_jobs(connected, reported)
        release_unlaunched_jobs(connected, reported)
        cluster = replace(cluster, local_record=cluster.session.folder.read())
        report_missing_checkpoints(connected, reported)
    return cluster, reported


def _is_due(cluster: LocatedCluster, jobs: Collection[JobRecord]) -> bool:
    """Return True if the nodes may have a job state to report that is not in the record.

    This is the case if a job was running or uploading when last seen, or if the nodes' tags name a job that
    is not in the record. Otherwise no request is sent, because a request counts as use of the nodes.
    """
    if set(cluster.unfetched_jobs) - {job.job for job in jobs} - {OLDER_JOBS}:
        return True
    return any(job.state in ACTIVE or (job.job in cluster.unfetched_jobs and _is_saving(job)) for job in jobs)


def _is_saving(job: JobRecord) -> bool:
    """Return True if a job, when last seen, was uploading to S3 or had saved all its results."""
    saving = job.saving
    return job.save_to is not None and (saving is None or not saving.ended or saving.is_complete)


def make_cluster_document(cluster: LocatedCluster, reported: Collection[JobRecord] = ()) -> ClusterDocument:
    """Return the document that `up` and `status` print, made from AWS's listing and this machine's record.

    `reported` are jobs that nodes have just reported.
    """
    listed = cluster.listing
    live = listed.live if listed else ()
    bill = compute_bill(cluster, listed)
    document = ClusterDocument(
        cluster=cluster.session.spec.name,
        state=_state(cluster),
        target=cluster.target.name,
        region=listed.region if listed else cluster.target.region,
        instance_type=live[0].instance_type if live else None,
        nodes=tuple(merge_records(NodeState, node, nic=None, gpus=0) for node in live),
        jobs=(),
        price_usd_per_hour=bill.price_usd_per_hour if bill else None,
        cost_usd=bill.cost_usd if bill else None,
        budget_usd=None,
        expires=formatting.optional_utc(listed.expires if listed else None),
        idle=None,
        looked=cluster.searched_places,
    )
    if cluster.local_record is not None:
        _add_record(document, cluster.local_record)
        document.jobs = tuple(view.as_seen_job() for view in JobRegistry(cluster.session, reported).own_jobs)
    return document


def _add_record(document: ClusterDocument, record: Record) -> None:
    """Add the fields that only the record has to a cluster's document."""
    nics = {node.instance_id: node.nic for node in record.prepared}
    document.instance_type = document.instance_type or record.instance_type
    document.budget_usd = record.asked.get("cluster.budget_usd")
    for node in document.nodes:
        node.nic, node.gpus = nics.get(node.instance_id), record.gpus_per_node
    if document.nodes:
        document.expires = document.expires or formatting.optional_utc(record.expires)
        document.idle = record.idle or None


def _state(cluster: LocatedCluster) -> ClusterState:
    record = cluster.local_record
    return cluster_state.cluster_state(
        cluster.listing,
        prepared=frozenset(node.instance_id for node in record.prepared) if record else None,
        launching=cluster.aws_client is not None and _is_launching(record, cluster.listing),
        size=record.nodes if record else None,
    )


def _is_launching(record: Record | None, cluster: ClusterListing | None) -> bool:
    """Return True if the record has an unfinished launch whose instances may still be listed."""
    if record is None or record.intent is None:
        return False
    from awsddp.aws.waits import VISIBLE_S

    return cluster is not None or datetime.now(UTC) - record.created < timedelta(seconds=VISIBLE_S)
