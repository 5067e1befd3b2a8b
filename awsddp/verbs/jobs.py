"""jobs: the jobs of all clusters of this machine, what they cost, and what the clusters cost."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from awsddp import report
from awsddp.billing import Bill
from awsddp.errors import AwsddpError, NotFoundError
from awsddp.records import ACTIVE, JobRecord
from awsddp.verbs.cluster import ClusterHandle, choose_job
from awsddp.verbs.context import Context
from awsddp.verbs.ledger import Past, bill_of, pasts
from awsddp.verbs.results import results_dir, saved_job


def jobs(ctx: Context) -> dict[str, Any]:
    """Return every job of this machine's clusters, and the nodes' own, the oldest first, and what they cost.

    Unreachable nodes are named, as is a cluster that has ended. Raises what keeps the nodes from an answer,
    with the document as its `result`; NotFoundError only where no cluster of this name was ever made here.
    """
    bill = None
    try:
        with ClusterHandle.partly_ready(ctx) as cluster:
            bill = bill_of(ctx, cluster.known, cluster.listed, cluster.gateway)
            return jobs_document(ctx, known_jobs(cluster), bill)
    except AwsddpError as error:
        error.result = document = jobs_document(ctx, (), bill)
        is_known = any(one["cluster"] == ctx.spec.name for one in document["clusters"])
        if not (isinstance(error, NotFoundError) and is_known):
            raise
        ctx.say(error.summary)
        return document


def known_jobs(cluster: ClusterHandle) -> tuple[JobRecord, ...]:
    """Return every job that the nodes know, oldest first.

    Unreachable nodes are named. Raises NotFoundError, and NoNodes if no node is reachable.
    """
    with cluster.connect_reachable():
        known = cluster.jobs(partial=True)
        cluster.say_missing()
        cluster.ctx.folder.remember(*known)
        return known


def job_now(ctx: Context, name: str) -> JobRecord:
    """Return a job as it is now: by what this machine knows if it has ended, else by its nodes.

    Raises NotFoundError, NodeError, CloudError.
    """
    found = find_job(ctx, name)
    if found is not None and found.job.state not in ACTIVE:
        return found.job
    with ClusterHandle.partly_ready(ctx) as cluster:
        return choose_job(known_jobs(cluster), name)


def jobs_document(ctx: Context, reported: Collection[JobRecord], bill: Bill | None = None) -> dict[str, Any]:
    """Return the `jobs` document; `reported` are the jobs as the cluster's nodes have just told them.

    `bill` is the cluster's account, where AWS has just been asked for it.
    """
    known = all_jobs(ctx, reported)
    clusters = []
    for past in pasts(ctx.home):
        account = bill if bill is not None and past.folder == ctx.folder.path else past.bill
        if account is not None:
            used = sum(one.usd or 0.0 for one in known if one.past and one.past.folder == past.folder)
            idle = None if account.cost_usd is None else round(max(0.0, account.cost_usd - used), 2)
            clusters.append({"cluster": past.name, **account.document(), "idle_usd": idle})
    return {
        "jobs": [one.document() for one in known],
        "clusters": sorted(clusters, key=lambda one: str(one["began"])),
        "total_usd": _total(clusters, "aws"),
        "would_have_cost_usd": _total(clusters, "local"),
    }


def _total(clusters: Iterable[Mapping[str, Any]], target: str) -> float:
    return round(sum(one["cost_usd"] or 0.0 for one in clusters if one["target"] == target), 2)


@dataclass(frozen=True, kw_only=True)
class FoundJob:
    """A job that this machine knows: its results directory, and its cluster where there is a ledger of it.

    `launched` is when, as text; `reported` tells that its nodes have just told it.
    """

    job: JobRecord
    folder: Path
    past: Past | None
    launched: str
    reported: bool = False

    @property
    def seconds(self) -> float | None:
        """How long the job ran, by its record; until now for one that runs."""
        if self.job.started is None:
            return None
        ended = datetime.fromisoformat(self.job.ended) if self.job.ended else datetime.now(UTC)
        return max(0.0, (ended - datetime.fromisoformat(self.job.started)).total_seconds())

    @property
    def usd(self) -> float | None:
        """What the job's nodes cost while it ran, by list price."""
        seconds, price = self.seconds, self.job.price_usd_per_hour
        return None if seconds is None or price is None else round(seconds / 3600 * price, 4)

    def document(self) -> dict[str, Any]:
        """Return the job with its cluster, its time and its cost."""
        return asdict(self.job) | {
            "cluster": self.past.name if self.past else None,
            "cluster_id": self.past.launched.get("id") if self.past else None,
            "seconds": self.seconds,
            "job_usd": self.usd,
            "reported": self.reported,
        }


