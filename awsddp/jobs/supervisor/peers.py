"""The other supervisors of a job: links to them, made again when they break, and when one is given up.

The first node accepts, the others connect. Only what proves that a supervisor has ended gives it up at once:
a connection that is closed (not reset) while no other to that node is open, its guard's word, a port at which
nobody listens any more. Everything else may be the network: it is waited for, `silent_s` long.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp.jobs.supervisor.job_causes import LOSSES
from awsddp.jobs.supervisor.link import Link, LinkClosed, LinkLost
from awsddp.jobs.supervisor.requests import read

if TYPE_CHECKING:
    from awsddp.jobs.supervisor.requests import Launch

BEAT_SECONDS = 2.0
_SILENT_SECONDS = 3 * BEAT_SECONDS
"""How long beats may go unanswered before another link is tried: both directions must work for an answer."""
_CLOSED = (
    "its supervisor has ended and closed the connection; a rank that kills every process (kill -1) does that"
)
"""What a connection that is closed proves: the node need not be gone."""
_CONNECT_SECONDS = 1.0
_REFUSED_SECONDS = 2.0
_RETRY_SECONDS = 0.5


class Frame(NamedTuple):
    """What goes over a link: it acknowledges the messages up to `received`.

    One with a `number` carries a message, a `beat` asks for an answer, and `lost` says why the supervisor in
    whose name the link was made has ended, with the `kind` of the cause.
    """

    received: int
    number: int = 0
    message: Any = None
    beat: bool = False
    lost: str | None = None
    kind: str = ""


class Session:
    """One side of a conversation that outlives its links: each message arrives once, and in order.

    Messages are numbered and acknowledged; what is not acknowledged is sent again on the next link. It does
    no I/O, so that it can be tried alone.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0
        self._pending: dict[int, Frame] = {}

    @property
    def pending(self) -> bool:
        """Whether the other side has not acknowledged everything."""
        return bool(self._pending)

    def send(self, message: object) -> Frame:
        """Take `message` on, and return the frame that carries it, for the link there is, if any."""
        self._sent += 1
        frame = self._pending[self._sent] = Frame(self._received, self._sent, message)
        return frame

    def resend(self) -> list[Frame]:
        """Return the frames with which a new link begins."""
        return [frame._replace(received=self._received) for frame in self._pending.values()]

    def acknowledge(self, *, beat: bool = False) -> Frame:
        """Return a frame that carries no message."""
        return Frame(self._received, beat=beat)

    def receive(self, frame: Frame) -> Any:
        """Return the message that `frame` carries, None where it carries none or one that came before."""
        for number in [number for number in self._pending if number <= frame.received]:
            del self._pending[number]
        if frame.number != self._received + 1:
            return None
        self._received += 1
        return frame.message


class Peer:
    """Another supervisor: the conversation with it, and the links that carry it. `link` is the newest."""

    def __init__(self, node: int, *, now: float) -> None:
        self.node = node
        self.session = Session()
        self.link: Link | None = None
        self.heard_at = now
        self.joined = False
        self.lost = False


