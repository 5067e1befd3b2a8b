"""status: the nodes, their cost and expiry, from AWS; the jobs as last seen."""

import contextlib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from awsddp import report
from awsddp.errors import AwsddpError
from awsddp.records import ACTIVE, Listed
from awsddp.state import Record
from awsddp.verbs.cluster import ClusterHandle, reachable
from awsddp.verbs.context import Context
from awsddp.verbs.ledger import bill_of, living

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet

REACH_S = 5.0
"""How long connecting to a node may take before a running job is shown as last seen."""


_OF_NODE = ("node", "instance_id", "state", "public_ip", "private_ip", "zone")
# This login is not a use of the node: the watchdog ignores its port.
_READ_IDLE = (
    'set -- $SSH_CONNECTION; echo "$2" | sudo -n tee -a /run/awsddp/asked > /dev/null; cat /run/awsddp/left'
)


def status(ctx: Context, *, ask_nodes: bool = False) -> dict[str, Any]:
    """Return the cluster as the `status` document; a cluster that is not found is "absent".

    Without a record only the running local cloud and one region are searched; `status_all` searches every
    region. With `ask_nodes` each node has `idle_left_s`, as its watchdog last counted; None where it did not
    answer within seconds. Raises CloudError where AWS does not answer, NotFoundError where another session of
    the caller's role has a cluster of this name.
    """
    with ClusterHandle.find(ctx, newer=True, everywhere=False) as cluster:
        _refresh(cluster)
        document = cluster_document(cluster)
        if document["state"] == "absent":
            cluster.refuse_sessions()
        if ask_nodes and cluster.own is not None:
            left = _idle_left(cluster)
            document["nodes"] = [one | {"idle_left_s": left.get(one["node"])} for one in document["nodes"]]
        return document


def _idle_left(cluster: ClusterHandle) -> dict[int, int]:
    """Return the idle seconds that nodes have left, by number, without those that do not answer."""
    words: dict[int, bytes] = {}

    def hear(node: int, data: bytes) -> None:
        words[node] = words.get(node, b"") + data[:99]

    with contextlib.suppress(AwsddpError), _connected(cluster) as fleet:
        request = (("sh", "-c", _READ_IDLE), b"")
        fleet.stream(dict.fromkeys(fleet.nodes, request), hear, silent_after_s=REACH_S)
    return {node: int(word) for node, word in words.items() if re.fullmatch(rb"\d{1,9}\n", word)}


def _connected(cluster: ClusterHandle) -> "AbstractContextManager[Fleet]":
    """Connect to the nodes that can be reached and were prepared from here."""
    live = cluster.own.live if cluster.own else ()
    nodes = [node for node in reachable(live) if cluster.is_prepared(node)]
    return cluster.connect(nodes, deadline_s=REACH_S, partial=True)


def _refresh(cluster: ClusterHandle) -> None:
    """Remember the progress of jobs that ran when last seen, if their nodes answer."""
    record = cluster.known
    if record is None or cluster.own is None or all(job.state not in ACTIVE for job in record.jobs):
        return
    with contextlib.suppress(AwsddpError), _connected(cluster):
        cluster.ctx.folder.remember(*cluster.jobs(partial=True))
        cluster.known = cluster.ctx.folder.read()


def cluster_document(handle: ClusterHandle) -> dict[str, Any]:
    """Return the document of `up` and `status` from what AWS and the folder know."""
    ctx, record, cluster = handle.ctx, handle.known, handle.listed
    nodes = cluster.live if cluster else ()
    prepared = {found.instance_id: found for found in record.prepared} if record else {}
    bill = bill_of(ctx, record, cluster, handle.gateway)
    expires = (cluster.expires if cluster else None) or (record.expires if record and nodes else None)
    return {
        "cluster": ctx.spec.name,
        "state": report.cluster_state(
            cluster,
            prepared=frozenset(prepared) if record else None,
            launching=handle.gateway is not None and _launching(record, cluster),
            size=record.nodes if record else None,
        ),
        "target": handle.target.name,
        "region": cluster.region if cluster else handle.target.region,
        "instance_type": nodes[0].instance_type if nodes else (record.instance_type if record else None),
        "nodes": [
            {key: getattr(node, key) for key in _OF_NODE}
            | {
                "nic": prepared[node.instance_id].nic if node.instance_id in prepared else None,
                "gpus": record.gpus_per_node if record else 0,
            }
            for node in nodes
        ],
        "jobs": _jobs(ctx, record.seen) if record else [],
        "price_usd_per_hour": bill.price_usd_per_hour if bill else None,
        "cost_usd": bill.cost_usd if bill else None,
        "budget_usd": record.asked.get("cluster.budget_usd") if record else None,
        "expires": report.iso(expires),
        "idle": record.idle or None if record and nodes else None,
        "looked": list(handle.searched),
    }


def _jobs(ctx: Context, seen: Mapping[str, datetime]) -> list[dict[str, Any]]:
    from awsddp.verbs.jobs import jobs_of
    from awsddp.verbs.results import is_fetched

    return [
        asdict(one.job)
        | {"last_seen": report.iso(seen.get(one.job.job)), "fetched": is_fetched(one.folder, one.job)}
        for one in jobs_of(ctx, living(ctx.folder))
    ]


def _launching(record: Record | None, cluster: Listed | None) -> bool:
    """Whether a launch was written down that has not answered, and may still show."""
    if record is None or record.intent is None:
        return False
    from awsddp.aws.waits import VISIBLE_S

    return cluster is not None or datetime.now(UTC) - record.created < timedelta(seconds=VISIBLE_S)
