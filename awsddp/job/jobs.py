"""jobs: the jobs of this machine, and what they cost."""

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
    """Return the `jobs` document, of the jobs of these `names` alone where there are some.

    With `since` jobs and clusters that ended before are left out, and so is what clusters cost before.
    `reported` are the jobs as the cluster's nodes have just told them, `bill` is the cluster's account, where
    AWS has just been asked for it. Raises NotFoundError, UsageError.
    """
    registry = JobRegistry(session, reported)
    known = registry.jobs
    chosen = [registry.require(name) for name in names] if names else known
    chosen = [one for one in chosen if not _was_before(one.job.ended, since)]
    clusters = []
    for past in pasts(session.home):
        account = bill if bill is not None and past.folder == session.folder.path else past.bill
        if account is not None and not _was_before(iso(account.ended), since):
            if since is not None and account.cost_usd is not None:
                earlier = billing.cost_until(past.rows, since)
                account = replace(account, cost_usd=round(max(0.0, account.cost_usd - earlier), 2))
            used = sum(one.job_usd or 0.0 for one in known if one.past and one.past.folder == past.folder)
            idle = None if account.cost_usd is None or since else round(max(0.0, account.cost_usd - used), 2)
            costed = widened(
                CostedCluster,
                account,
                cluster=past.name,
                began=utc(account.began),
                ended=iso(account.ended),
                idle_usd=idle,
            )
            clusters.append(costed)
    return JobsDocument(
        jobs=tuple(one.listed() for one in chosen),
        clusters=tuple(sorted(clusters, key=lambda one: one.began)),
        total_usd=_total(clusters, "aws"),
        would_have_cost_usd=_total(clusters, "local"),
        since=iso(since),
    )


def jobs_of_all(
    session: Session, names: Sequence[str] = (), *, since: datetime | None = None
) -> JobsDocument:
    """Return the jobs of these `names`, or all, the oldest first, and what they cost (`since`).

    All are those of this machine's clusters, and the nodes' own. Unreachable nodes are named, as is a cluster
    that has ended. Raises what keeps the nodes from an answer, with the document as its `result`;
    NotFoundError where a job, or any cluster of this name, was never made here (`default`, which nobody
    named: where there is no job either); UsageError.
    """
    bill = None
    if names and all(map(is_saved, names)):
        return jobs_document(session, (), None, [brought(session, one)[0].job for one in names])
    try:
        with preconnected_cluster(session) as cluster:
            bill = bill_of(cluster, cluster.listed)
            return jobs_document(session, known_jobs(cluster), bill, names, since=since)
    except AwsddpError as error:
        error.result = found = jobs_document(session, (), bill, names, since=since)
        was_here = any(one.cluster == session.spec.name for one in found.clusters)
        nobody_named = session.spec.name == "default" and session.folder.read(newer=True) is None
        absent = isinstance(error, NotFoundError) and was_here
        if nobody_named and not was_here:
            absent = isinstance(error, NotFoundError | ConfigError if found.jobs else NoRegion)
        if not absent:
            raise
        if not isinstance(error, NoRegion):  # and nothing was ever here
            session.say(error.summary)
        return found


def _was_before(ended: str | None, since: datetime | None) -> bool:
    return ended is not None and since is not None and datetime.fromisoformat(ended) < since


def _total(clusters: Iterable[CostedCluster], target: str) -> float:
    return round(sum(one.cost_usd or 0.0 for one in clusters if one.target == target), 2)
