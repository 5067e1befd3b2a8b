"""The nodes, connected: one SSH transport a node, all opened at once, kept for the whole command."""

import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import paramiko

from awsddp.errors import NodeError
from awsddp.nodes.connection import Connection, Endpoint, connect, load_key
from awsddp.nodes.failures import Layer, NodeFailure, split
from awsddp.nodes.parallel import ignore, side_by_side
from awsddp.report import OnEvent

__all__ = ["Endpoint", "Fleet", "Request", "Result"]

_CHUNK = 256 * 1024
_LOOK_S = 0.25  # how often the deadlines are looked at while nothing comes
_SETTLE_S = 1.0
_TAIL = 10

Request = tuple[Sequence[str], bytes]  # argv, stdin


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command on a node left. `exit_code` is -1 where a signal ended it."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    def tail(self) -> str:
        """Return the last lines of what it said, stderr before stdout."""
        said = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        return "\n".join(said.splitlines()[-_TAIL:])


def command_line(argv: Sequence[str]) -> str:
    """Return the line that a remote shell reads as exactly these words. The only place that builds one."""
    return shlex.join(argv)


class Fleet:
    """Connections to nodes, as a context manager.

    Entering connects to all nodes at once and raises NodesFailed when any cannot be reached; with `partial`
    the others are used and `failures` tells of the rest. `key` is the file of the login key, `known_hosts`
    the accepted host keys by instance id. Events come from the caller's thread.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        *,
        key: Path,
        known_hosts: Path,
        deadline_s: float = 600,
        partial: bool = False,
        on_event: OnEvent = ignore,
    ) -> None:
        self.endpoints = {endpoint.node: endpoint for endpoint in endpoints}
        self.failures: dict[int, NodeError] = {}
        self._key_file = key
        self._known_hosts = known_hosts
        self._deadline_s = deadline_s
        self._partial = partial
        self._on_event = on_event
        self._connections: dict[int, Connection] = {}

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
        """Connect anew to some nodes (all), whether they are connected or not. Raises NodesFailed."""
        key = load_key(self._key_file)

        def work(node: int, on_event: OnEvent, stop: threading.Event) -> Connection:
            connection = connect(
                self.endpoints[node],
                key=key,
                known_hosts=self._known_hosts,
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
        outcomes = side_by_side(work, chosen, on_event=self._on_event)
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
        outcomes = self._talk(
            requests, lambda node, data: output[node].extend(data), timeout_s=timeout_s, silent_after_s=None
        )
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

    def _talk(
        self,
        requests: Mapping[int, Request],
        on_data: Callable[[int, bytes], None],
        *,
        timeout_s: float | None,
        silent_after_s: float | None,
        on_stderr: Callable[[int, bytes], None] | None = None,
    ) -> dict[int, Result | NodeError]:
        bell = _Bell()
        outcomes: dict[int, Result | NodeError] = {}
        talks: dict[int, _Exchange] = {}
        try:
            for node, (argv, stdin) in requests.items():
                if node in self._connections:
                    talks[node] = _Exchange(self._connections[node], command_line(argv), stdin, bell)
                else:
                    outcomes[node] = self.failures.get(node) or NodeFailure(
                        node, "lost", "it is not connected"
                    )
            while talks:
                busy = False
                for node, talk in list(talks.items()):
                    data = talk.read()
                    if data:
                        busy = True
                        on_data(node, data)
                    if on_stderr is not None and (said := talk.read_stderr()):
                        busy = True
                        on_stderr(node, said)
                    outcome = (None if data else talk.outcome()) or talk.overdue(timeout_s, silent_after_s)
                    if outcome is not None:
                        outcomes[node] = outcome
                        self._end(talks.pop(node), outcome)
                if not busy and talks:
                    bell.wait(_LOOK_S)
        finally:
            for talk in talks.values():
                self._end(talk, None)
        return {node: outcomes[node] for node in requests}

    def _end(self, talk: "_Exchange", outcome: Result | NodeError | None) -> None:
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
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.drop()


class _Bell(threading.Event):
    """Wakes the one reader of many channels: paramiko sets it when data comes to any of them, or the end.

    paramiko also clears it when one buffer runs dry; another may still hold data: so not here.
    """

    def clear(self) -> None:
        """Leave it rung."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is rung, and take note."""
        rung = super().wait(timeout)
        super().clear()
        return rung


