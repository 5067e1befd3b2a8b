"""From a job to its ranks: the right to start it, its name and slot, its files, its supervisors."""

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.errors import AwsddpError, InUse, NotFoundError, UsageError
from awsddp.jobs import protocol
from awsddp.jobs.git import commit_of
from awsddp.jobs.ranks import Host, Rank
from awsddp.parallel import both, soon
from awsddp.plan.requirements import source_folders
from awsddp.records import JobNode, JobRecord, Node, RankResult
from awsddp.report import iso, node_name
from awsddp.resources import BUNDLED, BUNDLED_SCRIPT
from awsddp.spec import JobSpec, gpus_of, words_of
from awsddp.verbs import sync
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.environment import ensure_environment
from awsddp.verbs.health import preflight
from awsddp.verbs.requests import ANSWER_S, Answer, answering, answers_in_turn, ask, whole
from awsddp.verbs.results import results_dir

if TYPE_CHECKING:
    from awsddp.nodes.listing import Listing
    from awsddp.nodes.transport import Fleet
    from awsddp.verbs.resuming import Checkpoint

CLAIM_S = 60.0
"""How long another client, here or elsewhere, may be at it, starting a job."""


def start(
    cluster: ClusterHandle,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None" = None,
) -> JobRecord:
    """Send the files and start the job; one client at a time does so, on all machines.

    Nothing is sent while a job runs on the nodes, and nothing starts unless the nodes are fit (`preflight`)
    and AWS agreed that a poweroff keeps their disks. What fails is undone. Raises InUse, UsageError for a
    name that is taken, CloudError, NodeError.
    """
    ctx, folder = cluster.ctx, cluster.ctx.folder
    with folder.lock("train", wait_s=CLAIM_S):
        requests, send = _requests(cluster, ranks, listing, checkpoint)
        nodes = [node for node in cluster.nodes if node.node in requests]
        launch = next(iter(requests.values()))
        name = str(launch["job"])
        with _undone(cluster, nodes, launch):
            checked = soon(preflight, cluster, requests)
            both(partial(send, bundled=ctx.job.job.script is None), lambda: cluster.keep(nodes, name))
            checked.result()
            if checkpoint is not None:
                from awsddp.nodes.listing import files_to_send

                with checkpoint.staged() as staged:
                    parts = files_to_send(staged)
                    sync.send(ctx, cluster.fleet, parts, folder=checkpoint.folder, nodes=set(requests))
            ask(cluster.fleet, requests)
        if (first := min(cluster.fleet.nodes)) not in requests:  # a launch there would have ended the claim
            with contextlib.suppress(AwsddpError):
                ask(cluster.fleet, {first: {"do": "unclaim"}})
    job = JobRecord(
        job=name,
        state="waiting" if launch["after"] else "running",
        cause=None,
        world_size=len(ranks),
        started=iso(datetime.now(UTC)),
        **requests[ranks[0].node]["facts"],
        ranks=tuple(
            RankResult(rank=one.rank, local_rank=one.local_rank, node=one.node, exit_code=None, seconds=0.0)
            for one in ranks
        ),
        home=f"{ctx.job.job.results}/{name}",
        nodes=tuple(JobNode(node=node.node, instance_id=node.instance_id) for node in nodes),
    )
    with _running(name):
        folder.note("train", job=name, world_size=len(ranks), home=str(results_dir(ctx, name).absolute()))
        folder.remember(job)
    if launch["after"]:
        ctx.say(f"job {name} starts when these have ended: {', '.join(launch['after'])}")
    else:
        ctx.say(f"job {name} runs, its world size is {len(ranks)}")
    return job


def _requests(
    cluster: ClusterHandle, ranks: tuple[Rank, ...], listing: "Listing", checkpoint: "Checkpoint | None"
) -> tuple[dict[int, dict[str, Any]], Callable[..., object]]:
    """Return the launch requests by node, once the nodes have said that nothing is in the way, and what sends
    the job's files.

    The claim, on the cluster's first node, holds until that node launches, or is told that another one did.
    """
    ctx = cluster.ctx
    fleet = cluster.fleet
    commit = soon(commit_of, Path(ctx.job.sync.workdir), results=ctx.job.job.results)
    used = sorted({rank.node for rank in ranks})
    gpus = gpus_of(ctx.job.job.on) if ctx.job.job.on else {}
    questions = {node: protocol.slots_request(gpus.get(node, ()), is_first=node == used[0]) for node in used}
    answers = _claimed(fleet, questions)
    after, job = _after(ctx.job.job.after, answers), _free_name(cluster, answers)
    # A job that waits has a copy, as others use theirs.
    folder = ctx.job.job.work_folder if ctx.job.job.after is None else f"work-{job}"
    send = partial(sync.send, ctx, fleet, listing, folder=folder, nodes=set(used))
    spec = ensure_environment(cluster, send_files=send)
    slot = protocol.choose_slot(answers, first=used[0])
    record, (name, dirty) = cluster.record, commit.result()
    price = record.price_usd_per_hour
    facts = {
        "options": words_of(ctx.job),
        "resumed": checkpoint.job if checkpoint else None,
        "commit": name,
        "dirty": dirty,
        "instance_type": record.instance_type,
        "price_usd_per_hour": None if price is None else round(price / record.nodes * len(used), 6),
    }
    requests = protocol.launch_requests(
        _spec(cluster, spec),
        job=job,
        ranks=ranks,
        hosts=_hosts(cluster, used, folder, checkpoint),
        slot=slot,
        facts=facts,
        after=after,
    )
    return requests, send


