"""From a job to its ranks: the right to start it, its name and slot, its files, its supervisors."""

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.cluster import Job, JobNode, RankResult
from awsddp.errors import AwsddpError, InUse, UsageError
from awsddp.jobs import protocol
from awsddp.jobs.ranks import Host, Rank
from awsddp.report import node_name
from awsddp.spec import JobSpec
from awsddp.verbs import sync
from awsddp.verbs.context import Context
from awsddp.verbs.environment import ensure_environment
from awsddp.verbs.node_jobs import ANSWER_S, answering, ask, cancel
from awsddp.verbs.nodes import Ready
from awsddp.verbs.results import place_of, remember, tagging

if TYPE_CHECKING:
    from awsddp.nodes.sync import Listing
    from awsddp.nodes.transport import Fleet

BUNDLED_SCRIPT = "main.py"
CLAIM_S = 60.0
"""How long another client, here or elsewhere, may be at it, starting a job."""


def start(ctx: Context, cluster: Ready, fleet: "Fleet", ranks: tuple[Rank, ...], listing: "Listing") -> Job:
    """Send the files and start the job; one client at a time does so, on all machines.

    Nothing is sent while a job runs on the nodes, and nothing starts unless AWS agreed that a poweroff keeps
    their disks. What fails is undone. Raises InUse, UsageError for a name that is taken, CloudError,
    NodeError.
    """
    with ctx.folder.lock("train", wait_s=CLAIM_S):
        requests = _requests(ctx, cluster, fleet, ranks, listing)
        name = str(requests[ranks[0].node]["job"])
        with _undone(ctx, cluster, fleet, requests):
            _send(ctx, cluster, fleet, name, set(requests), listing)
            ask(fleet, requests)
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
        nodes=tuple(
            JobNode(node=node.node, instance_id=node.instance_id)
            for node in cluster.nodes
            if node.node in requests
        ),
    )
    remember(ctx, job)
    return job


def _requests(
    ctx: Context, cluster: Ready, fleet: "Fleet", ranks: tuple[Rank, ...], listing: "Listing"
) -> dict[int, dict[str, Any]]:
    """Return the launch requests by node, once the nodes have said that nothing is in the way.

    The claim, on the cluster's first node, holds until that node launches or the connection ends.
    """
    owner = f"`awsddp train` on {socket.gethostname()}, process {os.getpid()}"
    claim = protocol.claim_request(owner, wait_s=CLAIM_S)
    ask(fleet, {min(fleet.nodes): claim}, timeout_s=CLAIM_S + ANSWER_S)
    used = sorted({rank.node for rank in ranks})
    port = ctx.job.job.master_port
    answers = ask(fleet, dict.fromkeys(used, protocol.slots_request(port)))
    refuse_in_use(answers)
    job, record = ensure_environment(
        ctx, cluster.record, fleet, send_files=lambda: sync.send(ctx, fleet, listing)
    )
    ctx, cluster = replace(ctx, job=job), replace(cluster, record=record)
    return protocol.launch_requests(
        _spec(ctx, cluster),
        job=_free_name(ctx, cluster, answers),
        ranks=ranks,
        hosts=_hosts(cluster, set(used)),
        slot=protocol.choose_slot(answers, first=ranks[0].node, master_port=port),
    )


def refuse_in_use(answers: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise InUse where one of the nodes, by their answers to `slots_request`, runs a job."""
    running = {job: node for node, told in answers.items() for job, runs in told["jobs"].items() if runs}
    for job in running:
        nodes = [node_name(node) for node, told in sorted(answers.items()) if told["jobs"].get(job)]
        raise InUse(
            f"job {job} runs on {', '.join(nodes)}",
            "a node runs one job at a time",
            f"awsddp logs -f {job}   # wait for its end and its results\nawsddp cancel {job}   # or end it",
        )


def _free_name(ctx: Context, cluster: Ready, answers: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the job's name, which neither the nodes nor their tags nor home know. Raises UsageError."""
    known = {job for told in answers.values() for job in told["jobs"]}
    for name in _names(ctx.job):
        if name not in known | cluster.unfetched and not place_of(ctx, name).exists():
            return name
    raise UsageError(
        f"there is a job {ctx.job.job.name} already", "its nodes know it", "choose another --name"
    )


def _names(spec: JobSpec) -> Iterator[str]:
    """Yield the name that was given, else one name after the other, each with random digits."""
    if spec.job.name is not None:
        yield spec.job.name
        return
    stem = Path(spec.job.script or BUNDLED_SCRIPT).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40] or "job"
    while True:
        yield f"{stem}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _send(ctx: Context, cluster: Ready, fleet: "Fleet", job: str, used: set[int], listing: "Listing") -> None:
    """Have AWS keep the disks of the nodes that are used, and send the files meanwhile."""
    from awsddp.aws.poweroff import keep_on_poweroff

    with ThreadPoolExecutor(max_workers=1) as pool:
        kept = pool.submit(_tag, ctx, cluster, keep_on_poweroff, used, job)
        sync.send(ctx, fleet, listing, bundled=ctx.job.job.script is None)
    kept.result()


def _tag(ctx: Context, cluster: Ready, change: Callable[..., None], used: set[int], job: str) -> None:
    with tagging(ctx):
        change(cluster.aws, [node for node in cluster.nodes if node.node in used], job)


@contextlib.contextmanager
def _undone(
    ctx: Context, cluster: Ready, fleet: "Fleet", requests: Mapping[int, Mapping[str, Any]]
) -> Iterator[None]:
    """Take back what was begun where it fails: this launch's job, and the tags that only it has written.

    They stay, which is safe, where the nodes cannot be asked to end what may have started.
    """
    from awsddp.aws.poweroff import release

    one = next(iter(requests.values()))
    try:
        yield
    except BaseException:
        with contextlib.suppress(AwsddpError):
            cancel(ctx, fleet, one["job"], grace_s=0, launch=one["launch"])
            if set(requests) <= set(answering(fleet)):
                _tag(ctx, cluster, release, set(requests), one["job"])
        raise


def _spec(ctx: Context, cluster: Ready) -> JobSpec:
    """Return the job's spec with the bundled program as its script where none is named."""
    if ctx.job.job.script is not None:
        return ctx.job
    from awsddp.nodes.sync import PLACE

    script = f"{cluster.record.prepared[0].home}/{PLACE}/{sync.BUNDLED}/{BUNDLED_SCRIPT}"
    return replace(ctx.job, job=replace(ctx.job.job, script=script, module=False))


def _hosts(cluster: Ready, used: set[int]) -> list[Host]:
    from awsddp.nodes.sync import PLACE, WORK

    return [
        Host(
            node=node,
            prepared=cluster.prepared(node.node),
            workdir=f"{cluster.prepared(node.node).home}/{PLACE}/{WORK}",
        )
        for node in cluster.nodes
        if node.node in used
    ]
