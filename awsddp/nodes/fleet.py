"""SSH connections to all nodes, which are opened at the same time, and the commands that run over them."""

import contextlib
import functools
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace

import paramiko

from awsddp.errors import NodeError
from awsddp.model.events import OnEvent
from awsddp.model.node_answers import MAX_BYTES, append_output
from awsddp.model.records import JobRecord
from awsddp.nodes.connection import Connection, Preconnect, connect, load_key
from awsddp.nodes.login import Endpoint, JumpFailure, Login
from awsddp.nodes.node_failures import Layer, NodeFailure, tail
from awsddp.util.parallel import ignore_event, results_or_raise, run_in_thread, run_on_nodes

_CHECK_S = 0.25  # how often deadlines are checked while no data arrives
_CHUNK = 256 * 1024
_START_S = 1.0

Request = tuple[Sequence[str], bytes]  # argv, stdin


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds the exit code and the output of a command on a node. `exit_code` is -1 if a signal ended the
    command."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    def tail(self) -> str:
        """Return the last lines of stderr, or of stdout if stderr is empty."""
        return tail((self.stderr.strip() or self.stdout).decode(errors="replace"))


def command_line(argv: Sequence[str]) -> str:
    """Return `argv` quoted for a remote shell. All remote commands are quoted by this function."""
    return shlex.join(argv)


class Wakeup(threading.Event):
    """An event that wakes the thread that reads many channels.

    paramiko sets the event when a channel has data or has ended. paramiko also clears the event when one
    buffer is empty, although another buffer may hold data. For this reason `clear` does nothing.
    """

    def clear(self) -> None:
        """Do nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, then reset it."""
        is_set = super().wait(timeout)
        super().clear()
        return is_set


class RemoteCommand:
    """A command on a node.

    A background thread starts the command and sends its stdin. The caller's thread reads the output.

    The stdin of a `persistent` command stays open, and `send` writes to it.
    """

    def __init__(
        self, connection: Connection, request: Request, wakeup: Wakeup, *, persistent: bool = False
    ) -> None:
        self.connection = connection
        self._wakeup = wakeup
        self._channel: paramiko.Channel | None = None
        self._read_error: BaseException | None = None
        self._stderr = bytearray()
        self._run_in_background(functools.partial(self._start, *request, persistent=persistent))

    def send(self, data: bytes) -> None:
        """Send more data to stdin after the pending data, and restart the timeouts."""
        pending = self._sending

        def send_next() -> None:
            pending.result()
            self._send(data)

        self._run_in_background(send_next)

    @property
    def is_sending(self) -> bool:
        """True while the command is being started or its stdin is being sent."""
        return not self._sending.done()

    def wait_started(self) -> None:
        """Wait briefly for a command that is being started, so that its channel can be closed."""
        futures.wait([self._sending], _START_S)

    def read(self) -> bytes:
        """Return at most one chunk of available stdout, and buffer stderr for `read_stderr`."""
        channel = self._channel
        if channel is None:
            return b""
        try:
            if channel.recv_stderr_ready():
                self._stderr += channel.recv_stderr(_CHUNK)
                self._last_output = time.monotonic()
                if len(self._stderr) > MAX_BYTES:
                    raise EOFError(f"over {MAX_BYTES >> 20} MB on stderr")
            if not channel.recv_ready():
                return b""
            self._last_output = time.monotonic()
            return channel.recv(_CHUNK)
        except (paramiko.SSHException, OSError, EOFError) as error:
            self._read_error = error
            return b""

    def read_stderr(self) -> bytes:
        """Return the stderr received since the last call."""
        stderr = bytes(self._stderr)
        self._stderr.clear()
        return stderr

    def outcome(self) -> Result | NodeError | None:
        """Return the command's result or error, or None while it runs."""
        channel = self._channel
        is_connected = self.connection.transport.is_active()
        if self.is_sending and is_connected:
            return None
        if channel is not None and channel.closed:
            if channel.recv_ready() or channel.recv_stderr_ready():
                return None
            if channel.exit_status != -1 or (is_connected and self._error is None):
                return Result(exit_code=channel.exit_status, stdout=b"", stderr=bytes(self._stderr))
        elif is_connected and self._error is None:
            return None
        cause = self._error or self.connection.transport.get_exception()
        return self.failure("lost", str(cause or "") or "the connection ended")

    def timeout_error(self, timeout_s: float | None, silent_after_s: float | None) -> NodeError | None:
        """Return an error if the command has exceeded a timeout, or else None."""
        now = time.monotonic()
        if timeout_s is not None and now - self._started > timeout_s:
            return self.failure("silent", f"still running after {timeout_s:g} s")
        if silent_after_s is not None and now - self._last_output > silent_after_s:
            return self.failure("silent", f"no output for {silent_after_s:g} s")
        return None

    def failure(self, layer: Layer, why: str) -> NodeFailure:
        """Return an error for this node."""
        stderr = tail(self._stderr.decode(errors="replace"))
        message = "no answer" if layer == "silent" else "the connection was lost"
        return self.connection.endpoint.failure(layer, message, f"{why}\n{stderr}".strip())

    def close(self) -> None:
        """Close the channel, and with it the command's stdin and stdout."""
        if self._channel is not None:
            self._channel.close()

    @property
    def _error(self) -> BaseException | None:
        """The error that reading output or sending stdin raised, or None."""
        return self._read_error or (None if self.is_sending else self._sending.exception())

    def _run_in_background(self, act: Callable[[], None]) -> None:
        self._started = self._last_output = time.monotonic()
        self._sending = run_in_thread(act)
        self._sending.add_done_callback(lambda _: self._wakeup.set())

    def _start(self, argv: Sequence[str], stdin: bytes, *, persistent: bool) -> None:
        channel = self.connection.open_channel()
        channel.in_buffer.set_event(self._wakeup)
        channel.in_stderr_buffer.set_event(self._wakeup)
        self._channel = channel
        channel.exec_command(command_line(argv))
        self._send(stdin)
        if not persistent:
            channel.shutdown_write()

    def _send(self, data: bytes) -> None:
        assert self._channel is not None
        for start in range(0, len(data), _CHUNK):  # sendall() copies all remaining data every 32 KB
            self._channel.sendall(data[start : start + _CHUNK])


