"""The lives of a run: a job, and the jobs that continued it after a machine's fault (--recover)."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from awsddp.agent.s3.checkpoints import find_checkpoints
from awsddp.agent_client.calls import call_nodes
from awsddp.errors import AwsddpError, ConfigError, NotFoundError
from awsddp.job.checkpoint import find_run_id
from awsddp.job.fetch import make_manifest_request
from awsddp.job.registry import JobRegistry, JobView
from awsddp.model.metric_rows import as_number
from awsddp.model.records import JobRecord, Recovery
from awsddp.session.context import ConnectedCluster, Session
from awsddp.session.next_steps import job_options, resume_words
from awsddp.settings.loader import list_settings, load, parse_job_arguments
from awsddp.settings.spec import FILE, OPTION, OptionValue
from awsddp.storage.checkpoints import Checkpoint, find_newest_checkpoint
from awsddp.storage.results_dir import get_job_progress, read_metrics
from awsddp.storage.saved_job import download_saved_job, open_saved_job
from awsddp.util.formatting import counted, duration, elapsed_seconds

CHECKPOINT_DUE_S = 600.0
"""After this time (s), a job with --recover that has no checkpoint is reported."""
_MAX_NAMES = 3
_STEP = re.compile(
    r"(?:step|checkpoint|iter|iteration)[-_=]?(\d{1,12})(?!.*(?:step|checkpoint|iter)[-_=]?\d)"
)
"""A step in a checkpoint's name: checkpoint-400, epoch=3-step=400.ckpt, global_step400, step_400.pt."""


@dataclass(frozen=True, kw_only=True)
class NextLife:
    """What a job that continues a run gets: the run's id, the checkpoint (None: from the beginning), and the
    run's recoveries, of which the last starts this job."""

    run_id: str
    checkpoint: Checkpoint | None
    recoveries: tuple[Recovery, ...]


def list_lives(session: Session, job: JobRecord, reported: Sequence[JobRecord] = ()) -> list[JobView]:
    """Return the jobs of a job's run, oldest first. `reported` are jobs that nodes have just reported."""
    views = [view for view in JobRegistry(session, reported).jobs if _is_same_run(view.job, job)]
    return sorted(views, key=lambda view: len(view.job.recoveries))


def _is_same_run(job: JobRecord, other: JobRecord) -> bool:
    return (find_run_id(job), _first_job(job)) == (find_run_id(other), _first_job(other))


def _first_job(job: JobRecord) -> str:
    return job.recoveries[0].job if job.recoveries else job.job


def find_checkpoint_of_run(session: Session, lives: Sequence[JobView]) -> Checkpoint | None:
    """Return the newest complete checkpoint of the last life that has one, on this machine or in S3.

    If no life has a checkpoint, the job from which the first life resumed is searched. Returns None if that
    one has no checkpoint either. Raises CloudError or NodeError if S3 cannot be read.
    """
    resumed = lives[0].job.resumed
    earlier = JobRegistry(session).find(resumed) if resumed is not None else None
    for view in (*reversed(lives), *([earlier] if earlier is not None else ())):
        if checkpoint := find_checkpoint_of_job(session, view):
            return checkpoint
    return None


def find_checkpoint_of_job(session: Session, view: JobView) -> Checkpoint | None:
    """Return a job's newest complete checkpoint, on this machine or in S3, or None if there is none."""
    job = view.job
    local = find_newest_checkpoint(view.folder, world_size=job.world_size if job.missing else None)
    saved: Checkpoint | None = None
    if job.save_to is not None:
        uri = f"{job.save_to}/{job.job}"
        with contextlib.suppress(ConfigError, NotFoundError), open_saved_job(session, uri) as stored:
            saved = stored.read_checkpoint()
        with contextlib.suppress(AwsddpError):  # the metrics of a lost node, for the steps that are repeated
            download_saved_job(session, uri)
    if local is None or saved is None:
        return local or saved
    return max(saved, local, key=lambda checkpoint: checkpoint.modified)


def report_missing_checkpoints(connected: ConnectedCluster, jobs: Sequence[JobRecord]) -> None:
    """Report the running jobs with --recover that have no checkpoint although they run for CHECKPOINT_DUE_S.

    Raises NodeError if a node does not answer.
    """
    for job in jobs:
        elapsed_s = elapsed_seconds(job.started) if job.state == "running" else None
        has_earlier = any(recovery.checkpoint for recovery in job.recoveries)
        may_recover = "job.recover" in parse_job_arguments(job.options)
        if not may_recover or has_earlier or elapsed_s is None or elapsed_s < CHECKPOINT_DUE_S:
            continue
        request = make_manifest_request(connected.session, job)
        answers = call_nodes(connected.fleet, dict.fromkeys(connected.fleet.nodes_of_job(job), request))
        if not find_checkpoints(file.path for answer in answers.values() for file in answer.files):
            connected.session.say(
                f"{job.job} has no complete checkpoint after {duration(elapsed_s)}: after a machine's fault "
                "it would start from step 0"
            )


