"""exec: a command on every node at once, in the synced folder, with the ranks' Python first on the PATH."""

import contextlib
import os
import posixpath
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.errors import NodeError
from awsddp.jobs.protocol import FIRST_PORT
from awsddp.jobs.ranks import Rendezvous, fill, layout
from awsddp.nodes.failures import split
from awsddp.verbs import sync
from awsddp.verbs.advice import advised
from awsddp.verbs.cluster import ClusterHandle, choose_nodes
from awsddp.verbs.context import Context

if TYPE_CHECKING:
    from awsddp.nodes.command import Result
    from awsddp.nodes.transport import Fleet

# What is the user's comes as words of its own: nothing is pasted into the script.
_RUN = 'PATH="$1:$PATH"; export PATH; shift; cd ~/awsddp/work 2>/dev/null || cd; exec "$@"'

_MISSING = 'cd ~/awsddp/work 2>/dev/null; for name; do [ -e "$name" ] || printf "%s\\0" "$name"; done'
_LOOK_S = 20.0

OnOutput = Callable[[int, bytes, bool], None]
"""Gets a node's number, what it said, and whether it said so on stderr."""


def exec(
    ctx: Context, *, words: Sequence[str], node: int | None = None, stdin: bytes = b"", on_output: OnOutput
) -> dict[str, Any]:
    """Run a command on all nodes (or `node`) and return the `exec` document, whatever its exit codes.

    Several words are a program and its arguments, one word is a line for bash. Placeholders are those of a
    rank per node. `stdin` goes to every node. Raises NotFoundError or NodeError for nodes that are not there
    or are lost.
    """
    argv = list(words) if len(words) > 1 else ["bash", "-c", words[0]]
    said: dict[tuple[int, bool], bytearray] = {}

    def on_data(number: int, data: bytes, error: bool = False) -> None:
        said.setdefault((number, error), bytearray()).extend(data)
        on_output(number, data, error)

    with ClusterHandle.ready(ctx, node=node) as cluster:
        nodes = choose_nodes(cluster.nodes, node)
        with cluster.connect(nodes) as fleet:
            lines = _lines(cluster, {one.node for one in nodes}, argv)
            requests = {number: (line, stdin) for number, line in lines.items()}
            ends = fleet.stream(
                requests,
                on_data,
                silent_after_s=None,
                on_stderr=lambda number, data: on_data(number, data, True),
            )
            results = split(ends)
            _say_missing(ctx, fleet, [node for node, end in results.items() if end.exit_code], words)
    return {
        "nodes": [
            {
                "node": number,
                "exit_code": end.exit_code,
                "stdout": bytes(said.get((number, False), b"")).decode(errors="replace"),
                "stderr": bytes(said.get((number, True), b"")).decode(errors="replace"),
            }
            for number, end in sorted(results.items())
        ]
    }


def _lines(cluster: ClusterHandle, chosen: Collection[int], argv: Sequence[str]) -> dict[int, list[str]]:
    """Return the command of each chosen node; its rank is that among all nodes of the cluster."""
    nodes = sorted(cluster.nodes, key=lambda one: one.node)
    rendezvous = Rendezvous(job="exec", master_addr=str(nodes[0].private_ip), master_port=FIRST_PORT)
    return {
        rank.node: [
            *("sh", "-c", _RUN, "sh", posixpath.dirname(cluster.prepared(rank.node).ranks_python)),
            *(fill(word, rank, rendezvous=rendezvous) for word in argv),
        ]
        for rank in layout([one.node for one in nodes], gpus=0, nproc_per_node=1)
        if rank.node in chosen
    }


def _say_missing(ctx: Context, fleet: "Fleet", nodes: Collection[int], words: Sequence[str]) -> None:
    """Say which files that a failed command names are here alone, and what sends them."""
    named = _named_files(Path(ctx.job.sync.workdir), words)
    if not (nodes and named):
        return
    answers: Mapping[int, Result] = {}
    with contextlib.suppress(NodeError):
        answers = fleet.run(["sh", "-c", _MISSING, "sh", *named], nodes=nodes, timeout_s=_LOOK_S)
    missing = {name for one in answers.values() for name in one.stdout.decode(errors="replace").split("\0")}
    listing = sync.found_here(ctx) if missing.intersection(named) else None
    for name in named:
        if listing is not None and name in missing:
            found = listing.keeper(name)
            why = f"{found[1]} keeps {found[0]} here" if found else advised(ctx, "awsddp sync   # sends it")
            ctx.say(f"{name} is here, and not on the nodes: {why}")


def _named_files(workdir: Path, words: Sequence[str]) -> list[str]:
    """Return the words of a command that are files of the synced folder."""
    try:
        split = shlex.split(words[0]) if len(words) == 1 else list(words)
    except ValueError:
        split = words[0].split()
    found = dict.fromkeys(
        word.removeprefix("./") for word in split if word and not word.startswith(("-", "/"))
    )
    # Unlike Path.exists it is False, too, for a name that no file can have.
    return [word for word in found if word and os.path.exists(workdir / word)]  # noqa: PTH110
