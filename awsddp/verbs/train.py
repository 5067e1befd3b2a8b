"""train: sync, launch the ranks, stream their lines, bring results home."""

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from awsddp.cluster import Job, RankResult
from awsddp.errors import AwsddpError, Interrupted, LetGo, UsageError
from awsddp.jobs import launchers
from awsddp.jobs.logs import Merger
from awsddp.jobs.ranks import Rank, Rendezvous, expand, layout
from awsddp.spec import JobSpec
from awsddp.verbs import sync
from awsddp.verbs.context import Context
from awsddp.verbs.logs import merger_of
from awsddp.verbs.node_jobs import ask, ask_all, cancel
from awsddp.verbs.nodes import Ready, reach, ready
from awsddp.verbs.results import bring_home, job_result, place_of, remember, tagging
from awsddp.verbs.watching import Watch

if TYPE_CHECKING:
    from awsddp.nodes.sync import Listing
    from awsddp.nodes.transport import Fleet

BUNDLED_SCRIPT = "main.py"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def train(ctx: Context, *, on_lines: Callable[[bytes], None], detach: bool = False) -> dict[str, Any]:
    """Run a job to its end and return it as the `train` document, its results at home.

    With `detach` the job is started and left to its nodes; `logs` follows it and brings it home. `on_lines`
    gets the labelled lines of the ranks as they come. Raises UsageError for a job that cannot be,
    NotFoundError or NodeError for a cluster that is not ready, Interrupted after Ctrl-C.
    """
    check(ctx)
    listing = sync.listed(ctx)
    with ready(ctx) as cluster:
        ranks = _layout(ctx, cluster)
        _check_words(ctx, ranks[0])
        with reach(ctx, cluster) as fleet:
            with ctx.folder.lock("train", wait_s=60):
                job = _launch(ctx, cluster, fleet, ranks, listing)
            if detach:
                return job_result(ctx, job)
            return attend(ctx, cluster, fleet, job, on_lines=on_lines)


def check(ctx: Context) -> None:
    """Refuse, before anything costs money, a script that is not there, a name or placeholder that is none."""
    asked = ctx.job.job
    _check_words(ctx, layout([0], gpus=0)[0])
    if asked.name is not None and not _NAME.fullmatch(asked.name):
        raise UsageError(
            f"{asked.name!r} is no job name", "", "use up to 64 letters, digits, dots, dashes and underscores"
        )
    if asked.name is not None and place_of(ctx, asked.name).exists():
        raise UsageError(
            f"there is a job {asked.name} already",
            f"{place_of(ctx, asked.name)} exists",
            "choose another --name",
        )
    if asked.script is None or asked.module:
        return
    pattern = _PLACEHOLDER.sub("*", asked.script.replace("[", "[[]"))
    workdir = Path(ctx.job.sync.workdir)
    if not _any_file(workdir, pattern):
        raise UsageError(
            f"there is no script {asked.script}",
            f"it is looked for in the synced folder, {workdir.resolve()}",
            "name a file in it, or another --workdir",
        )


def _check_words(ctx: Context, rank: Rank) -> None:
    """Raise UsageError where a word of the job cannot be filled in for a rank like this."""
    for word in (ctx.job.job.script or "", *ctx.job.job.args):
        expand(word, rank, meeting=Rendezvous(job="", master_addr="", master_port=0), folder="")


def _any_file(folder: Path, pattern: str) -> bool:
    """Tell whether a file of `folder` has a name that fits; names that no file can have fit none."""
    try:
        return not Path(pattern).is_absolute() and any(path.is_file() for path in folder.glob(pattern))
    except (OSError, ValueError, NotImplementedError):
        return False


def _layout(ctx: Context, cluster: Ready) -> tuple[Rank, ...]:
    asked = ctx.job.job
    return layout(
        [node.node for node in cluster.nodes],
        gpus=min(one.gpus for one in cluster.record.prepared),
        world_size=asked.world_size,
        nproc_per_node=asked.nproc_per_node,
    )


