"""The checkpoint that a job is to continue from."""

from os.path import normpath

from awsddp.errors import ConfigError
from awsddp.job.registry import JobRegistry
from awsddp.session.context import Session
from awsddp.storage.checkpoints import Checkpoint, newest_checkpoint
from awsddp.storage.results_dir import saved_job
from awsddp.storage.saved_job import is_saved, opened
from awsddp.util.shipped_files import is_bundled


def checkpoint_of(session: Session) -> Checkpoint | None:
    """Return the checkpoint that `job.resume` names (None: it names none). Raises ConfigError, UsageError."""
    if session.job_spec.job.resume is None:
        return None
    asked = session.job_spec.job.resume
    if is_saved(asked):
        return _saved_checkpoint(session, asked)
    job = JobRegistry(session).name(asked) or _last_job(session)
    checkpoint = newest_checkpoint(session.results / job)
    kept = saved_job(session.results / job)
    if checkpoint is None and kept is not None and kept.save_to is not None:
        return _saved_checkpoint(session, f"{kept.save_to}/{job}")
    if checkpoint is None:
        raise ConfigError(
            f"job {job} has no checkpoint here",
            f"{session.results / job} has no run/latest, and no file or folder that is all of a checkpoint",
            f"awsddp fetch {job}   # if its results are on the nodes",
        )
    return checkpoint


def _saved_checkpoint(session: Session, uri: str) -> Checkpoint:
    with opened(session, uri) as saved:
        return saved.checkpoint()


def _last_job(session: Session) -> str:
    """Return the job of the same script that was launched last, of those whose results are here.

    Raises ConfigError.
    """
    script, here = session.job_spec.job.script, session.results.absolute()
    for one in reversed(JobRegistry(session).jobs):
        ran = one.job.script or ""
        is_same = is_bundled(ran) if script is None else normpath(ran) == normpath(script)
        if is_same and one.folder.parent == here and saved_job(one.folder) is not None:
            return one.job.job
    raise ConfigError(
        f"no job of {script or 'the bundled program'} has results here", "", "name a job: --resume JOB"
    )
