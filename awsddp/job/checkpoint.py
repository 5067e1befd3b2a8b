"""Find the checkpoint that a job resumes from."""

import contextlib
import hashlib
from dataclasses import replace
from os.path import normpath

from awsddp.errors import ConfigError, NotFoundError
from awsddp.job.registry import JobRegistry
from awsddp.model.records import JobRecord
from awsddp.session.context import Session
from awsddp.storage.checkpoints import Checkpoint, find_newest_checkpoint
from awsddp.storage.results_dir import read_job
from awsddp.storage.saved_job import is_s3_uri, open_saved_job
from awsddp.util.shipped_files import is_bundled


def find_checkpoint_to_resume(session: Session) -> Checkpoint | None:
    """Return the checkpoint that `job.resume` selects, or None if that key is not set.

    Raises ConfigError or UsageError.
    """
    if session.job_spec.job.resume is None:
        return None
    requested = session.job_spec.job.resume
    if is_s3_uri(requested):
        return _saved_checkpoint(session, requested)
    job = JobRegistry(session).resolve_name(requested) or _last_job(session)
    recorded = read_job(session.results / job)
    earlier = [recovery.job for recovery in reversed(recorded.recoveries)] if recorded is not None else []
    for name in (job, *earlier):  # a job that continued a run may have ended before it saved a checkpoint
        if checkpoint := find_newest_checkpoint(session.results / name):
            return checkpoint if recorded is None else replace(checkpoint, run_id=find_run_id(recorded))
        if recorded is not None and recorded.save_to is not None:
            with contextlib.suppress(*([ConfigError, NotFoundError] if earlier else [])):
                return _saved_checkpoint(session, f"{recorded.save_to}/{name}")
    raise ConfigError(
        f"job {job} has no checkpoint here",
        f"{session.results / job} has no run/latest, and no file or folder that is a complete checkpoint",
        f"awsddp fetch {job}   # if its results are on the nodes",
    )


def find_run_id(job: JobRecord) -> str:
    """Return the id of a job's run, which is derived from its name and instances if its record has no id."""
    if job.run_id is not None:
        return job.run_id
    identity = " ".join([job.job, *(node.instance_id for node in job.nodes)])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _saved_checkpoint(session: Session, uri: str) -> Checkpoint:
    with open_saved_job(session, uri) as saved:
        return replace(saved.read_checkpoint(), run_id=find_run_id(saved.job))


def _last_job(session: Session) -> str:
    """Return the last launched job that ran the same script and has results in the project's results folder.

    Raises ConfigError.
    """
    script, results = session.job_spec.job.script, session.results.absolute()
    for view in reversed(JobRegistry(session).jobs):
        script_run = view.job.script or ""
        is_same = is_bundled(script_run) if script is None else normpath(script_run) == normpath(script)
        if is_same and view.folder.parent == results and read_job(view.folder) is not None:
            return view.job.job
    raise ConfigError(
        f"no job of {script or 'the bundled program'} has results here", "", "name a job: --resume JOB"
    )
