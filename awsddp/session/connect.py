"""Connect to a cluster's nodes, publish their addresses, and list their jobs."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.model.records import JobRecord, Node, PreparedNode, list_unfetched_jobs
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.session.locate import find_cluster, require_live, resolve_target
from awsddp.settings.loader import with_cluster_settings
from awsddp.settings.spec import SSM
from awsddp.state import Record
from awsddp.util.formatting import node_name
from awsddp.util.parallel import NodesFailed, results_or_raise

if TYPE_CHECKING:
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.login import Endpoint, Jump, Login


JUMP_KEY = "network.jump"

CONNECT_S = 20.0
"""How long connecting to a node may take before the verb continues without the node."""
OFF_STATES = ("stopping", "stopped")
"""The EC2 states of instances that `up` starts."""


class NoReachableNodes(NodeError):
    """The cluster exists, but none of its nodes can be reached now.

    `stopped` has the names of the jobs whose results are on stopped nodes.
    """

    stopped: tuple[str, ...] = ()


def require_key(cluster: LocatedCluster) -> "tuple[LocatedCluster, tuple[Node, ...]]":
    """Return the cluster and its living nodes, after checking that this machine has the cluster's key.

    Raises CloudError, and NotFoundError if the cluster or the key is missing.
    """
    cluster, listed = require_live(cluster)
    if cluster.own_listing is None or not cluster.session.folder.key.exists():
        raise NotFoundError(
            f"cluster {listed.name} exists, but this machine does not have its key",
            f"{cluster.session.folder.path} does not contain the key",
            "use the machine that created the cluster, or terminate the cluster: awsddp down",
        )
    return cluster, listed.live


@contextlib.contextmanager
def preconnected_cluster(session: Session) -> "Iterator[LocatedCluster]":
    """Find the cluster. At the same time, open connections to the last known addresses of its nodes.

    Opens no connections through a jump host. Connections to nodes that AWS does not list are not used. Raises
    CloudError.
    """
    context = _preconnected(session, session.folder.read())
    with context as preconnect, find_cluster(session, name_lock_holder=True) as cluster:
        yield replace(cluster, preconnect=preconnect)


@contextlib.contextmanager
def ready_cluster(session: Session, *, node: int | None = None) -> "Iterator[LocatedCluster]":
    """Find the cluster and check that all nodes (or `node`) are prepared and running.

    Raises NotFoundError, NodeError or CloudError.
    """
    with preconnected_cluster(session) as cluster:
        yield require_ready(cluster, node)


def require_ready(cluster: LocatedCluster, number: int | None = None) -> LocatedCluster:
    """Return the cluster with its nodes, if all (or node `number`) are prepared and running.

    Raises NotFoundError or CloudError, or NodeError if a node is not ready.
    """
    name, (cluster, nodes) = cluster.session.spec.name, require_key(cluster)
    record = cluster.record
    if all(node.state in OFF_STATES for node in nodes):
        raise NodeError(f"cluster {name} is stopped", "", "awsddp up   # start it")
    required, live_ids = choose_nodes(nodes, number), {node.instance_id for node in nodes}
    why = [
        record.describe_node_state(node)
        for node in required
        if node.state != "running" or not record.is_prepared(node)
    ]
    if number is None:
        missing = (node for node in record.prepared if node.instance_id not in live_ids)
        why += [f"{node_name(node.node)} ({node.instance_id}) is gone" for node in missing]
    if why:
        raise NodeError(f"cluster {name} is not ready", ", ".join(why), "awsddp up   # finish it")
    return cluster.with_nodes(nodes, all_nodes=nodes)


def require_reachable(cluster: LocatedCluster) -> LocatedCluster:
    """Return the cluster with the nodes that are prepared and running.

    Raises NotFoundError or CloudError, or NoReachableNodes if there are no such nodes.
    """
    cluster, live = require_key(cluster)
    record = cluster.record
    cluster = cluster.with_nodes(
        [node for node in filter_reachable(live) if record.is_prepared(node)], all_nodes=live
    )
    if not cluster.nodes:
        why = ", ".join(map(record.describe_node_state, live))
        next_step = "awsddp up   # start or finish it"
        error = NoReachableNodes(
            f"no node of cluster {cluster.session.spec.name} can be reached", why, next_step
        )
        if all(node.state in OFF_STATES for node in live):
            error.stopped = tuple(list_unfetched_jobs(live))
        raise error
    return cluster


@contextlib.contextmanager
def connect(
    cluster: LocatedCluster,
    nodes: Sequence[Node] | None = None,
    *,
    deadline_s: float = 60,
    partial: bool = False,
    on_wait: Callable[[], None] | None = None,
) -> "Iterator[ConnectedCluster]":
    """Connect to `nodes` (default: all usable nodes) within the context, and publish their addresses.

    `on_wait` is called while connecting; an exception from `on_wait` ends the attempt. Raises NodesFailed if
    a node cannot be reached; with `partial`, the node is added to the fleet's `failures` instead. Raises
    NodeError for a node without an address, or ConfigError if the record cannot be written.
    """
    from awsddp.nodes.fleet import Fleet

    session, targets = cluster.session, cluster.nodes if nodes is None else nodes
    endpoints = list_endpoints(cluster, targets)
    cluster = publish_addresses(cluster)
    fleet = Fleet(
        endpoints,
        make_login(session, cluster.record),
        deadline_s=deadline_s,
        partial=partial,
        preconnect=cluster.preconnect,
        on_idle=on_wait,
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
    """Connect to the nodes that are prepared, running and reachable.

    Raises NotFoundError or CloudError, or NoReachableNodes if there are no such nodes.
    """
    cluster = require_reachable(cluster)
    with connect(cluster, deadline_s=CONNECT_S, partial=True) as connected:
        if not connected.fleet.nodes:
            error = NodesFailed(connected.fleet.failures, {}, len(cluster.nodes))
            raise NoReachableNodes(error.message, error.why, error.next)
        yield connected


def choose_nodes(nodes: Sequence[Node], number: int | None) -> tuple[Node, ...]:
    """Return the node with this number, or all nodes if `number` is None. Raises NotFoundError."""
    chosen = tuple(node for node in nodes if number in (None, node.node))
    if not chosen:
        names = ", ".join(node_name(node.node) for node in nodes)
        raise NotFoundError(f"no {node_name(number or 0)} in this cluster", f"there are: {names}")
    return chosen


def filter_reachable(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes that are running and have an address."""
    return tuple(node for node in nodes if node.state == "running" and node.address and node.node >= 0)


