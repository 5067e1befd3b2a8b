"""down: end everything, wait until AWS says it is gone, and say what it cost. Legal in every state."""

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from awsddp import report
from awsddp.cluster import Cluster
from awsddp.errors import ConfigError, LeftoverError
from awsddp.state import Record
from awsddp.verbs.context import NOWHERE, Context, Found, found
from awsddp.verbs.fetch import bring_home_all
from awsddp.verbs.settling import settled
from awsddp.verbs.status import cost_of


def down(ctx: Context, *, discard: bool = False, confirm: Callable[[str], None]) -> dict[str, Any]:
    """End the cluster and return design.md's `down` document. What is not there is no error.

    Results that are not home are fetched first, unless `discard`. `confirm` is asked before anything ends
    and raises to refuse. Raises NodeError where results cannot be fetched, LeftoverError where something
    could not be ended, CloudError where AWS cannot be asked.
    """
    with ctx.folder.lock("down"), found(ctx, newer=True, whole=True) as seen:
        if seen is None:
            _forget(ctx, ctx.folder.read(newer=True))
            return _document(ctx, None)
        cluster = _settled(ctx, seen)
        if cluster is None:
            _forget(ctx, seen.record)
            return _document(ctx, seen)
        if cluster.live:
            confirm(_what_ends(cluster))
            if not discard:
                bring_home_all(ctx, seen, cluster)
        cost = cost_of(seen.record, cluster)
        from awsddp.aws.teardown import teardown

        ended = teardown(seen.aws, cluster, on_event=ctx.say)
        with contextlib.suppress(ConfigError):  # the end of the machines does not wait for a full disk here
            ctx.folder.note("ended", id=cluster.id, terminated=ended.terminated, leftovers=ended.leftovers)
        if ended.leftovers:
            raise LeftoverError(
                f"not everything of cluster {cluster.name} could be ended",
                f"left: {', '.join(ended.leftovers)}",
                "awsddp down   # again; what is left may still cost money",
            )
        _forget(ctx, seen.record, cluster_id=cluster.id)
        return _document(ctx, seen, terminated=ended.terminated, removed=len(cluster.leftovers), cost=cost)


def _settled(ctx: Context, seen: Found) -> Cluster | None:
    """Return the cluster once AWS lists what this machine launched, or a launch that was cut off has shown
    what came of it."""
    from awsddp.aws.clusters import find_cluster
    from awsddp.aws.instances import appear, filled_by

    record = seen.record
    if record is None:
        return seen.cluster
    if record.intent is None:
        return settled(seen.aws, ctx.spec.name, record, seen.cluster)
    alive = {node.node for node in (seen.cluster.live if seen.cluster else ())}
    if alive and filled_by(record.intent) <= alive:
        return seen.cluster
    appear(seen.aws, record.intent, on_event=ctx.say)
    return find_cluster(seen.aws, ctx.spec.name, record.owner)


def _what_ends(cluster: Cluster) -> str:
    kinds = cluster.live[0].instance_type
    return f"Cluster {cluster.name}: {len(cluster.live)} x {kinds} in {cluster.region} will be terminated."


def _forget(ctx: Context, record: Record | None, cluster_id: str | None = None) -> None:
    ended = record.id if record is not None else cluster_id
    if ended is None:
        return
    try:
        ctx.folder.retire(ended)
    except ConfigError as error:
        ctx.say(f"{error.message}: {error.why or error.next}")


def _document(
    ctx: Context,
    seen: Found | None,
    *,
    terminated: tuple[str, ...] = (),
    removed: int = 0,
    cost: float | None = None,
) -> dict[str, Any]:
    return {
        "cluster": ctx.spec.name,
        "state": "absent",
        "target": seen.target.name if seen else "local",
        "terminated": list(terminated),
        "leftovers": [],
        "removed": removed,
        "cost_usd": cost if terminated else 0.0,
        "looked": list(seen.looked if seen else NOWHERE),
        "ended": report.iso(datetime.now(UTC)),
    }
