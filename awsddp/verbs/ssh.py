"""ssh: the command line of the system's ssh for a node: pinned host keys, only the cluster's key."""

import posixpath
import shlex
from collections.abc import Sequence

from awsddp.errors import NodeError
from awsddp.report import node_name
from awsddp.state import Record
from awsddp.verbs.cluster import ClusterHandle, choose_nodes, naming_holder
from awsddp.verbs.context import Context


def ssh(
    ctx: Context, *, node: int = 0, words: Sequence[str] = (), ports: Sequence[str] = (), tty: bool = False
) -> list[str]:
    """Return the command line that opens a shell on a node, or runs `words` there as ssh does.

    `ports` are forwarded, as "6006:localhost:6006". With `tty` a command gets a terminal.
    The node need not be ready, nor the others reachable. Raises NotFoundError, and NodeError for a node that
    does not run, or whose host key is not known yet.
    """
    from awsddp.nodes import hostkeys

    with naming_holder(ctx), ClusterHandle.find(ctx) as cluster:
        nodes = cluster.login_nodes()
        (chosen,) = choose_nodes(nodes, node)
        if chosen.state != "running" or chosen.address is None:
            raise NodeError(
                f"{node_name(node)} is not running", f"it is {chosen.state}", "awsddp up   # start it"
            )
        if chosen.instance_id not in hostkeys.read(ctx.folder.known_hosts):
            raise NodeError(
                f"{node_name(node)} is being prepared",
                "its host key is not known yet",
                "awsddp up   # finish it",
            )
        cluster.publish()
        words = [*(["-t"] if tty and words else []), node_name(node), *_command(cluster.record, node, words)]
        forwards = [word for port in ports for word in ("-L", port)]
        options = ["-o", "ExitOnForwardFailure=yes", *forwards] if ports else []
        return ["ssh", "-F", str(ctx.folder.ssh_config), *options, *words]


def _command(record: Record, node: int, words: Sequence[str]) -> list[str]:
    """Return the command as the node's shell gets it: with the PATH that a login shell has there."""
    python = next((one.ranks_python for one in record.prepared if one.node == node), None)
    if not words or python is None:
        return ["--", *words] if words else []
    return ["--", f'export PATH={shlex.quote(posixpath.dirname(python))}:"$PATH";', *words]
