"""train: sync, launch the ranks, stream their logs, fetch the results."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.errors import Interrupted, LetGo, UsageError
from awsddp.jobs.launchers import launcher
from awsddp.jobs.ranks import Rank, layout, ordered, template
from awsddp.plan.environment import make_environment_plan
from awsddp.records import JobRecord
from awsddp.spec import JobSection, gpus_of, with_secrets
from awsddp.verbs import sync
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context
from awsddp.verbs.local import check_memory
from awsddp.verbs.logs import merger_of
from awsddp.verbs.results import check_results_dir, job_result, results_dir
from awsddp.verbs.resuming import checkpoint_of
from awsddp.verbs.starting import start
from awsddp.verbs.watching import Watch

if TYPE_CHECKING:
    from awsddp.plan.records import LaunchPlan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORDS = ("all", "last")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def train(ctx: Context, *, on_lines: Callable[[bytes], None], detach: bool = False) -> dict[str, Any]:
    """Run a job to its end, fetch its results, and return it as the `train` document.

    With `detach` return once the ranks run; `logs` follows the job and fetches its results. `on_lines` gets
    the labelled lines of the ranks as they arrive. Raises UsageError for an invalid job, InUse where another
    job runs, NotFoundError or NodeError for a cluster that is not ready, Interrupted after Ctrl-C.
    """
    check(ctx, detach=detach)
    checkpoint = checkpoint_of(ctx)
    listing = sync.listed(ctx)
    with ClusterHandle.ready(ctx) as cluster:
        ranks = _layout(cluster)
        _check_words(ctx, nodes=ranks[0].nnodes)
        if cluster.record.pretended and ctx.job.job.after is None:
            check_memory(len(ranks), nodes=ranks[0].nnodes)
        with cluster.connect():
            job = start(cluster, ranks, listing, checkpoint)
            if detach:
                return job_result(ctx, job)
            return attend(cluster, job, on_lines=on_lines)


def check(ctx: Context, *, detach: bool) -> None:
    """Refuse a missing script, an invalid name or placeholder, and an unset secret, before any cost; without
    `detach` also results that cannot be written here.

    Raises UsageError, ConfigError.
    """
    asked = ctx.job.job
    with_secrets(ctx.job)
    check_results_dir(ctx, is_used=not detach)
    launcher(asked.launcher_name)
    make_environment_plan(ctx.job.env, internet=None, driver=None)
    _check_words(ctx, nodes=1)
    if asked.name is not None and not _NAME.fullmatch(asked.name):
        raise UsageError(
            f"invalid job name {asked.name!r}",
            "",
            "use up to 64 letters, digits, dots, dashes and underscores",
        )
    if asked.name in _WORDS:
        raise UsageError(
            f"job name {asked.name!r} is reserved",
            "--after and --resume use it as a keyword",
            "choose another --name",
        )
    if asked.name is not None and results_dir(ctx, asked.name).exists():
        raise UsageError(
            f"job {asked.name} already exists",
            f"{results_dir(ctx, asked.name)} exists",
            "choose another --name",
        )
    if asked.script is None or asked.module:
        return
    pattern = _PLACEHOLDER.sub("*", asked.script.replace("[", "[[]"))
    workdir = Path(ctx.job.sync.workdir)
    if not _any_file(workdir, pattern):
        raise UsageError(
            f"script not found: {asked.script}",
            f"searched in the synced folder, {workdir.resolve()}",
            "name a file there, or set sync.workdir",
        )


def _check_words(ctx: Context, *, nodes: int) -> None:
    """Raise UsageError for an invalid placeholder in the command of a job on so many nodes."""
    for word in (*ctx.job.job.prefix, ctx.job.job.script or "", *ctx.job.job.args):
        template(word, nnodes=nodes, folder="", resume=ctx.job.job.resume)


def _any_file(folder: Path, pattern: str) -> bool:
    """Return whether the name of a file in `folder` matches; False for a pattern that no name can match."""
    try:
        return not Path(pattern).is_absolute() and any(path.is_file() for path in folder.glob(pattern))
    except (OSError, ValueError, NotImplementedError):
        return False


def _layout(cluster: ClusterHandle) -> tuple[Rank, ...]:
    requested = cluster.ctx.job.job
    ranks = ranks_on(requested, {node.node: cluster.prepared(node.node).gpus for node in cluster.nodes})
    if requested.launcher_name != "torchrun":
        return ranks
    return ordered(ranks, {node.node: str(node.private_ip) for node in cluster.nodes})


def check_ranks(ctx: Context, plan: "LaunchPlan") -> None:
    """Refuse ranks that the nodes of a plan, or of its alternatives, could not carry. Raises UsageError."""
    for one in (plan, *plan.alternatives):
        ranks = ranks_on(ctx.job.job, dict.fromkeys(range(one.nodes), one.job_gpus))
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


def attend(cluster: ClusterHandle, job: JobRecord, *, on_lines: Callable[[bytes], None]) -> dict[str, Any]:
    """Follow a job to its end and fetch its results. Ctrl-C ends the job; a closed terminal leaves it."""
    ctx = cluster.ctx
    merger = merger_of(ctx, job)
    try:
        job = Watch(cluster, job, merger=merger, on_lines=on_lines).run()
    except LetGo:
        raise
    except KeyboardInterrupt:
        ctx.say(
            f"interrupted: ending job {job.job}, its ranks have {ctx.job.job.grace}; "
            "Ctrl-C again leaves the job running"
        )
        cluster.cancel(job.job)
        job = Watch(cluster, job, merger=merger, on_lines=on_lines).run()
        cluster.finish(job)
    else:
        return cluster.finish(job)
    raise Interrupted(
        f"interrupted: job {job.job} was {job.state}, its results are in {job.home}/",
        f"the nodes are still running{cluster.target.costs}",
        "awsddp down   # terminate them",
    )
