"""Reaching nodes: which can be used, by which way, and which jobs they know; the folder to them, a command on
them, a shell on one.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.model.records import JobRecord, Node, Prepared, unfetched_jobs
from awsddp.session.locate import require_live, target_of
from awsddp.settings.loader import overlaid
from awsddp.settings.spec import SSM
from awsddp.state import Record
from awsddp.util.format import node_name
from awsddp.util.parallel import NodesFailed, split

if TYPE_CHECKING:
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.fleet import Fleet
    from awsddp.nodes.login import Endpoint, Jump, Login
    from awsddp.session.context import Cluster


JUMP = "network.jump"

REACH_S = 20.0
"""How long connecting to a node may take before the others are asked without it."""
OFF = ("stopping", "stopped")
"""EC2's states of an instance that `up` starts."""


class NoNodes(NodeError):
    """The cluster exists, and none of its nodes can be reached now. `stopped` hold these jobs."""

    stopped: tuple[str, ...] = ()


def login_nodes(cluster: "Cluster") -> tuple[Node, ...]:
    """Return the nodes of a cluster whose key is here. Raises NotFoundError, CloudError."""
    listed = require_live(cluster)
    if cluster.own is None or not cluster.folder.key.exists():
        raise NotFoundError(
            f"cluster {listed.name} exists, but this machine does not have its key",
            f"{cluster.folder.path} does not hold it",
            "use the machine that made it, or terminate it: awsddp down",
        )
    return listed.live


def ready_nodes(cluster: "Cluster", number: int | None = None) -> tuple[Node, ...]:
    """Return the nodes, all (or the one of this number) prepared and running.

    Raises NotFoundError or NodeError, CloudError.
    """
    name, nodes = cluster.spec.name, login_nodes(cluster)
    record = cluster.record
    if all(node.state in OFF for node in nodes):
        raise NodeError(f"cluster {name} is stopped", "", "awsddp up   # start it")
    chosen, living = choose_nodes(nodes, number), {node.instance_id for node in nodes}
    why = [
        record.state_of(node) for node in chosen if node.state != "running" or not record.is_prepared(node)
    ]
    if number is None:
        lost = (one for one in record.prepared if one.instance_id not in living)
        why += [f"{node_name(one.node)} ({one.instance_id}) is gone" for one in lost]
    if why:
        raise NodeError(f"cluster {name} is not ready", ", ".join(why), "awsddp up   # finish it")
    return nodes


def use_reachable(cluster: "Cluster") -> None:
    """Work with those nodes that are prepared and running.

    Raises NotFoundError, CloudError, NoNodes where there are none.
    """
    living = login_nodes(cluster)
    cluster.use([node for node in reachable(living) if cluster.record.is_prepared(node)], of=living)
    if not cluster.nodes:
        why = ", ".join(map(cluster.record.state_of, living))
        next = "awsddp up   # start or finish it"
        error = NoNodes(f"no node of cluster {cluster.spec.name} can be reached", why, next)
        if all(node.state in OFF for node in living):
            error.stopped = tuple(unfetched_jobs(living))
        raise error


@contextlib.contextmanager
def connect_reachable(cluster: "Cluster") -> "Iterator[Fleet]":
    """Connect to the nodes that can be reached, of those that are ready.

    Raises NotFoundError, CloudError, NoNodes where there are none.
    """
    use_reachable(cluster)
    with cluster.connect(deadline_s=REACH_S, partial=True) as fleet:
        if not fleet.nodes:
            error = NodesFailed(fleet.failures, {}, len(cluster.nodes))
            raise NoNodes(error.message, error.why, error.next)
        yield fleet


def choose_nodes(nodes: Sequence[Node], number: int | None) -> tuple[Node, ...]:
    """Return the node of this number, or all of them. Raises NotFoundError."""
    chosen = tuple(node for node in nodes if number in (None, node.node))
    if not chosen:
        known = ", ".join(node_name(node.node) for node in nodes)
        raise NotFoundError(f"no {node_name(number or 0)} in this cluster", f"there are: {known}")
    return chosen


