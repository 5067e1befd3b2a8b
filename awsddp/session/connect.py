"""Connecting to the nodes of a cluster: which can be used, by which way, and which jobs they know."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.model.records import JobRecord, Node, Prepared, unfetched_jobs
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.session.locate import find_cluster, require_live, target_of
from awsddp.settings.loader import overlaid
from awsddp.settings.spec import SSM
from awsddp.state import Record
from awsddp.util.format import node_name
from awsddp.util.parallel import NodesFailed, split

if TYPE_CHECKING:
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.login import Endpoint, Jump, Login


JUMP = "network.jump"

REACH_S = 20.0
"""How long connecting to a node may take before the others are asked without it."""
OFF = ("stopping", "stopped")
"""EC2's states of an instance that `up` starts."""


class NoNodes(NodeError):
    """The cluster exists, and none of its nodes can be reached now. `stopped` hold these jobs."""

    stopped: tuple[str, ...] = ()


def require_login(cluster: LocatedCluster) -> "tuple[LocatedCluster, tuple[Node, ...]]":
    """Return a cluster whose key is here, and its living nodes. Raises NotFoundError, CloudError."""
    cluster, listed = require_live(cluster)
    if cluster.own is None or not cluster.session.folder.key.exists():
        raise NotFoundError(
            f"cluster {listed.name} exists, but this machine does not have its key",
            f"{cluster.session.folder.path} does not hold it",
            "use the machine that made it, or terminate it: awsddp down",
        )
    return cluster, listed.live


@contextlib.contextmanager
def preconnected_cluster(session: Session) -> "Iterator[LocatedCluster]":
    """Find the cluster; `connect_reachable` works with those nodes that are prepared and running.

    Begins to connect to its last known addresses, unless that is over a jump host. What AWS says decides
    what is used. Raises CloudError.
    """
    begun = _preconnected(session, session.folder.read())
    with begun as preconnect, find_cluster(session, names_holder=True) as cluster:
        yield replace(cluster, preconnect=preconnect)


@contextlib.contextmanager
def ready_cluster(session: Session, *, node: int | None = None) -> "Iterator[LocatedCluster]":
    """Find the cluster, all nodes (or `node`) prepared and running.

    Raises NotFoundError, NodeError, CloudError.
    """
    with preconnected_cluster(session) as cluster:
        yield require_ready(cluster, node)


def require_ready(cluster: LocatedCluster, number: int | None = None) -> LocatedCluster:
    """Return the cluster with its nodes, all (or the one of this number) prepared and running.

    Raises NotFoundError or NodeError, CloudError.
    """
    name, (cluster, nodes) = cluster.session.spec.name, require_login(cluster)
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
    return cluster.with_nodes(nodes, of=nodes)


def require_reachable(cluster: LocatedCluster) -> LocatedCluster:
    """Return the cluster with those nodes that are prepared and running.

    Raises NotFoundError, CloudError, NoNodes where there are none.
    """
    cluster, living = require_login(cluster)
    record = cluster.record
    cluster = cluster.with_nodes([one for one in reachable(living) if record.is_prepared(one)], of=living)
    if not cluster.nodes:
        why = ", ".join(map(record.state_of, living))
        next = "awsddp up   # start or finish it"
        error = NoNodes(f"no node of cluster {cluster.session.spec.name} can be reached", why, next)
        if all(node.state in OFF for node in living):
            error.stopped = tuple(unfetched_jobs(living))
        raise error
    return cluster