def find_jump_host(session: Session, record: Record | None = None) -> "Jump | None":
    """Return the cluster's jump host, or None if it has none. An option or a variable overrides the record.

    If there is no record, the session's settings decide. "ssm" means Systems Manager in the cluster's
    account.
    """
    name = with_cluster_settings(session.spec, record.settings if record is not None else {}).network.jump
    if not name:
        return None
    from awsddp.nodes.login import Jump, Ssm

    if name == SSM:
        target = resolve_target(session, record)
        return Ssm(name=name, folder=session.home, region=target.region, profile=target.profile)
    return Jump(name=name, folder=session.home)


def check_jump_host(session: Session) -> None:
    """Check that the jump host, if there is one, can be reached before anything is created behind it.

    Raises JumpFailure or ConfigError.
    """
    jump = find_jump_host(session)
    if jump is not None:
        jump.ensure_connected()


def make_login(session: Session, record: Record) -> "Login":
    """Return the login for the cluster's nodes: the key, the known host keys and the jump host."""
    from awsddp.nodes.hostkeys import strip_comment
    from awsddp.nodes.login import Login

    folder = session.folder
    return Login(
        key=folder.key,
        known_hosts=folder.known_hosts,
        ssh_config=folder.ssh_config,
        jump=find_jump_host(session, record),
        boot_key=strip_comment(record.intent.host_key) if record.intent and record.intent.host_key else "",
    )


@contextlib.contextmanager
def _preconnected(session: Session, record: Record | None) -> "Iterator[Preconnect]":
    """Start connecting to the last known addresses, yield the connections, and close unused ones at the end.

    Yields no connections for a cluster behind a jump host.
    """
    from awsddp.nodes.connection import close_when_connected, preconnect

    connections: Preconnect = {}
    with contextlib.suppress(OSError, ConfigError):
        if record is not None and (ssh_login := make_login(session, record)).jump is None:
            connections = preconnect(_endpoints(record, record.prepared, record.addresses), ssh_login)
    try:
        yield connections
    finally:
        for connection in connections.values():
            connection.add_done_callback(close_when_connected)


def list_endpoints(cluster: LocatedCluster, nodes: Sequence[Node]) -> "tuple[Endpoint, ...]":
    """Return the nodes' SSH endpoints. Raises NodeError for a node without an address."""
    unreachable = [node_name(node.node) for node in nodes if node.address is None]
    if unreachable:
        raise NodeError(
            f"{', '.join(unreachable)}: no address", "the instance is not running", "awsddp status"
        )
    addresses = {node.instance_id: str(node.address) for node in nodes}
    jump = find_jump_host(cluster.session, cluster.record)
    return _endpoints(cluster.record, nodes, addresses, jump=jump)


