"""--resume: the newest checkpoint of a job that is here, for the nodes of the next one."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.jobs.checkpoints import newest
from awsddp.resources import is_bundled
from awsddp.verbs.context import Context
from awsddp.verbs.jobs import all_jobs
from awsddp.verbs.results import results_dir, saved_job


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the job `job`: a file, or the parts of a folder that its nodes have."""

    job: str
    parts: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Its name in the folder `folder` on a node."""
        return self.parts[0].name

    @property
    def folder(self) -> str:
        """The folder beside the synced one that holds it on a node."""
        return f"resume-{self.job}"

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a folder that holds it alone, for as long as the context; files are linked, not copied."""
        beside = self.parts[0].parent
        with tempfile.TemporaryDirectory(dir=beside, prefix=".resume-") as folder:
            for part in self.parts:
                if part.is_file():
                    _link(part, Path(folder, self.name))
                else:
                    shutil.copytree(part, Path(folder, self.name), copy_function=_link, dirs_exist_ok=True)
            yield Path(folder)


def checkpoint_of(ctx: Context) -> Checkpoint | None:
    """Return the checkpoint that `job.resume` names (None: it names none). Raises ConfigError."""
    if ctx.job.job.resume is None:
        return None
    job = _last(ctx) if ctx.job.job.resume == "last" else ctx.job.job.resume
    parts = newest(results_dir(ctx, job))
    if not parts:
        raise ConfigError(
            f"job {job} has no checkpoint here",
            f"{results_dir(ctx, job)} has no run/latest, *.pt, *.pth, *.ckpt or distributed checkpoint",
            f"awsddp fetch {job}   # if its results are on the nodes",
        )
    ctx.say(f"resuming from {parts[0]}")
    return Checkpoint(job=job, parts=tuple(parts))


def _last(ctx: Context) -> str:
    """Return the job of the same script that was launched last, of those whose results are here.

    Raises ConfigError.
    """
    script, here = ctx.job.job.script, results_dir(ctx, "x").parent.absolute()
    for one in reversed(all_jobs(ctx)):
        ran = one.job.script or ""
        is_same = is_bundled(ran) if script is None else normpath(ran) == normpath(script)
        if is_same and one.folder.parent == here and saved_job(one.folder) is not None:
            return one.job.job
    raise ConfigError(
        f"no job of {script or 'the bundled program'} has results here", "", "name a job: --resume JOB"
    )


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
