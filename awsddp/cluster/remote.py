"""exec and ssh: run commands and open shells on the nodes."""

import posixpath
import shlex
from collections.abc import Callable, Collection, Sequence

from awsddp.errors import NodeError
from awsddp.model.documents import ExecDocument, NodeOutput
from awsddp.session.connect import choose_nodes, connect, publish_addresses, ready_cluster, require_key
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.locate import find_cluster
from awsddp.state import Record
from awsddp.util.formatting import node_name
from awsddp.util.parallel import results_or_raise

OnOutput = Callable[[int, bytes, bool], None]
"""A callback that receives a node's number, a piece of output, and True if the piece is from stderr."""
# User input is passed as arguments and never inserted into the script.
_RUN = 'PATH="$1:$PATH"; export PATH; shift; cd ~/awsddp/work 2>/dev/null || cd; exec "$@"'


def run_on_nodes(
    session: Session, *, words: Sequence[str], node: int | None, stdin: bytes, on_output: OnOutput
) -> ExecDocument:
    """Run a command on all nodes (or only on `node`), and return the `exec` document.

    No exit code raises an error. Several words are a program and its arguments; a single word is a line for
    bash. Placeholders are filled as for a job with one rank per node. `stdin` is sent to every node. Raises
    NotFoundError or NodeError for nodes that do not exist or cannot be reached.
    """
    from awsddp.job.unsynced_data import report_unsynced_files

    argv = list(words) if len(words) > 1 else ["bash", "-c", words[0]]
    output: dict[tuple[int, bool], bytearray] = {}

    def on_data(number: int, data: bytes, is_error: bool = False) -> None:
        output.setdefault((number, is_error), bytearray()).extend(data)
        on_output(number, data, is_error)

    with ready_cluster(session, node=node) as cluster:
        nodes = choose_nodes(cluster.nodes, node)
        with connect(cluster, nodes) as connected:
            lines = _command_lines(cluster, {chosen_node.node for chosen_node in nodes}, argv)
            requests = {number: (line, stdin) for number, line in lines.items()}
            ends = connected.fleet.stream(
                requests,
                on_data,
                on_stderr=lambda number, data: on_data(number, data, True),
            )
            results = results_or_raise(ends)
            failed = [number for number, end in results.items() if end.exit_code]
            report_unsynced_files(session, connected.fleet, failed, words)
    return ExecDocument(
        nodes=tuple(
            NodeOutput(
                node=number,
                exit_code=end.exit_code,
                stdout=bytes(output.get((number, False), b"")).decode(errors="replace"),
                stderr=bytes(output.get((number, True), b"")).decode(errors="replace"),
            )
            for number, end in sorted(results.items())
        )
    )


def _command_lines(
    cluster: LocatedCluster, chosen: Collection[int], argv: Sequence[str]
) -> dict[int, list[str]]:
    """Return each chosen node's command; ranks are numbered across all of the cluster's nodes."""
    from awsddp.agent_client.launch_requests import FIRST_PORT
    from awsddp.agent_client.rank_layout import Rendezvous, fill_placeholders, layout_ranks

    nodes = sorted(cluster.nodes, key=lambda node: node.node)
    rendezvous = Rendezvous(job="exec", master_addr=str(nodes[0].private_ip), master_port=FIRST_PORT)
    return {
        rank.node: [
            *(
                "sh",
                "-c",
                _RUN,
                "sh",
                posixpath.dirname(cluster.record.prepared_by_node[rank.node].ranks_python),
            ),
            *(fill_placeholders(word, rank, rendezvous=rendezvous) for word in argv),
        ]
        for rank in layout_ranks([node.node for node in nodes], gpus=0, nproc_per_node=1)
        if rank.node in chosen
    }


def ssh(session: Session, *, node: int, words: Sequence[str], ports: Sequence[str], tty: bool) -> list[str]:
    """Return the command line that opens a shell on a node or, with `words`, runs a command there.

    `ports` are forwarded; each is a string such as "6006:localhost:6006". With `tty`, a command gets a
    terminal. The node need not be ready, and the other nodes need not be reachable. Raises NotFoundError, and
    NodeError for a node that is not running or whose host key is not known yet.
    """
    from awsddp.nodes import hostkeys

    with find_cluster(session, name_lock_holder=True) as cluster:
        cluster, nodes = require_key(cluster)
        (chosen,) = choose_nodes(nodes, node)
        if chosen.state != "running" or chosen.address is None:
            raise NodeError(
                f"{node_name(node)} is not running", f"it is {chosen.state}", "awsddp up   # start it"
            )
        if chosen.instance_id not in hostkeys.load_keys(session.folder.known_hosts):
            raise NodeError(
                f"{node_name(node)} is being prepared",
                "its host key is not known yet",
                "awsddp up   # finish it",
            )
        cluster = publish_addresses(cluster)
        words = [
            *(["-t"] if tty and words else []),
            node_name(node),
            *_shell_command(cluster.record, node, words),
        ]
        forwards = [word for port in ports for word in ("-L", port)]
        options = ["-o", "ExitOnForwardFailure=yes", *forwards] if ports else []
        return ["ssh", "-F", str(session.folder.ssh_config), *options, *words]


def _shell_command(record: Record, node: int, words: Sequence[str]) -> list[str]:
    """Return the words that ssh runs on the node, with the ranks' Python environment first on PATH."""
    python = next((prepared.ranks_python for prepared in record.prepared if prepared.node == node), None)
    if not words or python is None:
        return ["--", *words] if words else []
    return ["--", f'export PATH={shlex.quote(posixpath.dirname(python))}:"$PATH";', *words]
