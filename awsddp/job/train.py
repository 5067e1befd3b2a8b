"""train: check the job, place the ranks, submit the job, stream the logs, and fetch the results."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.agent_client import launch_requests
from awsddp.agent_client.rank_layout import Rank, layout_on_nodes, sort_for_torchrun
from awsddp.errors import ConfigError, InUse
from awsddp.job.checkpoint import find_checkpoint_to_resume
from awsddp.job.follow import follow_to_end
from awsddp.job.script import check_script
from awsddp.job.submit import check_job_name, submit_job
from awsddp.local.client import check_memory
from awsddp.model.documents import JobDocument
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.nodes.project_files import list_project_files
from awsddp.plan.environment import make_environment_plan
from awsddp.session.connect import connect, ready_cluster
from awsddp.session.context import LocatedCluster, Session
from awsddp.storage.results_dir import make_job_result

if TYPE_CHECKING:
    from awsddp.job.lives import NextLife
    from awsddp.plan.records import LaunchPlan


def train(
    session: Session,
    *,
    on_lines: Callable[[bytes], None],
    detach: bool = False,
    next_life: "NextLife | None" = None,
    on_start: Callable[[JobRecord], object] = lambda job: None,
) -> JobDocument:
    """Run a job to its end, fetch its results, and return it as the `train` document.

    With `detach`, return once the ranks run; `logs` follows the job and fetches its results. `on_lines`
    receives the ranks' labelled lines. `next_life` is given for a job that continues a run. `on_start` is
    called with the job once its ranks run. Raises UsageError for an invalid job, InUse if another job runs,
    NotFoundError or NodeError for a cluster that is not ready, or Interrupted after Ctrl-C.
    """
    from awsddp.job.unsynced_data import ask_about_unsynced_data

    check_job(session, detach=detach)
    checkpoint = find_checkpoint_to_resume(session) if next_life is None else next_life.checkpoint
    if checkpoint is not None:
        session.say(f"resuming from {checkpoint.display_path}")
    is_first = session.verb == "train" and next_life is None  # `run` asks before its `up`
    if is_first and session.folder.read() is not None:
        session = ask_about_unsynced_data(session)
    listing = list_project_files(session.job_spec, awsddp_home=session.home, on_event=session.on_event)
    with ready_cluster(session) as cluster:
        ranks = _place_ranks(cluster)
        launch_requests.check_spec(session.job_spec, nodes=ranks[0].nnodes)
        if cluster.record.pretended and session.job_spec.job.after is None:
            check_memory(len(ranks), nodes=ranks[0].nnodes)
        _report_unfetched(cluster)
        if session.job_spec.job.save_to is not None:
            from awsddp.job.save_to_s3 import prepare_local_saving

            prepare_local_saving(cluster)
        with connect(cluster) as connected:
            try:
                job = submit_job(connected, ranks, listing, checkpoint, next_life)
            except InUse as busy:
                if detach:
                    busy.next = busy.next.replace("awsddp train", "awsddp train --detach")
                raise
            on_start(job)
            if detach:
                return make_job_result(session, job)
            return follow_to_end(connected, job, on_lines=on_lines)


def _report_unfetched(cluster: LocatedCluster) -> None:
    """Report jobs whose unfetched results this job may overwrite because it uses the same project folder."""
    ended = {job.job: job for job in cluster.record.jobs if job.state not in ACTIVE}
    names = [name for name in cluster.unfetched_jobs if name in ended and not _is_saved(ended[name])]
    if names and cluster.session.job_spec.job.after is None:
        jobs, command = ", ".join(names), f"awsddp fetch {names[-1]}"
        cluster.session.say(f"this job may overwrite unfetched results of {jobs}: {command}   # first")


def _is_saved(job: JobRecord) -> bool:
    return job.saving is not None and job.saving.is_complete


def check_job(session: Session, *, detach: bool) -> None:
    """Raise UsageError or ConfigError for a job that cannot start, before anything costs money.

    Checks the script, the name, the placeholders and the secrets. Without `detach`, also checks that results
    can be written.
    """
    requested = session.job_spec.job
    launch_requests.check_spec(session.job_spec, nodes=1)
    _check_results_dir(session, is_used=not detach)
    if session.job_spec.data.sources:
        from awsddp.storage.datasets import check_sources

        check_sources(session.job_spec)
    make_environment_plan(session.job_spec.env, internet=None, driver=None)
    if requested.name is not None:
        check_job_name(session, requested.name)
    if requested.script is not None:
        check_script(Path(session.job_spec.sync.workdir), requested.script, module=requested.module)


def _place_ranks(cluster: LocatedCluster) -> tuple[Rank, ...]:
    requested = cluster.session.job_spec.job
    prepared = cluster.record.prepared_by_node
    ranks = layout_on_nodes(requested, {node.node: prepared[node.node].gpus for node in cluster.nodes})
    if requested.launcher_name != "torchrun":
        return ranks
    return sort_for_torchrun(ranks, {node.node: str(node.private_ip) for node in cluster.nodes})


def check_ranks(session: Session, plan: "LaunchPlan") -> None:
    """Raise UsageError if the ranks do not fit the nodes of a plan or of one of its alternatives."""
    for launch_plan in (plan, *plan.alternatives):
        ranks = layout_on_nodes(
            session.job_spec.job, dict.fromkeys(range(launch_plan.nodes), launch_plan.job_gpus)
        )
        launch_requests.check_spec(session.job_spec, nodes=ranks[0].nnodes)
        if launch_plan.pretended:
            check_memory(len(ranks), nodes=ranks[0].nnodes)


def _check_results_dir(session: Session, *, is_used: bool) -> None:
    """Raise ConfigError if the results path is not UTF-8 or, with `is_used`, not writable.

    The path is checked before the job starts, because results are written only at the job's end.
    """
    folder = session.results.absolute()
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        why = "a job's record holds the path of its results"
        raise ConfigError(f"the path {str(folder)!r} is not UTF-8", why, "rename the folder") from error
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not is_used:
        return
    if not nearest.is_dir():
        why = f"{nearest} is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} is read-only"
    else:
        return
    raise ConfigError(f"cannot write results to {folder}", why, "choose another folder: -o job.results=DIR")
