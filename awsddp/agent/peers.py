"""The agents on a job's other nodes: how they connect and reconnect, and when a node counts as lost.

The first node accepts connections, and the other nodes connect to it. An agent counts as lost at once only if
one of these events proves its end: its connection is closed and not reset, its guard reports the end, or its
port refuses connections. (An agent resets a connection that it gives up.) Any other failure may be due to the
network, so the agent then counts as lost only after `silent_s`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import selectors
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp.agent.diagnosis.job_causes import LOSSES
from awsddp.agent.messages import make_reader
from awsddp.agent.peer_connection import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awsddp.agent.messages import Launch

BEAT_SECONDS = 2.0
_SILENT_SECONDS = 3 * BEAT_SECONDS
"""How long heartbeats may stay unanswered before a reconnect. An answer proves that both directions work."""
_CLOSED = (
    "its agent has ended and closed the connection, for example because a rank killed every process (kill -1)"
)
"""The reason why an agent is lost if its connection was closed. Its node may still be running."""
_CONNECT_SECONDS = 1.0
_REFUSED_SECONDS = 2.0
_RETRY_SECONDS = 0.5


class Frame(NamedTuple):
    """A frame has the messages `said`, and the number of messages that its sender has received (`heard`).

    `since` is how many messages the sender sent before the messages in the frame. Unacknowledged messages are
    resent; duplicates and stale messages are ignored. If the agent on the link's node has ended, `lost` says
    why, and `kind` is the kind of the cause.
    """

    heard: int = 0
    since: int = 0
    said: Sequence[Any] = ()
    lost: str | None = None
    kind: str = ""


_read_frame = make_reader(Frame)


class Session:
    """One side of a reliable message stream over successive links: each message arrives once, in order.

    A session does no I/O.
    """

    def __init__(self) -> None:
        self._received = 0
        self._acknowledged = 0  # how many of this side's messages the other side has received
        self._unacknowledged: list[object] = []

    @property
    def has_pending(self) -> bool:
        """True if the other side has not acknowledged all messages."""
        return bool(self._unacknowledged)

    def send(self, message: object) -> Frame:
        """Queue `message`, and return a frame with only this message, to be sent over the current link."""
        self._unacknowledged.append(message)
        return Frame(self._received, self._acknowledged + len(self._unacknowledged) - 1, [message])

    def pending_frame(self) -> Frame:
        """Return a frame with all messages that the other side has not acknowledged."""
        return Frame(self._received, self._acknowledged, list(self._unacknowledged))

    def receive(self, frame: Frame) -> Sequence[Any]:
        """Return a frame's new messages, or no messages if earlier ones are missing."""
        del self._unacknowledged[: max(0, frame.heard - self._acknowledged)]
        self._acknowledged = max(self._acknowledged, frame.heard)
        news = frame.said[self._received - frame.since :] if frame.since <= self._received else ()
        self._received += len(news)
        return news


class Peer:
    """The agent on another node, with the session and the link that the session uses."""

    def __init__(self, node: int, *, now: float) -> None:
        self.node = node
        self.session = Session()
        self.link: Link | None = None
        self.received_at = now
        self.joined = False
        self.lost = False


