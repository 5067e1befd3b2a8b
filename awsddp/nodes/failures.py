"""Errors of nodes, and of several nodes at once."""

from collections.abc import Mapping
from typing import Any, Literal

from awsddp.errors import NodeError
from awsddp.report import node_name

Layer = Literal["no route", "refused", "banner", "host key", "login", "lost", "silent", "command", "files"]

_NEXT: dict[Layer, str] = {
    "no route": "awsddp up opens SSH for where you are now; awsddp status shows whether the machine runs",
    "refused": "the instance is up, but sshd is not (yet): retry awsddp up in a minute",
    "banner": "the machine is overloaded or still booting: try again, or replace it: awsddp down, awsddp up",
    "host key": "another host may have this address. If in doubt: awsddp down, awsddp up",
    "login": "use the machine and AWSDDP_HOME that made the cluster; set access.user, and "
    "awsddp up; or recreate it: awsddp down, awsddp up",
    "lost": "awsddp status shows whether the machine still runs",
    "silent": "awsddp status shows whether the machine still runs",
    "command": "try again: awsddp up; if it stays so: awsddp down, awsddp up",
    "files": "fix the problem above and repeat the command",
}


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
            lines = [f"{error.message}" + (f" ({error.why})" if error.why else "") for error in ordered]
            super().__init__(f"{len(ordered)} of {of} nodes failed", "\n".join(lines), ordered[0].next)
        self.failures = dict(failures)
        self.results = dict(results)


def split(outcomes: Mapping[int, Any]) -> dict[int, Any]:
    """Return the results by node. Raises NodesFailed where any outcome is a NodeError."""
    failures = {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, NodeError)}
    results = {node: outcome for node, outcome in outcomes.items() if node not in failures}
    if failures:
        raise NodesFailed(failures, results, len(outcomes))
    return results
