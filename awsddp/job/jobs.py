"""jobs: list this machine's jobs and clusters with their cost."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from awsddp.errors import AwsddpError, ConfigError, NoRegion, NotFoundError
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import query_jobs
from awsddp.model import billing
from awsddp.model.billing import Bill
from awsddp.model.documents import CostedCluster, JobsDocument
from awsddp.model.records import JobRecord, merge_records
from awsddp.session.connect import preconnected_cluster
from awsddp.session.context import Session
from awsddp.session.cost import compute_bill
from awsddp.state import list_cluster_histories
from awsddp.storage.saved_job import download_saved_job, is_s3_uri
from awsddp.util.formatting import optional_utc, utc


def make_jobs_document(
    session: Session,
    reported: Collection[JobRecord],
    bill: Bill | None = None,
    names: Sequence[str] = (),
    *,
    since: datetime | None = None,
) -> JobsDocument:
    """Return the `jobs` document for the jobs with these `names`, or for all jobs if `names` is empty.

    Jobs and clusters that ended before `since` are left out, and so are costs before that time. `reported`
    are the jobs that the session's cluster has just reported; `bill` is the cluster's bill, if AWS has just
    listed the cluster. Raises NotFoundError or UsageError.
    """
    registry = JobRegistry(session, reported)
    views = registry.jobs
    chosen = [registry.require(name) for name in names] if names else views
    chosen = [view for view in chosen if not _ended_before(view.job.ended, since)]
    clusters = []
    for history in list_cluster_histories(session.home):
        account = bill if bill is not None and history.folder == session.folder.path else history.bill
        if account is not None and not _ended_before(optional_utc(account.ended), since):
            if since is not None and account.cost_usd is not None:
                earlier = billing.compute_cost_until(history.rows, since)
                account = replace(account, cost_usd=round(max(0.0, account.cost_usd - earlier), 2))
            jobs_usd = sum(
                view.job_usd or 0.0
                for view in views
                if view.history and view.history.folder == history.folder
            )
            idle_usd = (
                None if account.cost_usd is None or since else round(max(0.0, account.cost_usd - jobs_usd), 2)
            )
            costed = merge_records(
                CostedCluster,
                account,
                cluster=history.name,
                began=utc(account.began),
                ended=optional_utc(account.ended),
                idle_usd=idle_usd,
            )
            clusters.append(costed)
    return JobsDocument(
        jobs=tuple(view.as_listed_job() for view in chosen),
        clusters=tuple(sorted(clusters, key=lambda cluster: cluster.began)),
        total_usd=_total(clusters, "aws"),
        would_have_cost_usd=_total(clusters, "local"),
        since=optional_utc(since),
    )


def list_jobs(session: Session, names: Sequence[str] = (), *, since: datetime | None = None) -> JobsDocument:
    """Return the `jobs` document for the jobs in `names`, or for all known jobs if `names` is empty.

    All known jobs are the jobs in this machine's files and the jobs that the nodes report. The oldest job
    comes first. `since` has the same meaning as in `make_jobs_document`. Unreachable nodes and an ended
    cluster are reported. If an error prevents the nodes from reporting their jobs, the error is raised with
    the document as its `result`. Raises UsageError, and NotFoundError if this machine has no such job or has
    never created a cluster with this name. If the cluster's name is `default` and the cluster has no record
    on this machine, NotFoundError is raised only if there are also no jobs.
    """
    bill = None
    if names and all(map(is_s3_uri, names)):
        return make_jobs_document(
            session, (), None, [download_saved_job(session, uri)[0].job for uri in names]
        )
    try:
        with preconnected_cluster(session) as cluster:
            bill = compute_bill(cluster, cluster.listing)
            return make_jobs_document(session, query_jobs(cluster), bill, names, since=since)
    except AwsddpError as error:
        error.result = document = make_jobs_document(session, (), bill, names, since=since)
        is_known = any(costed.cluster == session.spec.name for costed in document.clusters)
        is_unnamed = session.spec.name == "default" and session.folder.read(ignore_newer=True) is None
        absent = isinstance(error, NotFoundError) and is_known
        if is_unnamed and not is_known:
            absent = isinstance(error, NotFoundError | ConfigError if document.jobs else NoRegion)
        if not absent:
            raise
        if not isinstance(error, NoRegion):  # without a region, there is no cluster to report
            session.say(error.summary)
        return document


def _ended_before(ended: str | None, since: datetime | None) -> bool:
    return ended is not None and since is not None and datetime.fromisoformat(ended) < since


def _total(clusters: Iterable[CostedCluster], target: str) -> float:
    return round(sum(cluster.cost_usd or 0.0 for cluster in clusters if cluster.target == target), 2)
