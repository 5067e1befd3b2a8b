"""jobs: the jobs of all clusters of this machine, what they cost, and what the clusters cost."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from awsddp import billing, report
from awsddp.cluster import ACTIVE, Job
from awsddp.errors import AwsddpError, NotFoundError
from awsddp.state import Folder
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context
from awsddp.verbs.ledger import Past, pasts
from awsddp.verbs.results import results_dir, saved_job


def jobs(ctx: Context) -> dict[str, Any]:
    """Return every job of this machine's clusters, and the nodes' own, the oldest first, and what they cost.

    Unreachable nodes are named, as is a cluster that has ended. Raises what keeps the nodes from an answer,
    with the document as its `result`; NotFoundError only where no cluster of this name was ever made here.
    """
    try:
        return jobs_document(ctx, known_jobs(ctx))
    except AwsddpError as error:
        document = jobs_document(ctx, ())
        names = {one["cluster"] for one in document["clusters"]}
        if isinstance(error, NotFoundError) and ctx.spec.name in names:
            ctx.say(error.summary)
            return document
        error.result = document
        raise


def known_jobs(ctx: Context) -> tuple[Job, ...]:
    """Return every job that the nodes know, oldest first.

    Unreachable nodes are named. Raises NotFoundError, and NoNodes if no node is reachable.
    """
    with ClusterHandle.partly_ready(ctx) as cluster, cluster.connect_reachable():
        known = cluster.jobs(partial=True)
        cluster.say_missing()
        ctx.folder.remember(*known)
        return known


def jobs_document(ctx: Context, reported: Collection[Job]) -> dict[str, Any]:
    """Return the `jobs` document; `reported` are the jobs as the cluster's nodes have just told them."""
    known = all_jobs(ctx, reported)
    now = datetime.now(UTC)
    clusters = []
    for past in pasts(ctx.home):
        if (bill := billing.account(past.rows, now)) is not None:
            used = sum(one.usd or 0.0 for one in known if one.past and one.past.folder == past.folder)
            idle = None if bill.cost_usd is None else round(max(0.0, bill.cost_usd - used), 2)
            clusters.append({"cluster": past.name, **bill.document(), "idle_usd": idle})
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

    job: Job
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


def all_jobs(ctx: Context, reported: Collection[Job] = ()) -> list[FoundJob]:
    """Return the jobs of this machine's clusters and those whose results are in the project's folder.

    The oldest comes first. `reported` are as for `jobs_document`.
    """
    found: dict[Path, FoundJob] = {}
    made = list(pasts(ctx.home))
    if reported and all(past.folder != ctx.folder.path for past in made):  # its ledger was lost
        made.append(Past(name=ctx.spec.name, folder=ctx.folder.path, rows=[]))
    for past in made:
        latest = {}
        if past.folder.parent.name == "clusters" and (record := Folder(ctx.home, past.name).read(newer=True)):
            latest = {job.job: job for job in record.jobs}
        live = {job.job: job for job in reported} if past.folder == ctx.folder.path else {}
        rows = {row["job"]: row for row in past.rows if row["event"] == "train" and "home" in row}
        for name in dict.fromkeys((*rows, *latest, *live)):
            row = rows.get(name, {})
            folder = Path(row.get("home", results_dir(ctx, name).absolute()))
            job = live.get(name) or saved_job(folder) or latest.get(name)
            if job is not None:
                launched, is_live = row.get("time") or job.started or "", name in live
                job = job if is_live else _interrupted(job, past)
                found[folder] = FoundJob(
                    job=job, folder=folder, past=past, launched=launched, reported=is_live
                )
    for path in results_dir(ctx, "x").parent.absolute().glob("*/job.json"):
        if path.parent not in found and (job := saved_job(path.parent)) is not None:
            ids = {one.instance_id for one in job.nodes}
            own = next((past for past in made if not ids.isdisjoint(past.instances)), None)
            launched = job.started or ""
            found[path.parent] = FoundJob(job=job, folder=path.parent, past=own, launched=launched)
    return sorted(found.values(), key=lambda one: one.launched)


def _interrupted(job: Job, past: Past) -> Job:
    """Return a job; one that was last seen active on a cluster that has ended ended with it."""
    last = next((row for row in reversed(past.rows) if row["event"] in ("launched", "ended")), None)
    if job.state not in ACTIVE or last is None or last["event"] == "launched":
        return job
    ended = datetime.fromisoformat(str(last.get("at") or last["time"]))
    return replace(job, state="interrupted", ended=report.iso(ended))