def describe_recovery(view: JobView, checkpoint: Checkpoint | None, lives: Sequence[JobView]) -> Recovery:
    """Return the description of a job that continues `view`, the last of `lives`, from `checkpoint`."""
    job, cause = view.job, view.job.cause
    return Recovery(
        job=job.job,
        kind=cause.kind if cause is not None else job.state,
        why=cause.explanation if cause is not None else "",
        checkpoint=None if checkpoint is None else _shorten_path(checkpoint.display_path),
        steps_repeated=_count_repeated_steps(view, checkpoint, lives),
        seconds_lost=elapsed_seconds(job.ended),
        cost_usd=view.job_usd,
        earlier_world_size=job.world_size,
    )


def _shorten_path(path: str) -> str:
    """Return a path relative to the current folder if it is in that folder."""
    with contextlib.suppress(ValueError):
        return Path(path).relative_to(Path.cwd().resolve()).as_posix()
    return path


def _count_repeated_steps(
    view: JobView, checkpoint: Checkpoint | None, lives: Sequence[JobView]
) -> int | None:
    """Return how many steps a job had done after a checkpoint, or None if that is unknown.

    A checkpoint's step is in its name, or it is the last step in the metrics of its job that was done before
    the checkpoint was written.
    """
    last = get_job_progress(view.folder, view.job).step
    if last is None:
        return None
    if checkpoint is None:
        return last
    if match := _STEP.search("/".join(checkpoint.parts[0].parts[-2:])):
        return max(0, last - int(match[1]))
    source = next((life for life in lives if life.job.job == checkpoint.job), view)
    steps = [
        step
        for row in read_metrics(source.folder)
        if (time := as_number(row.get("time"))) is not None
        and time <= checkpoint.modified
        and (step := as_number(row.get("step"))) is not None
    ]
    return max(0, last - int(max(steps))) if steps else None


def describe_changed_files(session: Session, job: JobRecord) -> str:
    """Return the first of the project's files that changed after a job started, or "". Raises ConfigError."""
    from awsddp.nodes.project_files import list_project_files

    if job.started is None:
        return ""
    started = datetime.fromisoformat(job.started).timestamp()
    listing = list_project_files(session.job_spec, awsddp_home=session.home)
    files = (entry.path for entry in listing.entries if entry.kind == "f")
    changed = sorted(file for file in files if (listing.root / file).stat().st_mtime > started)
    more = f" and {counted(len(changed) - _MAX_NAMES, 'other')}" if len(changed) > _MAX_NAMES else ""
    return ", ".join(changed[:_MAX_NAMES]) + more


def list_variables(job: JobRecord) -> list[str]:
    """Return the variables of this environment that a `recover` of the job needs as well."""
    prefix = "env.variables."
    options = parse_job_arguments(job.options)
    names = [key.removeprefix(prefix) for key in options if key.startswith(prefix) and options[key] is None]
    return [*names, *(["AWSDDP_NOTIFY_URL"] if "AWSDDP_NOTIFY_URL" in os.environ else [])]


def make_next_session(
    session: Session, job: JobRecord, taken: set[str], *, nodes: int, resumed: str | None
) -> Session:
    """Return the session for the job that continues `job`, with a free name and the same settings.

    `resumed` is the job with the checkpoint, which the script gets as an option if it takes one (None: no
    checkpoint). `taken` are names that other jobs have. If the job gets fewer `nodes` than `job` had, it
    keeps the number of ranks per node.
    """
    requested, first = session.job_spec.job, _first_job(job)
    names = (f"{first}.{number}" for number in count(len(job.recoveries) + 2))
    name = next(name for name in names if name not in taken and not (session.results / name).exists())
    args = job.args
    if resumed is not None:
        args = (*args, *resume_words(session, job))
    elif job.recoveries and args[-1:] == ("{resume}",):  # an earlier job of the run had a checkpoint
        args = args[:-2]
    fewer = nodes < len(job.nodes)
    per_node = max(1, job.world_size // max(1, len(job.nodes)))
    section = replace(
        requested,
        name=name,
        args=args,
        after=None,
        resume=resumed,
        world_size=None if fewer else requested.world_size,
        nproc_per_node=per_node if fewer else requested.nproc_per_node,
    )
    return session.with_settings(job_spec=replace(session.job_spec, job=section))


def with_job_settings(session: Session, job: JobRecord) -> Session:
    """Return the session with the settings of a recorded job, except those that the command line sets.

    The values of the job's variables are not recorded, so they are read from this environment. Raises
    ConfigError for a setting that is no longer valid.
    """
    typed = {
        key: value for key, value, source in list_settings(session.spec, session.job_spec) if source == OPTION
    }
    options: dict[str, OptionValue] = {
        key.replace("env.variables.", "env.secrets.") if value is None else key: value
        for key, value in job_options(job).items()
    }
    _, job_spec = load(session.name, file=Path(FILE), overrides=options | typed)
    return session.with_settings(job_spec=job_spec)
