"""status --all and down --orphans: all resources with awsddp's tags, and the end of the orphans."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from awsddp import report
from awsddp.errors import LeftoverError
from awsddp.records import Listed, Target
from awsddp.report import money
from awsddp.state import Folder
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context, aws_of, target_for
from awsddp.verbs.status import cluster_document

if TYPE_CHECKING:
    from awsddp.aws.everywhere import Everywhere, Holding
    from awsddp.aws.session import Aws


def status_all(ctx: Context) -> list[dict[str, Any]]:
    """Return the `status` documents of every cluster in every region, also of other owners, and of orphans.

    With --local those of the local cloud, with --region those of that region. Raises CloudError if no region
    answers.
    """
    with _searched(ctx) as (target, aws, _, found):
        return [_document(ctx, target, aws, holding) for holding in found.holdings]


def down_orphans(ctx: Context, *, discard: bool = False, confirm: Callable[[str], None]) -> dict[str, Any]:
    """Terminate the caller's resources whose cluster has no instance or is past its expiry; nothing else.

    A cluster with unfetched results is kept, unless `discard`. `confirm` is called with the list of orphans
    and raises to refuse. Raises LeftoverError if something was kept or could not be terminated, CloudError if
    AWS does not answer.
    """
    from awsddp.aws.teardown import teardown

    with _searched(ctx) as (target, login, looked, found):
        unused = [
            holding
            for holding in found.holdings
            if holding.orphan and not _lives(_recorded(ctx, target, login, holding.cluster, wait=True))
        ]
        orphans = [holding for holding in unused if discard or not holding.cluster.unfetched]
        kept = [holding.cluster for holding in unused if holding not in orphans]
        if orphans:
            confirm("Orphans:\n" + "\n".join(f"  {_line(orphan)}" for orphan in orphans) + "\n")
        terminated: list[str] = []
        left: list[str] = []
        for orphan in orphans:
            there = replace(target, region=orphan.cluster.region)
            trail = ctx.home / "history" / f"{orphan.cluster.name}-{orphan.cluster.id}"
            aws = aws_of(ctx, there, trail=trail, login=login)
            ended = teardown(aws, orphan.cluster, on_event=ctx.on_event)
            terminated += ended.terminated
            left += ended.leftovers
        if left:
            raise LeftoverError(
                "not every orphan could be terminated",
                f"left: {', '.join(left)}",
                "awsddp down --orphans   # again; what is left may still cost money",
            )
        if kept:
            fetch = f"fetch {kept[0].unfetched[0]}"
            raise LeftoverError(
                "orphans that hold results were not terminated",
                "; ".join(f"{one.name} ({one.id}): results of {', '.join(one.unfetched)}" for one in kept),
                f"awsddp -c {kept[0].name} {fetch}   # or: awsddp down --orphans --discard",
            )
        return {
            "clusters": [orphan.cluster.id for orphan in orphans],
            "terminated": terminated,
            "leftovers": [],
            "looked": looked,
            "unread": list(found.unread),
        }


@contextmanager
def _searched(ctx: Context) -> "Iterator[tuple[Target, Aws, list[str], Everywhere]]":
    """Yield the target, the gateway that logged in, the searched regions, and what was found."""
    from awsddp.aws.everywhere import find_everywhere
    from awsddp.aws.facts import enabled_regions

    with target_for(ctx, of_all=True) as target:
        aws = aws_of(ctx, target)
        alone = ctx.spec.cluster.region is not None or target.name == "local"
        regions = [aws.region] if alone else list(enabled_regions(aws))

        def gateway(region: str) -> "Aws":
            return aws if region == aws.region else aws_of(ctx, replace(target, region=region), login=aws)

        found = find_everywhere(gateway, regions, owner=aws.identity().user_id, now=datetime.now(UTC))
        for text in found.unread:
            ctx.say(f"not searched: {text}")
        yield target, aws, regions, found


def _document(ctx: Context, target: Target, login: "Aws", holding: "Holding") -> dict[str, Any]:
    """Return a cluster's document. Of one that this machine has a record of, it says what `status` says."""
    cluster = holding.cluster
    found = _recorded(ctx, target, login, cluster)
    seen = cluster_document(found)
    keys = ("state", "target", "instance_type", "nodes", "price_usd_per_hour", "cost_usd", "expires")
    price = {} if found.known else {"price_usd_per_hour": holding.price_usd_per_hour}
    return {
        **{key: seen[key] for key in keys},
        **price,
        "cluster": cluster.name,
        "id": cluster.id,
        "region": cluster.region,
        "owner": cluster.owner,
        "mine": holding.mine,
        "orphan": holding.orphan and not _lives(found),
        "jobs": found.unfetched,
        "leftovers": list(cluster.leftovers),
    }


def _lives(found: ClusterHandle) -> bool:
    """Tell whether nodes of a cluster live by its record, whatever their tags are, before its expiry."""
    lives = found.listed is not None and found.listed.live
    return bool(found.known and lives) and found.record.expires > datetime.now(UTC)


def _recorded(
    ctx: Context, target: Target, login: "Aws", cluster: Listed, *, wait: bool = False
) -> ClusterHandle:
    """Return a cluster as `status` finds it, by its record, or as it is listed where this machine has none.

    With `wait` what was launched from here and is not listed yet is waited for, as `down` does.
    """
    here = replace(ctx, spec=replace(ctx.spec, name=cluster.name), folder=Folder(ctx.home, cluster.name))
    record = here.folder.read(newer=True)
    if record is None or record.id != cluster.id:
        return ClusterHandle(ctx=ctx, target=target, listed=cluster)
    target = replace(target, region=cluster.region)
    aws = aws_of(here, target, login=login)
    known = ClusterHandle(ctx=here, target=target, gateway=aws, known=record)
    known.look()
    if wait:
        known.wait_until_launches_show()
    known.listed = known.own
    return known


def _line(holding: "Holding") -> str:
    cluster = holding.cluster
    what = [*(node.instance_id for node in cluster.live), *cluster.leftovers]
    owed = f"; results not fetched: {', '.join(cluster.unfetched)}" if cluster.unfetched else ""
    past = f", past its expiry of {report.iso(cluster.expires)}" if cluster.live else ""
    return (
        f"{cluster.name} ({cluster.id}) in {cluster.region}{past}: {', '.join(what)}, "
        f"{money(holding.price_usd_per_hour)} per hour{owed}"
    )