@dataclass(eq=False)
class Fleet:
    """Connections to nodes, as a context manager.

    When the context is entered, awsddp connects to all nodes at once, and raises NodesFailed if any node is
    unreachable. If `partial` is set, unreachable nodes raise no error. Instead, only the reachable nodes are
    used, and `failures` holds the errors. Open connections in `preconnect` are used. `on_event` and, during
    connection attempts, `on_idle` are called from the caller's thread.
    """

    initial: InitVar[Iterable[Endpoint]]
    login: Login
    _: KW_ONLY
    deadline_s: float = 600
    partial: bool = False
    preconnect: Preconnect = field(default_factory=dict)
    on_idle: Callable[[], None] | None = None
    on_event: OnEvent = ignore_event
    failures: dict[int, NodeError] = field(default_factory=dict, init=False)
    _connections: dict[int, Connection] = field(default_factory=dict, init=False)
    _wakeup: Wakeup = field(default_factory=Wakeup, init=False)
    # `request` starts these commands as persistent commands.
    _programs: dict[int, RemoteCommand] = field(default_factory=dict, init=False)

    def __post_init__(self, initial: Iterable[Endpoint]) -> None:
        self.endpoints = {endpoint.node: endpoint for endpoint in initial}

    def __enter__(self) -> "Fleet":
        try:
            self.reconnect(deadline_s=self.deadline_s, partial=self.partial)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of the connected nodes."""
        return tuple(sorted(self._connections))

    @property
    def responsive_nodes(self) -> list[int]:
        """The numbers of the connected nodes that have no failure."""
        return [node for node in self.nodes if node not in self.failures]

    def nodes_of_job(self, job: JobRecord) -> list[int]:
        """Return the numbers of the responsive nodes whose instances ran the job."""
        ran_on = {node.instance_id for node in job.nodes}
        return [node for node in self.responsive_nodes if self.endpoints[node].instance_id in ran_on]

    def host_key(self, node: int) -> str:
        """Return the public host key that verified the connection to `node`."""
        return self._connections[node].host_key

    def reconnect(
        self, nodes: Iterable[int] | None = None, *, deadline_s: float = 30, partial: bool = False
    ) -> None:
        """Close and reopen the connections to `nodes` (default: all).

        Raises NodesFailed, and JumpFailure if the jump host is unreachable.
        """
        dial = functools.partial(
            connect, key=load_key(self.login.key), login=self.login, deadline_s=deadline_s
        )

        def work(node: int, on_event: OnEvent, stop: threading.Event) -> Connection:
            endpoint, connection = self.endpoints[node], None
            with contextlib.suppress(KeyError, NodeError):
                connection = self.preconnect.pop(endpoint).result()
            connection = connection or dial(endpoint, stop=stop, on_event=on_event)
            if stop.is_set():
                connection.drop()
            return connection

        numbers = sorted(self.endpoints if nodes is None else nodes)
        for node in numbers:
            self._drop(node)
        try:
            if self.login.jump is not None:
                self.login.jump.ensure_connected()
            outcomes = run_on_nodes(work, numbers, on_idle=self.on_idle, on_event=self.on_event)
        except JumpFailure as failure:
            if not partial:
                raise
            outcomes = dict.fromkeys(numbers, failure)
        for node, outcome in outcomes.items():
            if isinstance(outcome, NodeError):
                self.failures[node] = outcome
            else:
                self.failures.pop(node, None)
                self._connections[node] = outcome
        if not partial:
            results_or_raise(outcomes)

    def close(self) -> None:
        """Close all connections. Commands on nodes keep running unless they use stdin, stdout or stderr."""
        for node in list(self._connections):
            self._drop(node)

    @contextlib.contextmanager
    def forward_ports(
        self, nodes: Iterable[int], serve: Callable[[paramiko.Channel], None]
    ) -> Iterator[dict[int, int]]:
        """Listen on one port on each node's loopback interface, and yield {node: port}.

        `serve` is called with each connection, on a thread that it must not block. Raises NodesFailed.
        """
        ports = results_or_raise(
            run_on_nodes(
                lambda node, *_: self._connections[node].forward(serve), nodes, on_event=self.on_event
            )
        )
        try:
            yield ports
        finally:
            for node in ports.keys() & self._connections.keys():
                self._connections[node].end_forward(ports[node])

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", nodes: Iterable[int] | None = None, timeout_s: float
    ) -> dict[int, Result]:
        """Run a command on `nodes` (default: all connected) at once and return {node: result}.

        If nodes were lost or exceeded `timeout_s`, raises NodesFailed once all commands have ended. No exit
        code raises an error.
        """
        numbers = self.nodes if nodes is None else nodes
        return results_or_raise(self.run_each(dict.fromkeys(numbers, (argv, stdin)), timeout_s=timeout_s))

    def run_each(self, requests: Mapping[int, Request], *, timeout_s: float) -> dict[int, Result | NodeError]:
        """Run a different command on each node, all at once, and return {node: Result}.

        The value is a NodeError for a node that was lost or whose command exceeded `timeout_s`.
        """
        output = {node: bytearray() for node in requests}

        def on_data(node: int, data: bytes) -> None:
            append_output(output[node], data, node=node)

        outcomes = self.stream(requests, on_data, timeout_s=timeout_s)
        return {
            node: replace(end, stdout=bytes(output[node])) if isinstance(end, Result) else end
            for node, end in outcomes.items()
        }

    def stream(
        self,
        requests: Mapping[int, Request],
        on_data: Callable[[int, bytes], None],
        *,
        silent_after_s: float | None = None,
        timeout_s: float | None = None,
        on_stderr: Callable[[int, bytes], None] | None = None,
    ) -> dict[int, Result | NodeError]:
        """Run a command on each node and pass its stdout to `on_data(node, data)` in large chunks.

        `on_data` is called from the caller's thread. An exception that `on_data` raises ends all streams. A
        node that sends nothing for `silent_after_s` counts as lost; the other nodes continue. Returns each
        node's Result (with an empty stdout) or NodeError. `on_stderr` receives stderr in the same way. If
        `on_stderr` is None, the Result has stderr.
        """
        wakeup = Wakeup()
        commands = {
            node: RemoteCommand(self._connections[node], request, wakeup)
            for node, request in requests.items()
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
        """Send a message to the `program` on each node, and pass the program's response to `on_data`.

        All requests have the same program. The program is started with the first message and runs as long as
        the connection is open, so that a message takes one round trip. `on_data(node, data)` returns True
        once the response is complete; the node's Result then has exit code 0. Any other Result means that the
        program has ended.
        """
        commands: dict[int, RemoteCommand] = {}
        for node, message in messages.items():
            if node in self._connections and node not in self._programs:
                connection = self._connections[node]
                self._programs[node] = RemoteCommand(connection, program, self._wakeup, persistent=True)
            if node in self._programs:
                commands[node] = self._programs.pop(node)  # added again once its response is complete
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
        """Read output until each command ends or `on_data` returns True for a complete response.

        `limits` is the pair (timeout_s, silent_after_s).
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
                    stderr = command.read_stderr() if on_stderr is not None else b""
                    if on_stderr is not None and stderr:
                        on_stderr(node, stderr)
                    busy = busy or bool(data or stderr)
                    if is_complete:
                        outcomes[node] = Result(exit_code=0, stdout=b"", stderr=b"")
                        self._programs[node] = running.pop(node)
                        continue
                    outcome = (None if data else command.outcome()) or command.timeout_error(*limits)
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
        """Close a command. If the node was lost or stdin is blocked, also close the node's connection."""
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
