"""Release nodes that hold no unfetched results, so that a poweroff may terminate them."""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from awsddp.model.node_answers import Claimed, Jobs
from awsddp.model.records import MORE, JobRecord, Node
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.state import TAGS_S

LEASE_S = 60
"""How long other clients cannot start a job if this one dies while it releases nodes."""


def owner(verb: str) -> str:
    """Return the name that this client shows to others while it holds the right to start jobs."""
    return f"`awsddp {verb}` on {socket.gethostname()}, process {os.getpid()}"


def release_saved(connected: ConnectedCluster, jobs: Iterable[JobRecord]) -> None:
    """Release the connected nodes of the jobs whose results are all in S3. Raises CloudError."""
    for job in jobs:
        if job.job in connected.cluster.unfetched and job.saving is not None and job.saving.is_whole:
            holders = connected.fleet.holders(job)
            _release(
                connected.cluster, [node for node in connected.cluster.nodes if node.node in holders], job.job
            )


def release_unbegun(connected: ConnectedCluster, reported: Iterable[JobRecord]) -> set[str]:
    """Release the connected nodes from jobs that were never launched; return the names of these jobs.

    This happens if a client was killed between tagging the nodes and launching the job. `reported` are the
    jobs that the nodes report. Nothing is released while another client may be about to launch. Raises
    CloudError, NodeError.
    """
    from awsddp.agent import messages
    from awsddp.agent_client.calls import answers_in_turn, ask

    launched, fleet = {job.job for job in reported} | {MORE}, connected.fleet
    suspects = [
        node
        for node in connected.cluster.nodes
        if node.node in fleet.answering and {*node.unfetched} - launched
    ]
    if not suspects:
        return set()
    first = min(
        node.node for node in (*connected.cluster.nodes, *connected.cluster.excluded)
    )  # it holds the right to start jobs
    if first not in fleet.answering:
        return set()
    turns: dict[int, list[messages.Request[Any]]] = {node.node: [messages.State()] for node in suspects}
    claim = messages.Claim(owner=owner(connected.session.verb), wait_s=0, lease_s=LEASE_S)
    turns[first] = [claim, *turns.get(first, ())]
    answers = answers_in_turn(fleet, turns)
    if not isinstance(answers[first][0], Claimed):
        return set()
    try:
        jobs_by_node = {node: answer[-1] for node, answer in answers.items() if isinstance(answer[-1], Jobs)}
        names_by_node = {node: [job.job for job in answer.jobs] for node, answer in jobs_by_node.items()}
        return release_unknown(connected.cluster, suspects, names_by_node)
    finally:
        ask(fleet, {first: messages.Unclaim()})


def release_unknown(
    cluster: LocatedCluster, nodes: Sequence[Node], names_by_node: Mapping[int, Iterable[str]]
) -> set[str]:
    """Release nodes from the jobs that their tags name and they do not have; return the names of these jobs.

    `names_by_node` has the jobs of each node, reported while no other client could launch one. Raises
    CloudError.
    """
    unknown: dict[str, list[Node]] = {}
    for node in nodes:
        for job in set(node.unfetched).difference(names_by_node.get(node.node, node.unfetched), {MORE}):
            unknown.setdefault(job, []).append(node)
    for job, tagged in unknown.items():
        _release(cluster, tagged, job)
    return set(unknown)


def _release(cluster: LocatedCluster, nodes: Sequence[Node], job: str) -> None:
    from awsddp.aws.power import release

    with cluster.session.folder.lock("train", part="tags", wait_s=TAGS_S):
        release(cluster.aws, nodes, job)