def all_jobs(ctx: Context, reported: Collection[JobRecord] = ()) -> list[FoundJob]:
    """Return the jobs of this machine's clusters and those whose results are in the project's folder.

    The oldest comes first. `reported` are as for `jobs_document`.
    """
    made = list(pasts(ctx.home))
    found = [one for past in made for one in jobs_of(ctx, past, reported)]
    known = {(one.folder, one.job.nodes) for one in found}
    for path in results_dir(ctx, "x").parent.absolute().glob("*/job.json"):
        job = saved_job(path.parent)
        if job is not None and (path.parent, job.nodes) not in known:
            own = next((past for past in made if _has_run(past, job)), None)
            found.append(FoundJob(job=job, folder=path.parent, past=own, launched=job.started or ""))
    return sorted(found, key=lambda one: one.launched)


def jobs_of(ctx: Context, past: Past, reported: Collection[JobRecord] = ()) -> list[FoundJob]:
    """Return the jobs of one cluster, the oldest first: as its nodes `reported` them, else as last seen.

    The results say how a job ended, also where they were moved into the project's folder. A job that was last
    seen active on a cluster that has ended was interrupted.
    """
    found = []
    live = {job.job: job for job in reported if past.folder == ctx.folder.path}
    seen = {job.job: job for job in past.record.jobs} if past.record else {}
    rows = {row["job"]: row for row in past.rows if row["event"] == "train" and "home" in row}
    ended = bill.ended if (bill := past.bill) else None
    for name in dict.fromkeys((*rows, *seen, *live)):
        row, last, here = rows.get(name, {}), seen.get(name), results_dir(ctx, name).absolute()
        home = Path(row.get("home", here))
        saved = ((folder, saved_job(folder)) for folder in (home, here))
        own = ((at, job) for at, job in saved if job and _has_run(past, job, seen=last))
        folder, kept = next(own, (home, None))
        job = live.get(name) or (kept if kept and kept.state not in ACTIVE else last or kept)
        if job is None:
            continue
        launched = row.get("time") or job.started or ""
        if ended is not None and job.state in ACTIVE and name not in live:
            job = replace(job, state="interrupted", ended=report.iso(ended))
        found.append(FoundJob(job=job, folder=folder, past=past, launched=launched, reported=name in live))
    return sorted(found, key=lambda one: one.launched)


def _has_run(past: Past, job: JobRecord, *, seen: JobRecord | None = None) -> bool:
    """Tell whether a job ran on machines of this cluster; on those of the job `seen`, where it is known."""
    return job.nodes == seen.nodes if seen else any(one.instance_id in past.instances for one in job.nodes)


def find_job(ctx: Context, name: str | None) -> FoundJob | None:
    """Return the job of this name that this machine knows: one in the project's folder before others.

    Without a name the one that was launched last, on a cluster of this name if there is one.
    """
    found = [one for one in all_jobs(ctx) if name in (None, one.job.job)]

    def rank(one: FoundJob) -> tuple[bool, bool]:
        is_own = one.past is not None and one.past.name == ctx.spec.name
        return name is not None and one.folder == results_dir(ctx, name).absolute(), is_own

    return max(reversed(found), key=rank, default=None)
