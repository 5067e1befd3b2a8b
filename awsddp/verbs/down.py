"""down: end everything, wait until AWS says it is gone, and say what it cost. Legal in every state."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from awsddp import report
from awsddp.billing import Bill
from awsddp.cluster import Cluster
from awsddp.errors import ConfigError, LeftoverError, NodeError, UsageError
from awsddp.state import Record
from awsddp.verbs.context import NOWHERE, Context, Found, found
from awsddp.verbs.costs import bill_of
from awsddp.verbs.fetch import bring_home_all
from awsddp.verbs.settling import settled

if TYPE_CHECKING:
    from awsddp.aws.session import Aws


def down(
    ctx: Context,
    *,
    discard: bool = False,
    known_only: bool = False,
    confirm: Callable[[str], None],
    lose: Callable[[NodeError], bool] = lambda error: False,
) -> dict[str, Any]:
    """End the cluster and return the `down` document. What is not there is no error.

    Results that are not home are fetched first, unless `discard`. With `known_only` a cluster that this
    machine has no record of is refused (UsageError). `confirm` is asked before anything ends
    and raises to refuse; `lose` is asked where results cannot be fetched, with the error that says why.
    Raises that NodeError unless it agrees, LeftoverError where something could not be ended, CloudError
    where AWS cannot be asked.
    """
    with ctx.folder.lock("down"), found(ctx, newer=True, whole=True) as seen:
        if seen is None:
            _forget(ctx, ctx.folder.read(newer=True))
            return _document(ctx, None)
        clusters = _settled(ctx, seen)
        if not clusters:
            if seen.record is not None:  # it ended by itself, at its expiry at the latest
                at = min(datetime.now(UTC), seen.record.expires)
                ctx.folder.note("ended", id=seen.record.id, at=at)
            _forget(ctx, seen.record)
            return _document(ctx, seen)
        live = [one for one in clusters if one.live]
        if known_only and any(seen.record is None or one.id != seen.record.id for one in live):
            raise _unknown(seen, live)
        if live:
            confirm("\n".join(_what_ends(ctx, seen, one, discard=discard) for one in live))
        for one in live if not discard else ():
            mine = seen.record is not None and seen.record.id == one.id
            try:
                bring_home_all(ctx, seen if mine else replace(seen, record=None), one)
            except NodeError as error:
                if not lose(error):
                    raise
        bill_of(ctx, seen.record, clusters[0], seen.aws)
        terminated = _end(ctx, seen.aws, clusters)
        bill = bill_of(ctx, seen.record, None)
        _forget(ctx, seen.record, cluster_id=clusters[0].id)
        removed = sum(len(one.leftovers) for one in clusters)
        return _document(ctx, seen, terminated=terminated, removed=removed, bill=bill)


def _unknown(seen: Found, live: Sequence[Cluster]) -> UsageError:
    made = "; ".join(f"{seen.machines(one)}{_made(one)}" for one in live)
    return UsageError(
        f"-y does not end cluster {live[0].name}, which this machine has no record of",
        made,
        f"awsddp -c {live[0].name} down -y   # if that is what you want",
    )


def _end(ctx: Context, aws: "Aws", clusters: tuple[Cluster, ...]) -> tuple[str, ...]:
    """End the clusters, one for each id that carries the name, and return the instances that ended.

    Raises LeftoverError, once all that can be is ended.
    """
    from awsddp.aws.teardown import teardown

    terminated: list[str] = []
    left: list[str] = []
    for cluster in clusters:
        began = datetime.now(UTC)  # EC2 bills no instance that is shutting down
        ended = teardown(aws, cluster, on_event=ctx.say)
        with contextlib.suppress(ConfigError):  # the end of the machines does not wait for a full disk here
            ctx.folder.note(
                "ended", id=cluster.id, at=began, terminated=ended.terminated, leftovers=ended.leftovers
            )
        terminated += ended.terminated
        left += ended.leftovers
    if left:
        raise LeftoverError(
            f"not everything of cluster {ctx.spec.name} could be ended",
            f"left: {', '.join(left)}",
            "awsddp down   # again; what is left may still cost money",
        )
    return tuple(terminated)


def _settled(ctx: Context, seen: Found) -> tuple[Cluster, ...]:
    """Return what carries the name once AWS lists what this machine launched, or a launch that was cut off
    has shown what came of it; this machine's own first."""
    from awsddp.aws.clusters import find_clusters
    from awsddp.aws.instances import appear, filled_by

    record = seen.record
    clusters = tuple(one for one in (seen.cluster, *seen.others) if one is not None)
    if record is None:
        return clusters
    mine = next((one for one in clusters if one.id == record.id), None)
    if record.intent is None:
        mine = settled(seen.aws, ctx.spec.name, record, mine)
    elif not (mine and mine.live and filled_by(record.intent) <= {node.node for node in mine.live}):
        appear(seen.aws, record.intent, on_event=ctx.say)
        again = find_clusters(seen.aws, ctx.spec.name, record.owner)
        mine = next((one for one in again if one.id == record.id), None)
    others = tuple(one for one in clusters if one.id != record.id)
    return (mine, *others) if mine is not None else others


def _what_ends(ctx: Context, seen: Found, cluster: Cluster, *, discard: bool) -> str:
    said = [f"Cluster {cluster.name}: {seen.machines(cluster)}{_made(cluster)} will be terminated."]
    for job in seen.record.jobs if seen.record else ():
        if job.state == "running" and job.job in cluster.unfetched:
            grace = "" if discard else f" and has {ctx.job.job.grace} to save"
            said.append(f"Job {job.job} still runs (as last seen): it is ended{grace}.")
    if cluster.unfetched:
        fate = "are lost" if discard else "come home first"
        said.append(f"The results of {', '.join(cluster.unfetched)} {fate}.")
    return "\n".join(said)


def _made(cluster: Cluster) -> str:
    """Return when a cluster was made, and on which machine, as far as its tags say."""
    host = cluster.host and f" on {cluster.host}"
    return f", made at {report.iso(cluster.created)}{host}," if cluster.created else ""


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
    bill: Bill | None = None,
) -> dict[str, Any]:
    return {
        "cluster": ctx.spec.name,
        "state": "absent",
        "target": seen.target.name if seen else "local",
        "terminated": list(terminated),
        "leftovers": [],
        "removed": removed,
        "cost_usd": bill.cost_usd if bill else None,
        "looked": list(seen.looked if seen else NOWHERE),
        "ended": report.iso(datetime.now(UTC)),
    }