class Peers:
    """All other supervisors that this one talks to. `now` is in seconds of one monotonic clock throughout.

    `heard` holds (node, message) and `lost` (node, reason, kind of the cause), oldest first; the caller takes
    them away.
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
        nodes = [one.node for one in request.nodes]
        others = nodes[1:] if listener is not None else nodes[:1]
        self._peers = {node: Peer(node, now=now) for node in others}
        self._links: list[Link] = []
        self._beat_at = now
        self._now = now
        self._attempt: Link | None = None
        self._attempt_connected = False
        self._attempt_until = now
        self._refused_since: float | None = None
        self.error = ""
        self.heard: list[tuple[int, Any]] = []
        self.lost: list[tuple[int, str, str]] = []
        if listener is not None:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)

    @property
    def joined(self) -> bool:
        """Whether all of them have been connected at least once."""
        return all(peer.joined for peer in self._peers.values())

    @property
    def unread(self) -> bool:
        """Whether one that is not given up has not acknowledged everything."""
        return any(peer.session.pending and not peer.lost for peer in self._peers.values() if peer.joined)

    def send(self, message: object) -> None:
        """Send `message` to all of them, now or on the next link."""
        for peer in self._peers.values():
            frame = peer.session.send(message)
            if peer.link is not None:
                self._send(peer.link, frame)

    def take(self, source: object, mask: int, now: float) -> None:
        """Handle what the selector reports of `source`."""
        self._now = now
        if source is self._listener:
            self._accept()
        for link in [link for link in self._links if link.socket is source]:
            self._exchange(link, mask)

    def tick(self, now: float) -> None:
        """Send heartbeats, give up silent peers, reconnect to those that do not answer."""
        self._now = now
        limit = self._request.silent_s
        for peer in self._peers.values():
            if peer.joined and now - peer.heard_at > limit:
                self._lose(peer, f"no heartbeat for {limit:g} s")
        if self._listener is None:
            self._keep_up(next(iter(self._peers.values())))

    def stood_still(self, now: float) -> None:
        """Reset the clocks after this process did not run for a while: the peers were not silent."""
        for peer in self._peers.values():
            peer.heard_at = now

    def _keep_up(self, first: Peer) -> None:
        """Beat to the first node, and connect to it anew when it does not respond."""
        now = self._now
        if first.link is not None and now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._send(first.link, first.session.acknowledge(beat=True))
        answers = first.link is not None and now - first.heard_at <= _SILENT_SECONDS
        if not (answers or first.lost) and now >= self._attempt_until:
            self._connect(first)

    def _connect(self, first: Peer) -> None:
        if self._attempt is not None and not self._attempt_connected:
            self.error = f"{self._place}: no answer"
            self._close(self._attempt)
        self._attempt_until = self._now + _CONNECT_SECONDS
        sock = socket.socket()
        sock.setblocking(False)
        code = sock.connect_ex(_address(self._request))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._failed(first, OSError(code, os.strerror(code)))
            return
        self._attempt = self._add(Link(sock, self._request.secret, me=self._request.node, node=first.node))
        self._attempt_connected = False

    @property
    def _place(self) -> str:
        return "{}:{}".format(*_address(self._request))

    def _failed(self, first: Peer, error: OSError) -> None:
        """Handle a failed attempt to connect; a port that refuses for 2 s has lost its supervisor."""
        now = self._now
        self.error = f"{self._place}: {error}"
        self._attempt_until = now + (_RETRY_SECONDS if first.joined else 0.0)
        if error.errno != errno.ECONNREFUSED:
            self._refused_since = None
            return
        self._refused_since = now if self._refused_since is None else self._refused_since
        if first.joined and now - self._refused_since >= _REFUSED_SECONDS:
            self._lose(first, "its supervisor has ended")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
            self._add(Link(sock, self._request.secret, me=self._request.node))
        except OSError:
            return

    def _add(self, link: Link) -> Link:
        self._links.append(link)
        self._selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        return link

    def _exchange(self, link: Link, mask: int) -> None:
        """Send and receive what `link` is ready for."""
        proved = link.proved
        try:
            if mask & selectors.EVENT_WRITE:
                link.flush()
            frames = link.receive() if mask & selectors.EVENT_READ else []
        except LinkLost as lost:
            self._broken(link, lost)
            return
        self._watch(link)
        if link is self._attempt and not proved:
            self._attempt_connected, self._attempt_until = True, self._now + _SILENT_SECONDS
        peer = self._peers.get(link.node) if link.proved and link.node is not None else None
        if peer is None:
            return
        if mask & selectors.EVENT_READ:
            peer.heard_at = self._now
        if not proved:
            self._join(peer, link)
        for frame in frames:
            self._hear(peer, link, read(Frame, frame))

    def _join(self, peer: Peer, link: Link) -> None:
        """Carry the conversation on over a link that was just proved. Who connected closes the older ones."""
        peer.link, peer.joined, self._refused_since = link, True, None
        if self._listener is None:
            for other in [other for other in self._links if other is not link]:
                self._close(other)
            self._beat_at = self._now
        for frame in peer.session.resend():
            self._send(link, frame)

    def _hear(self, peer: Peer, link: Link, frame: Frame) -> None:
        if frame.lost is not None:
            self._lose(peer, frame.lost, frame.kind if frame.kind in LOSSES else "node_lost")
        message = peer.session.receive(frame)
        if message is not None:
            self.heard.append((peer.node, message))
        if frame.number or frame.beat:
            self._send(link, peer.session.acknowledge())

    def _send(self, link: Link, frame: Frame) -> None:
        try:
            link.send(frame)
        except LinkLost as lost:
            self._broken(link, lost)
        else:
            self._watch(link)

    def _watch(self, link: Link) -> None:
        if link in self._links:
            write = selectors.EVENT_WRITE if link.unsent else 0
            self._selector.modify(link.socket, selectors.EVENT_READ | write)

    def _broken(self, link: Link, lost: LinkLost) -> None:
        """Handle a lost link. Closed means that its supervisor ended; reset may be the network."""
        self._close(link)
        peer = self._peers.get(link.node) if link.node is not None else None
        if peer is None:
            return
        if link is self._attempt and not link.proved:
            cause = lost.__cause__
            self._failed(peer, cause if isinstance(cause, OSError) else OSError(str(lost)))
        others = [other for other in self._links if other.proved and other.node == peer.node]
        if peer.link is link:
            peer.link, self._attempt_until = (others[-1] if others else None), self._now
        if link.proved and isinstance(lost, LinkClosed) and not others:
            self._lose(peer, _CLOSED)

    def _close(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.socket)
        link.close()

    def _lose(self, peer: Peer, why: str, kind: str = "node_lost") -> None:
        if not peer.lost:
            peer.lost = True
            self.lost.append((peer.node, why, kind))


def report_lost(request: Launch, node: int, why: str, *, kind: str = "node_lost", seconds: float) -> bool:
    """Report to the first node's supervisor that the one of `node` has ended; return whether it heard.

    Tries for `seconds`.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with socket.create_connection(_address(request), timeout=_CONNECT_SECONDS) as sock:
                link = Link(sock, request.secret, me=node, node=request.first.node)
                if _report(link, Frame(0, beat=True, lost=why, kind=kind)):
                    return True
        except ConnectionRefusedError:  # it has ended, too
            return False
        except (OSError, LinkLost):
            pass
        time.sleep(_RETRY_SECONDS)
    return False


def _report(link: Link, frame: Frame) -> bool:
    """Send the report over a new link, and return whether it was answered."""
    end = time.monotonic() + _SILENT_SECONDS
    sent = False
    while time.monotonic() < end:
        select.select([link.socket], [link.socket] if link.unsent else [], [], 1.0)
        link.flush()
        answered = link.receive()
        if sent and answered:
            return True
        if link.proved and not sent:
            sent = True
            link.send(frame)
    return False


def _address(request: Launch) -> tuple[str, int]:
    return request.first.private_ip, request.link_port