def _launch(ctx: Context, cluster: Ready, fleet: "Fleet", ranks: tuple[Rank, ...], listing: "Listing") -> Job:
    """Send the files and start the job. Nothing starts unless AWS agreed that a poweroff keeps the disks.

    AWS is asked, the nodes say which slots they have, and the files travel, all side by side.
    """
    from awsddp.aws.poweroff import keep_on_poweroff, release

    def tag(change: Callable[..., None]) -> None:
        with tagging(ctx):
            change(cluster.aws, nodes, name)

    name = _name(ctx.job, place_of(ctx, "x").parent)
    used = {rank.node for rank in ranks}
    nodes = [node for node in cluster.nodes if node.node in used]
    with contextlib.ExitStack() as undo:
        undo.callback(_quietly, tag, release)
        with ThreadPoolExecutor(max_workers=2) as pool:
            kept = pool.submit(tag, keep_on_poweroff)
            slots = pool.submit(ask_all, fleet, launchers.slots_request(ctx.job.job.master_port))
            sync.send(ctx, fleet, listing, bundled=ctx.job.job.script is None)
        kept.result()
        requests = launchers.launch_requests(
            _spec(ctx, cluster),
            job=name,
            ranks=ranks,
            hosts=_hosts(cluster, used),
            slot=launchers.choose_slot(slots.result(), first=ranks[0].node),
        )
        undo.callback(_quietly, cancel, ctx, fleet, name, grace_s=0)
        ask(fleet, requests)
        undo.pop_all()
    ctx.folder.note("train", job=name, world_size=len(ranks))
    job = Job(
        job=name,
        state="running",
        cause=None,
        ranks=tuple(
            RankResult(rank=one.rank, local_rank=one.local_rank, node=one.node, exit_code=None, seconds=0.0)
            for one in ranks
        ),
        home=f"{ctx.job.job.results}/{name}",
    )
    remember(ctx, job)
    return job


def _quietly(act: Callable[..., None], *args: Any, **settings: Any) -> None:
    """Clean up after what failed, which is told; what cannot be cleaned up keeps its safe value."""
    with contextlib.suppress(AwsddpError):
        act(*args, **settings)


def _spec(ctx: Context, cluster: Ready) -> JobSpec:
    """Return the job's spec with the bundled program as its script where none is named."""
    if ctx.job.job.script is not None:
        return ctx.job
    from awsddp.nodes.sync import PLACE

    script = f"{cluster.record.prepared[0].home}/{PLACE}/{sync.BUNDLED}/{BUNDLED_SCRIPT}"
    return replace(ctx.job, job=replace(ctx.job.job, script=script, module=False))


def _hosts(cluster: Ready, used: set[int]) -> list[launchers.Host]:
    from awsddp.nodes.sync import PLACE, WORK

    return [
        launchers.Host(
            node=node,
            prepared=cluster.prepared(node.node),
            workdir=f"{cluster.prepared(node.node).home}/{PLACE}/{WORK}",
        )
        for node in cluster.nodes
        if node.node in used
    ]


def _name(spec: JobSpec, folder: Path) -> str:
    if spec.job.name is not None:
        return spec.job.name
    stem = Path(spec.job.script or BUNDLED_SCRIPT).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40] or "job"
    name = base = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    count = 1
    while (folder / name).exists():
        count += 1
        name = f"{base}-{count}"
    return name


def attend(
    ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, *, on_lines: Callable[[bytes], None]
) -> dict[str, Any]:
    """Follow a job to its end and bring it home. Ctrl-C ends the job; a closed terminal leaves it."""
    merger = merger_of(ctx, job)
    try:
        job = Watch(ctx, cluster, fleet, job, merger=merger, on_lines=on_lines).run()
    except LetGo:
        raise
    except KeyboardInterrupt:
        _interrupted(ctx, cluster, fleet, job, on_lines=on_lines, merger=merger)
    bring_home(ctx, cluster, fleet, job)
    remember(ctx, job)
    return job_result(ctx, job)


def _interrupted(
    ctx: Context,
    cluster: Ready,
    fleet: "Fleet",
    job: Job,
    *,
    on_lines: Callable[[bytes], None],
    merger: Merger,
) -> NoReturn:
    """End the job, bring home what it made, and say so."""
    ctx.say(f"interrupted: ending job {job.job}, its ranks have {ctx.job.job.grace}; Ctrl-C again leaves it")
    cancel(ctx, fleet, job.job)
    job = Watch(ctx, cluster, fleet, job, merger=merger, on_lines=on_lines).run()
    bring_home(ctx, cluster, fleet, job)
    remember(ctx, job)
    raise Interrupted(
        f"interrupted: job {job.job} was {job.state}, its results are in {job.home}/",
        "the nodes still run and cost money",
        "awsddp down   # end them",
    )
