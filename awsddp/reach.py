"""How the nodes of a cluster are reached: jump host, addresses, ssh_config; and the Python that they run."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from awsddp.config import overlaid
from awsddp.errors import ConfigError, NodeError
from awsddp.records import Node, Prepared
from awsddp.report import node_name
from awsddp.search import (
    reachable,
    target_of,
)
from awsddp.spec import SSM
from awsddp.state import Folder, Record

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.jump import Jump
    from awsddp.nodes.login import Endpoint, Login


JUMP = "network.jump"


def jump_of(cluster: "Cluster", record: Record | None = None) -> "Jump | None":
    """Return the jump host of an option or a variable, else the cluster's; without a cluster the one set now.

    "ssm" is Systems Manager, called as the cluster's own account.
    """
    name = overlaid(cluster.spec, record.settings if record is not None else {}).network.jump
    if not name:
        return None
    if name == SSM:
        from awsddp.nodes.jump import Ssm

        target = target_of(cluster, record)
        return Ssm(name=name, folder=cluster.home, region=target.region, profile=target.profile)
    from awsddp.nodes.jump import Jump

    return Jump(name=name, folder=cluster.home)


def reach_jump(cluster: "Cluster") -> None:
    """Connect to the jump host, if there is one, before anything is created behind it.

    Raises JumpFailure, ConfigError.
    """
    jump = jump_of(cluster)
    if jump is not None:
        jump.reach()


def login(cluster: "Cluster") -> "Login":
    """Return what a login needs beside the address: key, known host keys, jump host."""
    return _login(cluster.folder, jump_of(cluster, cluster.record))


def _login(folder: Folder, jump: "Jump | None" = None) -> "Login":
    from awsddp.nodes.login import Login

    return Login(key=folder.key, known_hosts=folder.known_hosts, ssh_config=folder.ssh_config, jump=jump)


@contextlib.contextmanager
def preconnected(cluster: "Cluster") -> "Iterator[Preconnect | None]":
    """Begin to connect to the last known addresses, for as long as the context; over a jump host do not."""
    from awsddp.nodes.connection import Preconnect

    record = None
    with contextlib.suppress(OSError, ConfigError):
        record = cluster.folder.read()
        if record is not None and jump_of(cluster, record) is not None:
            record = None
    if record is None:
        yield None
        return
    folder, endpoints = cluster.folder, _endpoints(record, record.prepared, record.addresses)
    with contextlib.closing(Preconnect(endpoints, _login(folder))) as made:
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
        cluster.say(f"{cluster.state_of(node)}, and was skipped ({node.instance_id})")
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
