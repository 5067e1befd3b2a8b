"""exec: a command on every node at once, in the synced folder, with the ranks' Python first on the PATH."""

import posixpath
from collections.abc import Callable, Sequence
from typing import Any

from awsddp.errors import NodeError
from awsddp.report import node_name
from awsddp.verbs.cluster import ClusterHandle, choose_nodes
from awsddp.verbs.context import Context

# What is the user's comes as words of its own: nothing is pasted into the script.
_RUN = 'PATH="$1:$PATH"; export PATH; shift; cd ~/awsddp/work 2>/dev/null || cd; exec "$@"'

OnOutput = Callable[[int, bytes, bool], None]
"""Gets a node's number, what it said, and whether it said so on stderr."""


def exec(
    ctx: Context, *, words: Sequence[str], node: int | None = None, stdin: bytes = b"", on_output: OnOutput
) -> dict[str, Any]:
    """Run a command on all nodes (or `node`) and return the `exec` document, whatever its exit codes.

    Several words are a program and its arguments, one word is a line for the node's shell. `stdin` goes to
    every node. Raises NotFoundError or NodeError for nodes that are not there or are lost.
    """
    argv = list(words) if len(words) > 1 else ["sh", "-c", words[0]]
    said: dict[tuple[int, bool], bytearray] = {}

    def on_data(number: int, data: bytes, error: bool = False) -> None:
        said.setdefault((number, error), bytearray()).extend(data)
        on_output(number, data, error)

    with ClusterHandle.ready(ctx) as cluster:
        nodes = choose_nodes(cluster.nodes, node)
        with cluster.connect(nodes) as fleet:
            requests = {one.node: (_line(cluster, one.node, argv), stdin) for one in nodes}
            ends = fleet.stream(
                requests,
                on_data,
                silent_after_s=None,
                on_stderr=lambda number, data: on_data(number, data, True),
            )
    lost = {number: end for number, end in ends.items() if isinstance(end, NodeError)}
    if lost:
        first = next(iter(lost.values()))
        raise NodeError(
            f"{', '.join(map(node_name, lost))}: lost while the command ran", str(first), first.next
        )
    return {
        "nodes": [
            {
                "node": number,
                "exit_code": None if isinstance(end, NodeError) else end.exit_code,
                "stdout": bytes(said.get((number, False), b"")).decode(errors="replace"),
                "stderr": bytes(said.get((number, True), b"")).decode(errors="replace"),
            }
            for number, end in sorted(ends.items())
        ]
    }


def _line(cluster: ClusterHandle, node: int, argv: Sequence[str]) -> list[str]:
    return ["sh", "-c", _RUN, "sh", posixpath.dirname(cluster.prepared(node).ranks_python), *argv]
