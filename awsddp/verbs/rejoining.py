"""Machines that took the place of lost ones join the torchrun jobs that went on without these."""

import secrets
from dataclasses import replace
from functools import partial

from awsddp.cluster import ACTIVE, Job, Node
from awsddp.report import node_name
from awsddp.verbs import launches, starting, sync
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.environment import ensure_environment
from awsddp.verbs.requests import ask
from awsddp.verbs.resuming import checkpoint_of


def rejoin(cluster: ClusterHandle) -> None:
    """Launch, on each machine that is new, its part of the jobs that go on or wait without the one before it.

    It gets the files of the job's folder as they are here now, and secrets from this environment. The oldest
    job comes first: later ones may wait for it. Interrupted anywhere, it continues when called again. Raises
    ConfigError for a secret that is not set, NodeError, CloudError.
    """
    folder = cluster.ctx.folder
    kept = launches.kept(folder)
    if not kept:
        return
    with cluster.connect() as fleet:
        starting.claim(fleet, fleet.nodes, verb="up")
        active = {job.job: job for job in cluster.jobs() if job.state in ACTIVE}
        for name in kept.keys() - active.keys():
            launches.forget(folder, name)
        for name, job in active.items():
            if name in kept and (new := _new(cluster, job)):
                _launch(cluster, job, kept[name], new)


def _new(cluster: ClusterHandle, job: Job) -> list[Node]:
    """Return the machines that took the place of some that the job ran on, none where it cannot go on."""
    ran = {one.node: one.instance_id for one in job.nodes}
    now = {node.node: node for node in cluster.nodes}
    new = [node for number, node in now.items() if ran.get(number, node.instance_id) != node.instance_id]
    first = min(ran)  # which coordinates the job; rank 0 may be on another
    return new if ran.keys() <= now.keys() and first not in {node.node for node in new} else []


def _launch(cluster: ClusterHandle, job: Job, launch: launches.Launch, new: list[Node]) -> None:
    ctx, numbers = replace(cluster.ctx, job=launch.spec), {node.node for node in new}
    handle, asked = replace(cluster, ctx=ctx), launch.spec.job
    checkpoint, listing = checkpoint_of(ctx), sync.listed(ctx)
    folder = starting.work_folder(asked, job.job)
    send = partial(sync.send, ctx, cluster.fleet, listing, folder=folder, nodes=numbers)
    requests = starting.requests_for(
        handle,
        launch.ranks,
        spec=ensure_environment(handle, send_files=send),
        job=job.job,
        slot=launch.slot,
        facts=launch.facts,
        checkpoint=checkpoint,
        after=launch.after,
    )
    names = ", ".join(map(node_name, sorted(numbers)))
    ctx.say(f"{names} joins job {job.job}, with the files of {ctx.job.sync.workdir} as they are now")
    handle.keep(new, job.job)
    send(bundled=asked.script is None)
    if checkpoint is not None:
        with checkpoint.staged() as staged:
            sync.send_checkpoint(handle, staged, folder=checkpoint.folder, nodes=numbers)
    again = {"secret": launch.secret, "life": secrets.token_hex(8)}
    ask(cluster.fleet, {node: {**requests[node], **again} for node in numbers})
