"""Errors on nodes. Each kind of error has its own next step."""

import shutil
from typing import Literal

from awsddp.errors import ConfigError, NodeError
from awsddp.util.formatting import node_name

Layer = Literal[
    "no route", "refused", "banner", "host key", "login", "lost", "silent", "command", "files", "changed"
]

_NEXT: dict[Layer, str] = {
    "no route": "awsddp up   # allows SSH from your address\nawsddp status   # shows whether the node runs",
    "refused": "awsddp up   # again in a minute: the instance is up, but sshd is not (yet)",
    "banner": "awsddp up   # again: the machine is overloaded or still booting\n"
    "awsddp down && awsddp up   # or replace it",
    "host key": "awsddp down && awsddp up   # if in doubt: another host may have this address",
    "login": "use the machine and AWSDDP_HOME that made the cluster\n"
    "awsddp up -o access.user=NAME   # or another login name\nawsddp down && awsddp up   # or recreate it",
    "lost": "awsddp status   # shows whether the node still runs",
    "silent": "awsddp status   # shows whether the node still runs",
    "command": "awsddp up   # again\nawsddp down && awsddp up   # if the error persists",
    "files": "fix the problem above and repeat the command",
    "changed": "repeat the command",
}


def find_program(name: str, why: str, install: str) -> str:
    """Return the path of a program on this machine. Raises ConfigError if the program is not installed."""
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"{name} not found on this machine", why, install)
    return path


def tail(output: str) -> str:
    """Return the last lines of a program's output for an error message."""
    return "\n".join(output.strip().splitlines()[-10:])


class NodeFailure(NodeError):
    """A node is unreachable, or a request to it failed.

    `layer` is the step that failed: "no route", "refused", "banner", "host key" or "login" while connecting,
    "lost" or "silent" on an open connection, "command" or "files" for a request on the node, and "changed"
    for an S3 object that was replaced during the transfer.
    """

    def __init__(self, node: int, layer: Layer, message: str, why: str = "", next_step: str = "") -> None:
        super().__init__(f"{node_name(node)}: {message}", why, next_step or _NEXT[layer])
        self.node = node
        self.layer: Layer = layer
