"""What this machine and the nodes know: jobs, found, told by the nodes, ended; and what a cluster costs."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from awsddp.errors import NodeError, NotFoundError, UsageError
from awsddp.job.release import release_saved, release_unbegun
from awsddp.model import billing
from awsddp.model.documents import ListedJob
from awsddp.model.records import ACTIVE, Frozen, JobRecord, widened
from awsddp.session.connect import connect_reachable, preconnected_cluster, say_missing, told_jobs
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.state import Past, pasts
from awsddp.storage.results_dir import missing, reached, saved_job
from awsddp.storage.saved_job import brought, is_saved
from awsddp.util.format import elapsed, iso

_NEWEST = 5
"""How many jobs are named where one is not found."""


def told_job(connected: ConnectedCluster, name: str | None, *, ran: bool = False) -> JobRecord:
    """Return a job (`full_name`), or the last one, as the nodes that answer know it.

    The last one that runs, or else has run, comes first where `ran` is wanted and no name is given.
    Raises UsageError, NotFoundError, and NodeError for one that is remembered and whose nodes are missing.
    """
    jobs = told_jobs(connected, partial=True)
    unbegun = release_unbegun(connected, jobs)
    name = full_name(connected.session, name, (job.job for job in jobs))
    refuse_unbegun(name, unbegun)
    if ran and name is None:
        running = tuple(job for job in jobs if job.state == "running")
        jobs = running or tuple(job for job in jobs if job.state != "waiting") or jobs
    try:
        return choose_job(jobs, name)
    except NotFoundError:
        remembered = [job for job in connected.cluster.record.jobs if job.job == name and job.nodes]
        for job in remembered:
            why = "\n".join(missing(connected, job).values())
            raise NodeError(f"no reachable node knows job {name}", why, "awsddp jobs") from None
        raise


def refuse_unbegun(name: str | None, unbegun: Collection[str]) -> None:
    """Raise NotFoundError for a job that was never launched."""
    if name in unbegun:
        why = "the command that was to start it ended before its nodes heard of it"
        raise NotFoundError(
            f"job {name} never began", why, f"awsddp train --name {name} SCRIPT   # its name is free"
        )


def full_name(session: Session, text: str | None, told: Iterable[str] = ()) -> str | None:
    """Return the name of the job that `text` means: a name, `last` (None), or a part of one name alone.

    A name comes before a part; those that nodes have `told` and those in the project's folder before the
    others of this machine. A job in S3 is brought here, but its results. What is in no name is returned as it
    is. Raises UsageError for a part of several, and as `saved.opened`.
    """
    if text is None or text == "last":
        return None
    if is_saved(text):
        return brought(session, text)[0].job
    known = all_jobs(session)
    own = [one.job.job for one in known if one.folder.parent == session.results.absolute()]
    own += told
    every = [*(one.job.job for one in known), *own]
    for names in (own, every) if text and text not in every else ():
        found = [name for name in dict.fromkeys(names) if text in name]
        if len(found) > 1:
            shown = ", ".join(found[-_NEWEST:])
            raise UsageError(f"several jobs have {text} in their name", shown, "use more of the name")
        if found:
            return found[0]
    return text


def choose_job(jobs: Sequence[JobRecord], name: str | None) -> JobRecord:
    """Return the job of this name, or the last one. Raises NotFoundError."""
    chosen = next((job for job in reversed(jobs) if name in (None, job.job)), None)
    if chosen is None:
        why, advice = "no jobs on this cluster yet", "awsddp train"
        if jobs:
            names = ", ".join(job.job for job in jobs[-_NEWEST:])
            why, advice = f"the newest jobs: {names}", "awsddp jobs   # all of them"
            if near := difflib.get_close_matches(name or "", [job.job for job in jobs], n=1):
                advice = f"did you mean {near[0]}?\n{advice}"
        raise NotFoundError(f"no job {name}" if name else "no job", why, advice)
    return chosen


def known_jobs(cluster: LocatedCluster) -> tuple[JobRecord, ...]:
    """Return every job that the nodes know, oldest first.

    Unreachable nodes are named. Raises NotFoundError, and NoNodes if no node is reachable.
    """
    with connect_reachable(cluster) as connected:
        known = told_jobs(connected, partial=True)
        say_missing(connected)
        cluster.session.folder.remember(*known)
        release_saved(connected, known)
        release_unbegun(connected, known)
        return known


def job_now(session: Session, name: str) -> JobRecord:
    """Return a job (`full_name`) as it is now: by what this machine knows if it has ended, else by its nodes.

    Raises UsageError, NotFoundError, NodeError, CloudError.
    """
    found = find_job(session, name)
    if found is not None and found.job.state not in ACTIVE:
        return found.job
    with preconnected_cluster(session) as cluster:
        jobs = known_jobs(cluster)
        return choose_job(jobs, full_name(session, name, (job.job for job in jobs)))


class FoundJob(Frozen):
    """A job that this machine knows: its results directory, and its cluster where there is a ledger of it.

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


