"""Release nodes that hold no unfetched results, so that a poweroff may terminate them."""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from awsddp.model.node_answers import ClaimResult, Jobs
from awsddp.model.records import OLDER_JOBS, JobRecord, Node
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.state import TAG_CHANGE_S

LEASE_S = 60
"""How long other clients cannot start a job if this client is killed while it releases nodes."""


def describe_client(verb: str) -> str:
    """Return this client's name, which other clients see while this client has the right to start jobs."""
    return f"`awsddp {verb}` on {socket.gethostname()}, process {os.getpid()}"


def release_saved_jobs(connected: ConnectedCluster, jobs: Iterable[JobRecord]) -> None:
    """Release the connected nodes from jobs whose results are all in S3. Raises CloudError."""
    for job in jobs:
        if job.job in connected.cluster.unfetched_jobs and job.saving is not None and job.saving.is_complete:
            holders = connected.fleet.nodes_of_job(job)
            _release(
                connected.cluster, [node for node in connected.cluster.nodes if node.node in holders], job.job
            )


def release_unlaunched_jobs(connected: ConnectedCluster, reported: Iterable[JobRecord]) -> set[str]:
    """Release the connected nodes from jobs that were never launched, and return these jobs' names.

    Such jobs exist if a client was killed after it tagged the nodes and before it launched the job.
    `reported` are the jobs that the nodes report. Nothing is released while another client may be about to
    launch. Raises CloudError, NodeError.
    """
    from awsddp.agent import messages
    from awsddp.agent_client.calls import call_nodes, call_nodes_in_sequence

    launched, fleet = {job.job for job in reported} | {OLDER_JOBS}, connected.fleet
    suspects = [
        node
        for node in connected.cluster.nodes
        if node.node in fleet.responsive_nodes and {*node.unfetched} - launched
    ]
    if not suspects:
        return set()
    first = min(
        node.node for node in (*connected.cluster.nodes, *connected.cluster.excluded)
    )  # the first node holds the right to start jobs
    if first not in fleet.responsive_nodes:
        return set()
    turns: dict[int, list[messages.Request[Any]]] = {node.node: [messages.State()] for node in suspects}
    claim = messages.Claim(owner=describe_client(connected.session.verb), wait_s=0, lease_s=LEASE_S)
    turns[first] = [claim, *turns.get(first, ())]
    answers = call_nodes_in_sequence(fleet, turns)
    if not isinstance(answers[first][0], ClaimResult):
        return set()
    try:
        jobs_by_node = {node: answer[-1] for node, answer in answers.items() if isinstance(answer[-1], Jobs)}
        names_by_node = {node: [job.job for job in answer.jobs] for node, answer in jobs_by_node.items()}
        return release_unknown_jobs(connected.cluster, suspects, names_by_node)
    finally:
        call_nodes(fleet, {first: messages.Unclaim()})


def release_unknown_jobs(
    cluster: LocatedCluster, nodes: Sequence[Node], names_by_node: Mapping[int, Iterable[str]]
) -> set[str]:
    """Release nodes from jobs that are in the nodes' tags but not on the nodes; return these jobs' names.

    `names_by_node` has the jobs that each node reported while no other client could launch a job. Raises
    CloudError.
    """
    unknown: dict[str, list[Node]] = {}
    for node in nodes:
        for job in set(node.unfetched).difference(names_by_node.get(node.node, node.unfetched), {OLDER_JOBS}):
            unknown.setdefault(job, []).append(node)
    for job, tagged in unknown.items():
        _release(cluster, tagged, job)
    return set(unknown)


def _release(cluster: LocatedCluster, nodes: Sequence[Node], job: str) -> None:
    from awsddp.aws.power import release

    with cluster.session.folder.lock("train", part="tags", wait_s=TAG_CHANGE_S):
        release(cluster.aws, nodes, job)
