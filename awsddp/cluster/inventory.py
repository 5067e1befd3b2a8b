"""List all owners' clusters in all regions, terminate orphans, and list the clusters that have a record."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from awsddp.cluster.status import make_cluster_document
from awsddp.errors import CloudError, LeftoverError, LocalCloudError, NoRegion
from awsddp.job.registry import JobRegistry
from awsddp.local import client as local
from awsddp.model.documents import FoundCluster, HomeDocument, KnownCluster, KnownJob, Orphans
from awsddp.model.records import ClusterListing, Target, merge_records
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.locate import aws_client_for, open_target, refresh_listing, wait_until_launched_listed
from awsddp.state import list_cluster_histories
from awsddp.util import formatting
from awsddp.util.formatting import money

if TYPE_CHECKING:
    from awsddp.aws.client import AwsClient
    from awsddp.aws.clusters import Holding, RegionSearch


class _Search(NamedTuple):
    """Holds the search result for one target, and the regions that were searched."""

    cluster: LocatedCluster
    regions: list[str]
    result: "RegionSearch"


def status_all(session: Session) -> list[FoundCluster]:
    """Return the `status` documents of all owners' clusters in all regions, including orphans.

    Includes a running local cloud. With --local, only the local cloud is searched; with --region, only that
    region. Raises CloudError if no region answers.
    """
    with _search(session) as searches:
        return [_document(cluster, holding) for cluster, _, result in searches for holding in result.holdings]


def down_orphans(session: Session, *, discard: bool = False, confirm: Callable[[str], None]) -> Orphans:
    """Terminate the user's resources whose cluster has no instance or is past its expiry.

    A cluster with unfetched results is not terminated, unless `discard` is set. `confirm` is called with the
    list of orphans and raises an exception to refuse. Raises LeftoverError if an orphan was kept for its
    results or could not be terminated, or CloudError if AWS does not answer.
    """
    from awsddp.aws.teardown import teardown

    with _search(session) as searches:
        candidates = [
            (cluster, holding)
            for cluster, _, result in searches
            for holding in result.holdings
            if holding.orphan and not _is_alive(_with_record(cluster, holding.cluster, wait=True))
        ]
        with_results = [holding.cluster for _, holding in candidates if holding.cluster.unfetched]
        refused = [] if discard else with_results
        orphans = [(cluster, holding) for cluster, holding in candidates if holding.cluster not in refused]
        if orphans:
            lines = [f"  {_describe_orphan(cluster, orphan)}" for cluster, orphan in orphans]
            confirm("\n".join(("Orphans:", *lines, "")))
        terminated: list[str] = []
        leftovers: list[str] = []
        for cluster, orphan in orphans:
            target = replace(cluster.target, region=orphan.cluster.region)
            trail = session.home / "history" / f"{orphan.cluster.name}-{orphan.cluster.id}"
            aws = aws_client_for(session, target, trail=trail, login=cluster.aws)
            outcome = teardown(aws, orphan.cluster, on_event=session.on_event)
            terminated += outcome.terminated
            leftovers += outcome.leftovers
        if leftovers:
            raise LeftoverError(
                "not every orphan could be terminated",
                f"left: {', '.join(leftovers)}",
                "awsddp down --orphans   # again; what is left may still cost money",
            )
        if refused:
            first = refused[0]
            held = (
                f"{listed.name} ({listed.id}): results of {', '.join(listed.unfetched)}" for listed in refused
            )
            raise LeftoverError(
                "orphans that hold results were not terminated",
                "; ".join(held),
                f"awsddp -c {first.name} fetch {first.unfetched[0]}   # or: awsddp down --orphans --discard",
            )
        return Orphans(
            clusters=tuple(orphan.cluster.id for _, orphan in orphans),
            terminated=tuple(terminated),
            leftovers=(),
            looked=tuple(region for search in searches for region in search.regions),
            unread=tuple(text for search in searches for text in search.result.unread),
        )


@contextmanager
def _search(session: Session) -> "Iterator[list[_Search]]":
    """Search the running local cloud and AWS, or only the target that a setting or the record selects.

    Raises CloudError.
    """
    requested = session.spec.cluster
    is_set = session.local or requested.region or requested.profile
    record = None if is_set else session.folder.read()
    searches = []
    with contextlib.ExitStack() as stack:
        if not is_set and (record is None or record.target.name != "local"):
            opened = local.open_cloud(session.home, session.on_event, start=False)
            try:
                if (running := stack.enter_context(opened)) is not None:
                    searches.append(_search_target(session, running))
            except LocalCloudError as error:
                session.say(f"the local cloud was not searched: {error.summary}")
        target = stack.enter_context(open_target(session, record))
        try:
            searches.append(_search_target(session, target))
        except CloudError as error:
            if not searches or getattr(error, "code", "") != "NoCredentialsError":
                raise
            session.say(f"AWS was not searched: {error.message}")
        yield searches


def _search_target(session: Session, target: Target) -> _Search:
    """Search all of a target's regions, or only the requested region. No region needs to be configured."""
    from awsddp.aws.client import OPEN_REGION
    from awsddp.aws.clusters import find_everywhere
    from awsddp.aws.plan_facts import list_enabled_regions

    try:
        aws = aws_client_for(session, target)
    except NoRegion:
        target = replace(target, region=OPEN_REGION)
        aws = aws_client_for(session, target)
    is_single = session.spec.cluster.region is not None or target.name == "local"
    regions = [aws.region] if is_single else list(list_enabled_regions(aws))

    def client_for(region: str) -> "AwsClient":
        return (
            aws
            if region == aws.region
            else aws_client_for(session, replace(target, region=region), login=aws)
        )

    result = find_everywhere(client_for, regions, owner=aws.identity().user_id, now=datetime.now(UTC))
    for text in result.unread:
        session.say(f"not searched: {text}")
    cluster = LocatedCluster(session=session, target=target, aws_client=aws)
    return _Search(cluster, regions, result)


