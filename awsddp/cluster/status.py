"""status: the nodes of a cluster, their cost and expiry, from AWS; its jobs as last seen."""

import contextlib
import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from awsddp.errors import AwsddpError
from awsddp.job.registry import JobRegistry
from awsddp.job.release import release_saved, release_unbegun
from awsddp.model import cluster_state
from awsddp.model.documents import ClusterDocument, NodeState
from awsddp.model.records import ACTIVE, MORE, ClusterState, JobRecord, Listed, widened
from awsddp.session.connect import connect, reachable, told_jobs
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.session.cost import bill_of
from awsddp.session.locate import find_cluster, refuse_sessions
from awsddp.state import Record
from awsddp.util import format

ASK_S = 5.0
"""How long connecting to a node may take before a running job is shown as last seen."""

# This login is not a use of the node: the watchdog ignores its port.
_READ_IDLE = (
    'set -- $SSH_CONNECTION; echo "$2" | sudo -n tee -a /run/awsddp/asked > /dev/null; cat /run/awsddp/left'
)


def status(session: Session, *, ask_nodes: bool = False) -> ClusterDocument:
    """Return the cluster as the `status` document; a cluster that is not found is "absent".

    Without a record only the running local cloud and one region are searched; `status_all` searches every
    region. With `ask_nodes` each node has `idle_left_s`, as its watchdog last counted; None where it did not
    answer within seconds. Raises CloudError where AWS does not answer, NotFoundError where another session of
    the caller's role has a cluster of this name.
    """
    with find_cluster(session, newer=True, everywhere=False) as cluster:
        cluster, told = refresh(cluster)
        found = cluster_document(cluster, told)
        if found.state == "absent":
            refuse_sessions(cluster)
        if ask_nodes and cluster.own is not None:
            left = _idle_left(cluster)
            for node in found.nodes:
                node.idle_left_s = left.get(node.node)
        return found


def _idle_left(cluster: LocatedCluster) -> dict[int, int]:
    """Return the idle seconds that nodes have left, by number, without those that do not answer."""
    words: dict[int, bytes] = {}

    def hear(node: int, data: bytes) -> None:
        words[node] = words.get(node, b"") + data[:99]

    with contextlib.suppress(AwsddpError), _connected(cluster) as connected:
        request = (("sh", "-c", _READ_IDLE), b"")
        connected.fleet.stream(dict.fromkeys(connected.fleet.nodes, request), hear, silent_after_s=ASK_S)
    return {node: int(word) for node, word in words.items() if re.fullmatch(rb"\d{1,9}\n", word)}


def _connected(cluster: LocatedCluster) -> "AbstractContextManager[ConnectedCluster]":
    """Connect to the nodes that can be reached and were prepared from here."""
    live = cluster.own.live if cluster.own else ()
    prepared = [node for node in reachable(live) if cluster.record.is_prepared(node)]
    return connect(cluster.with_nodes(prepared, of=live), deadline_s=ASK_S, partial=True)


def refresh(cluster: LocatedCluster) -> "tuple[LocatedCluster, tuple[JobRecord, ...]]":
    """Remember how far jobs are that ran or saved to S3 when last seen; return the cluster, and these jobs if
    nodes answer.
    """
    record = cluster.known
    told: tuple[JobRecord, ...] = ()
    if record is None or cluster.own is None or not _is_due(cluster, record.jobs):
        return cluster, told
    with contextlib.suppress(AwsddpError), _connected(cluster) as connected:
        told = told_jobs(connected, partial=True)
        cluster.session.folder.remember(*told)
        release_saved(connected, told)
        release_unbegun(connected, told)
        cluster = replace(cluster, known=cluster.session.folder.read())
    return cluster, told


def _is_due(cluster: LocatedCluster, jobs: Collection[JobRecord]) -> bool:
    """Tell whether the nodes may know more than this machine: of a job that ran or saved when it was last
    seen, or of one that their tags name and it does not know. Whoever asks them uses them.
    """
    if set(cluster.unfetched) - {job.job for job in jobs} - {MORE}:
        return True
    return any(job.state in ACTIVE or (job.job in cluster.unfetched and _saves(job)) for job in jobs)


def _saves(job: JobRecord) -> bool:
    """Tell whether a job saved to S3 when last seen, or had saved all, so that its nodes can be released."""
    saving = job.saving
    return job.save_to is not None and (saving is None or not saving.ended or saving.is_whole)


def cluster_document(cluster: LocatedCluster, told: Collection[JobRecord] = ()) -> ClusterDocument:
    """Return the document of `up` and `status`: what AWS says, and what the record of this machine adds.

    `told` are jobs that nodes have just told.
    """
    listed = cluster.listed
    live = listed.live if listed else ()
    bill = bill_of(cluster, listed)
    document = ClusterDocument(
        cluster=cluster.session.spec.name,
        state=_state(cluster),
        target=cluster.target.name,
        region=listed.region if listed else cluster.target.region,
        instance_type=live[0].instance_type if live else None,
        nodes=tuple(widened(NodeState, node, nic=None, gpus=0) for node in live),
        jobs=(),
        price_usd_per_hour=bill.price_usd_per_hour if bill else None,
        cost_usd=bill.cost_usd if bill else None,
        budget_usd=None,
        expires=format.iso(listed.expires if listed else None),
        idle=None,
        looked=cluster.searched,
    )
    if cluster.known is not None:
        _add_record(document, cluster.known)
        document.jobs = tuple(one.seen() for one in JobRegistry(cluster.session, told).own)
    return document


def _add_record(document: ClusterDocument, record: Record) -> None:
    """Add what this machine remembers of a cluster to its document."""
    nics = {one.instance_id: one.nic for one in record.prepared}
    document.instance_type = document.instance_type or record.instance_type
    document.budget_usd = record.asked.get("cluster.budget_usd")
    for node in document.nodes:
        node.nic, node.gpus = nics.get(node.instance_id), record.gpus_per_node
    if document.nodes:
        document.expires = document.expires or format.iso(record.expires)
        document.idle = record.idle or None


def _state(cluster: LocatedCluster) -> ClusterState:
    record = cluster.known
    return cluster_state.cluster_state(
        cluster.listed,
        prepared=frozenset(one.instance_id for one in record.prepared) if record else None,
        launching=cluster.gateway is not None and _launching(record, cluster.listed),
        size=record.nodes if record else None,
    )


def _launching(record: Record | None, cluster: Listed | None) -> bool:
    """Whether a launch was written down that has not answered, and may still show."""
    if record is None or record.intent is None:
        return False
    from awsddp.aws.waits import VISIBLE_S

    return cluster is not None or datetime.now(UTC) - record.created < timedelta(seconds=VISIBLE_S)
