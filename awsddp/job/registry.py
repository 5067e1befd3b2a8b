"""The jobs that this machine knows: by name, from all that tells of them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from awsddp.errors import NotFoundError, UsageError
from awsddp.model import billing
from awsddp.model.documents import ListedJob, SeenJob
from awsddp.model.records import ACTIVE, Frozen, JobRecord, widened
from awsddp.session.context import Session
from awsddp.state import Past, living, pasts
from awsddp.storage.results_dir import is_fetched, reached, saved_job
from awsddp.storage.saved_job import brought, is_saved
from awsddp.util.format import elapsed, iso

NEWEST = 5
"""How many jobs are named where one is not found."""


class JobView(Frozen):
    """A job as this machine knows it: its results directory, and its cluster where there is a ledger of it.

    `launched` is when, as text; `reported` tells that its nodes have just told it. `share` is the part of its
    nodes' price that it pays: less than 1.0 where other jobs ran on them at the same time.
    """

    job: JobRecord
    folder: Path
    past: Past | None
    launched: str
    reported: bool = False
    share: float = 1.0

    @property
    def seconds(self) -> float | None:
        """How long the job ran, by its record; until now for one that runs."""
        return elapsed(self.job.started, self.job.ended)

    @property
    def job_usd(self) -> float | None:
        """What the job's nodes cost while it ran, by list price; jobs that share a node share its price."""
        seconds, price = self.seconds, self.job.price_usd_per_hour
        return None if seconds is None or price is None else round(seconds / 3600 * price * self.share, 4)

    def listed(self) -> ListedJob:
        """Return the job with its cluster, its time and its cost."""
        launch = self.past and self.past.launched
        name, key = self.past and self.past.name, launch and launch.id
        how_far = reached(self.folder, self.job)
        return widened(ListedJob, self, self.job, how_far, cluster=name, cluster_id=key)

    def seen(self) -> SeenJob:
        """Return the job as last seen, and whether its results are here."""
        record = self.past and self.past.record
        last_seen = iso(record.seen.get(self.job.job)) if record else None
        return widened(
            SeenJob, self, self.job, last_seen=last_seen, fetched=is_fetched(self.folder, self.job)
        )


