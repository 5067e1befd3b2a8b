"""down: terminate everything, wait until it is gone, and return the cost. Works in every state."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from awsddp import report
from awsddp.billing import Bill
from awsddp.errors import ConfigError, LeftoverError, NodeError, UsageError
from awsddp.records import ACTIVE, Listed
from awsddp.state import Record
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context
from awsddp.verbs.fetch import fetch_all
from awsddp.verbs.jobs import jobs_of
from awsddp.verbs.ledger import bill_of, living
from awsddp.verbs.results import is_owed


def down(
    ctx: Context,
    *,
    discard: bool = False,
    known_only: bool = False,
    confirm: Callable[[str], None],
    lose: Callable[[NodeError], bool] = lambda error: False,
) -> dict[str, Any]:
    """Terminate the cluster and return the `down` document. A cluster that does not exist is not an error.

    Unfetched results are fetched first, unless `discard`. With `known_only` a cluster that this machine has
    no record of is refused (UsageError). `confirm` is called before anything is terminated and raises to
    refuse; `lose` is called with the error if results cannot be fetched. Raises that NodeError unless
    `lose` returns True, NotFoundError where only another session of the caller's role has one,
    LeftoverError where something could not be terminated, CloudError where AWS does not answer.
    """
    with ctx.folder.lock("down"), ClusterHandle.find(ctx, newer=True, whole=True) as cluster:
        record = cluster.known
        if cluster.gateway is not None:
            cluster.wait_until_launches_show()
        clusters = cluster.all_listed
        if not clusters:
            if record is not None:  # it ended by itself, at its expiry at the latest
                ctx.folder.note("ended", id=record.id, at=min(datetime.now(UTC), record.expires))
            _forget(ctx, record)
            cluster.refuse_sessions()
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
        bill_of(ctx, record, clusters[0], cluster.aws)
        terminated = _end(cluster, clusters)
        bill = bill_of(ctx, record, None)
        _forget(ctx, record, cluster_id=clusters[0].id)
        removed = sum(len(one.leftovers) for one in clusters)
        return _document(cluster, terminated=terminated, removed=removed, bill=bill)


def _end(cluster: ClusterHandle, clusters: Sequence[Listed]) -> tuple[str, ...]:
    """Terminate the clusters of this name, one per id, and return the terminated instances.

    Raises LeftoverError, after everything else is terminated.
    """
    ctx = cluster.ctx
    terminated: list[str] = []
    left: list[str] = []
    for one in clusters:
        began = datetime.now(UTC)  # EC2 bills no instance that is shutting down
        ended = cluster.end(one)
        with contextlib.suppress(ConfigError):  # the end of the machines does not wait for a full disk here
            ctx.folder.note(
                "ended", id=one.id, at=began, terminated=ended.terminated, leftovers=ended.leftovers
            )
        terminated += ended.terminated
        left += ended.leftovers
    if left:
        raise LeftoverError(
            f"not everything of cluster {ctx.spec.name} could be terminated",
            f"left: {', '.join(left)}",
            "awsddp down   # again; what is left may still cost money",
        )
    return tuple(terminated)


def _what_ends(cluster: ClusterHandle, listed: Listed, *, discard: bool) -> str:
    question = [f"Cluster {listed.name}: {cluster.machines(listed)}{_made(listed)} will be terminated."]
    for job in (one.job for one in jobs_of(cluster.ctx, living(cluster.ctx.folder))):
        if job.state in ACTIVE and is_owed(cluster.ctx, listed.unfetched, job):
            waits = job.state == "waiting"
            grace = "" if discard or waits else f" and has {cluster.ctx.job.job.grace} to save"
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


def _forget(ctx: Context, record: Record | None, cluster_id: str | None = None) -> None:
    ended = record.id if record is not None else cluster_id
    if ended is None:
        return
    try:
        ctx.folder.retire(ended)
    except ConfigError as error:
        ctx.say(f"{error.message}: {error.why or error.next}")


def _document(
    cluster: ClusterHandle, *, terminated: tuple[str, ...] = (), removed: int = 0, bill: Bill | None = None
) -> dict[str, Any]:
    return {
        "cluster": cluster.ctx.spec.name,
        "state": "absent",
        "target": cluster.target.name,
        "terminated": list(terminated),
        "leftovers": [],
        "removed": removed,
        "cost_usd": bill.cost_usd if bill else None,
        "looked": list(cluster.searched),
        "ended": report.iso(datetime.now(UTC)),
    }
