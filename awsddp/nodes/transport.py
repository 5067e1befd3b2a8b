"""The nodes, connected: one SSH transport a node, all opened at once, kept for the complete command."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from types import TracebackType

from awsddp.answers import take
from awsddp.errors import NodeError
from awsddp.nodes.command import RemoteCommand, Request, Result, Wakeup, command_line
from awsddp.nodes.connection import Connection, Endpoint, Preconnect, connect, load_key
from awsddp.nodes.failures import NodeFailure, split
from awsddp.nodes.jump import Jump, JumpFailure
from awsddp.nodes.parallel import ignore, run_on_nodes
from awsddp.report import OnEvent

_CHECK_S = 0.25  # between checks of the deadlines while no data arrives


@dataclass(eq=False)
class Fleet:
    """Connections to nodes, as a context manager.

    Entering connects to all nodes at once and raises NodesFailed when any cannot be reached; with `partial`
    the others are used and `failures` holds the rest. `key` is the file of the login key, `known_hosts` the
    accepted host keys by instance id, `jump` the jump host, `preconnect` what may be connected already.
    Events come from the caller's thread, as do calls of `meanwhile` while nodes are connected to.
    """

    given: InitVar[Iterable[Endpoint]]
    _: KW_ONLY
    key: Path
    known_hosts: Path
    jump: Jump | None = None
    deadline_s: float = 600
    partial: bool = False
    preconnect: Preconnect | None = None
    meanwhile: Callable[[], None] | None = None
    on_event: OnEvent = ignore
    failures: dict[int, NodeError] = field(default_factory=dict, init=False)
    _connections: dict[int, Connection] = field(default_factory=dict, init=False)
    _wakeup: Wakeup = field(default_factory=Wakeup, init=False)
    _programs: dict[int, RemoteCommand] = field(default_factory=dict, init=False)  # that answer requests

    def __post_init__(self, given: Iterable[Endpoint]) -> None:
        self.endpoints = {endpoint.node: endpoint for endpoint in given}

    def __enter__(self) -> "Fleet":
        try:
            self.reconnect(deadline_s=self.deadline_s, partial=self.partial)
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
        """Close and open the connections to some nodes (all).

        Raises NodesFailed, and JumpFailure if the jump host is unreachable.
        """
        key = load_key(self.key)

        def work(node: int, on_event: OnEvent, stop: threading.Event) -> Connection:
            early = self.preconnect.take(self.endpoints[node]) if self.preconnect is not None else None
            connection = early or connect(
                self.endpoints[node],
                key=key,
                known_hosts=self.known_hosts,
                jump=self.jump,
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
            if self.jump is not None:
                self.jump.reach(deadline_s=deadline_s if partial else 0)
            outcomes = run_on_nodes(work, chosen, meanwhile=self.meanwhile, on_event=self.on_event)
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
        """Close all connections. Commands on the nodes keep running, unless they read or write here."""
        for node in list(self._connections):
            self._drop(node)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", nodes: Iterable[int] | None = None, timeout_s: float
    ) -> dict[int, Result]:
        """Run one command on some nodes (all that are connected) at once, as `run_each` does."""
        chosen = self.nodes if nodes is None else nodes
        return self.run_each(dict.fromkeys(chosen, (argv, stdin)), timeout_s=timeout_s)

    def run_each(self, requests: Mapping[int, Request], *, timeout_s: float) -> dict[int, Result]:
        """Run a command of its own on each node, all at once; return the results, whatever the exit codes.

        Raises NodesFailed, when all have ended, for nodes that were lost or did not end within `timeout_s`.
        """
        output = {node: bytearray() for node in requests}

        def on_data(node: int, data: bytes) -> None:
            take(output[node], data, node=node)

        outcomes = self.stream(requests, on_data, silent_after_s=None, timeout_s=timeout_s)
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
        timeout_s: float | None = None,
        on_stderr: Callable[[int, bytes], None] | None = None,
    ) -> dict[int, Result | NodeError]:
        """Run a command on each node and pass its stdout on as it comes, in large chunks.

        `on_data(node, data)` is called from the caller's thread; what it raises ends all streams. A node that
        sends nothing for `silent_after_s` is lost; the others go on. Returns the Result of each node (its
        stdout is empty) or its NodeError. `on_stderr` gets stderr in the same way; without it, stderr is in
        the Result.
        """
        wakeup = Wakeup()
        commands = {
            node: RemoteCommand(self._connections[node], command_line(argv), stdin, wakeup)
            for node, (argv, stdin) in requests.items()
            if node in self._connections
        }
        return self._read(requests, commands, wakeup, on_data, on_stderr, (timeout_s, silent_after_s))

    def request(
        self,
        program: Request,
        messages: Mapping[int, bytes],
        on_data: Callable[[int, bytes], bool],
        *,
        timeout_s: float | None = None,
        silent_after_s: float | None = None,
    ) -> dict[int, Result | NodeError]:
        """Send each node's `program` one more message, and pass on its answer, as `stream` does.

        The program, the same for all requests, is started with the first message and lives as long as the
        connection: a message is one round trip. `on_data(node, data)` returns whether the answer is complete;
        the Result of its node then has exit code 0. Any other Result says how the program ended.
        """
        commands: dict[int, RemoteCommand] = {}
        for node, message in messages.items():
            if node in self._connections and node not in self._programs:
                argv, stdin = program
                self._programs[node] = RemoteCommand(
                    self._connections[node], command_line(argv), stdin, self._wakeup, persistent=True
                )
            if node in self._programs:
                commands[node] = self._programs.pop(node)  # kept only if its answer is complete
                commands[node].send(message)
        return self._read(messages, commands, self._wakeup, on_data, None, (timeout_s, silent_after_s))

    def _read(
        self,
        nodes: Iterable[int],
        commands: Mapping[int, RemoteCommand],
        wakeup: Wakeup,
        on_data: Callable[[int, bytes], bool | None],
        on_stderr: Callable[[int, bytes], None] | None,
        limits: tuple[float | None, float | None],
    ) -> dict[int, Result | NodeError]:
        """Read commands to their ends, or until `on_data` returns that the answer of a node is complete.

        `limits` are the seconds that a command may run, and may be silent.
        """
        running = dict(commands)
        outcomes: dict[int, Result | NodeError] = {
            node: self.failures.get(node) or NodeFailure(node, "lost", "not connected")
            for node in nodes
            if node not in commands
        }
        try:
            while running:
                busy = False
                for node, command in list(running.items()):
                    data = command.read()
                    is_complete = on_data(node, data) if data else False
                    said = command.read_stderr() if on_stderr is not None else b""
                    if on_stderr is not None and said:
                        on_stderr(node, said)
                    busy = busy or bool(data or said)
                    if is_complete:
                        outcomes[node] = Result(exit_code=0, stdout=b"", stderr=b"")
                        self._programs[node] = running.pop(node)
                        continue
                    outcome = (None if data else command.outcome()) or command.overdue(*limits)
                    if outcome is not None:
                        outcomes[node] = outcome
                        self._end(running.pop(node), outcome)
                if not busy and running:
                    wakeup.wait(_CHECK_S)
        finally:
            for command in running.values():
                self._end(command, None)
        return {node: outcomes[node] for node in nodes}

    def _end(self, command: RemoteCommand, outcome: Result | NodeError | None) -> None:
        """Close a command; also the connection, if the node was lost or stdin is blocked."""
        node = command.connection.endpoint.node
        if isinstance(outcome, NodeError):
            self.failures[node] = outcome
        else:
            command.wait_started()
        if isinstance(outcome, NodeError) or command.is_sending:
            self._drop(node)
        else:
            command.close()

    def _drop(self, node: int) -> None:
        self._programs.pop(node, None)
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.drop()
