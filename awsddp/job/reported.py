"""Query a cluster's nodes for one of their jobs, or for all their jobs."""

import difflib
from collections.abc import Collection, Sequence

from awsddp.errors import NodeError, NotFoundError
from awsddp.job.registry import MAX_LISTED_JOBS, JobRegistry
from awsddp.job.release import release_saved_jobs, release_unlaunched_jobs
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import (
    connect_reachable,
    list_jobs_on_nodes,
    preconnected_cluster,
    report_skipped_nodes,
)
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.storage.results_dir import find_missing_parts


def find_job_on_nodes(
    connected: ConnectedCluster, text: str | None, *, prefer_started: bool = False
) -> JobRecord:
    """Return the job that `resolve_name` finds (by default, the last job) as the reachable nodes report it.

    With `prefer_started`, the default is the last running job, or else the last job that has started. Raises
    UsageError, NotFoundError, and NodeError if no reachable node reports a job that is in the cluster's
    record.
    """
    jobs = list_jobs_on_nodes(connected, partial=True)
    unlaunched = release_unlaunched_jobs(connected, jobs)
    name = JobRegistry(connected.session, jobs).resolve_name(text)
    refuse_unlaunched_job(name, unlaunched)
    if prefer_started and name is None:
        running = tuple(job for job in jobs if job.state == "running")
        jobs = running or tuple(job for job in jobs if job.state != "waiting") or jobs
    try:
        return choose_job(jobs, name)
    except NotFoundError:
        recorded = [job for job in connected.cluster.record.jobs if job.job == name and job.nodes]
        for job in recorded:
            why = "\n".join(find_missing_parts(connected, job).values())
            raise NodeError(f"no reachable node knows job {name}", why, "awsddp jobs") from None
        raise


def refuse_unlaunched_job(name: str | None, unlaunched: Collection[str]) -> None:
    """Raise NotFoundError for a job that was never launched."""
    if name in unlaunched:
        why = "the command that should have started the job ended before it reached the nodes"
        raise NotFoundError(
            f"job {name} never began", why, f"awsddp train --name {name} SCRIPT   # its name is free"
        )


def choose_job(jobs: Sequence[JobRecord], name: str | None) -> JobRecord:
    """Return the job with this name, or the last job if `name` is None. Raises NotFoundError."""
    chosen = next((job for job in reversed(jobs) if name in (None, job.job)), None)
    if chosen is None:
        why, advice = "no jobs on this cluster yet", "awsddp train"
        if jobs:
            names = ", ".join(job.job for job in jobs[-MAX_LISTED_JOBS:])
            why, advice = f"the newest jobs: {names}", "awsddp jobs   # all of them"
            if near := difflib.get_close_matches(name or "", [job.job for job in jobs], n=1):
                advice = f"did you mean {near[0]}?\n{advice}"
        raise NotFoundError(f"no job {name}" if name else "no job", why, advice)
    return chosen


def query_jobs(cluster: LocatedCluster) -> tuple[JobRecord, ...]:
    """Return every job that the nodes report, oldest first, and update the cluster's record.

    Unreachable nodes are reported. Raises NotFoundError, or NoReachableNodes if no node is reachable.
    """
    with connect_reachable(cluster) as connected:
        jobs = list_jobs_on_nodes(connected, partial=True)
        report_skipped_nodes(connected)
        cluster.session.folder.save_jobs(*jobs)
        release_saved_jobs(connected, jobs)
        release_unlaunched_jobs(connected, jobs)
        return jobs


def get_job(session: Session, text: str) -> JobRecord:
    """Return the job that `resolve_name` finds: from local records if it has ended, or else from its nodes.

    Raises UsageError, NotFoundError, NodeError or CloudError.
    """
    view = JobRegistry(session).find(text)
    if view is not None and view.job.state not in ACTIVE:
        return view.job
    with preconnected_cluster(session) as cluster:
        jobs = query_jobs(cluster)
        return choose_job(jobs, JobRegistry(session, jobs).resolve_name(text))
