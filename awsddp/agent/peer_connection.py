"""A connection between two supervisors of a job: lines of JSON, each with a proof of the job's secret.

Both sides begin with a challenge. A proof is an HMAC over both challenges, the role of its side and the line,
so that neither a replay nor a reflection proves anything. What is said is not encrypted: a VPC's traffic
between instances is not readable by others, and no secret is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import struct
from typing import TYPE_CHECKING, Any

from awsddp.agent.messages import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

NOBODY = -1
_LIMIT = 64 << 20  # bytes of a line, which has all that the other side has not heard
_STRANGER_LIMIT = 4096  # bytes of a line before the other side has proved itself
_GREETING = re.compile(r"(\d{1,9}) ([0-9a-f]{32})")  # the number of a side's node, and its challenge
_RESET = struct.pack("ii", 1, 0)  # socket(7), SO_LINGER


class Link:
    """One end of a connection. `node` is who the other side is: on the accepting side NOBODY until proved.

    Never blocks: `turn` is called when the socket is ready. Where the connection is lost, its methods raise
    OSError: BrokenPipeError where the other side has closed it in order.
    """

    def __init__(self, sock: socket.socket, secret: str, *, me: int, node: int = NOBODY) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.node = node
        self.proved = False
        self._secret = secret.encode()
        self._joins = node != NOBODY
        self._me = me
        self._own = os.urandom(16).hex()
        self._theirs: Sequence[str] = ()  # what the other side began with
        self._in = b""
        self._out = f"{me} {self._own}\n".encode()

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self.socket.fileno() >= 0

    @property
    def unsent(self) -> bool:
        """Whether bytes wait for the socket to take them."""
        return bool(self._out)

    def send(self, message: object) -> None:
        """Send `message` to the other side, if it has proved itself."""
        if self.proved:
            self._put(message)
            self._flush()

    def turn(self) -> list[Any]:
        """Send what waits, as far as the socket takes it, and return the messages that have come."""
        self._flush()
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise BrokenPipeError("it closed the connection")
        *lines, self._in = (self._in + data).split(b"\n")
        messages = [self._read(line.decode("ascii", "replace")) for line in lines]
        if len(self._in) > (_LIMIT if self.proved else _STRANGER_LIMIT):
            raise ConnectionError("it sent an unterminated line")
        self._flush()
        return [message for message in messages if message is not None]

    def close(self) -> None:
        """Reset the connection: closed in order, it would say that this supervisor has ended."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.socket.close()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]

    def _read(self, line: str) -> Any:
        """Return the message of a line, None for a challenge and its answer."""
        if not self._theirs:
            greeting = _GREETING.fullmatch(line)
            if greeting is None:
                raise ConnectionError("protocol error")
            self._theirs = greeting.groups()
            self._put(None)
            return None
        proof, _, text = line.partition(" ")
        if not hmac.compare_digest(self._proof(text, ours=False).encode(), proof.encode()):
            raise ConnectionError("wrong job secret")
        self.node = self.node if self._joins else int(self._theirs[0])
        self.proved = True
        return json.loads(text)

    def _put(self, message: object) -> None:
        text = json.dumps(plain(message))
        self._out += f"{self._proof(text, ours=True)} {text}\n".encode()

    def _proof(self, text: str, *, ours: bool) -> str:
        role = "join" if self._joins == ours else "lead"
        sides = [(str(self._me), self._own), self._theirs]
        said = json.dumps([role, sides if self._joins else sides[::-1], text])
        return hmac.new(self._secret, said.encode(), hashlib.sha256).hexdigest()
