"""A conversation between two supervisors that outlives its links: each message arrives once, and in order.

Messages are numbered and acknowledged; what is not acknowledged is sent again on the next link. It does no
I/O, so that it can be tried alone.
"""

from __future__ import annotations

from typing import Any


class Session:
    """One side of a conversation. A frame is what goes over a link, a message what it carries."""

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0
        self._pending: list[tuple[int, dict[str, Any]]] = []

    @property
    def pending(self) -> bool:
        """Whether the other side has not acknowledged everything."""
        return bool(self._pending)

    def send(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take `message` on, and return the frame that carries it, for the link there is, if any."""
        self._sent += 1
        self._pending.append((self._sent, message))
        return self._frame(self._sent, message)

    def resend(self) -> list[dict[str, Any]]:
        """Return the frames with which a new link begins."""
        return [self._frame(number, message) for number, message in self._pending]

    def acknowledge(self) -> dict[str, Any]:
        """Return a frame that carries no message."""
        return {"received": self._received}

    def receive(self, frame: dict[str, Any]) -> dict[str, Any] | None:
        """Return the message that `frame` carries, None where it carries none or one that came before."""
        acknowledged = frame["received"]
        self._pending = [entry for entry in self._pending if entry[0] > acknowledged]
        if frame.get("number") != self._received + 1:
            return None
        self._received += 1
        message: dict[str, Any] = frame["message"]
        return message

    def _frame(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        return {"number": number, "message": message, "received": self._received}