class _Exchange:
    """One command on one node. A thread of its own begins it and sends stdin; the caller's thread reads."""

    def __init__(self, connection: Connection, line: str, stdin: bytes, bell: _Bell) -> None:
        self.connection = connection
        self._line = line
        self._stdin = stdin
        self._bell = bell
        self._channel: paramiko.Channel | None = None
        self._error: BaseException | None = None
        self._stderr = bytearray()
        self._began = self._heard = time.monotonic()
        self._sender = threading.Thread(target=self._begin, daemon=True)
        self._sender.start()

    @property
    def sending(self) -> bool:
        """Whether the command is still being begun, or stdin is still on its way."""
        return self._sender.is_alive()

    def settle(self) -> None:
        """Give a command that has only just begun the moment that it needs to be left in good order."""
        self._sender.join(_SETTLE_S)

    def read(self) -> bytes:
        """Return what stdout holds by now, a chunk at most; stderr is kept."""
        channel = self._channel
        if channel is None:
            return b""
        try:
            if channel.recv_stderr_ready():
                self._stderr += channel.recv_stderr(_CHUNK)
                self._heard = time.monotonic()
            if not channel.recv_ready():
                return b""
            self._heard = time.monotonic()
            return channel.recv(_CHUNK)
        except (paramiko.SSHException, OSError, EOFError) as error:
            self._error = self._error or error
            return b""

    def read_stderr(self) -> bytes:
        """Return what came on stderr since it was last asked for."""
        said = bytes(self._stderr)
        self._stderr.clear()
        return said

    def outcome(self) -> Result | NodeError | None:
        """Return how it ended, None while it has not."""
        channel = self._channel
        alive = self.connection.transport.is_active()
        if self.sending and alive:
            return None
        if channel is not None and channel.closed:
            if channel.recv_ready() or channel.recv_stderr_ready():
                return None
            if channel.exit_status != -1 or (alive and self._error is None):
                return Result(exit_code=channel.exit_status, stdout=b"", stderr=bytes(self._stderr))
        elif alive and self._error is None:
            return None
        cause = self._error or self.connection.transport.get_exception()
        return self.failure("lost", str(cause or "") or "the connection ended")

    def overdue(self, timeout_s: float | None, silent_after_s: float | None) -> NodeError | None:
        """Return the failure of a command that takes too long, or of a node that is silent for too long."""
        now = time.monotonic()
        if timeout_s is not None and now - self._began > timeout_s:
            return self.failure("silent", f"no end after {timeout_s:g} s")
        if silent_after_s is not None and now - self._heard > silent_after_s:
            return self.failure("silent", f"nothing came from it for {silent_after_s:g} s")
        return None

    def failure(self, layer: Layer, why: str) -> NodeFailure:
        """Return the failure of this node."""
        endpoint = self.connection.endpoint
        said = bytes(self._stderr).decode(errors="replace").splitlines()[-_TAIL:]
        message = "it does not answer" if layer == "silent" else "the connection was lost"
        return NodeFailure(endpoint.node, layer, f"{message} ({endpoint})", "\n".join([why, *said]))

    def close(self) -> None:
        """Leave the channel; the other side sees the end of its stdin and a closed stdout."""
        if self._channel is not None:
            self._channel.close()

    def _begin(self) -> None:
        try:
            channel = self.connection.transport.open_session()
            channel.in_buffer.set_event(self._bell)
            channel.in_stderr_buffer.set_event(self._bell)
            self._channel = channel
            channel.exec_command(self._line)
            for start in range(0, len(self._stdin), _CHUNK):  # sendall() copies all that is left, each 32 KB
                channel.sendall(self._stdin[start : start + _CHUNK])
            channel.shutdown_write()
        except (paramiko.SSHException, OSError, EOFError) as error:
            self._error = error  # a command that ends before it has read all its stdin is none: see outcome()
        finally:
            self._bell.set()
