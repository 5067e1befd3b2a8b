"""status: what there is, what it costs, and until when. The truth is in AWS, the jobs as last seen."""

import contextlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from awsddp import report
from awsddp.cluster import Cluster, Node, Target
from awsddp.errors import NodeError
from awsddp.state import Record
from awsddp.verbs.context import NOWHERE, Context, found
from awsddp.verbs.costs import bill_of
from awsddp.verbs.nodes import connect

if TYPE_CHECKING:
    from awsddp.aws.session import Aws


_ASK_S = 5.0
# Who only asks is no user of the node: the watchdog leaves out the port of this login.
_READ_IDLE = (
    'set -- $SSH_CONNECTION; echo "$2" | sudo -n tee -a /run/awsddp/asked > /dev/null; cat /run/awsddp/left'
)


def status(ctx: Context, *, ask_nodes: bool = False) -> dict[str, Any]:
    """Return the cluster as the `status` document; a cluster that is nowhere is "absent".

    With `ask_nodes` each node has `idle_left_s`, as its watchdog last counted; None where it did not answer
    within seconds. Raises CloudError where AWS cannot be asked.
    """
    with found(ctx, newer=True) as seen:
        if seen is None:
            return cluster_document(ctx, None, None, target=Target(name="local"), looked=NOWHERE)
        document = cluster_document(
            ctx, seen.record, seen.cluster, seen.aws, target=seen.target, looked=seen.looked
        )
        if ask_nodes and seen.record is not None and seen.cluster is not None and ctx.folder.key.exists():
            left = _idle_left(ctx, seen.record, seen.cluster.live)
            document["nodes"] = [one | {"idle_left_s": left.get(one["node"])} for one in document["nodes"]]
        return document


def _idle_left(ctx: Context, record: Record, nodes: Sequence[Node]) -> dict[int, int]:
    """Return the idle seconds that nodes have left, by number, without those that do not answer."""
    known = {one.instance_id for one in record.prepared}
    asked = [node for node in nodes if node.state == "running" and node.instance_id in known]
    words: dict[int, bytes] = {node.node: b"" for node in asked}

    def hear(node: int, data: bytes) -> None:
        words[node] += data[:99]

    with (
        contextlib.suppress(NodeError),
        connect(ctx, record, asked, deadline_s=_ASK_S, partial=True) as fleet,
    ):
        request = (("sh", "-c", _READ_IDLE), b"")
        fleet.stream(dict.fromkeys(fleet.nodes, request), hear, silent_after_s=_ASK_S)
    return {node: int(word) for node, word in words.items() if re.fullmatch(rb"\d{1,9}\n", word)}


def cluster_document(
    ctx: Context,
    record: Record | None,
    cluster: Cluster | None,
    aws: "Aws | None" = None,
    *,
    target: Target | None = None,
    looked: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the document of `up` and `status` from what AWS and the folder know."""
    nodes = cluster.live if cluster else ()
    prepared = {found.instance_id: found for found in record.prepared} if record else {}
    place = target or (record.target if record else Target())
    bill = bill_of(ctx, record, cluster, aws)
    state = report.cluster_state(
        cluster,
        prepared=frozenset(prepared) if record else None,
        launching=_launching(record, cluster),
        size=record.nodes if record else None,
    )
    expires = (cluster.expires if cluster else None) or (record.expires if record and nodes else None)
    return {
        "cluster": ctx.spec.name,
        "state": state,
        "target": place.name,
        "region": cluster.region if cluster else place.region,
        "instance_type": nodes[0].instance_type if nodes else (record.instance_type if record else None),
        "nodes": [
            report.node_document(
                node,
                nic=prepared[node.instance_id].nic if node.instance_id in prepared else None,
                gpus=record.gpus_per_node if record else 0,
            )
            for node in nodes
        ],
        "jobs": _jobs(ctx, record, cluster) if record else [],
        "price_usd_per_hour": bill.price_usd_per_hour if bill else None,
        "cost_usd": bill.cost_usd if bill else None,
        "budget_usd": record.asked.get("cluster.budget_usd") if record else None,
        "expires": report.iso(expires),
        "idle": record.idle or None if record and nodes else None,
        "looked": list(looked),
    }


def _jobs(ctx: Context, record: Record, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Return the jobs as they were when a node was last asked about them."""
    owed, seen = cluster.unfetched if cluster else [], ctx.folder.seen()
    return [
        report.job_document(job)
        | {"last_seen": report.iso(seen.get(job.job)), "fetched": job.job not in owed}
        for job in record.jobs
    ]


def _launching(record: Record | None, cluster: Cluster | None) -> bool:
    """Whether a launch was written down that has not answered, and may still show."""
    if record is None or record.intent is None:
        return False
    from awsddp.aws.waits import VISIBLE_S

    return cluster is not None or datetime.now(UTC) - record.created < timedelta(seconds=VISIBLE_S)