def _document(cluster: LocatedCluster, holding: "Holding") -> FoundCluster:
    """Return the cluster's document. If this machine has the cluster's record, add the fields of `status`."""
    listed = holding.cluster
    located = _with_record(cluster, listed)
    document = make_cluster_document(located)
    return merge_records(
        FoundCluster,
        holding,
        listed,
        document,
        cluster=listed.name,
        price_usd_per_hour=document.price_usd_per_hour
        if located.local_record
        else holding.price_usd_per_hour,
        orphan=holding.orphan and not _is_alive(located),
        jobs=tuple(located.unfetched_jobs),
    )


def _is_alive(cluster: LocatedCluster) -> bool:
    """Return True if a cluster with a record has living nodes and is not expired, whatever its tags are."""
    lives = cluster.listing is not None and cluster.listing.live
    return bool(cluster.local_record and lives) and cluster.record.expires > datetime.now(UTC)


def _with_record(cluster: LocatedCluster, listed: ClusterListing, *, wait: bool = False) -> LocatedCluster:
    """Return a cluster with its record and a new listing. Without a record, its listing is `listed`.

    With `wait`, waits until AWS lists the instances that this machine launched. `down` waits in the same way.
    """
    original = cluster.session
    session = replace(
        original, name=listed.name, settings=(replace(original.spec, name=listed.name), original.job_spec)
    )
    record = session.folder.read(ignore_newer=True)
    if record is None or record.id != listed.id:
        return replace(cluster, listing=listed)
    target = replace(cluster.target, region=listed.region)
    aws = aws_client_for(session, target, login=cluster.aws)
    located = refresh_listing(
        LocatedCluster(session=session, target=target, aws_client=aws, local_record=record)
    )
    if wait:
        located = wait_until_launched_listed(located)
    return replace(located, listing=located.own_listing)


def _describe_orphan(cluster: LocatedCluster, holding: "Holding") -> str:
    listed = holding.cluster
    resource_ids = [*(node.instance_id for node in listed.live), *listed.leftovers]
    results = f"; results not fetched: {', '.join(listed.unfetched)}" if listed.unfetched else ""
    expiry = f", past its expiry of {formatting.optional_utc(listed.expires)}" if listed.live else ""
    location = replace(cluster.target, region=listed.region).location
    return (
        f"{listed.name} ({listed.id}) in {location}{expiry}: {', '.join(resource_ids)}, "
        f"{money(holding.price_usd_per_hour)} per hour{results}"
    )


def list_known_clusters(session: Session) -> HomeDocument:
    """Return the clusters that have a record, as last seen, and whether a local cloud is running.

    Because no requests are sent, a cluster may have ended since it was last seen; `status` shows whether it
    has.
    """
    registry = JobRegistry(session)
    clusters = [
        merge_records(
            KnownCluster,
            record,
            record.target,
            cluster=history.name,
            target=record.target.name,
            price_usd_per_hour=bill.price_usd_per_hour if (bill := history.bill) else None,
            expires=str(formatting.optional_utc(record.expires)),
            expired=record.expires < datetime.now(UTC),
            jobs=tuple(
                KnownJob(job=view.job.job, state=view.job.state) for view in registry.jobs_of_cluster(history)
            ),
        )
        for history in list_cluster_histories(session.home)
        if (record := history.record) is not None
    ]
    jobs = () if clusters else registry.jobs
    return HomeDocument(
        clusters=tuple(clusters),
        local_cloud=local.is_running(session.home),
        ended=sum(history.record is None for history in list_cluster_histories(session.home)),
        last_job=KnownJob(job=jobs[-1].job.job, state=jobs[-1].job.state) if jobs else None,
    )
