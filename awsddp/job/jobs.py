"""jobs: list the jobs and clusters of this machine with their cost."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from awsddp.errors import AwsddpError, ConfigError, NoRegion, NotFoundError
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import known_jobs
from awsddp.model import billing
from awsddp.model.billing import Bill
from awsddp.model.documents import CostedCluster, JobsDocument
from awsddp.model.records import JobRecord, widened
from awsddp.session.connect import preconnected_cluster
from awsddp.session.context import Session
from awsddp.session.cost import bill_of
from awsddp.state import pasts
from awsddp.storage.saved_job import brought, is_saved
from awsddp.util.format import iso, utc


def jobs_document(
    session: Session,
    reported: Collection[JobRecord],
    bill: Bill | None = None,
    names: Sequence[str] = (),
    *,
    since: datetime | None = None,
) -> JobsDocument:
    """Return the `jobs` document for the jobs of these `names` (empty: all).

    `since` leaves out jobs and clusters that ended before, and the earlier cost of clusters. `reported` are
    the jobs that the session's cluster has just reported, `bill` is its bill if AWS has just listed it.
    Raises NotFoundError, UsageError.
    """
    registry = JobRegistry(session, reported)
    views = registry.jobs
    chosen = [registry.require(name) for name in names] if names else views
    chosen = [view for view in chosen if not _ended_before(view.job.ended, since)]
    clusters = []
    for history in pasts(session.home):
        account = bill if bill is not None and history.folder == session.folder.path else history.bill
        if account is not None and not _ended_before(iso(account.ended), since):
            if since is not None and account.cost_usd is not None:
                earlier = billing.cost_until(history.rows, since)
                account = replace(account, cost_usd=round(max(0.0, account.cost_usd - earlier), 2))
            jobs_usd = sum(
                view.job_usd or 0.0 for view in views if view.past and view.past.folder == history.folder
            )
            idle_usd = (
                None if account.cost_usd is None or since else round(max(0.0, account.cost_usd - jobs_usd), 2)
            )
            costed = widened(
                CostedCluster,
                account,
                cluster=history.name,
                began=utc(account.began),
                ended=iso(account.ended),
                idle_usd=idle_usd,
            )
            clusters.append(costed)
    return JobsDocument(
        jobs=tuple(view.listed() for view in chosen),
        clusters=tuple(sorted(clusters, key=lambda cluster: cluster.began)),
        total_usd=_total(clusters, "aws"),
        would_have_cost_usd=_total(clusters, "local"),
        since=iso(since),
    )


def jobs_of_all(
    session: Session, names: Sequence[str] = (), *, since: datetime | None = None
) -> JobsDocument:
    """Return the `jobs` document for `names`; without names, for all jobs of this machine and of the nodes.

    The oldest job comes first; `since` as in `jobs_document`. Unreachable nodes are reported, and so is a
    cluster that has ended. An error that prevents the nodes' report is raised with the document as its
    `result`. Raises NotFoundError if this machine has no such job or never made a cluster of this name (the
    name `default`, if not configured: only if there are no jobs either); UsageError.
    """
    bill = None
    if names and all(map(is_saved, names)):
        return jobs_document(session, (), None, [brought(session, uri)[0].job for uri in names])
    try:
        with preconnected_cluster(session) as cluster:
            bill = bill_of(cluster, cluster.listed)
            return jobs_document(session, known_jobs(cluster), bill, names, since=since)
    except AwsddpError as error:
        error.result = document = jobs_document(session, (), bill, names, since=since)
        is_known = any(costed.cluster == session.spec.name for costed in document.clusters)
        is_unnamed = session.spec.name == "default" and session.folder.read(newer=True) is None
        absent = isinstance(error, NotFoundError) and is_known
        if is_unnamed and not is_known:
            absent = isinstance(error, NotFoundError | ConfigError if document.jobs else NoRegion)
        if not absent:
            raise
        if not isinstance(error, NoRegion):  # nor has this machine any jobs
            session.say(error.summary)
        return document


def _ended_before(ended: str | None, since: datetime | None) -> bool:
    return ended is not None and since is not None and datetime.fromisoformat(ended) < since


def _total(clusters: Iterable[CostedCluster], target: str) -> float:
    return round(sum(cluster.cost_usd or 0.0 for cluster in clusters if cluster.target == target), 2)
