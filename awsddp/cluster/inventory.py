"""Every cluster: of all regions, of all owners, those without an owner, those of this machine."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from awsddp.cluster.status import cluster_document
from awsddp.errors import CloudError, LeftoverError, LocalCloudError, NoRegion
from awsddp.job.registry import JobRegistry
from awsddp.local import client as local
from awsddp.model.documents import FoundCluster, HomeDocument, KnownCluster, KnownJob, Orphans
from awsddp.model.records import Listed, Target, widened
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.locate import aws_of, look, target_for, wait_until_launches_show
from awsddp.state import pasts
from awsddp.util import format
from awsddp.util.format import money

if TYPE_CHECKING:
    from awsddp.aws.client import Aws
    from awsddp.aws.clusters import Everywhere, Holding


def status_all(session: Session) -> list[FoundCluster]:
    """Return the `status` documents of every cluster in every region, also of other owners, and of orphans.

    Those of the local cloud, too, if it runs; with --local those alone, with --region those of that region.
    Raises CloudError if no region answers.
    """
    with _searched(session) as places:
        return [_found(here, holding) for here, _, found in places for holding in found.holdings]


def down_orphans(session: Session, *, discard: bool = False, confirm: Callable[[str], None]) -> Orphans:
    """Terminate the caller's resources whose cluster has no instance or is past its expiry; nothing else.

    A cluster with unfetched results is kept, unless `discard`. `confirm` is called with the list of orphans
    and raises to refuse. Raises LeftoverError if something was kept or could not be terminated, CloudError if
    AWS does not answer.
    """
    from awsddp.aws.teardown import teardown

    with _searched(session) as places:
        unused = [
            (here, holding)
            for here, _, found in places
            for holding in found.holdings
            if holding.orphan and not _lives(_recorded(here, holding.cluster, wait=True))
        ]
        owed = [holding.cluster for _, holding in unused if holding.cluster.unfetched]
        kept = [] if discard else owed
        orphans = [(here, holding) for here, holding in unused if holding.cluster not in kept]
        if orphans:
            confirm("Orphans:\n" + "\n".join(f"  {_orphan(here, one)}" for here, one in orphans) + "\n")
        terminated: list[str] = []
        left: list[str] = []
        for here, orphan in orphans:
            there = replace(here.target, region=orphan.cluster.region)
            trail = session.home / "history" / f"{orphan.cluster.name}-{orphan.cluster.id}"
            aws = aws_of(session, there, trail=trail, login=here.aws)
            ended = teardown(aws, orphan.cluster, on_event=session.on_event)
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
        return Orphans(
            clusters=tuple(orphan.cluster.id for _, orphan in orphans),
            terminated=tuple(terminated),
            leftovers=(),
            looked=tuple(region for _, regions, _ in places for region in regions),
            unread=tuple(text for _, _, found in places for text in found.unread),
        )


@contextmanager
def _searched(session: Session) -> "Iterator[list[tuple[LocatedCluster, list[str], Everywhere]]]":
    """Yield for each place the cluster with its target and a gateway, what was searched, and what was found.

    The places are the running local cloud and AWS; one of them where a setting, or the record, names it.
    """
    asked = session.spec.cluster
    is_set = session.local or asked.region or asked.profile
    record = None if is_set else session.folder.read()
    places = []
    with contextlib.ExitStack() as stack:
        if not is_set and (record is None or record.target.name != "local"):
            opened = local.opened(session.home, session.on_event, start=False)
            try:
                if (running := stack.enter_context(opened)) is not None:
                    places.append(_look_in(session, running))
            except LocalCloudError as error:
                session.say(f"not searched: the local cloud: {error.summary}")
        target = stack.enter_context(target_for(session, record))
        try:
            places.append(_look_in(session, target))
        except CloudError as error:
            if not places or getattr(error, "code", "") != "NoCredentialsError":
                raise
            session.say(f"not searched: AWS: {error.message}")
        yield places


def _look_in(session: Session, target: Target) -> "tuple[LocatedCluster, list[str], Everywhere]":
    """Search a place: all its regions, unless one is asked for. Needs no region that is configured."""
    from awsddp.aws.client import OPEN_REGION
    from awsddp.aws.clusters import find_everywhere
    from awsddp.aws.plan_facts import enabled_regions

    try:
        aws = aws_of(session, target)
    except NoRegion:
        target = replace(target, region=OPEN_REGION)
        aws = aws_of(session, target)
    alone = session.spec.cluster.region is not None or target.name == "local"
    regions = [aws.region] if alone else list(enabled_regions(aws))

    def gateway(region: str) -> "Aws":
        return aws if region == aws.region else aws_of(session, replace(target, region=region), login=aws)

    found = find_everywhere(gateway, regions, owner=aws.identity().user_id, now=datetime.now(UTC))
    for text in found.unread:
        session.say(f"not searched: {text}")
    return LocatedCluster(session=session, target=target, gateway=aws), regions, found


def _found(cluster: LocatedCluster, holding: "Holding") -> FoundCluster:
    """Return a cluster's document. Of one that this machine has a record of, it says what `status` says."""
    listed = holding.cluster
    found = _recorded(cluster, listed)
    seen = cluster_document(found)
    return widened(
        FoundCluster,
        holding,
        listed,
        seen,
        cluster=listed.name,
        price_usd_per_hour=seen.price_usd_per_hour if found.known else holding.price_usd_per_hour,
        orphan=holding.orphan and not _lives(found),
        jobs=tuple(found.unfetched),
    )