class Peers:
    """All agents that this agent is connected to. `now` is always in seconds on the same monotonic clock.

    `received` holds (node, message), and `lost` holds (node, reason, kind of the cause), both with the oldest
    entry first. The agent removes the entries.
    """

    def __init__(
        self,
        request: Launch,
        selector: selectors.BaseSelector,
        listener: socket.socket | None,
        *,
        now: float,
    ) -> None:
        self._request = request
        self._selector = selector
        self._listener = listener
        nodes = [node.node for node in request.nodes]
        others = nodes[1:] if listener is not None else nodes[:1]
        self._peers = {node: Peer(node, now=now) for node in others}
        self._now = self._beat_at = now
        self._reconnect_at = now  # when to replace the link to the first node
        self._refused_since = math.inf
        self.error = ""
        self.received: list[tuple[int, Any]] = []
        self.lost: list[tuple[int, str, str]] = []
        if listener is not None:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)

    @property
    def joined(self) -> bool:
        """True if all peers have been connected at least once."""
        return all(peer.joined for peer in self._peers.values())

    @property
    def has_unacknowledged(self) -> bool:
        """True if a peer that is not lost has not acknowledged all messages."""
        return any(peer.session.has_pending and not peer.lost for peer in self._peers.values() if peer.joined)

    @property
    def all_acknowledged(self) -> bool:
        """True if every peer has joined, was never lost, and has acknowledged all messages."""
        return not any(
            peer.session.has_pending or peer.lost or not peer.joined for peer in self._peers.values()
        )

    def send(self, message: object) -> None:
        """Send `message` to all peers, now or on the next link."""
        for peer in self._peers.values():
            frame = peer.session.send(message)
            if peer.link is not None:
                self._send(peer.link, frame)

    def handle_event(self, link: Link | None, now: float) -> None:
        """Handle an event from the selector for `link`, or for the listener if `link` is None."""
        self._now = now
        if link is None:
            self._accept()
        elif link.is_open:  # an earlier event may have replaced the link
            self._exchange(link)

    def tick(self, now: float) -> None:
        """Send heartbeats, give up silent peers, and reconnect if the first node does not answer."""
        self._now = now
        limit = self._request.silent_s
        for peer in self._peers.values():
            if peer.joined and now - peer.received_at > limit:
                self._lose(peer, f"no heartbeat for {limit:g} s")
            if self._listener is None:
                self._beat_or_reconnect(peer)

    def reset_clocks(self, now: float) -> None:
        """Restart all peers' silence timeouts, because this process did not run for some time."""
        for peer in self._peers.values():
            peer.received_at = now

    def _beat_or_reconnect(self, first: Peer) -> None:
        """Send a heartbeat to the first node, and reconnect to it if it does not respond."""
        if self._now >= self._reconnect_at and not first.lost:
            self._connect(first)
        elif self._now >= self._beat_at:
            self._beat_at = self._now + BEAT_SECONDS
            self._send_pending(first)

    def _connect(self, first: Peer) -> None:
        if first.link is not None:
            self.error = f"{self._address_text}: no answer"
            self._close(first.link)
        self._reconnect_at = self._now + _CONNECT_SECONDS
        sock = socket.socket()
        sock.setblocking(False)
        code = sock.connect_ex(_address(self._request))
        first.link = self._add(Link(sock, self._request.secret, me=self._request.node, node=first.node))
        if code not in (0, errno.EINPROGRESS):
            self._handle_broken(first.link, OSError(code, os.strerror(code)))

    @property
    def _address_text(self) -> str:
        return "{}:{}".format(*_address(self._request))

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._add(Link(sock, self._request.secret, me=self._request.node))

    def _add(self, link: Link) -> Link:
        # With TCP_NODELAY no frame is delayed until an ACK arrives.
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        return link

    def _exchange(self, link: Link) -> None:
        """Send the bytes that `link` accepts, and receive the frames that have arrived."""
        proved = link.is_authenticated
        try:
            frames = link.exchange()
        except OSError as error:
            self._handle_broken(link, error)
            return
        self._update_events(link)
        if frames or not proved:  # the peer answers, or has just connected
            self._reconnect_at = self._now + _SILENT_SECONDS
        peer = self._peers.get(link.node)
        if peer is None or not link.is_authenticated:
            return
        if not proved:
            self._beat_at = self._now
        for frame in frames:
            self._receive(peer, link, _read_frame(frame))

    def _receive(self, peer: Peer, link: Link, frame: Frame) -> None:
        """Handle a frame. The first node answers every frame; other nodes answer only frames with new
        messages.

        The session continues on the link that the newest frame used. A loss is reported over a separate link.
        """
        if frame.lost is not None:
            self._lose(peer, frame.lost, frame.kind if frame.kind in LOSSES else "node_lost")
            self._send(link, Frame())
            return
        if peer.link is not None and peer.link is not link:
            self._close(peer.link)
        peer.link, peer.joined, peer.received_at = link, True, self._now
        self._refused_since = math.inf
        news = peer.session.receive(frame)
        self.received += [(peer.node, message) for message in news]
        if news or self._listener is not None:
            self._send_pending(peer)

    def _send_pending(self, peer: Peer) -> None:
        """Send all unacknowledged messages.

        If earlier bytes are still unsent, nothing is sent, because the unsent bytes would accumulate.
        """
        if peer.link is not None and not peer.link.has_unsent:
            self._send(peer.link, peer.session.pending_frame())

    def _send(self, link: Link, frame: Frame) -> None:
        try:
            link.send(frame)
        except OSError as error:
            self._handle_broken(link, error)
        else:
            self._update_events(link)

    def _update_events(self, link: Link) -> None:
        write_event = selectors.EVENT_WRITE if link.has_unsent else 0
        self._selector.modify(link.socket, selectors.EVENT_READ | write_event, link)

    def _handle_broken(self, link: Link, error: OSError) -> None:
        """Handle a lost link.

        If the link was closed, or the port refuses connections for 2 s, the agent has ended. Any other error
        may be due to the network.
        """
        self._close(link)
        peer = self._peers.get(link.node)
        if peer is None or peer.link is not link:  # the link was not authenticated or was replaced
            return
        peer.link = None
        self.error = f"{self._address_text}: {error}"
        self._reconnect_at = self._now
        if link.is_authenticated:
            if isinstance(error, BrokenPipeError):
                self._lose(peer, _CLOSED)
            return
        is_refused = isinstance(error, ConnectionRefusedError)
        self._refused_since = min(self._refused_since, self._now) if is_refused else math.inf
        if peer.joined:
            self._reconnect_at += _RETRY_SECONDS
            if self._now - self._refused_since >= _REFUSED_SECONDS:
                self._lose(peer, "its agent has ended")

    def _close(self, link: Link) -> None:
        if link.is_open:
            self._selector.unregister(link.socket)
            link.close()

    def _lose(self, peer: Peer, why: str, kind: str = "node_lost") -> None:
        if not peer.lost:
            peer.lost = True
            self.lost.append((peer.node, why, kind))


def report_lost(request: Launch, node: int, why: str, *, kind: str = "node_lost", seconds: float) -> bool:
    """Report to the first node's agent that the agent on `node` has ended, and retry for at most `seconds`.

    Return True if the report was received.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with socket.create_connection(_address(request), timeout=_CONNECT_SECONDS) as sock:
                link = Link(sock, request.secret, me=node, node=request.first_node.node)
                if _send_report(link, Frame(lost=why, kind=kind)):
                    return True
        except ConnectionRefusedError:  # the first node's agent has also ended
            return False
        except OSError:
            pass
        time.sleep(_RETRY_SECONDS)
    return False


def _send_report(link: Link, frame: Frame) -> bool:
    """Send the report over a new link once a second. Return True if the first node answered."""
    end = time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < end:
        select.select([link.socket], [link.socket] if link.has_unsent else [], [], 1.0)
        if link.exchange():
            return True
        link.send(frame)
    return False


def _address(request: Launch) -> tuple[str, int]:
    return request.first_node.private_ip, request.link_port
