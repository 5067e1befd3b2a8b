"""Look up this machine's jobs by name, in ledgers, records, results folders and the nodes' reports."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from awsddp.errors import NotFoundError, UsageError
from awsddp.model import billing
from awsddp.model.documents import ListedJob, SeenJob
from awsddp.model.records import ACTIVE, Frozen, JobRecord, merge_records
from awsddp.session.context import Session
from awsddp.state import ClusterHistory, list_cluster_histories, read_cluster_history
from awsddp.storage.results_dir import get_job_progress, is_fetched, read_job
from awsddp.storage.saved_job import download_saved_job, is_s3_uri
from awsddp.util.formatting import elapsed_seconds, optional_utc

MAX_LISTED_JOBS = 5
"""The maximum number of jobs that an error lists when a job is not found."""


class JobView(Frozen):
    """A job with its results folder and its cluster's history (None if no ledger names the job).

    `launched` is the launch time in ISO format. `reported` is True if the nodes have just reported the job.
    `share` is the part of the nodes' price that the job pays. It is below 1.0 if other jobs ran on the nodes
    at the same time.
    """

    job: JobRecord
    folder: Path
    history: ClusterHistory | None
    launched: str
    reported: bool = False
    share: float = 1.0

    @property
    def seconds(self) -> float | None:
        """The job's run time in seconds (until now if it is running), or None if the job has not started."""
        return elapsed_seconds(self.job.started, self.job.ended)

    @property
    def job_usd(self) -> float | None:
        """The list price of the job's nodes while it ran (USD); jobs that share a node share its price."""
        seconds, price = self.seconds, self.job.price_usd_per_hour
        return None if seconds is None or price is None else round(seconds / 3600 * price * self.share, 4)

    def as_listed_job(self) -> ListedJob:
        """Return the job with its cluster, run time and cost."""
        launch = self.history and self.history.launch_row
        name, cluster_id = self.history and self.history.name, launch and launch.id
        progress = get_job_progress(self.folder, self.job)
        return merge_records(ListedJob, self, self.job, progress, cluster=name, cluster_id=cluster_id)

    def as_seen_job(self) -> SeenJob:
        """Return the job as last seen, and whether its results are fetched."""
        record = self.history and self.history.record
        last_seen = optional_utc(record.seen.get(self.job.job)) if record else None
        return merge_records(
            SeenJob, self, self.job, last_seen=last_seen, fetched=is_fetched(self.folder, self.job)
        )


