"""train: check, lay out the ranks, launch them, stream their logs, fetch the results."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.config import with_secrets
from awsddp.errors import ConfigError, Interrupted, LetGo, UsageError
from awsddp.files import listed_files
from awsddp.follow import Watch, finish, merger_of
from awsddp.jobs.files import newest_checkpoint
from awsddp.jobs.launchers import launcher
from awsddp.jobs.ranks import Rank, layout, ordered, template
from awsddp.known import all_jobs, end_ranks
from awsddp.local.client import check_memory
from awsddp.plan.environment import make_environment_plan
from awsddp.records import JobRecord
from awsddp.resources import is_bundled
from awsddp.results import check_results_dir, job_result, saved_job
from awsddp.returns import JobDocument
from awsddp.spec import JobSection
from awsddp.start import start
from awsddp.values import gpus_of

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.plan.records import LaunchPlan


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORDS = ("all", "last")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def train(cluster: "Cluster", *, on_lines: Callable[[bytes], None], detach: bool = False) -> JobDocument:
    """Run a job to its end, fetch its results, and return it as the `train` document.

    With `detach` return once the ranks run; `logs` follows the job and fetches its results. `on_lines` gets
    the labelled lines of the ranks as they arrive. Raises UsageError for an invalid job, InUse where another
    job runs, NotFoundError or NodeError for a cluster that is not ready, Interrupted after Ctrl-C.
    """
    check(cluster, detach=detach)
    checkpoint = checkpoint_of(cluster)
    listing = listed_files(cluster)
    with cluster.ready() as cluster:
        ranks = _layout(cluster)
        _check_words(cluster, nodes=ranks[0].nnodes)
        if cluster.record.pretended and cluster.job_spec.job.after is None:
            check_memory(len(ranks), nodes=ranks[0].nnodes)
        with cluster.connect():
            job = start(cluster, ranks, listing, checkpoint)
            if detach:
                return job_result(cluster, job)
            return attend(cluster, job, on_lines=on_lines)


def check(cluster: "Cluster", *, detach: bool) -> None:
    """Refuse a missing script, an invalid name or placeholder, and an unset secret, before any cost; without
    `detach` also results that cannot be written here.

    Raises UsageError, ConfigError.
    """
    asked = cluster.job_spec.job
    with_secrets(cluster.job_spec)
    check_results_dir(cluster, is_used=not detach)
    launcher(asked.launcher_name)
    make_environment_plan(cluster.job_spec.env, internet=None, driver=None)
    _check_words(cluster, nodes=1)
    if asked.name is not None:
        _check_name(cluster, asked.name)
    if asked.script is None or asked.module:
        return
    pattern = _PLACEHOLDER.sub("*", asked.script.replace("[", "[[]"))
    workdir = Path(cluster.job_spec.sync.workdir)
    if not _any_file(workdir, pattern):
        raise UsageError(
            f"script not found: {asked.script}",
            f"searched in the synced folder, {workdir.resolve()}",
            "name a file there, or set sync.workdir",
        )


def _check_name(cluster: "Cluster", name: str) -> None:
    """Raise UsageError for a name that no job may have, or that one whose results are here has."""
    another, folder = "choose another --name", cluster.results / name
    if not _NAME.fullmatch(name):
        characters = "use up to 64 letters, digits, dots, dashes and underscores"
        raise UsageError(f"invalid job name {name!r}", "", characters)
    if name in _WORDS:
        why = "--after and --resume use it as a keyword"
        raise UsageError(f"job name {name!r} is reserved", why, another)
    if folder.exists():
        raise UsageError(f"job {name} already exists", f"{folder} exists", another)


def _check_words(cluster: "Cluster", *, nodes: int) -> None:
    """Raise UsageError for an invalid placeholder in the command of a job on so many nodes."""
    for word in (*cluster.job_spec.job.prefix, cluster.job_spec.job.script or "", *cluster.job_spec.job.args):
        template(word, nnodes=nodes, folder="", resume=cluster.job_spec.job.resume)


def _any_file(folder: Path, pattern: str) -> bool:
    """Return whether the name of a file in `folder` matches; False for a pattern that no name can match."""
    try:
        return not Path(pattern).is_absolute() and any(path.is_file() for path in folder.glob(pattern))
    except (OSError, ValueError, NotImplementedError):
        return False


def _layout(cluster: "Cluster") -> tuple[Rank, ...]:
    requested = cluster.job_spec.job
    ranks = ranks_on(requested, {node.node: cluster.record.on(node.node).gpus for node in cluster.nodes})
    if requested.launcher_name != "torchrun":
        return ranks
    return ordered(ranks, {node.node: str(node.private_ip) for node in cluster.nodes})


def check_ranks(cluster: "Cluster", plan: "LaunchPlan") -> None:
    """Refuse ranks that the nodes of a plan, or of its alternatives, could not carry. Raises UsageError."""
    for one in (plan, *plan.alternatives):
        ranks = ranks_on(cluster.job_spec.job, dict.fromkeys(range(one.nodes), one.job_gpus))
        if one.pretended:
            check_memory(len(ranks), nodes=ranks[0].nnodes)


def ranks_on(requested: JobSection, has: Mapping[int, int]) -> tuple[Rank, ...]:
    """Return the ranks of a job on nodes with so many GPUs each. Raises UsageError."""
    gpus = _chosen_gpus(requested.on, has)
    return layout(
        list(gpus)[: requested.max_nodes],
        gpus=gpus,
        world_size=requested.world_size,
        nproc_per_node=requested.nproc_per_node,
    )


def _chosen_gpus(text: str | None, has: Mapping[int, int]) -> Mapping[int, int]:
    """Return how many GPUs the job may use, by node, on the nodes that `job.on` names. Raises UsageError."""
    if text is None:
        return has
    for node, gpus in gpus_of(text).items():
        if node not in has:
            raise UsageError(f"--on {text}: there is no node{node}", f"nodes are: {', '.join(map(str, has))}")
        if gpus and gpus[-1] >= has[node]:
            raise UsageError(f"--on {text}: node{node} has no GPU {gpus[-1]}", f"it has {has[node]} GPUs")
    return {node: len(gpus) or has[node] for node, gpus in gpus_of(text).items()}


def attend(cluster: "Cluster", job: JobRecord, *, on_lines: Callable[[bytes], None]) -> JobDocument:
    """Follow a job to its end and fetch its results. Ctrl-C ends the job; a closed terminal leaves it."""
    merger = merger_of(cluster, job)
    try:
        job = Watch(cluster, job, merger=merger, on_lines=on_lines).run()
    except LetGo:
        raise
    except KeyboardInterrupt:
        cluster.say(
            f"interrupted: ending job {job.job}, its ranks have {cluster.job_spec.job.grace}; "
            "Ctrl-C again leaves the job running"
        )
        end_ranks(cluster, job.job)
        job = Watch(cluster, job, merger=merger, on_lines=on_lines).run()
        finish(cluster, job)
    else:
        return finish(cluster, job)
    raise Interrupted(
        f"interrupted: job {job.job} was {job.state}, its results are in {job.home}/",
        f"the nodes are still running{cluster.target.costs}",
        "awsddp down   # terminate them",
    )


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


def checkpoint_of(cluster: "Cluster") -> Checkpoint | None:
    """Return the checkpoint that `job.resume` names (None: it names none). Raises ConfigError."""
    if cluster.job_spec.job.resume is None:
        return None
    job = _last_job(cluster) if cluster.job_spec.job.resume == "last" else cluster.job_spec.job.resume
    parts = newest_checkpoint(cluster.results / job)
    if not parts:
        raise ConfigError(
            f"job {job} has no checkpoint here",
            f"{cluster.results / job} has no run/latest, *.pt, *.pth, *.ckpt or distributed checkpoint",
            f"awsddp fetch {job}   # if its results are on the nodes",
        )
    cluster.say(f"resuming from {parts[0]}")
    return Checkpoint(job=job, parts=tuple(parts))


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


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
