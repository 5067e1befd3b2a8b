"""A connection between two nodes' agents: lines of JSON, each with a proof that the sender has the secret.

Both sides begin with a challenge. A proof is an HMAC over both challenges, the sender's role and the line, so
that neither a replay nor a reflection is valid. Lines are not encrypted, because no line contains a secret,
and others cannot read the traffic between instances in a VPC.
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

from awsddp.agent.messages import to_json_value

if TYPE_CHECKING:
    from collections.abc import Sequence

UNKNOWN_NODE = -1
_MAX_LINE = 64 << 20  # in bytes; a line can hold all unacknowledged messages
_MAX_STRANGER_LINE = 4096  # in bytes; applies until the other side is authenticated
_GREETING = re.compile(r"(\d{1,9}) ([0-9a-f]{32})")  # node, challenge
_RESET = struct.pack("ii", 1, 0)  # socket(7), SO_LINGER


class Link:
    """One end of a connection. `node` is the other side's node, or UNKNOWN_NODE until it is authenticated.

    No method blocks. `exchange` is to be called when the socket is ready. The methods raise OSError when the
    connection is lost, or BrokenPipeError if the other side has closed the connection normally.
    """

    def __init__(self, sock: socket.socket, secret: str, *, me: int, node: int = UNKNOWN_NODE) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.node = node
        self.is_authenticated = False
        self._secret = secret.encode()
        self._is_connecting = node != UNKNOWN_NODE
        self._own_node = me
        self._challenge = os.urandom(16).hex()
        self._greeting_fields: Sequence[str] = ()  # the other side's greeting
        self._in_buffer = b""
        self._out_buffer = f"{me} {self._challenge}\n".encode()

    @property
    def is_open(self) -> bool:
        """True until `close` is called."""
        return self.socket.fileno() >= 0

    @property
    def has_unsent(self) -> bool:
        """True if there are bytes waiting to be sent."""
        return bool(self._out_buffer)

    def send(self, message: object) -> None:
        """Send `message` if the other side is authenticated."""
        if self.is_authenticated:
            self._queue(message)
            self._flush()

    def exchange(self) -> list[Any]:
        """Send as many waiting bytes as the socket accepts, and return the messages that have arrived."""
        self._flush()
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise BrokenPipeError("it closed the connection")
        *lines, self._in_buffer = (self._in_buffer + data).split(b"\n")
        messages = [self._read(line.decode("ascii", "replace")) for line in lines]
        if len(self._in_buffer) > (_MAX_LINE if self.is_authenticated else _MAX_STRANGER_LINE):
            raise ConnectionError("it sent an unterminated line")
        self._flush()
        return [message for message in messages if message is not None]

    def close(self) -> None:
        """Reset the connection. The other side would take a normal close as the end of this agent."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.socket.close()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out_buffer:
                self._out_buffer = self._out_buffer[self.socket.send(self._out_buffer) :]

    def _read(self, line: str) -> Any:
        """Return the message in a line, or None if the line is the challenge or the first proof."""
        if not self._greeting_fields:
            greeting = _GREETING.fullmatch(line)
            if greeting is None:
                raise ConnectionError("protocol error")
            self._greeting_fields = greeting.groups()
            self._queue(None)
            return None
        proof, _, text = line.partition(" ")
        if not hmac.compare_digest(self._proof(text, ours=False).encode(), proof.encode()):
            raise ConnectionError("wrong job secret")
        self.node = self.node if self._is_connecting else int(self._greeting_fields[0])
        self.is_authenticated = True
        return json.loads(text)

    def _queue(self, message: object) -> None:
        text = json.dumps(to_json_value(message))
        self._out_buffer += f"{self._proof(text, ours=True)} {text}\n".encode()

    def _proof(self, text: str, *, ours: bool) -> str:
        role = "join" if self._is_connecting == ours else "lead"
        sides = [(str(self._own_node), self._challenge), self._greeting_fields]
        signed = json.dumps([role, sides if self._is_connecting else sides[::-1], text])
        return hmac.new(self._secret, signed.encode(), hashlib.sha256).hexdigest()
