"""A connection between two supervisors of a job: lines of JSON, once both have proved to know the secret.

Both sides answer a challenge with an HMAC over both challenges, each under its own role, so that neither a
replay nor a reflection proves anything. What is said is not encrypted: a VPC's traffic between instances is
not readable by others, and no secret is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
from typing import Any

from awsddp.jobs.supervisor.requests import Sparse, plain

_LIMIT = 4 << 20  # bytes of a line
_STRANGER_LIMIT = 4096  # bytes of a line before the other side has proved itself


class LinkLost(Exception):
    """The other side is gone, or is not who it should be."""


class LinkClosed(LinkLost):
    """The other side has closed the connection, in order."""


class Greeting(Sparse):
    """What both sides say before they trust each other: a challenge, who joins, who leads, and proofs."""

    challenge: str | None = None
    node: int | None = None
    proof: str | None = None


class Link:
    """One end of a connection. `node` is who the other side is: on the accepting side None until proved.

    Never blocks: `receive` and `flush` are called when the socket is ready.
    """

    def __init__(self, sock: socket.socket, secret: str, *, me: int, node: int | None = None) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.node = node
        self.proved = False
        self._accepting = node is None
        self._secret = secret.encode()
        self._me = me
        self._challenge = os.urandom(16).hex()
        self._expected: str | None = None
        self._in = b""
        self._out = b""
        if self._accepting:
            self._put(Greeting(challenge=self._challenge))

    @property
    def unsent(self) -> bool:
        """Whether bytes wait for the socket to take them."""
        return bool(self._out)

    def send(self, message: object) -> None:
        """Send `message` to the other side, once it has proved itself. Raises LinkLost."""
        self._put(message)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it. Raises LinkLost."""
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            return
        except BrokenPipeError as error:  # tcp(7): the other end closed; ECONNRESET where it did not
            raise LinkClosed(str(error)) from error
        except OSError as error:
            raise LinkLost(str(error)) from error

    def receive(self) -> list[Any]:
        """Return the messages that have come, JSON objects. Raises LinkLost."""
        messages = []
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(str(error)) from error
        if not data:
            raise LinkClosed("it closed the connection")
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            message = _parse(line)
            if self.proved:
                messages.append(message)
            else:
                self._greet(Greeting.from_json(message))
        if len(self._in) > (_LIMIT if self.proved else _STRANGER_LIMIT):
            raise LinkLost("it sent an unterminated line")
        return messages

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def _greet(self, said: Greeting) -> None:
        theirs = str(said.challenge)
        if self._accepting:
            proof = self._proof("join", said.node, self._challenge, theirs)
            if not isinstance(said.node, int) or not hmac.compare_digest(proof, str(said.proof)):
                raise LinkLost("wrong job secret")
            self.node = said.node
            self._put(Greeting(proof=self._proof("lead", said.node, self._challenge, theirs)))
            self._trust()
        elif said.challenge is not None:
            proof = self._proof("join", self._me, theirs, self._challenge)
            self._expected = self._proof("lead", self._me, theirs, self._challenge)
            self._put(Greeting(node=self._me, challenge=self._challenge, proof=proof))
            self.flush()
        elif self._expected and hmac.compare_digest(self._expected, str(said.proof)):
            self._trust()
        else:
            raise LinkLost("wrong job secret")

    def _trust(self) -> None:
        self.proved = True
        self.flush()

    def _proof(self, role: str, node: object, asked: str, answered: str) -> str:
        text = json.dumps([role, node, asked, answered])
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _put(self, message: object) -> None:
        self._out += json.dumps(plain(message)).encode() + b"\n"


def _parse(line: bytes) -> Any:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise LinkLost("protocol error") from error
    if not isinstance(message, dict):
        raise LinkLost("protocol error")
    return message
