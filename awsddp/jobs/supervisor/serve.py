"""The running supervisor: one thread that waits for its ranks, its signals and the other supervisors."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

from awsddp.jobs.supervisor.coordinator import FAILED_GRACE, Coordinator
from awsddp.jobs.supervisor.folder import JobFolder, cause_of_node, initial, read_json, write_json
from awsddp.jobs.supervisor.link import Link, LinkLost
from awsddp.jobs.supervisor.processes import Ranks, adopt_orphans, sweep
from awsddp.jobs.supervisor.times import Times

_BEAT_SECONDS = 2.0
_FAREWELL_SECONDS = 3.0


def guard(request: dict[str, Any], folder: JobFolder, listener: socket.socket | None, ready: int) -> None:
    """Run the supervisor in a child, and end whatever of the job it leaves, however it ends.

    Both hold the job's lock. `ready` is a pipe's descriptor, written to when the supervisor is there.
    """
    adopt_orphans("awsddp-guard")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # a handler: SIG_IGN would be inherited by the ranks
    child = os.fork()
    if child == 0:
        adopt_orphans("awsddp-job")
        Supervisor(request, folder, listener).run(ready)
        return
    os.close(ready)
    if listener is not None:
        listener.close()
    while os.waitpid(-1, 0)[0] != child:
        pass
    sweep()


class Supervisor:
    """This node's part of the job and, on its first node, the coordination of all."""

    def __init__(self, request: dict[str, Any], folder: JobFolder, listener: socket.socket | None) -> None:
        now = time.monotonic()
        self._request = request
        self._folder = folder
        self._me: int = request["node"]
        self._ranks = Ranks(request, folder)
        self._times = Times(request, folder)
        self._coordinator = Coordinator(request, now=now) if listener is not None else None
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._links: dict[Link, float] = {}  # when it was last heard
        self._upstream: Link | None = None
        self._upstream_error = ""
        self._join_by = now + request["join_s"]
        self._beat_at = now
        self._turned_at = now
        self._going = False
        self._gone = False
        self._asked: dict[str, Any] | None = None  # a cancel that node 0 has not answered yet
        self._end: dict[str, Any] | None = None
        self._verdict: str | None = None  # of this node alone, when the first node is lost
        self._own = {**initial(request), "pid": os.getpid()}

    def run(self, ready: int) -> None:
        """Serve until nothing of the job is left here and the document is final."""
        self._listen_to_signals()
        self._write()
        os.write(ready, b"1")
        os.close(ready)
        if self._listener is not None:
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._say({"is": "here"})
        while self._end is None:
            self._turn()
        self._times.note(last=True)
        self._own.update(self._end)
        self._write()
        self._farewell()

    def _listen_to_signals(self) -> None:
        self._wake, wake = socket.socketpair()
        self._wake.setblocking(False)
        wake.setblocking(False)
        self._waker = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def _on_term(self, *_: object) -> None:
        """End the job as cancel.json says; a TERM without one is the node's own shutdown."""
        asked = read_json(self._folder.cancel) or {"state": "interrupted", "grace": self._request["grace"]}
        self._asked = {"is": "stop", **asked}

    def _turn(self) -> None:
        """Wait for one thing to happen, or for the next look at the clock, and take it in."""
        waiting = self._ranks.stopping or self._alone  # the first node opens its port at the same moment
        events = self._selector.select(0.02 if waiting else 0.25)
        now = time.monotonic()
        if now - self._turned_at > 2 * _BEAT_SECONDS:  # we ourselves stood still: nobody was silent to us
            self._links = dict.fromkeys(self._links, now)
        self._turned_at = now
        for key, mask in events:
            self._take(key.fileobj, mask, now)
        if self._alone and not self._ranks.stopping:
            self._connect(now)
        if self._asked is not None and not self._alone:
            self._say(self._asked)
            self._asked = None
        for report in self._ranks.reap():
            self._note()
            self._say(report)
        self._beat(now)
        self._look_left()
        if self._coordinator is not None:
            self._coordinate(now)

    @property
    def _alone(self) -> bool:
        """Whether this node has no word from the first node: it is not the first, nor connected to it."""
        return self._coordinator is None and self._upstream is None

    # ---- what comes in

    def _take(self, source: object, mask: int, now: float) -> None:
        if source is self._wake:
            self._wake.recv(4096)
        elif source is self._listener:
            self._accept(now)
        else:
            for link in [link for link in self._links if link.socket is source]:
                self._exchange(link, mask, now)

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
            link = Link(sock, self._request["secret"], me=self._me)
        except OSError:
            return
        self._add(link, now)

    def _add(self, link: Link, now: float) -> None:
        self._links[link] = now
        self._selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _exchange(self, link: Link, mask: int, now: float) -> None:
        """Move what `link` has to give and to take. A link that breaks is dropped, its node with it."""
        try:
            if mask & selectors.EVENT_WRITE:
                link.flush()
            messages = link.receive() if mask & selectors.EVENT_READ else []
        except LinkLost as lost:
            self._drop(link, str(lost))
            return
        if mask & selectors.EVENT_READ:
            self._links[link] = now
        self._watch(link)
        for message in messages:
            if self._coordinator is not None and link.node is not None:
                self._coordinator.hear(link.node, message, now=now)
            else:
                self._obey(message)

    def _watch(self, link: Link) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        self._selector.modify(link.socket, events)

    def _drop(self, link: Link, why: str) -> None:
        if link not in self._links:
            return
        self._selector.unregister(link.socket)
        del self._links[link]
        link.close()
        if self._coordinator is not None:
            if link.proved and link.node is not None:
                self._coordinator.lose(link.node, why)
        elif link is self._upstream:
            self._upstream = None
            self._upstream_error = why
            if self._going or self._ranks.stopping:
                self._abandon(f"it lost node{self._first} ({why})")

    # ---- to and from the first node

    @property
    def _first(self) -> int:
        return int(self._request["nodes"][0]["node"])

    def _connect(self, now: float) -> None:
        if self._asked is not None:
            self._abandon("it was cancelled before it had started", state=self._asked["state"])
            return
        if now >= self._join_by:
            self._abandon(f"node{self._first} could not be reached ({self._upstream_error})")
            return
        address = (self._request["nodes"][0]["private_ip"], self._request["link_port"])
        try:
            sock = socket.create_connection(address, timeout=1)
        except OSError as error:
            self._upstream_error = f"{address[0]}:{address[1]}: {error}"
            return
        self._upstream = Link(sock, self._request["secret"], me=self._me, node=self._first)
        self._add(self._upstream, now)
        self._say({"is": "here"})

    def _abandon(self, why: str, *, state: str = "failed") -> None:
        """End this node's part without the first node, and say so in this node's own document."""
        self._verdict = state
        if state == "failed":
            explanation = f"node{self._me} ended its ranks: {why}."
            self._own["cause"] = cause_of_node(self._request, self._first, explanation)
        self._ranks.stop(FAILED_GRACE)

    def _say(self, message: dict[str, Any]) -> None:
        """Tell the first node, which may be this one."""
        if self._coordinator is not None:
            self._coordinator.hear(self._me, message, now=time.monotonic())
        elif self._upstream is not None:
            self._send(self._upstream, message)

    def _send(self, link: Link, message: dict[str, Any]) -> None:
        try:
            link.send(message)
            self._watch(link)
        except LinkLost as lost:
            self._drop(link, str(lost))

    def _obey(self, order: dict[str, Any]) -> None:
        kind = order.get("do")
        if kind == "go" and not self._ranks.stopping:
            self._going = True
            self._ranks.start()
            self._note()
            self._say({"is": "started", "ranks": [(p.rank, p.started) for p in self._ranks.processes]})
        elif kind == "stop":
            self._ranks.stop(order["grace"])
        elif kind == "end":
            self._end = order["document"]

    def _note(self) -> None:
        """Write down this node's own ranks; on the first node the whole job's document holds them."""
        if self._coordinator is None:
            mine = {process.rank: process for process in self._ranks.processes}
            for rank in self._own["ranks"]:
                if rank["rank"] in mine:
                    rank.update(mine[rank["rank"]].entry())
            self._write()

    def _beat(self, now: float) -> None:
        self._times.note()
        limit = self._request["silent_s"]
        for link in [link for link, heard in self._links.items() if now - heard > limit]:
            self._drop(link, f"nothing was heard of it for {limit:g} s")
        if now >= self._beat_at:
            self._beat_at = now + _BEAT_SECONDS
            self._tell_all({"is": "alive"})

    def _look_left(self) -> None:
        """When everything of the job is gone from this node, say so, once."""
        if not self._gone and self._ranks.gone():
            self._gone = True
            self._say({"is": "gone", "stuck": self._ranks.stuck})
        if self._gone and self._alone:
            self._end = {"state": self._verdict or "failed"}

    def _coordinate(self, now: float) -> None:
        assert self._coordinator is not None
        self._coordinator.tick(now=now)
        orders, self._coordinator.orders = self._coordinator.orders, []
        for order in orders:
            self._tell_all(order)
            self._obey(order)
        document = self._coordinator.document()
        if self._coordinator.done:
            self._tell_all({"do": "end", "document": document})
            self._end = document
        elif {**self._own, **document} != self._own:
            self._own.update(document)
            self._write()

    def _tell_all(self, order: dict[str, Any]) -> None:
        for link in [link for link in self._links if link.proved]:
            self._send(link, order)

    def _write(self) -> None:
        try:
            write_json(self._folder.state, self._own)
        except OSError as error:  # a full disk must not end the job; the next change tries again
            sys.stderr.write(f"state.json could not be written: {error}\n")

    def _farewell(self) -> None:
        """Let the other supervisors read the end before the connections close."""
        end = time.monotonic() + _FAREWELL_SECONDS
        while self._coordinator is not None and self._links and time.monotonic() < end:
            for key, mask in self._selector.select(0.1):
                self._take(key.fileobj, mask, time.monotonic())
