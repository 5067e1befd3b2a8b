"""The nodes, connected: one SSH transport a node, all opened at once, kept for the whole command."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from awsddp.answers import MOST_BYTES, malformed
from awsddp.errors import NodeError
from awsddp.nodes.ahead import HeadStart
from awsddp.nodes.connection import Connection, Endpoint, connect, load_key
from awsddp.nodes.exchange import Bell, Exchange, Request, Result, command_line
from awsddp.nodes.failures import NodeFailure, split
from awsddp.nodes.jump import Jump, JumpFailure, reach
from awsddp.nodes.parallel import ignore, side_by_side
from awsddp.report import OnEvent

__all__ = ["Endpoint", "Fleet", "Request", "Result"]

_LOOK_S = 0.25  # how often the deadlines are looked at while nothing comes


class Fleet:
    """Connections to nodes, as a context manager.

    Entering connects to all nodes at once and raises NodesFailed when any cannot be reached; with `partial`
    the others are used and `failures` tells of the rest. `key` is the file of the login key, `known_hosts`
    the accepted host keys by instance id, `jump` what all goes over, `ahead` connections that may have been
    begun already. Events come from the caller's thread.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        *,
        key: Path,
        known_hosts: Path,
        jump: Jump | None = None,
        deadline_s: float = 600,
        partial: bool = False,
        ahead: HeadStart | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        self.endpoints = {endpoint.node: endpoint for endpoint in endpoints}
        self.failures: dict[int, NodeError] = {}
        self._key_file = key
        self._known_hosts = known_hosts
        self._jump = jump
        self._deadline_s = deadline_s
        self._partial = partial
        self._ahead = ahead
        self._on_event = on_event
        self._connections: dict[int, Connection] = {}
        self._bell = Bell()
        self._staying: dict[int, Exchange] = {}  # the program that each node is in conversation with

    def __enter__(self) -> "Fleet":
        try:
            self.reconnect(deadline_s=self._deadline_s, partial=self._partial)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that are connected."""
        return tuple(sorted(self._connections))

    def host_key(self, node: int) -> str:
        """Return the public host key that verified the connection to `node`."""
        return self._connections[node].host_key

    def reconnect(
        self, nodes: Iterable[int] | None = None, *, deadline_s: float = 30, partial: bool = False
    ) -> None:
        """Connect anew to some nodes (all), whether they are connected or not.

        Raises NodesFailed, JumpFailure where not even the jump host can be reached.
        """
        key = load_key(self._key_file)

        def work(node: int, on_event: OnEvent, stop: threading.Event) -> Connection:
            begun = self._ahead.take(self.endpoints[node]) if self._ahead is not None else None
            connection = begun or connect(
                self.endpoints[node],
                key=key,
                known_hosts=self._known_hosts,
                jump=self._jump,
                deadline_s=deadline_s,
                stop=stop,
                on_event=on_event,
            )
            if stop.is_set():
                connection.drop()
            return connection

        chosen = sorted(self.endpoints if nodes is None else nodes)
        for node in chosen:
            self._drop(node)
        try:
            if self._jump is not None:
                reach(self._jump, deadline_s=deadline_s if partial else 0)
            outcomes = side_by_side(work, chosen, on_event=self._on_event)
        except JumpFailure as failure:
            if not partial:
                raise
            outcomes = dict.fromkeys(chosen, failure)
        for node, outcome in outcomes.items():
            if isinstance(outcome, NodeError):
                self.failures[node] = outcome
            else:
                self.failures.pop(node, None)
                self._connections[node] = outcome
        if not partial:
            split(outcomes)

    def close(self) -> None:
        """End all connections. What still runs on the nodes keeps running, unless it reads or writes here."""
        for node in list(self._connections):
            self._drop(node)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", nodes: Iterable[int] | None = None, timeout_s: float
    ) -> dict[int, Result]:
        """Run one command on some nodes (all that are connected), side by side, as `run_each` does."""
        chosen = self.nodes if nodes is None else nodes
        return self.run_each(dict.fromkeys(chosen, (argv, stdin)), timeout_s=timeout_s)

    def run_each(self, requests: Mapping[int, Request], *, timeout_s: float) -> dict[int, Result]:
        """Run a command of its own on each node, side by side; return what each left, whatever its exit code.

        Raises NodesFailed, when all have ended, for nodes that were lost or did not end within `timeout_s`.
        """
        output = {node: bytearray() for node in requests}

        def on_data(node: int, data: bytes) -> None:
            output[node] += data
            if len(output[node]) > MOST_BYTES:
                raise malformed(node, f"over {MOST_BYTES >> 20} MB")

        outcomes = self._talk(requests, on_data, timeout_s=timeout_s, silent_after_s=None)
        return split(
            {
                node: replace(end, stdout=bytes(output[node])) if isinstance(end, Result) else end
                for node, end in outcomes.items()
            }
        )

    def stream(
        self,
        requests: Mapping[int, Request],
        on_data: Callable[[int, bytes], None],
        *,
        silent_after_s: float | None,
        on_stderr: Callable[[int, bytes], None] | None = None,
    ) -> dict[int, Result | NodeError]:
        """Run a command on each node and hand over its stdout as it comes, in large chunks.

        `on_data(node, data)` is called from the caller's thread; what it raises ends all streams. A node that
        sends nothing for `silent_after_s` is given up as lost; the others go on. Returns each node's Result
        (its stdout is empty) or the NodeError of a node that was lost. `on_stderr` gets what comes on stderr
        in the same way; without it, that is in the Result.
        """
        return self._talk(
            requests, on_data, timeout_s=None, silent_after_s=silent_after_s, on_stderr=on_stderr
        )

    def converse(
        self,
        program: Request,
        messages: Mapping[int, bytes],
        on_data: Callable[[int, bytes], bool],
        *,
        timeout_s: float | None = None,
        silent_after_s: float | None = None,
    ) -> dict[int, Result | NodeError]:
        """Send each node's `program` a message more, and hand over what it answers, as `stream` does.

        The program, the same for all conversations, is started with the first message and stays for as long
        as the connection: a message is one round trip. `on_data(node, data)` tells whether the answer is
        whole. The Result of a node is then empty, with exit code 0; else it tells how the program ended.
        """
        talks: dict[int, Exchange] = {}
        for node, message in messages.items():
            if node in self._connections and node not in self._staying:
                argv, stdin = program
                self._staying[node] = Exchange(
                    self._connections[node], command_line(argv), stdin, self._bell, stays=True
                )
            if node in self._staying:
                talks[node] = self._staying[node]
                talks[node].say(message)
        whole: set[int] = set()

        def take(node: int, data: bytes) -> None:
            if on_data(node, data):
                whole.add(node)

        try:
            return self._attend(
                messages, talks, self._bell, take, whole, timeout_s=timeout_s, silent_after_s=silent_after_s
            )
        finally:
            for node in talks.keys() - whole:  # in the middle of an answer: the next message starts anew
                self._staying.pop(node, None)

    def _talk(
        self,
        requests: Mapping[int, Request],
        on_data: Callable[[int, bytes], None],
        *,
        timeout_s: float | None,
        silent_after_s: float | None,
        on_stderr: Callable[[int, bytes], None] | None = None,
    ) -> dict[int, Result | NodeError]:
        bell = Bell()
        talks = {
            node: Exchange(self._connections[node], command_line(argv), stdin, bell)
            for node, (argv, stdin) in requests.items()
            if node in self._connections
        }
        return self._attend(
            requests,
            talks,
            bell,
            on_data,
            set(),
            timeout_s=timeout_s,
            silent_after_s=silent_after_s,
            on_stderr=on_stderr,
        )

    def _attend(
        self,
        nodes: Iterable[int],
        talks: dict[int, Exchange],
        bell: Bell,
        on_data: Callable[[int, bytes], None],
        whole: set[int],
        *,
        timeout_s: float | None,
        silent_after_s: float | None,
        on_stderr: Callable[[int, bytes], None] | None = None,
    ) -> dict[int, Result | NodeError]:
        """Carry exchanges to their ends, or until `on_data` counts a node among the `whole`."""
        open_ = dict(talks)
        outcomes: dict[int, Result | NodeError] = {
            node: self.failures.get(node) or NodeFailure(node, "lost", "not connected")
            for node in nodes
            if node not in talks
        }
        try:
            while open_:
                busy = False
                for node, talk in list(open_.items()):
                    data = talk.read()
                    if data:
                        busy = True
                        on_data(node, data)
                    if on_stderr is not None and (said := talk.read_stderr()):
                        busy = True
                        on_stderr(node, said)
                    if node in whole:
                        outcomes[node] = Result(exit_code=0, stdout=b"", stderr=b"")
                        del open_[node]
                        continue
                    outcome = (None if data else talk.outcome()) or talk.overdue(timeout_s, silent_after_s)
                    if outcome is not None:
                        outcomes[node] = outcome
                        self._end(open_.pop(node), outcome)
                if not busy and open_:
                    bell.wait(_LOOK_S)
        finally:
            for talk in open_.values():
                self._end(talk, None)
        return {node: outcomes[node] for node in nodes}

    def _end(self, talk: Exchange, outcome: Result | NodeError | None) -> None:
        """Leave an exchange. A node that was lost, or whose line is blocked, loses its connection."""
        node = talk.connection.endpoint.node
        if isinstance(outcome, NodeError):
            self.failures[node] = outcome
        else:
            talk.settle()
        if isinstance(outcome, NodeError) or talk.sending:
            self._drop(node)
        else:
            talk.close()

    def _drop(self, node: int) -> None:
        self._staying.pop(node, None)
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.drop()
