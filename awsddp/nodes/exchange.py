"""One command on one node, over a channel of its connection: begun, fed, read, its end understood."""

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paramiko

from awsddp.answers import MOST_BYTES
from awsddp.errors import NodeError
from awsddp.nodes.connection import Connection
from awsddp.nodes.failures import Layer, NodeFailure

_CHUNK = 256 * 1024
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


class Bell(threading.Event):
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


class Exchange:
    """One command on one node. A thread of its own begins it and sends stdin; the caller's thread reads.

    One that `stays` is not told the end of its stdin: `say` sends it more.
    """

    def __init__(
        self, connection: Connection, line: str, stdin: bytes, bell: Bell, *, stays: bool = False
    ) -> None:
        self.connection = connection
        self._line = line
        self._stdin = stdin
        self._bell = bell
        self._stays = stays
        self._channel: paramiko.Channel | None = None
        self._error: BaseException | None = None
        self._stderr = bytearray()
        self._began = self._heard = time.monotonic()
        self._sender = threading.Thread(target=self._begin, daemon=True)
        self._sender.start()

    def say(self, data: bytes) -> None:
        """Send more on stdin, once what was sent before is on its way; the clock of deadlines starts anew."""
        before = self._sender

        def send() -> None:
            before.join()
            if self._channel is not None and self._error is None:
                self._guarded(lambda: self._send(data))

        self._began = self._heard = time.monotonic()
        self._sender = threading.Thread(target=send, daemon=True)
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
                if len(self._stderr) > MOST_BYTES:
                    raise EOFError(f"over {MOST_BYTES >> 20} MB on stderr")
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
        message = "no answer" if layer == "silent" else "the connection was lost"
        return NodeFailure(endpoint.node, layer, f"{message} ({endpoint})", "\n".join([why, *said]))

    def close(self) -> None:
        """Leave the channel; the other side sees the end of its stdin and a closed stdout."""
        if self._channel is not None:
            self._channel.close()

    def _begin(self) -> None:
        self._guarded(self._start)

    def _start(self) -> None:
        channel = self.connection.transport.open_session()
        channel.in_buffer.set_event(self._bell)
        channel.in_stderr_buffer.set_event(self._bell)
        self._channel = channel
        channel.exec_command(self._line)
        self._send(self._stdin)
        if not self._stays:
            channel.shutdown_write()

    def _send(self, data: bytes) -> None:
        assert self._channel is not None
        for start in range(0, len(data), _CHUNK):  # sendall() copies all that is left, each 32 KB
            self._channel.sendall(data[start : start + _CHUNK])

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (paramiko.SSHException, OSError, EOFError) as error:
            self._error = error  # a command that ends before it has read all its stdin is none: see outcome()
        finally:
            self._bell.set()
