"""Errors of nodes, and of several nodes at once."""

import shutil
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from awsddp.errors import AwsddpError, ConfigError, NodeError
from awsddp.report import node_name

Outcome = TypeVar("Outcome")
Layer = Literal["no route", "refused", "banner", "host key", "login", "lost", "silent", "command", "files"]

_NEXT: dict[Layer, str] = {
    "no route": "awsddp up   # opens SSH for where you are now\nawsddp status   # whether the machine runs",
    "refused": "awsddp up   # again in a minute: the instance is up, but sshd is not (yet)",
    "banner": "awsddp up   # again: the machine is overloaded or still booting\n"
    "awsddp down && awsddp up   # or replace it",
    "host key": "awsddp down && awsddp up   # if in doubt: another host may have this address",
    "login": "use the machine and AWSDDP_HOME that made the cluster\n"
    "awsddp up -o access.user=NAME   # or another login name\nawsddp down && awsddp up   # or recreate it",
    "lost": "awsddp status   # whether the machine still runs",
    "silent": "awsddp status   # whether the machine still runs",
    "command": "awsddp up   # again\nawsddp down && awsddp up   # if it stays so",
    "files": "fix the problem above and repeat the command",
}


def find_program(name: str, why: str, install: str) -> str:
    """Return the path of a program on this machine. Raises ConfigError where there is none."""
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"{name} not found on this machine", why, install)
    return path


def tail(output: str) -> str:
    """Return the last lines of what a program printed: what an error quotes of it."""
    return "\n".join(output.strip().splitlines()[-10:])


class NodeFailure(NodeError):
    """A node is unreachable, or a request to it failed.

    `layer` is where: "no route", "refused", "banner", "host key" and "login" up to the login; "lost" and
    "silent" after it; "command" and "files" on the node itself.
    """

    def __init__(self, node: int, layer: Layer, message: str, why: str = "", next: str = "") -> None:
        super().__init__(f"{node_name(node)}: {message}", why, next or _NEXT[layer])
        self.node = node
        self.layer: Layer = layer


class NodesFailed(NodeError):
    """Some nodes failed. `failures` holds the error of each, `results` the results of the others."""

    def __init__(self, failures: Mapping[int, NodeError], results: Mapping[int, Any], of: int) -> None:
        ordered = [failures[node] for node in sorted(failures)]
        if len(ordered) == 1:
            super().__init__(ordered[0].message, ordered[0].why, ordered[0].next)
        else:
            lines = [error.summary for error in ordered]
            super().__init__(f"{len(ordered)} of {of} nodes failed", "\n".join(lines), ordered[0].next)
        self.failures = dict(failures)
        self.results = dict(results)


def split(outcomes: Mapping[int, Outcome | AwsddpError]) -> dict[int, Outcome]:
    """Return the results by node. Raises NodesFailed for NodeErrors among them, any other error as it is."""
    failures: dict[int, NodeError] = {}
    results: dict[int, Outcome] = {}
    for node, outcome in outcomes.items():
        if isinstance(outcome, NodeError):
            failures[node] = outcome
        elif isinstance(outcome, AwsddpError):
            raise outcome
        else:
            results[node] = outcome
    if failures:
        raise NodesFailed(failures, results, len(outcomes))
    return results