@contextlib.contextmanager
def connect(
    cluster: LocatedCluster,
    nodes: Sequence[Node] | None = None,
    *,
    deadline_s: float = 60,
    partial: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> "Iterator[ConnectedCluster]":
    """Connect to the nodes (all to work with), for as long as the context; write where all nodes are.

    Raises NodesFailed where one cannot be reached; with `partial` the fleet's `failures` names it. Raises
    NodeError for one without an address, ConfigError where the disk refuses. What `meanwhile` raises, as for
    Fleet, ends the attempt.
    """
    from awsddp.nodes.fleet import Fleet

    session, chosen = cluster.session, cluster.nodes if nodes is None else nodes
    endpoints = endpoints_of(cluster, chosen)
    cluster = publish(cluster)
    fleet = Fleet(
        endpoints,
        login(session, cluster.record),
        deadline_s=deadline_s,
        partial=partial,
        preconnect=cluster.preconnect,
        meanwhile=meanwhile,
        on_event=session.on_event,
    )
    try:
        with fleet:
            yield ConnectedCluster(cluster=cluster, fleet=fleet)
    except NodeError as error:
        error.nodes = cluster.nodes
        raise


@contextlib.contextmanager
def connect_reachable(cluster: LocatedCluster) -> "Iterator[ConnectedCluster]":
    """Connect to the nodes that can be reached, of those that are ready.

    Raises NotFoundError, CloudError, NoNodes where there are none.
    """
    cluster = require_reachable(cluster)
    with connect(cluster, deadline_s=REACH_S, partial=True) as connected:
        if not connected.fleet.nodes:
            error = NodesFailed(connected.fleet.failures, {}, len(cluster.nodes))
            raise NoNodes(error.message, error.why, error.next)
        yield connected


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


def jump_of(session: Session, record: Record | None = None) -> "Jump | None":
    """Return the jump host of an option or a variable, else the cluster's; without a cluster the one set now.

    "ssm" is Systems Manager, called as the cluster's own account.
    """
    name = overlaid(session.spec, record.settings if record is not None else {}).network.jump
    if not name:
        return None
    from awsddp.nodes.login import Jump, Ssm

    if name == SSM:
        target = target_of(session, record)
        return Ssm(name=name, folder=session.home, region=target.region, profile=target.profile)
    return Jump(name=name, folder=session.home)


def reach_jump(session: Session) -> None:
    """Connect to the jump host, if there is one, before anything is created behind it.

    Raises JumpFailure, ConfigError.
    """
    jump = jump_of(session)
    if jump is not None:
        jump.reach()


def login(session: Session, record: Record) -> "Login":
    """Return what a login needs beside the address: key, known host keys, jump host."""
    from awsddp.nodes.hostkeys import bare
    from awsddp.nodes.login import Login

    folder = session.folder
    return Login(
        key=folder.key,
        known_hosts=folder.known_hosts,
        ssh_config=folder.ssh_config,
        jump=jump_of(session, record),
        boot_key=bare(record.intent.host_key) if record.intent and record.intent.host_key else "",
    )


@contextlib.contextmanager
def _preconnected(session: Session, record: Record | None) -> "Iterator[Preconnect]":
    """Begin to connect to the last known addresses, for as long as the context; over a jump host do not."""
    from awsddp.nodes.connection import cut, preconnect

    begun: Preconnect = {}
    with contextlib.suppress(OSError, ConfigError):
        if record is not None and (how := login(session, record)).jump is None:
            begun = preconnect(_endpoints(record, record.prepared, record.addresses), how)
    try:
        yield begun
    finally:
        for connection in begun.values():
            connection.add_done_callback(cut)


def endpoints_of(cluster: LocatedCluster, nodes: Sequence[Node]) -> "tuple[Endpoint, ...]":
    """Return how nodes are reached. Raises NodeError for one without an address."""
    lost = [node_name(node.node) for node in nodes if node.address is None]
    if lost:
        raise NodeError(f"{', '.join(lost)}: no address", "the instance is not running", "awsddp status")
    addresses = {node.instance_id: str(node.address) for node in nodes}
    jump = jump_of(cluster.session, cluster.record)
    return _endpoints(cluster.record, nodes, addresses, jump=jump)


def publish(cluster: LocatedCluster) -> LocatedCluster:
    """Write where all nodes are, to the record and the ssh_config; return the cluster. Raises ConfigError."""
    session, listed = cluster.session, cluster.own.nodes if cluster.own else cluster.nodes
    running = {node.instance_id: str(node.address) for node in reachable(listed)}
    if not running.items() <= cluster.record.addresses.items():
        cluster = cluster.change_record(
            lambda record: replace(record, addresses={**record.addresses, **running})
        )
    session.folder.publish(lambda prefix, record: _entries(session, listed, record, prefix))
    return cluster


def _entries(session: Session, listed: Sequence[Node], record: Record, prefix: str) -> str:
    """Return the entries of the ssh_config: of the nodes that AWS lists, and of those that another command
    has launched and prepared since.
    """
    from awsddp.nodes.login import ssh_config

    how, seen = login(session, record), {node.instance_id for node in listed}
    newer = {one.node: one for one in record.prepared if one.instance_id not in seen}
    nodes = newer | {node.node: node for node in reachable(listed)}
    addresses = record.addresses | {node.instance_id: str(node.address) for node in reachable(listed)}
    chosen = [node for _, node in sorted(nodes.items())]
    endpoints = _endpoints(record, chosen, addresses, jump=how.jump)
    return ssh_config(endpoints, how, prefix=prefix) if endpoints else ""


def told_jobs(connected: ConnectedCluster, *, partial: bool = False) -> tuple[JobRecord, ...]:
    """Return every job that the connected nodes know, oldest first.

    With `partial` a node that does not answer joins the fleet's failures, unless none does. A job that
    this machine does not remember is none of this cluster's where its name is taken in the results
    folder: no node may choose a folder of the user's.
    """
    from awsddp.agent import messages
    from awsddp.agent_client import job_reports
    from awsddp.agent_client.calls import answers_of

    request = messages.State()
    answers = answers_of(connected.fleet, dict.fromkeys(connected.fleet.answering, request))
    failed = {node: answer for node, answer in answers.items() if isinstance(answer, NodeError)}
    if partial and len(failed) < len(answers):
        connected.fleet.failures.update(failed)
        answers = {node: answer for node, answer in answers.items() if node not in failed}
    documents = {node: answer.jobs for node, answer in split(answers).items()}
    jobs = job_reports.jobs(documents, results=connected.session.job_spec.job.results)
    record = connected.session.folder.read()
    known = {job.job for job in record.jobs} if record else set()
    return tuple(
        job for job in jobs if job.job in known or not os.path.lexists(connected.session.results / job.job)
    )


def say_missing(connected: ConnectedCluster) -> None:
    """Report which nodes of the cluster were skipped, and why."""
    session, cluster = connected.session, connected.cluster
    living = {node.instance_id for node in (*cluster.nodes, *cluster.excluded)}
    for one in cluster.record.prepared:
        if one.instance_id not in living:
            session.say(f"{node_name(one.node)} ({one.instance_id}) is gone")
    for node in cluster.excluded:
        session.say(f"{cluster.record.state_of(node)}, and was skipped ({node.instance_id})")
    for number, failure in sorted(connected.fleet.failures.items()):
        session.say(f"{node_name(number)} was skipped: {failure.message}")


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