def publish_addresses(cluster: LocatedCluster) -> LocatedCluster:
    """Write the nodes' addresses to the record and the ssh_config; return the updated cluster.

    Raises ConfigError.
    """
    session, listed = cluster.session, cluster.own_listing.nodes if cluster.own_listing else cluster.nodes
    running = {node.instance_id: str(node.address) for node in filter_reachable(listed)}
    if not running.items() <= cluster.record.addresses.items():
        cluster = cluster.change_record(
            lambda record: replace(record, addresses={**record.addresses, **running})
        )
    session.folder.write_ssh_config(lambda prefix, record: _entries(session, listed, record, prefix))
    return cluster


def _entries(session: Session, listed: Sequence[Node], record: Record, prefix: str) -> str:
    """Return ssh_config entries for the listed nodes and for nodes that another command prepared later."""
    from awsddp.nodes.login import ssh_config

    ssh_login, listed_ids = make_login(session, record), {node.instance_id for node in listed}
    newer = {node.node: node for node in record.prepared if node.instance_id not in listed_ids}
    nodes = newer | {node.node: node for node in filter_reachable(listed)}
    addresses = record.addresses | {node.instance_id: str(node.address) for node in filter_reachable(listed)}
    chosen = [node for _, node in sorted(nodes.items())]
    endpoints = _endpoints(record, chosen, addresses, jump=ssh_login.jump)
    return ssh_config(endpoints, ssh_login, prefix=prefix) if endpoints else ""


def list_jobs_on_nodes(connected: ConnectedCluster, *, partial: bool = False) -> tuple[JobRecord, ...]:
    """Return every job that the connected nodes report, oldest first.

    With `partial`, a node that does not answer is added to the fleet's failures, unless no node answers at
    all. Ignores an unknown job if a folder with its name already exists in the results folder. Otherwise, a
    node could make awsddp write into one of the user's folders.
    """
    from awsddp.agent import messages
    from awsddp.agent_client import job_reports
    from awsddp.agent_client.calls import call_each_node

    request = messages.State()
    answers = call_each_node(connected.fleet, dict.fromkeys(connected.fleet.responsive_nodes, request))
    failed = {node: answer for node, answer in answers.items() if isinstance(answer, NodeError)}
    if partial and len(failed) < len(answers):
        connected.fleet.failures.update(failed)
        answers = {node: answer for node, answer in answers.items() if node not in failed}
    documents = {node: answer.jobs for node, answer in results_or_raise(answers).items()}
    jobs = job_reports.merge_jobs(documents, results=connected.session.job_spec.job.results)
    record = connected.session.folder.read()
    recorded = {job.job for job in record.jobs} if record else set()
    return tuple(
        job for job in jobs if job.job in recorded or not os.path.lexists(connected.session.results / job.job)
    )


def report_skipped_nodes(connected: ConnectedCluster) -> None:
    """Report the nodes that were skipped, and why."""
    session, cluster = connected.session, connected.cluster
    live_ids = {node.instance_id for node in (*cluster.nodes, *cluster.excluded)}
    for prepared in cluster.record.prepared:
        if prepared.instance_id not in live_ids:
            session.say(f"{node_name(prepared.node)} ({prepared.instance_id}) is gone")
    for node in cluster.excluded:
        session.say(f"{cluster.record.describe_node_state(node)}, and was skipped ({node.instance_id})")
    for number, failure in sorted(connected.fleet.failures.items()):
        session.say(f"{node_name(number)} was skipped: {failure.message}")


def _endpoints(
    record: Record,
    nodes: Sequence[Node | PreparedNode],
    addresses: dict[str, str],
    *,
    jump: "Jump | None" = None,
) -> "tuple[Endpoint, ...]":
    """Return the SSH endpoints of the nodes that have an address in `addresses` (by instance id)."""
    from awsddp.nodes.login import Endpoint

    return tuple(
        Endpoint(
            node=node.node,
            instance_id=node.instance_id,
            host=node.instance_id
            if jump is not None and jump.uses_instance_ids
            else addresses[node.instance_id],
            port=record.target.ssh_port,
            user=record.ssh_user,
        )
        for node in nodes
        if node.instance_id in addresses
    )