class JobRegistry:
    """The jobs that ran on this machine's clusters or have results in the project's results folder.

    `reported` are the jobs that the nodes of the session's cluster have just reported. A job's state is taken
    from the first of these sources that has it:

    1. its nodes' report; 2. its results on this machine, if they were fetched after it had ended; 3. its
    cluster's record of the job as last seen; 4. its results on this machine, if they were fetched while it
    ran.
    """

    def __init__(self, session: Session, reported: Iterable[JobRecord] = ()) -> None:
        self._session = session
        self._reported = {job.job: job for job in reported}

    @cached_property
    def jobs(self) -> list[JobView]:
        """All jobs, oldest first."""
        clusters = list(list_cluster_histories(self._session.home))
        views = [view for cluster in clusters for view in self.jobs_of_cluster(cluster)]
        known_views = {(view.folder, view.job.nodes) for view in views}
        for path in self._session.results.absolute().glob("*/job.json"):
            job = read_job(path.parent)
            if job is not None and (path.parent, job.nodes) not in known_views:
                history = next((cluster for cluster in clusters if _has_run(cluster, job)), None)
                views.append(
                    JobView(job=job, folder=path.parent, history=history, launched=job.started or "")
                )
        return sorted(_with_shares(views), key=lambda view: view.launched)

    @property
    def own_jobs(self) -> list[JobView]:
        """The jobs on the session's cluster, oldest first."""
        return self.jobs_of_cluster(read_cluster_history(self._session.folder))

    def jobs_of_cluster(self, history: ClusterHistory) -> list[JobView]:
        """Return a cluster's jobs, oldest first.

        If a job was last seen active and its cluster has ended, the job was interrupted.
        """
        reported = self._reported if history.folder == self._session.folder.path else {}
        seen = {job.job: job for job in history.record.jobs} if history.record else {}
        rows = {row.job: row for row in history.rows if row.event == "train" and row.job and row.home}
        views = []
        for name in dict.fromkeys((*rows, *seen, *reported)):
            row, last = rows.get(name), seen.get(name)
            folder, results = self._find_results(name, history, row, last)
            ended = results if results and results.state not in ACTIVE else None
            job = reported.get(name) or ended or last or results
            if job is not None:
                job = job if name in reported else _mark_interrupted(job, history)
                launched = row.time.isoformat() if row else job.started or ""
                is_reported = name in reported
                view = JobView(
                    job=job, folder=folder, history=history, launched=launched, reported=is_reported
                )
                views.append(view)
        return sorted(views, key=lambda view: view.launched)

    def _find_results(
        self, name: str, history: ClusterHistory, row: billing.LedgerRow | None, last: JobRecord | None
    ) -> tuple[Path, JobRecord | None]:
        """Return a job's results folder, and the job in that folder's job.json (None without such a file).

        The folder may have been moved into the project's results folder after the launch.
        """
        project_folder = (self._session.results / name).absolute()
        recorded_folder = Path(row.home) if row and row.home else project_folder
        for folder in (recorded_folder, project_folder):
            job = read_job(folder)
            if job is not None and _has_run(history, job, seen=last):
                return folder, job
        return recorded_folder, None

    def resolve_name(self, text: str | None, *, also_reported: Iterable[str] = ()) -> str | None:
        """Return the job's name for `text` (its name, a unique part of its name, or an S3 URI).

        Returns None if `text` is None or "last". A name that equals `text` is preferred to a name that
        contains it. Jobs that nodes have reported, jobs in `also_reported` and jobs in the project's results
        folder are preferred to this machine's other jobs. If `text` is an S3 URI, downloads the job's record,
        logs and metrics. Text that matches no job is returned unchanged. Raises UsageError if several names
        contain `text`, and the errors of `open_saved_job`.
        """
        if text is None or text == "last":
            return None
        if is_s3_uri(text):
            return download_saved_job(self._session, text)[0].job
        results = self._session.results.absolute()
        preferred = [view.job.job for view in self.jobs if view.folder.parent == results]
        preferred += [*self._reported, *also_reported]
        every = [*(view.job.job for view in self.jobs), *preferred]
        for names in (preferred, every) if text and text not in every else ():
            matches = [name for name in dict.fromkeys(names) if text in name]
            if len(matches) > 1:
                newest = ", ".join(matches[-MAX_LISTED_JOBS:])
                raise UsageError(f"several jobs have {text} in their name", newest, "use more of the name")
            if matches:
                return matches[0]
        return text

    def find(self, text: str | None) -> JobView | None:
        """Return the job that `text` names (`resolve_name`), preferably from the project's results folder.

        Without a name, return the job launched last, preferably on a cluster with the session's name. Raises
        UsageError.
        """
        name = self.resolve_name(text)
        matches = [view for view in self.jobs if name in (None, view.job.job)]

        def rank(view: JobView) -> tuple[bool, bool]:
            is_own = view.history is not None and view.history.name == self._session.spec.name
            return name is not None and view.folder == (self._session.results / name).absolute(), is_own

        return max(reversed(matches), key=rank, default=None)

    def require(self, text: str | None) -> JobView:
        """Return the job that `find` returns. Raises UsageError, or NotFoundError if there is none."""
        view = self.find(text)
        if view is None:
            message = f"no job {text}" if text else "no jobs have run from this machine"
            searched = f"searched {self._session.results}/ and the clusters of {self._session.home}"
            raise NotFoundError(message, searched, "awsddp jobs   # all jobs")
        return view


def _has_run(history: ClusterHistory, job: JobRecord, *, seen: JobRecord | None = None) -> bool:
    """Return True if a job ran on this cluster's instances.

    If `seen` (the job as last seen) is set, the job must have run on exactly the instances of `seen`.
    """
    return (
        job.nodes == seen.nodes
        if seen
        else any(node.instance_id in history.instance_ids for node in job.nodes)
    )


def _mark_interrupted(job: JobRecord, history: ClusterHistory) -> JobRecord:
    """Return the job, marked as interrupted if it was last seen active and its cluster has ended."""
    ended = bill.ended if job.state in ACTIVE and (bill := history.bill) else None
    return replace(job, state="interrupted", ended=optional_utc(ended)) if ended is not None else job


def _with_shares(views: Sequence[JobView]) -> Iterator[JobView]:
    """Yield each job with its share of its nodes' price."""
    now = datetime.now(UTC)
    spans: list[tuple[datetime, datetime, Collection[str]]] = []
    for view in views:
        start, end = (
            moment and datetime.fromisoformat(moment) for moment in (view.job.started, view.job.ended)
        )
        began, instance_ids = start or now, frozenset(node.instance_id for node in view.job.nodes)
        spans.append((began, max(began, end or now), instance_ids if start else frozenset()))
    for view, share in zip(views, billing.compute_shares(spans), strict=True):
        yield replace(view, share=share)
