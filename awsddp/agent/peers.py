"""The other supervisors of a job: links to them, made again when they break, and when one is given up.

The first node accepts, the others connect. Only what proves that a supervisor has ended gives it up at once:
a connection that is closed, not reset (supervisors reset those that they give up), its guard's word, a port
at which nobody listens any more. Everything else may be the network: it is waited for, `silent_s` long.
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
from awsddp.agent.messages import reader
from awsddp.agent.peer_connection import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awsddp.agent.messages import Launch

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
    """What goes over a link: what a side `said` after its first `since` messages, and how many it `heard`.

    It says again what the other has not heard; what comes twice, or late, means nothing. `lost` says why
    the supervisor in whose name the link was made has ended, with the `kind` of the cause.
    """

    heard: int = 0
    since: int = 0
    said: Sequence[Any] = ()
    lost: str | None = None
    kind: str = ""


_READ = reader(Frame)


class Session:
    """One side of a conversation that outlives its links: each message arrives once, and in order.

    It does no I/O, so that it can be tried alone.
    """

    def __init__(self) -> None:
        self._heard = 0
        self._known = 0  # how many of the own messages the other side has heard
        self._unheard: list[object] = []

    @property
    def pending(self) -> bool:
        """Whether the other side has not heard everything."""
        return bool(self._unheard)

    def say(self, message: object) -> Frame:
        """Take `message` on, and return the frame that carries it alone, for the link there is, if any."""
        self._unheard.append(message)
        return Frame(self._heard, self._known + len(self._unheard) - 1, [message])

    def frame(self) -> Frame:
        """Return the frame with all that the other side may not have heard."""
        return Frame(self._heard, self._known, list(self._unheard))

    def hear(self, frame: Frame) -> Sequence[Any]:
        """Return what is new in a frame: nothing where messages before it are missing."""
        del self._unheard[: max(0, frame.heard - self._known)]
        self._known = max(self._known, frame.heard)
        news = frame.said[self._heard - frame.since :] if frame.since <= self._heard else ()
        self._heard += len(news)
        return news


class Peer:
    """Another supervisor: the conversation with it, and the link that carries it."""

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
        self._now = self._beat_at = now
        self._try_at = now  # when the link to the first node is given up, and made anew
        self._refused_since = math.inf
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
        """Whether one that is not given up has not heard everything."""
        return any(peer.session.pending and not peer.lost for peer in self._peers.values() if peer.joined)

    def send(self, message: object) -> None:
        """Send `message` to all of them, now or on the next link."""
        for peer in self._peers.values():
            frame = peer.session.say(message)
            if peer.link is not None:
                self._send(peer.link, frame)

    def take(self, link: Link | None, now: float) -> None:
        """Handle what the selector reports, by its data: a link that is ready, None for the listener."""
        self._now = now
        if link is None:
            self._accept()
        elif link.is_open:  # it was not replaced in the same turn
            self._exchange(link)

    def tick(self, now: float) -> None:
        """Send heartbeats, give up silent peers, reconnect to those that do not answer."""
        self._now = now
        limit = self._request.silent_s
        for peer in self._peers.values():
            if peer.joined and now - peer.heard_at > limit:
                self._lose(peer, f"no heartbeat for {limit:g} s")
            if self._listener is None:
                self._keep_up(peer)

    def stood_still(self, now: float) -> None:
        """Reset the clocks after this process did not run for a while: the peers were not silent."""
        for peer in self._peers.values():
            peer.heard_at = now

    def _keep_up(self, first: Peer) -> None:
        """Beat to the first node, and connect to it anew when it does not respond."""
        if self._now >= self._try_at and not first.lost:
            self._connect(first)
        elif self._now >= self._beat_at:
            self._beat_at = self._now + BEAT_SECONDS
            self._tell(first)

    def _connect(self, first: Peer) -> None:
        if first.link is not None:
            self.error = f"{self._place}: no answer"
            self._close(first.link)
        self._try_at = self._now + _CONNECT_SECONDS
        sock = socket.socket()
        sock.setblocking(False)
        code = sock.connect_ex(_address(self._request))
        first.link = self._add(Link(sock, self._request.secret, me=self._request.node, node=first.node))
        if code not in (0, errno.EINPROGRESS):
            self._broken(first.link, OSError(code, os.strerror(code)))

    @property
    def _place(self) -> str:
        return "{}:{}".format(*_address(self._request))

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._add(Link(sock, self._request.secret, me=self._request.node))

    def _add(self, link: Link) -> Link:
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a frame waits for no other's ACK
        self._selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        return link

    def _exchange(self, link: Link) -> None:
        """Send and receive what `link` is ready for."""
        proved = link.proved
        try:
            frames = link.turn()
        except OSError as error:
            self._broken(link, error)
            return
        self._watch(link)
        if frames or not proved:  # it answers, or has just connected
            self._try_at = self._now + _SILENT_SECONDS
        peer = self._peers.get(link.node)
        if peer is None or not link.proved:
            return
        if not proved:
            self._beat_at = self._now
        for frame in frames:
            self._hear(peer, link, _READ(frame))

    def _hear(self, peer: Peer, link: Link, frame: Frame) -> None:
        """Take in what is new in a frame; the first node answers each, the others those with news.

        The conversation goes on over the link of the newest one; that of a report is none of it.
        """
        if frame.lost is not None:
            self._lose(peer, frame.lost, frame.kind if frame.kind in LOSSES else "node_lost")
            self._send(link, Frame())
            return
        if peer.link is not None and peer.link is not link:
            self._close(peer.link)
        peer.link, peer.joined, peer.heard_at = link, True, self._now
        self._refused_since = math.inf
        news = peer.session.hear(frame)
        self.heard += [(peer.node, message) for message in news]
        if news or self._listener is not None:
            self._tell(peer)

    def _tell(self, peer: Peer) -> None:
        """Send all that a peer may not have heard; on a link that hangs it would pile up."""
        if peer.link is not None and not peer.link.unsent:
            self._send(peer.link, peer.session.frame())

    def _send(self, link: Link, frame: Frame) -> None:
        try:
            link.send(frame)
        except OSError as error:
            self._broken(link, error)
        else:
            self._watch(link)

    def _watch(self, link: Link) -> None:
        write = selectors.EVENT_WRITE if link.unsent else 0
        self._selector.modify(link.socket, selectors.EVENT_READ | write, link)

    def _broken(self, link: Link, error: OSError) -> None:
        """Handle a lost link. Closed means that its supervisor ended, as does a port that refuses for 2 s.

        Anything else may be the network.
        """
        self._close(link)
        peer = self._peers.get(link.node)
        if peer is None or peer.link is not link:  # a stranger
            return
        peer.link = None
        self.error = f"{self._place}: {error}"
        self._try_at = self._now
        if link.proved:
            if isinstance(error, BrokenPipeError):
                self._lose(peer, _CLOSED)
            return
        refused = isinstance(error, ConnectionRefusedError)
        self._refused_since = min(self._refused_since, self._now) if refused else math.inf
        if peer.joined:
            self._try_at += _RETRY_SECONDS
            if self._now - self._refused_since >= _REFUSED_SECONDS:
                self._lose(peer, "its supervisor has ended")

    def _close(self, link: Link) -> None:
        if link.is_open:
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
                if _report(link, Frame(lost=why, kind=kind)):
                    return True
        except ConnectionRefusedError:  # it has ended, too
            return False
        except OSError:
            pass
        time.sleep(_RETRY_SECONDS)
    return False


def _report(link: Link, frame: Frame) -> bool:
    """Send the report over a new link, once a second, and return whether it was answered."""
    end = time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < end:
        select.select([link.socket], [link.socket] if link.unsent else [], [], 1.0)
        if link.turn():
            return True
        link.send(frame)
    return False


def _address(request: Launch) -> tuple[str, int]:
    return request.first.private_ip, request.link_port
