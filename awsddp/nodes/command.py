"""One command on one node, over a channel of its connection."""

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paramiko

from awsddp.answers import MOST_BYTES
from awsddp.errors import NodeError
from awsddp.nodes.connection import Connection
from awsddp.nodes.failures import Layer, NodeFailure, tail

_CHUNK = 256 * 1024
_START_S = 1.0

Request = tuple[Sequence[str], bytes]  # argv, stdin


@dataclass(frozen=True, kw_only=True)
class Result:
    """Exit code and output of a command on a node. `exit_code` is -1 if a signal ended it."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    def tail(self) -> str:
        """Return the last lines of stderr, of stdout if stderr is empty."""
        return tail((self.stderr.strip() or self.stdout).decode(errors="replace"))


def command_line(argv: Sequence[str]) -> str:
    """Return the line that a remote shell parses to `argv`. Every remote command line is made here."""
    return shlex.join(argv)


class Wakeup(threading.Event):
    """Wakes the reader of many channels: paramiko sets it when one of them has data or has ended.

    paramiko also clears it when one buffer is empty. Another may still hold data, so `clear` does nothing.
    """

    def clear(self) -> None:
        """Do nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, then reset it."""
        is_set = super().wait(timeout)
        super().clear()
        return is_set


class RemoteCommand:
    """One command on one node. Its own thread starts it and sends stdin; the caller's thread reads.

    The stdin of a `persistent` one stays open: `send` sends more.
    """

    def __init__(
        self, connection: Connection, line: str, stdin: bytes, wakeup: Wakeup, *, persistent: bool = False
    ) -> None:
        self.connection = connection
        self._line = line
        self._stdin = stdin
        self._wakeup = wakeup
        self._persistent = persistent
        self._channel: paramiko.Channel | None = None
        self._error: BaseException | None = None
        self._stderr = bytearray()
        self._in_background(self._start)

    def send(self, data: bytes) -> None:
        """Send more on stdin, after what is still being sent; deadlines count from now."""
        before = self._sender

        def send_next() -> None:
            before.join()
            if self._channel is not None and self._error is None:
                self._send(data)

        self._in_background(send_next)

    @property
    def is_sending(self) -> bool:
        """Whether the command is being started, or stdin is being sent."""
        return self._sender.is_alive()

    def wait_started(self) -> None:
        """Wait a moment for a command that was only just started, so that its channel can be closed."""
        self._sender.join(_START_S)

    def read(self) -> bytes:
        """Return what stdout holds now, one chunk at most; stderr is kept for `read_stderr`."""
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
        """Return what came on stderr since the last call."""
        said = bytes(self._stderr)
        self._stderr.clear()
        return said

    def outcome(self) -> Result | NodeError | None:
        """Return how it ended, None while it runs."""
        channel = self._channel
        alive = self.connection.transport.is_active()
        if self.is_sending and alive:
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
        """Return the error of a command that runs, or of a node that is silent, for too long."""
        now = time.monotonic()
        if timeout_s is not None and now - self._began > timeout_s:
            return self.failure("silent", f"still running after {timeout_s:g} s")
        if silent_after_s is not None and now - self._heard > silent_after_s:
            return self.failure("silent", f"no output for {silent_after_s:g} s")
        return None

    def failure(self, layer: Layer, why: str) -> NodeFailure:
        """Return the error of this node."""
        endpoint = self.connection.endpoint
        said = tail(self._stderr.decode(errors="replace"))
        message = "no answer" if layer == "silent" else "the connection was lost"
        return NodeFailure(endpoint.node, layer, f"{message} ({endpoint})", f"{why}\n{said}".strip())

    def close(self) -> None:
        """Close the channel; the command sees the end of its stdin and a closed stdout."""
        if self._channel is not None:
            self._channel.close()

    def _in_background(self, act: Callable[[], None]) -> None:
        self._began = self._heard = time.monotonic()
        self._sender = threading.Thread(target=self._guarded, args=(act,), daemon=True)
        self._sender.start()

    def _start(self) -> None:
        channel = self.connection.open_channel()
        channel.in_buffer.set_event(self._wakeup)
        channel.in_stderr_buffer.set_event(self._wakeup)
        self._channel = channel
        channel.exec_command(self._line)
        self._send(self._stdin)
        if not self._persistent:
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
            self._wakeup.set()