class JobRegistry:
    """The jobs of this machine's clusters, and those whose results are in the project's folder.

    `reported` are jobs of the session's cluster that its nodes have just told. What is known of a job comes
    from the first of these sources that has it:

    1. its nodes, which have just told it;
    2. its results on this machine, if they were fetched after it had ended;
    3. the record of its cluster, as the job was last seen;
    4. its results on this machine, if they were fetched while it ran.
    """

    def __init__(self, session: Session, reported: Iterable[JobRecord] = ()) -> None:
        self._session = session
        self._reported = {job.job: job for job in reported}

    @cached_property
    def jobs(self) -> list[JobView]:
        """All jobs, the oldest first."""
        clusters = list(pasts(self._session.home))
        found = [one for past in clusters for one in self.of_cluster(past)]
        known = {(one.folder, one.job.nodes) for one in found}
        for path in self._session.results.absolute().glob("*/job.json"):
            job = saved_job(path.parent)
            if job is not None and (path.parent, job.nodes) not in known:
                own = next((past for past in clusters if _has_run(past, job)), None)
                found.append(JobView(job=job, folder=path.parent, past=own, launched=job.started or ""))
        return sorted(_shared(found), key=lambda one: one.launched)

    @property
    def own(self) -> list[JobView]:
        """The jobs of the session's cluster, the oldest first."""
        return self.of_cluster(living(self._session.folder))

    def of_cluster(self, past: Past) -> list[JobView]:
        """Return the jobs of a cluster, the oldest first.

        A job that was last seen active on a cluster that has ended was interrupted.
        """
        reported = self._reported if past.folder == self._session.folder.path else {}
        seen = {job.job: job for job in past.record.jobs} if past.record else {}
        rows = {row.job: row for row in past.rows if row.event == "train" and row.job and row.home}
        found = []
        for name in dict.fromkeys((*rows, *seen, *reported)):
            row, last = rows.get(name), seen.get(name)
            folder, results = self._results(name, past, row, last)
            ended = results if results and results.state not in ACTIVE else None
            job = reported.get(name) or ended or last or results
            if job is not None:
                job = job if name in reported else _interrupted(job, past)
                launched = row.time.isoformat() if row else job.started or ""
                is_reported = name in reported
                view = JobView(job=job, folder=folder, past=past, launched=launched, reported=is_reported)
                found.append(view)
        return sorted(found, key=lambda one: one.launched)

    def _results(
        self, name: str, past: Past, row: billing.Row | None, last: JobRecord | None
    ) -> tuple[Path, JobRecord | None]:
        """Return the folder of a job's results, also where it was moved into the project's, and the job as
        they say it.
        """
        here = (self._session.results / name).absolute()
        home = Path(row.home) if row and row.home else here
        for folder in (home, here):
            job = saved_job(folder)
            if job is not None and _has_run(past, job, seen=last):
                return folder, job
        return home, None

    def name(self, text: str | None, *, told: Iterable[str] = ()) -> str | None:
        """Return the name of the job that `text` means: a name, `last` (None), or a part of one name alone.

        A name comes before a part; those that nodes have reported, or `told` by their names alone, and those
        in the project's folder come before the others of this machine. A job in S3 is brought here, but its
        results. What is in no name is returned as it is. Raises UsageError for a part of several, and as
        `saved_job.opened`.
        """
        if text is None or text == "last":
            return None
        if is_saved(text):
            return brought(self._session, text)[0].job
        results = self._session.results.absolute()
        own = [one.job.job for one in self.jobs if one.folder.parent == results]
        own += [*self._reported, *told]
        every = [*(one.job.job for one in self.jobs), *own]
        for names in (own, every) if text and text not in every else ():
            found = [name for name in dict.fromkeys(names) if text in name]
            if len(found) > 1:
                shown = ", ".join(found[-NEWEST:])
                raise UsageError(f"several jobs have {text} in their name", shown, "use more of the name")
            if found:
                return found[0]
        return text

    def find(self, text: str | None) -> JobView | None:
        """Return the job that `text` means (`name`): one in the project's folder before others.

        Without a name the one that was launched last, on a cluster of the session's name if there is one.
        Raises UsageError.
        """
        name = self.name(text)
        found = [one for one in self.jobs if name in (None, one.job.job)]

        def rank(one: JobView) -> tuple[bool, bool]:
            is_own = one.past is not None and one.past.name == self._session.spec.name
            return name is not None and one.folder == (self._session.results / name).absolute(), is_own

        return max(reversed(found), key=rank, default=None)

    def require(self, text: str | None) -> JobView:
        """Return what `find` finds. Raises NotFoundError, UsageError."""
        found = self.find(text)
        if found is None:
            what = f"no job {text}" if text else "no jobs have run from this machine"
            where = f"searched {self._session.results}/ and the clusters of {self._session.home}"
            raise NotFoundError(what, where, "awsddp jobs   # all jobs")
        return found


def _has_run(past: Past, job: JobRecord, *, seen: JobRecord | None = None) -> bool:
    """Tell whether a job ran on machines of this cluster; on those of the job `seen`, where it is known."""
    return job.nodes == seen.nodes if seen else any(one.instance_id in past.instances for one in job.nodes)


def _interrupted(job: JobRecord, past: Past) -> JobRecord:
    """Return a job that was last seen active as interrupted, if its cluster has ended."""
    ended = bill.ended if job.state in ACTIVE and (bill := past.bill) else None
    return replace(job, state="interrupted", ended=iso(ended)) if ended is not None else job


def _shared(found: Sequence[JobView]) -> Iterator[JobView]:
    """Yield the jobs with the shares of their nodes' price that they pay."""
    now = datetime.now(UTC)
    spans: list[tuple[datetime, datetime, Collection[str]]] = []
    for one in found:
        start, end = (
            moment and datetime.fromisoformat(moment) for moment in (one.job.started, one.job.ended)
        )
        began, ids = start or now, frozenset(node.instance_id for node in one.job.nodes)
        spans.append((began, max(began, end or now), ids if start else frozenset()))
    for one, share in zip(found, billing.shares(spans), strict=True):
        yield replace(one, share=share)
