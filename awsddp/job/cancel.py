"""cancel: end jobs; their ranks get a grace period to save a checkpoint."""

from collections.abc import Sequence

from awsddp.errors import NotFoundError
from awsddp.job.checkpoint import find_run_id
from awsddp.job.lives import list_lives
from awsddp.job.registry import JobRegistry
from awsddp.job.release import release_unlaunched_jobs
from awsddp.job.reported import choose_job, refuse_unlaunched_job
from awsddp.model.documents import JobDocument
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import (
    connect_reachable,
    list_jobs_on_nodes,
    preconnected_cluster,
    report_skipped_nodes,
)
from awsddp.session.context import ConnectedCluster, Session
from awsddp.settings.loader import parse_job_arguments
from awsddp.settings.values import parse_duration
from awsddp.storage.results_dir import make_job_result


def cancel(session: Session, *, job: str | None = None) -> JobDocument:
    """End the job that `resolve_name` finds (by default, the last running job); return its `train` document.

    A job that has ended is returned unchanged, but no client continues its run any more. Results stay on the
    nodes until they are fetched. Unreachable nodes are reported, and the job is ended on all other nodes.
    Raises NotFoundError if the job is unknown or no job runs, and NoReachableNodes if no node is reachable.
    """
    return cancel_jobs(session, [] if job is None else [job])[0]


def cancel_jobs(session: Session, names: Sequence[str]) -> list[JobDocument]:
    """End several jobs in the same way as `cancel`. "all" in `names` means all running and waiting jobs.

    Waiting jobs are ended first. Raises the errors of `cancel`. An unknown name is refused before any job is
    ended.
    """
    _end_runs(session, names)
    with preconnected_cluster(session) as cluster, connect_reachable(cluster) as connected:
        jobs = list_jobs_on_nodes(connected, partial=True)
        report_skipped_nodes(connected)
        unlaunched = release_unlaunched_jobs(connected, jobs)
        active = [job for job in jobs if job.state in ACTIVE]
        running = [job for job in active if job.state == "running"]
        if not (active if "all" in names else running) and ("all" in names or set(names) <= {"last"}):
            raise NotFoundError("no job is running on this cluster", "", "awsddp jobs   # ended jobs")
        chosen, registry = list(active) if "all" in names else [], JobRegistry(session, jobs)
        for text in names or ("last",):
            if text != "all":
                name = registry.resolve_name(text)
                refuse_unlaunched_job(name, unlaunched)
                chosen.append(
                    choose_job(running, None) if name is None else _choose_life(registry, name, jobs, session)
                )
        documents = []
        # End waiting jobs first, from newest to oldest, so that none of them starts because another job ends.
        for job in sorted({job.job: job for job in reversed(chosen)}.values(), key=_is_running):
            ended = end_job(connected, job)
            session.folder.save_jobs(ended)
            documents.append(make_job_result(session, ended))
        return documents


def _end_runs(session: Session, names: Sequence[str]) -> None:
    """End the runs of jobs with --recover, so that no client continues them."""
    if "all" in names:
        session.folder.end_runs("cancel")
    for view in map(JobRegistry(session).find, {*names} - {"all"}):
        if view is not None and _may_recover(view.job):
            session.folder.end_runs("cancel", run_id=find_run_id(view.job))
            session.say(f"no client continues the run of {view.job.job} any more")


def _may_recover(job: JobRecord) -> bool:
    return bool(job.recoveries) or "job.recover" in parse_job_arguments(job.options)


def _choose_life(registry: JobRegistry, name: str, jobs: Sequence[JobRecord], session: Session) -> JobRecord:
    """Return the reported job with this name, or the active job that continues its run.

    Raises NotFoundError for a job that is not reported, unless it may have a run.
    """
    recorded = next((view.job for view in registry.jobs if view.job.job == name), None)
    if recorded is None or not _may_recover(recorded):
        return choose_job(jobs, name)
    last = list_lives(session, recorded, jobs)[-1].job
    return last if last.state in ACTIVE else recorded


def _is_running(job: JobRecord) -> bool:
    return job.state == "running"


def end_ranks(
    connected: ConnectedCluster, job: str, *, grace_s: float | None = None, launch: str | None = None
) -> None:
    """End a job on every node that has it (SIGTERM, later SIGKILL); return when the job has ended.

    `grace_s` is the time between the two signals (default: `job.grace`). With `launch`,
    the job is ended only if it belongs to this launch.
    """
    from awsddp.agent import messages
    from awsddp.agent_client.calls import ANSWER_S, call_nodes

    grace = parse_duration(connected.session.job_spec.job.grace) if grace_s is None else grace_s
    states = call_nodes(connected.fleet, dict.fromkeys(connected.fleet.responsive_nodes, messages.State()))
    holders = {node for node, state in states.items() if any(node_job.job == job for node_job in state.jobs)}
    request = messages.Cancel(job=job, grace=grace, launch=launch)
    call_nodes(connected.fleet, dict.fromkeys(holders, request), timeout_s=grace + ANSWER_S)


def end_job(connected: ConnectedCluster, job: JobRecord) -> JobRecord:
    """End a running or waiting job after its grace period; return the job as the nodes then report it."""
    if job.state not in ACTIVE:
        return job
    grace = connected.session.job_spec.job.grace
    detail = f": its ranks get {grace} to save" if job.state == "running" else ", which waits"
    connected.session.say(f"ending job {job.job}{detail}")
    end_ranks(connected, job.job)
    return choose_job(list_jobs_on_nodes(connected, partial=True), job.job)
