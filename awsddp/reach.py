"""Which nodes of a cluster can be used, and how they are reached: jump host, addresses, ssh_config."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from awsddp.config import overlaid
from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.nodes.failures import NodesFailed
from awsddp.records import Node, Prepared, unfetched_jobs
from awsddp.report import node_name
from awsddp.search import require_live, target_of
from awsddp.spec import SSM
from awsddp.state import Record

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.login import Endpoint, Jump, Login
    from awsddp.nodes.transport import Fleet


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
    from awsddp.nodes.login import Login

    folder, jump = cluster.folder, jump_of(cluster, record or cluster.record)
    return Login(key=folder.key, known_hosts=folder.known_hosts, ssh_config=folder.ssh_config, jump=jump)


@contextlib.contextmanager
def preconnected(cluster: "Cluster") -> "Iterator[Preconnect | None]":
    """Begin to connect to the last known addresses, for as long as the context; over a jump host do not."""
    from awsddp.nodes.connection import Preconnect

    record = how = None
    with contextlib.suppress(OSError, ConfigError):
        record = cluster.folder.read()
        how = login(cluster, record) if record is not None else None
    if record is None or how is None or how.jump is not None:
        yield None
        return
    endpoints = _endpoints(record, record.prepared, record.addresses)
    with contextlib.closing(Preconnect(endpoints, how)) as made:
        yield made


def endpoints(cluster: "Cluster", nodes: Sequence[Node] | None = None) -> "tuple[Endpoint, ...]":
    """Return how nodes (all that the command works with) are reached; write where all nodes are.

    Raises NodeError for one without an address, ConfigError where the disk refuses.
    """
    chosen = cluster.nodes if nodes is None else nodes
    lost = [node_name(node.node) for node in chosen if node.address is None]
    if lost:
        raise NodeError(f"{', '.join(lost)}: no address", "the instance is not running", "awsddp status")
    publish(cluster)
    addresses = {node.instance_id: str(node.address) for node in chosen}
    return _endpoints(cluster.record, chosen, addresses, jump=login(cluster).jump)


def publish(cluster: "Cluster") -> None:
    """Write where all nodes are, to the record and the ssh_config. Raises ConfigError."""
    from awsddp.nodes.login import ssh_config

    listed = cluster.own.nodes if cluster.own else cluster.nodes
    running = {node.instance_id: str(node.address) for node in reachable(listed)}
    if not running.items() <= cluster.record.addresses.items():
        cluster.change(lambda record: replace(record, addresses={**record.addresses, **running}))
    how, seen = login(cluster), {node.instance_id for node in listed}

    def entries(prefix: str) -> str:
        record = cluster.folder.read() or cluster.record
        # What AWS did not list when this command looked, another one has launched and prepared since.
        newer = {one.node: one for one in record.prepared if one.instance_id not in seen}
        nodes = newer | {node.node: node for node in reachable(listed)}
        addresses = {**record.addresses, **running}
        chosen = [node for _, node in sorted(nodes.items())]
        endpoints = _endpoints(record, chosen, addresses, jump=how.jump)
        return ssh_config(endpoints, how, prefix=prefix) if endpoints else ""

    cluster.folder.publish(entries)


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
