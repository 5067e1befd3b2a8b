"""The checkpoint that a job is to continue from."""

from os.path import normpath
from typing import TYPE_CHECKING

from awsddp.errors import ConfigError
from awsddp.job.registry import all_jobs, full_name
from awsddp.storage.checkpoints import Checkpoint, newest_checkpoint
from awsddp.storage.results_dir import saved_job
from awsddp.storage.saved_job import is_saved, opened
from awsddp.util.shipped_files import is_bundled

if TYPE_CHECKING:
    from awsddp.session.context import Cluster


def checkpoint_of(cluster: "Cluster") -> Checkpoint | None:
    """Return the checkpoint that `job.resume` names (None: it names none). Raises ConfigError, UsageError."""
    if cluster.job_spec.job.resume is None:
        return None
    asked = cluster.job_spec.job.resume
    if is_saved(asked):
        return _saved_checkpoint(cluster, asked)
    job = full_name(cluster, asked) or _last_job(cluster)
    checkpoint = newest_checkpoint(cluster.results / job)
    kept = saved_job(cluster.results / job)
    if checkpoint is None and kept is not None and kept.save_to is not None:
        return _saved_checkpoint(cluster, f"{kept.save_to}/{job}")
    if checkpoint is None:
        raise ConfigError(
            f"job {job} has no checkpoint here",
            f"{cluster.results / job} has no run/latest, and no file or folder that is all of a checkpoint",
            f"awsddp fetch {job}   # if its results are on the nodes",
        )
    return checkpoint


def _saved_checkpoint(cluster: "Cluster", uri: str) -> Checkpoint:
    with opened(cluster, uri) as saved:
        return saved.checkpoint()


def _last_job(cluster: "Cluster") -> str:
    """Return the job of the same script that was launched last, of those whose results are here.

    Raises ConfigError.
    """
    script, here = cluster.job_spec.job.script, cluster.results.absolute()
    for one in reversed(all_jobs(cluster)):
        ran = one.job.script or ""
        is_same = is_bundled(ran) if script is None else normpath(ran) == normpath(script)
        if is_same and one.folder.parent == here and saved_job(one.folder) is not None:
            return one.job.job
    raise ConfigError(
        f"no job of {script or 'the bundled program'} has results here", "", "name a job: --resume JOB"
    )