def _lives(found: LocatedCluster) -> bool:
    """Tell whether nodes of a cluster live by its record, whatever their tags are, before its expiry."""
    lives = found.listed is not None and found.listed.live
    return bool(found.known and lives) and found.record.expires > datetime.now(UTC)


def _recorded(cluster: LocatedCluster, listed: Listed, *, wait: bool = False) -> LocatedCluster:
    """Return a cluster as `status` finds it, by its record, or as it is listed where this machine has none.

    With `wait` what was launched from here and is not listed yet is waited for, as `down` does.
    """
    asked = cluster.session
    session = replace(
        asked, name=listed.name, settings=(replace(asked.spec, name=listed.name), asked.job_spec)
    )
    record = session.folder.read(newer=True)
    if record is None or record.id != listed.id:
        return replace(cluster, listed=listed)
    target = replace(cluster.target, region=listed.region)
    aws = aws_of(session, target, login=cluster.aws)
    here = look(LocatedCluster(session=session, target=target, gateway=aws, known=record))
    if wait:
        here = wait_until_launches_show(here)
    return replace(here, listed=here.own)


def _orphan(here: LocatedCluster, holding: "Holding") -> str:
    cluster = holding.cluster
    what = [*(node.instance_id for node in cluster.live), *cluster.leftovers]
    owed = f"; results not fetched: {', '.join(cluster.unfetched)}" if cluster.unfetched else ""
    past = f", past its expiry of {format.iso(cluster.expires)}" if cluster.live else ""
    place = replace(here.target, region=cluster.region).place
    return (
        f"{cluster.name} ({cluster.id}) in {place}{past}: {', '.join(what)}, "
        f"{money(holding.price_usd_per_hour)} per hour{owed}"
    )


def home(session: Session) -> HomeDocument:
    """Return the clusters that this machine remembers, as last seen, and whether a local cloud runs.

    No requests are sent: a cluster may have ended since, which `status` shows.
    """
    registry = JobRegistry(session)
    clusters = [
        widened(
            KnownCluster,
            record,
            record.target,
            cluster=past.name,
            target=record.target.name,
            price_usd_per_hour=bill.price_usd_per_hour if (bill := past.bill) else None,
            expires=str(format.iso(record.expires)),
            expired=record.expires < datetime.now(UTC),
            jobs=tuple(KnownJob(job=one.job.job, state=one.job.state) for one in registry.of_cluster(past)),
        )
        for past in pasts(session.home)
        if (record := past.record) is not None
    ]
    jobs = () if clusters else registry.jobs
    return HomeDocument(
        clusters=tuple(clusters),
        local_cloud=local.runs(session.home),
        ended=sum(past.record is None for past in pasts(session.home)),
        last_job=KnownJob(job=jobs[-1].job.job, state=jobs[-1].job.state) if jobs else None,
    )
