"""What several verbs do with a cluster that is up: look at it and connect to its nodes."""

import contextlib
import importlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from awsddp.cluster import Cluster, Node, Prepared
from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.report import node_name
from awsddp.state import Record, write_private
from awsddp.verbs.context import NOWHERE, Context, Found, found
from awsddp.verbs.settling import settled

if TYPE_CHECKING:
    from awsddp.aws.session import Aws
    from awsddp.nodes.jump import Jump
    from awsddp.nodes.preconnect import Preconnect
    from awsddp.nodes.transport import Endpoint, Fleet

JUMP = "network.jump"


def import_beside(module: str) -> None:
    """Import a module that will be needed while AWS or a node is waited for."""
    threading.Thread(target=importlib.import_module, args=(module,), daemon=True).start()


class NoNodes(NodeError):
    """The cluster exists, and none of its nodes can be asked anything now. `stopped` hold these jobs."""

    stopped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A cluster whose nodes are prepared and, as AWS says, running. `nodes` are sorted by number.

    `others` live as well and are not of use now. `preconnect` holds connections that were opened while AWS
    was asked.
    """

    aws: "Aws"
    record: Record
    nodes: tuple[Node, ...]
    others: tuple[Node, ...] = ()
    preconnect: "Preconnect | None" = None

    @property
    def unfetched(self) -> set[str]:
        """The jobs whose results are not home, by the tags of the nodes."""
        return {job for node in (*self.nodes, *self.others) for job in node.unfetched}

    def prepared(self, node: int) -> Prepared:
        """Return what was found on a node."""
        return next(one for one in self.record.prepared if one.node == node)


@contextlib.contextmanager
def ready(ctx: Context) -> Iterator[Ready]:
    """Yield the cluster, ready to work. Raises NotFoundError, NodeError where it is not, CloudError."""
    with preconnected(ctx) as preconnect, found(ctx) as seen:
        yield replace(ready_in(ctx, seen), preconnect=preconnect)


@contextlib.contextmanager
def preconnected(ctx: Context) -> "Iterator[Preconnect | None]":
    """Begin to connect to the nodes where the folder last saw them, unless that is over a jump host.

    What AWS says decides what is used.
    """
    from awsddp.nodes.preconnect import Preconnect
    from awsddp.nodes.sync import read_ssh_config

    preconnect = None
    with contextlib.suppress(OSError, ValueError, ConfigError):
        if jump_of(ctx, ctx.folder.read()) is None:
            known = read_ssh_config(ctx.folder.ssh_config.read_text(encoding="utf-8"))
            preconnect = Preconnect(known, key=ctx.folder.key, known_hosts=ctx.folder.known_hosts)
    try:
        yield preconnect
    finally:
        if preconnect is not None:
            preconnect.close()


def ready_in(ctx: Context, seen: Found | None) -> Ready:
    """Return the cluster of a search, ready to work. Raises NotFoundError or NodeError where it is not."""
    name = ctx.spec.name
    record, nodes = login_to(ctx, seen)
    assert seen is not None
    running = {node.instance_id for node in nodes if node.state == "running"}
    if not running and all(node.state in ("stopped", "stopping") for node in nodes):
        raise NodeError(f"cluster {name} is stopped", "", "awsddp up   # start it")
    if not record.prepared or {one.instance_id for one in record.prepared} != running:
        raise NodeError(
            f"cluster {name} is not ready",
            f"{len(running)} of its {len(nodes)} nodes run, {len(record.prepared)} were prepared",
            "awsddp up   # finish it",
        )
    return Ready(aws=seen.aws, record=record, nodes=nodes)


def living(ctx: Context, seen: Found | None) -> Cluster:
    """Return the cluster of a search, of which something lives, once AWS lists what this machine made ready.

    Raises NotFoundError, CloudError.
    """
    cluster = seen.cluster if seen else None
    if seen is not None and seen.record is not None:
        cluster = settled(seen.aws, ctx.spec.name, seen.record, cluster)
    if cluster is None or not cluster.live:
        looked = ", ".join(seen.looked if seen else NOWHERE)
        raise NotFoundError(f"no cluster {ctx.spec.name}", f"looked in: {looked}", "awsddp up   # make it")
    return cluster


def login_to(ctx: Context, seen: Found | None) -> tuple[Record, tuple[Node, ...]]:
    """Return the record and the nodes of a cluster whose key is here. Raises NotFoundError, CloudError."""
    cluster = living(ctx, seen)
    record = seen.record if seen else None
    if record is None or record.id != cluster.id or not ctx.folder.key.exists():
        raise NotFoundError(
            f"cluster {cluster.name} exists, but its key is not on this machine",
            f"{ctx.folder.path} does not hold it",
            "go to the machine that made it, or end it: awsddp down",
        )
    return record, cluster.live


def chosen_nodes(nodes: Sequence[Node], number: int | None) -> tuple[Node, ...]:
    """Return the node of this number, or all of them. Raises NotFoundError."""
    chosen = tuple(node for node in nodes if number in (None, node.node))
    if not chosen:
        known = ", ".join(node_name(node.node) for node in nodes)
        raise NotFoundError(f"no {node_name(number or 0)} in this cluster", f"there are: {known}")
    return chosen


def endpoints(record: Record, nodes: Sequence[Node]) -> "tuple[Endpoint, ...]":
    """Return how each node is reached. Raises NodeError for a node without an address."""
    from awsddp.nodes.transport import Endpoint

    lost = [node_name(node.node) for node in nodes if node.address is None]
    if lost:
        raise NodeError(f"{', '.join(lost)}: no address", "the instance does not run", "awsddp status")
    return tuple(
        Endpoint(
            node=node.node,
            instance_id=node.instance_id,
            host=str(node.address),
            port=record.target.ssh_port,
            user=record.ssh_user,
        )
        for node in nodes
    )


def jump_of(ctx: Context, record: Record | None = None) -> "Jump | None":
    """Return the jump host that is asked for now, else the one that the cluster was made with."""
    asked = record.asked if record is not None and JUMP not in ctx.spec.given else {}
    name = asked.get(JUMP, ctx.spec.network.jump)
    if not name:
        return None
    from awsddp.nodes.jump import Jump

    return Jump(name=name, folder=ctx.home)


def reach_jump(ctx: Context) -> None:
    """Connect to the jump host, if there is one, before anything is made that only it leads to.

    Raises JumpFailure, ConfigError.
    """
    jump = jump_of(ctx)
    if jump is not None:
        from awsddp.nodes.jump import reach

        reach(jump)


def connect(
    ctx: Context,
    record: Record,
    nodes: Sequence[Node],
    *,
    deadline_s: float = 60,
    partial: bool = False,
    preconnect: "Preconnect | None" = None,
) -> "Fleet":
    """Return the connections to the nodes, to be entered; the ssh_config for rsync is written beside."""
    from awsddp.nodes.transport import Fleet

    places = write_ssh_config(ctx, record, nodes)
    return Fleet(
        places,
        key=ctx.folder.key,
        known_hosts=ctx.folder.known_hosts,
        jump=jump_of(ctx, record),
        deadline_s=deadline_s,
        partial=partial,
        preconnect=preconnect,
        on_event=ctx.on_event,
    )


def reach(ctx: Context, cluster: Ready, nodes: Sequence[Node] | None = None) -> "Fleet":
    """Return the connections to all or some nodes of a cluster that is ready, to be entered."""
    return connect(
        ctx, cluster.record, cluster.nodes if nodes is None else nodes, preconnect=cluster.preconnect
    )


def write_ssh_config(ctx: Context, record: Record, nodes: Sequence[Node]) -> "tuple[Endpoint, ...]":
    """Write how the nodes are reached for ssh, rsync and editors, where it changed, and return it."""
    from awsddp.nodes.sync import ssh_config

    places = endpoints(record, nodes)
    jump = jump_of(ctx, record)
    text = ssh_config(places, ctx.folder.key, ctx.folder.known_hosts, jump=jump).encode()
    if not ctx.folder.ssh_config.exists() or ctx.folder.ssh_config.read_bytes() != text:
        write_private(ctx.folder.ssh_config, text)
    return places