def all_jobs(session: Session, reported: Collection[JobRecord] = ()) -> list[FoundJob]:
    """Return the jobs of this machine's clusters and those whose results are in the project's folder.

    The oldest comes first. `reported` are as for `jobs_document`.
    """
    made = list(pasts(session.home))
    found = [one for past in made for one in jobs_of(session, past, reported)]
    known = {(one.folder, one.job.nodes) for one in found}
    for path in session.results.absolute().glob("*/job.json"):
        job = saved_job(path.parent)
        if job is not None and (path.parent, job.nodes) not in known:
            own = next((past for past in made if _has_run(past, job)), None)
            found.append(FoundJob(job=job, folder=path.parent, past=own, launched=job.started or ""))
    return sorted(_shared(found), key=lambda one: one.launched)


def _shared(found: Sequence[FoundJob]) -> list[FoundJob]:
    """Return the jobs with the shares of their nodes' price that they pay."""
    now = datetime.now(UTC)
    spans = []
    for one in found:
        start, end = (
            moment and datetime.fromisoformat(moment) for moment in (one.job.started, one.job.ended)
        )
        began, ids = start or now, frozenset(node.instance_id for node in one.job.nodes)
        spans.append((began, max(began, end or now), ids if start else frozenset()))
    return [replace(one, share=share) for one, share in zip(found, billing.shares(spans), strict=True)]


def jobs_of(session: Session, past: Past, reported: Collection[JobRecord] = ()) -> list[FoundJob]:
    """Return the jobs of one cluster, the oldest first: as its nodes `reported` them, else as last seen.

    The results say how a job ended, also where they were moved into the project's folder. A job that was last
    seen active on a cluster that has ended was interrupted.
    """
    found = []
    live = {job.job: job for job in reported if past.folder == session.folder.path}
    seen = {job.job: job for job in past.record.jobs} if past.record else {}
    rows = {row.job: row for row in past.rows if row.event == "train" and row.job and row.home}
    ended = bill.ended if (bill := past.bill) else None
    for name in dict.fromkeys((*rows, *seen, *live)):
        row, last, here = rows.get(name), seen.get(name), (session.results / name).absolute()
        home = Path(row.home) if row and row.home else here
        saved = ((folder, saved_job(folder)) for folder in (home, here))
        own = ((at, job) for at, job in saved if job and _has_run(past, job, seen=last))
        folder, kept = next(own, (home, None))
        job = live.get(name) or (kept if kept and kept.state not in ACTIVE else last or kept)
        if job is None:
            continue
        launched = row.time.isoformat() if row else job.started or ""
        if ended is not None and job.state in ACTIVE and name not in live:
            job = replace(job, state="interrupted", ended=iso(ended))
        found.append(FoundJob(job=job, folder=folder, past=past, launched=launched, reported=name in live))
    return sorted(found, key=lambda one: one.launched)


def _has_run(past: Past, job: JobRecord, *, seen: JobRecord | None = None) -> bool:
    """Tell whether a job ran on machines of this cluster; on those of the job `seen`, where it is known."""
    return job.nodes == seen.nodes if seen else any(one.instance_id in past.instances for one in job.nodes)


def known_job(session: Session, name: str | None, known: list[FoundJob] | None = None) -> FoundJob:
    """Return what `find_job` finds. Raises NotFoundError, UsageError."""
    found = find_job(session, name, known)
    if found is None:
        what = f"no job {name}" if name else "no jobs have run from this machine"
        where = f"searched {session.results}/ and the clusters of {session.home}"
        raise NotFoundError(what, where, "awsddp jobs   # all jobs")
    return found


def find_job(session: Session, name: str | None, known: list[FoundJob] | None = None) -> FoundJob | None:
    """Return a job (`full_name`) that this machine knows: one in the project's folder before others.

    Without a name the one that was launched last, on a cluster of this name if there is one. `known` is what
    `all_jobs` returned. Raises UsageError.
    """
    name = full_name(session, name, (one.job.job for one in known or () if one.reported))
    found = [one for one in known or all_jobs(session) if name in (None, one.job.job)]

    def rank(one: FoundJob) -> tuple[bool, bool]:
        is_own = one.past is not None and one.past.name == session.spec.name
        return name is not None and one.folder == (session.results / name).absolute(), is_own

    return max(reversed(found), key=rank, default=None)
