"""A cluster of which a part may be missing: the nodes that can be asked now, and what of a job cannot be had.

A node is the instance that a job's document names, never a number: a replacement is another machine.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from awsddp.cluster import Job
from awsddp.errors import NodeError, NotFoundError
from awsddp.nodes.failures import NodesFailed
from awsddp.report import node_name
from awsddp.verbs.context import Context, found
from awsddp.verbs.node_jobs import answering, choose_job, jobs_on
from awsddp.verbs.nodes import NoNodes, Ready, connect, login_to, preconnected

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet

REACH_S = 20.0
"""How long a node may take to be connected to before the others are asked without it."""


@contextlib.contextmanager
def part(ctx: Context) -> Iterator[Ready]:
    """Yield the cluster with the nodes that run and were prepared; `others` live, too.

    Raises NotFoundError, CloudError, NoNodes where there is none.
    """
    with preconnected(ctx) as preconnect, found(ctx) as seen:
        record, living = login_to(ctx, seen)
        assert seen is not None
        prepared = {one.instance_id for one in record.prepared}
        nodes = tuple(
            node
            for node in living
            if node.state == "running" and node.address and node.instance_id in prepared
        )
        if not nodes:
            states = ", ".join(f"{node_name(node.node)} is {node.state}" for node in living)
            error = NoNodes(
                f"no node of cluster {ctx.spec.name} can be asked", states, "awsddp up   # start or finish it"
            )
            if all(node.state in ("stopping", "stopped") for node in living):
                error.stopped = tuple(sorted({job for node in living for job in node.unfetched}))
            raise error
        others = tuple(node for node in living if node not in nodes)
        yield Ready(aws=seen.aws, record=record, nodes=nodes, others=others, preconnect=preconnect)


@contextlib.contextmanager
def connected(ctx: Context, cluster: Ready) -> "Iterator[Fleet]":
    """Connect to the nodes of a part, those that answer; say which do not. Raises NoNodes where none does."""
    fleet = connect(
        ctx, cluster.record, cluster.nodes, deadline_s=REACH_S, partial=True, preconnect=cluster.preconnect
    )
    with fleet:
        if not fleet.nodes:
            error = NodesFailed(fleet.failures, {}, len(cluster.nodes))
            raise NoNodes(error.message, error.why, error.next)
        yield fleet


def say_missing(ctx: Context, cluster: Ready, fleet: "Fleet") -> None:
    """Say which nodes of the cluster were not asked, and why."""
    living = {node.instance_id for node in (*cluster.nodes, *cluster.others)}
    for one in cluster.record.prepared:
        if one.instance_id not in living:
            ctx.say(f"{node_name(one.node)} ({one.instance_id}) is gone")
    for node in cluster.others:
        ctx.say(f"{node_name(node.node)} ({node.instance_id}) is {node.state}, and was not asked")
    for number, failure in sorted(fleet.failures.items()):
        ctx.say(f"{node_name(number)} was not asked: {failure.message}")


def choose(ctx: Context, cluster: Ready, fleet: "Fleet", name: str | None) -> Job:
    """Return the job of this name, or the last one, as the nodes that answer know it.

    Raises NotFoundError, and NodeError for one that is remembered and whose nodes all are missing.
    """
    try:
        return choose_job(jobs_on(ctx, fleet, partial=True), name)
    except NotFoundError:
        remembered = [job for job in cluster.record.jobs if job.job == name and job.nodes]
        for job in remembered:
            why = "\n".join(missing(cluster, fleet, job).values())
            raise NodeError(f"no node that can be asked knows job {name}", why, "awsddp jobs") from None
        raise


def holders(fleet: "Fleet", job: Job) -> list[int]:
    """Return the numbers of the nodes that answer and are the ones on which the job ran."""
    ran_on = {one.instance_id for one in job.nodes}
    return [node for node in answering(fleet) if fleet.endpoints[node].instance_id in ran_on]


def missing(cluster: Ready, fleet: "Fleet", job: Job) -> dict[int, str]:
    """Return why a node's part of a job cannot be had now, by the number that the node had."""
    reached = {fleet.endpoints[node].instance_id for node in holders(fleet, job)}
    living = {node.instance_id: node for node in (*cluster.nodes, *cluster.others)}
    reasons = {}
    for one in job.nodes:
        node, who = living.get(one.instance_id), f"{node_name(one.node)} ({one.instance_id})"
        if one.instance_id in reached:
            continue
        if node is None:
            reasons[one.node] = f"{who} is gone; its part of job {job.job} is lost"
        elif node.state != "running":
            reasons[one.node] = f"{who} is {node.state}; it holds its part of job {job.job}"
        else:
            failure = fleet.failures.get(node.node)
            reasons[one.node] = f"{who} holds its part of job {job.job}: {failure or 'it is not prepared'}"
    return reasons