def reachable(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes that run and have an address."""
    return tuple(node for node in nodes if node.state == "running" and node.address and node.node >= 0)


def jump_of(cluster: "Cluster", record: Record | None = None) -> "Jump | None":
    """Return the jump host of an option or a variable, else the cluster's; without a cluster the one set now.

    "ssm" is Systems Manager, called as the cluster's own account.
    """
    name = overlaid(cluster.spec, record.settings if record is not None else {}).network.jump
    if not name:
        return None
    from awsddp.nodes.login import Jump, Ssm

    if name == SSM:
        target = target_of(cluster, record)
        return Ssm(name=name, folder=cluster.home, region=target.region, profile=target.profile)
    return Jump(name=name, folder=cluster.home)


def reach_jump(cluster: "Cluster") -> None:
    """Connect to the jump host, if there is one, before anything is created behind it.

    Raises JumpFailure, ConfigError.
    """
    jump = jump_of(cluster)
    if jump is not None:
        jump.reach()


def login(cluster: "Cluster", record: Record | None = None) -> "Login":
    """Return what a login needs beside the address: key, known host keys, jump host."""
    from awsddp.nodes.hostkeys import bare
    from awsddp.nodes.login import Login

    folder, record = cluster.folder, record or cluster.record
    return Login(
        key=folder.key,
        known_hosts=folder.known_hosts,
        ssh_config=folder.ssh_config,
        jump=jump_of(cluster, record),
        boot_key=bare(record.intent.host_key) if record.intent and record.intent.host_key else "",
    )


@contextlib.contextmanager
def preconnected(cluster: "Cluster", record: Record | None) -> "Iterator[Preconnect]":
    """Begin to connect to the last known addresses, for as long as the context; over a jump host do not."""
    from awsddp.nodes.connection import cut, preconnect

    begun: Preconnect = {}
    with contextlib.suppress(OSError, ConfigError):
        if record is not None and (how := login(cluster, record)).jump is None:
            begun = preconnect(_endpoints(record, record.prepared, record.addresses), how)
    try:
        yield begun
    finally:
        for connection in begun.values():
            connection.add_done_callback(cut)


def fleet_of(
    cluster: "Cluster",
    nodes: Sequence[Node],
    *,
    deadline_s: float,
    partial: bool,
    meanwhile: Callable[[], None] | None,
) -> "Fleet":
    """Return the connections to nodes, not yet opened, as `Cluster.connect`. Raises what `endpoints` does."""
    from awsddp.nodes.fleet import Fleet

    return Fleet(
        endpoints(cluster, nodes),
        login(cluster),
        deadline_s=deadline_s,
        partial=partial,
        preconnect=cluster.preconnect or {},
        meanwhile=meanwhile,
        on_event=cluster.on_event,
    )


def endpoints(cluster: "Cluster", nodes: Sequence[Node]) -> "tuple[Endpoint, ...]":
    """Return how nodes are reached; write where all nodes are.

    Raises NodeError for one without an address, ConfigError where the disk refuses.
    """
    lost = [node_name(node.node) for node in nodes if node.address is None]
    if lost:
        raise NodeError(f"{', '.join(lost)}: no address", "the instance is not running", "awsddp status")
    publish(cluster)
    addresses = {node.instance_id: str(node.address) for node in nodes}
    return _endpoints(cluster.record, nodes, addresses, jump=login(cluster).jump)


def publish(cluster: "Cluster") -> None:
    """Write where all nodes are, to the record and the ssh_config. Raises ConfigError."""
    listed = cluster.own.nodes if cluster.own else cluster.nodes
    running = {node.instance_id: str(node.address) for node in reachable(listed)}
    if not running.items() <= cluster.record.addresses.items():
        cluster.change(lambda record: replace(record, addresses={**record.addresses, **running}))
    cluster.folder.publish(lambda prefix, record: _entries(cluster, listed, record, prefix))


def _entries(cluster: "Cluster", listed: Sequence[Node], record: Record, prefix: str) -> str:
    """Return the entries of the ssh_config: of the nodes that AWS lists, and of those that another command
    has launched and prepared since.
    """
    from awsddp.nodes.login import ssh_config

    how, seen = login(cluster), {node.instance_id for node in listed}
    newer = {one.node: one for one in record.prepared if one.instance_id not in seen}
    nodes = newer | {node.node: node for node in reachable(listed)}
    addresses = record.addresses | {node.instance_id: str(node.address) for node in reachable(listed)}
    chosen = [node for _, node in sorted(nodes.items())]
    endpoints = _endpoints(record, chosen, addresses, jump=how.jump)
    return ssh_config(endpoints, how, prefix=prefix) if endpoints else ""


def told_jobs(cluster: "Cluster", *, partial: bool = False) -> tuple[JobRecord, ...]:
    """Return every job that the connected nodes know, oldest first.

    With `partial` a node that does not answer joins the fleet's failures, unless none does. A job that
    this machine does not remember is none of this cluster's where its name is taken in the results
    folder: no node may choose a folder of the user's.
    """
    from awsddp.agent import messages
    from awsddp.agent_client import job_reports
    from awsddp.agent_client.calls import answers_of

    request = messages.State()
    answers = answers_of(cluster.fleet, dict.fromkeys(cluster.fleet.answering, request))
    failed = {node: answer for node, answer in answers.items() if isinstance(answer, NodeError)}
    if partial and len(failed) < len(answers):
        cluster.fleet.failures.update(failed)
        answers = {node: answer for node, answer in answers.items() if node not in failed}
    documents = {node: answer.jobs for node, answer in split(answers).items()}
    jobs = job_reports.jobs(documents, results=cluster.job_spec.job.results)
    record = cluster.folder.read()
    known = {job.job for job in record.jobs} if record else set()
    return tuple(job for job in jobs if job.job in known or not os.path.lexists(cluster.results / job.job))


def say_missing(cluster: "Cluster") -> None:
    """Report which nodes of the cluster were skipped, and why."""
    living = {node.instance_id for node in (*cluster.nodes, *cluster.excluded)}
    for one in cluster.record.prepared:
        if one.instance_id not in living:
            cluster.say(f"{node_name(one.node)} ({one.instance_id}) is gone")
    for node in cluster.excluded:
        cluster.say(f"{cluster.record.state_of(node)}, and was skipped ({node.instance_id})")
    for number, failure in sorted(cluster.fleet.failures.items()):
        cluster.say(f"{node_name(number)} was skipped: {failure.message}")


def _endpoints(
    record: Record, nodes: Sequence[Node | Prepared], addresses: dict[str, str], *, jump: "Jump | None" = None
) -> "tuple[Endpoint, ...]":
    """Return how nodes are reached; `addresses` go by instance id."""
    from awsddp.nodes.login import Endpoint

    return tuple(
        Endpoint(
            node=one.node,
            instance_id=one.instance_id,
            host=one.instance_id if jump is not None and jump.by_id else addresses[one.instance_id],
            port=record.target.ssh_port,
            user=record.ssh_user,
        )
        for one in nodes
        if one.instance_id in addresses
    )