def _claimed(fleet: "Fleet", requests: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
    """Return the answers to `requests`, given while no other client could launch. Raises InUse.

    The claim and they share a round trip. Where another client has held the claim meanwhile, or a job runs,
    of which some nodes may not know yet, the nodes are asked again.
    """
    first, began = min(fleet.nodes), time.monotonic()
    owner = f"`awsddp train` on {socket.gethostname()}, process {os.getpid()}"
    turns: dict[int, list[Mapping[str, Any]]] = {node: [request] for node, request in requests.items()}
    turns[first] = [protocol.claim_request(owner, wait_s=0), *turns.get(first, [])]
    told = answers_in_turn(fleet, turns)
    claimed, answers = told[first][0], {node: told[node][-1] for node in requests}
    is_mine = isinstance(claimed, dict) and claimed["free_s"] >= time.monotonic() - began
    if is_mine and not any(any(one["jobs"].values()) for one in answers.values() if isinstance(one, dict)):
        return whole(answers)
    ask(fleet, {first: protocol.claim_request(owner, wait_s=CLAIM_S)}, timeout_s=CLAIM_S + ANSWER_S)
    return ask(fleet, requests)


def _after(asked: str | None, answers: Mapping[int, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the jobs that a job waits for: the one that it names, and all that are in its way now.

    `answers` are those to `slots_request`. Without a name, and "all" is one, nothing may be in the way.
    Raises InUse, NotFoundError.
    """
    in_the_way = {job: nodes for told in answers.values() for job, nodes in told["jobs"].items() if nodes}
    if asked is None:
        for job, nodes in in_the_way.items():
            raise InUse(
                f"job {job} runs on {', '.join(map(node_name, nodes))}",
                "a node runs one job at a time, and those that wait come first",
                f"awsddp logs -f {job}   # wait for its end and its results\n"
                f"awsddp cancel {job}   # or end it\nawsddp train --after {job} ...   # or let this one wait",
            )
        return ()
    known = sorted({job for told in answers.values() for job in told["jobs"]})
    if asked not in (*known, "all"):
        raise NotFoundError(
            f"no job {asked} on the nodes of this one",
            f"they know: {', '.join(known) or 'none'}",
            "awsddp jobs   # and their nodes",
        )
    return tuple(job for job in known if job == asked or job in in_the_way)


def _free_name(cluster: ClusterHandle, answers: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the job's name, unknown to the nodes, their tags and the results folder. Raises UsageError."""
    ctx = cluster.ctx
    known = {job for answer in answers.values() for job in answer["jobs"]}
    for name in _names(ctx.job):
        if name not in known.union(cluster.unfetched) and not results_dir(ctx, name).exists():
            return name
    raise UsageError(
        f"job {ctx.job.job.name} already exists", "its nodes hold a job of that name", "choose another --name"
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


@contextlib.contextmanager
def _undone(cluster: ClusterHandle, nodes: list[Node], launch: Mapping[str, Any]) -> Iterator[None]:
    """Undo what was begun where it fails: this launch's job, and the tags that only it has written.

    They stay, which is safe, where the nodes cannot be asked to end what may have started.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(AwsddpError):
            cluster.cancel(launch["job"], grace_s=0, launch=launch["launch"])
            if {node.node for node in nodes} <= set(answering(cluster.fleet)):
                cluster.release(nodes, launch["job"])
        raise


@contextlib.contextmanager
def _running(job: str) -> Iterator[None]:
    """Say in an error that the job has started all the same, and how to follow it."""
    try:
        yield
    except AwsddpError as error:
        error.message = f"job {job} was started, but {error.message}"
        error.next = (
            f"{error.next}\nawsddp logs -f {job}   # follow it then\nawsddp cancel {job}   # or end it"
        )
        raise


def _spec(cluster: ClusterHandle, spec: JobSpec) -> JobSpec:
    """Return the job's spec with the bundled program as its script where none is named."""
    if spec.job.script is not None:
        return spec
    from awsddp.nodes.sync import REMOTE_DIR

    script = f"{cluster.record.prepared[0].home}/{REMOTE_DIR}/{BUNDLED}/{BUNDLED_SCRIPT}"
    return replace(spec, job=replace(spec.job, script=script, module=False))


def _hosts(
    cluster: ClusterHandle, used: Collection[int], folder: str, checkpoint: "Checkpoint | None"
) -> list[Host]:
    from awsddp.nodes.sync import REMOTE_DIR

    requested = cluster.ctx.job.job
    gpus = gpus_of(requested.on) if requested.on else {}
    sources = source_folders(Path(cluster.ctx.job.sync.workdir))
    return [
        Host(
            node=node,
            prepared=cluster.prepared(node.node),
            workdir=f"{cluster.prepared(node.node).home}/{REMOTE_DIR}/{folder}",
            gpus=gpus.get(node.node, ()),
            sources=sources,
            resume=f"{cluster.prepared(node.node).home}/{REMOTE_DIR}/{checkpoint.folder}/{checkpoint.name}"
            if checkpoint
            else None,
        )
        for node in cluster.nodes
        if node.node in used
    ]
