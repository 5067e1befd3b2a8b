"""Releasing nodes: which hold no results any more, so that a poweroff may end them."""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from awsddp.model.node_answers import Claimed, Jobs
from awsddp.model.records import MORE, JobRecord, Node
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.state import TAGS_S

LEASE_S = 60
"""For how long no other client may start a job once this one has vanished while it releases."""


def owner(verb: str) -> str:
    """Return how a client that claims the right to start a job is shown to others."""
    return f"`awsddp {verb}` on {socket.gethostname()}, process {os.getpid()}"


def release_saved(connected: ConnectedCluster, jobs: Iterable[JobRecord]) -> None:
    """Release the connected nodes of those jobs whose results are all in S3: a poweroff ends them then.

    Raises CloudError.
    """
    for job in jobs:
        if job.job in connected.cluster.unfetched and job.saving is not None and job.saving.is_whole:
            holders = connected.fleet.holders(job)
            _release(
                connected.cluster, [node for node in connected.cluster.nodes if node.node in holders], job.job
            )


def release_unbegun(connected: ConnectedCluster, told: Iterable[JobRecord]) -> set[str]:
    """Release the connected nodes of jobs that they do not know; return the names of these jobs.

    A client was killed after it had tagged the nodes and before it launched the job. `told` are jobs that the
    nodes know. Nothing is released while another client may be about to launch. Raises CloudError, NodeError.
    """
    from awsddp.agent import messages
    from awsddp.agent_client.calls import answers_in_turn, ask

    known, fleet = {job.job for job in told} | {MORE}, connected.fleet
    suspects = [
        node for node in connected.cluster.nodes if node.node in fleet.answering and {*node.unfetched} - known
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
        found = {node: answer[-1] for node, answer in answers.items() if isinstance(answer[-1], Jobs)}
        jobs = {node: [one.job for one in answer.jobs] for node, answer in found.items()}
        return release_unknown(connected.cluster, suspects, jobs)
    finally:
        ask(fleet, {first: messages.Unclaim()})


def release_unknown(
    cluster: LocatedCluster, nodes: Sequence[Node], known: Mapping[int, Iterable[str]]
) -> set[str]:
    """Release these nodes of the jobs that their tags name and that they do not know; return the jobs' names.

    `known` are the jobs that each of them knows, told while no other client could launch one. Raises
    CloudError.
    """
    unknown: dict[str, list[Node]] = {}
    for node in nodes:
        for job in set(node.unfetched).difference(known.get(node.node, node.unfetched), {MORE}):
            unknown.setdefault(job, []).append(node)
    for job, tagged in unknown.items():
        _release(cluster, tagged, job)
    return set(unknown)


def _release(cluster: LocatedCluster, nodes: Sequence[Node], job: str) -> None:
    from awsddp.aws.power import release

    with cluster.session.folder.lock("train", part="tags", wait_s=TAGS_S):
        release(cluster.aws, nodes, job)
