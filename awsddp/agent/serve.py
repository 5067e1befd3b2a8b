"""The running supervisor: one thread that waits for its ranks, its signals and the other supervisors."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from pathlib import Path

from awsddp.agent.coordinator import (
    FAILED_GRACE,
    SILENT_SECONDS,
    Coordinator,
    Elastic,
    Order,
    Said,
    read_order,
)
from awsddp.agent.diagnosis.evidence import full_disk
from awsddp.agent.diagnosis.job_causes import cause_of_node
from awsddp.agent.diagnosis.stacks import DUMP, Answer, stacks
from awsddp.agent.job_folder import Ending, JobFolder, Whole, initial, rank_lines, read_json, write_json
from awsddp.agent.messages import Launch, plain
from awsddp.agent.peers import BEAT_SECONDS, Peers, report_lost
from awsddp.agent.processes import Ranks, Workers, adopt_orphans, sweep
from awsddp.agent.samples import Samples

_REPORT_SECONDS = 10.0
LIMIT_SECONDS = 110.0
"""The longest grace at a shutdown: awsddp-jobs.service holds it up for 120 s."""
_REASON = Path("/run/awsddp/shutdown")
_REASONS = {
    "expires": ("expired", "it expired (cluster.expires)"),
    "spot": ("spot_interruption", "AWS reclaims the spot instance"),
    "reboot": ("interrupted", "it was rebooted"),
    "poweroff": ("interrupted", "it was powered off, from inside or by a stop of the instance"),
}


def guard(request: Launch, folder: JobFolder, listener: socket.socket | None, ready: int) -> None:
    """Run the supervisor in a child, and kill what it leaves of the job.

    A crash is reported to the first node. Both processes hold the job's lock. `ready` is the descriptor of a
    pipe that is written to when the supervisor runs.
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
    ended = (0, 0)
    while ended[0] != child:
        ended = os.waitpid(-1, 0)
    sweep()
    if ended[1] != 0 and listener is None:
        why = f"its supervisor {_ending(ended[1])} {full_disk(folder.path)}"
        report_lost(request, request.node, why.rstrip(" ."), seconds=request.silent_s)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed (signal {os.WTERMSIG(status)})."
    return "failed: supervisor.log on the node tells why."


class Supervisor:
    """This node's part of the job and, on its first node, the coordination of all."""

    def __init__(self, request: Launch, folder: JobFolder, listener: socket.socket | None) -> None:
        now, elastic = time.monotonic(), request.elastic
        self._request = request
        self._folder = folder
        self._me, self._first = request.node, request.first.node
        self._patience_s = 0.1 if elastic else 0.25  # no signal tells that a worker has noted something
        self._ranks = Workers(request, folder) if elastic else Ranks(request, folder)
        self._samples = Samples(request, folder)
        kind = Elastic if elastic else Coordinator
        self._coordinator = kind(request, now=now) if listener is not None else None
        self._selector = selectors.DefaultSelector()
        self._peers = Peers(request, self._selector, listener, now=now)
        self._after = [JobFolder(job) for job in request.after]
        self._join_by = now + request.join_s
        self._turned_at = now
        self._gone = False
        self._silent = False  # nothing was written by any rank of the job for a while
        self._report_at = 0.0
        self._sizes: dict[str, int] = {}
        self._asked: Ending | None = None  # how to end, from a cancel or the node's shutdown
        self._sent: Ending | None = None  # the last of these that the first node was sent
        self._end: Whole | None = None
        self._verdict: str | None = None  # of this node alone, when the first node is lost
        self._own = initial(request)
        self._own.pid = os.getpid()

    def run(self, ready: int) -> None:
        """Serve until nothing of the job is left here and the document is final."""
        self._listen_to_signals()
        self._write()
        os.write(ready, b"1")
        os.close(ready)
        self._say(Said(kind="here"))
        while self._end is None:
            self._turn()
        self._own.take(self._end)
        with contextlib.suppress(OSError):
            self._folder.reserve.unlink()
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
        written = read_json(self._folder.cancel)
        asked = Ending.from_json(written) if written else shutdown(self._request)
        if asked.lost is not None and self._asked:  # how the job ends stays as it was asked before
            asked.take(self._asked)
        self._asked = asked

    def _turn(self) -> None:
        """Wait for one event or the next check of the deadlines, and handle it."""
        waiting = self._ranks.stopping or self._alone  # the first node opens its port at the same moment
        now = self._exchange(0.02 if waiting else self._patience_s)
        if self._asked != self._sent:
            self._ask_to_end()
        if self._alone and now >= self._join_by:
            self._abandon(f"node{self._first} could not be reached ({self._peers.error})")
        self._report_output(now)
        self._report()
        if self._ranks.alive and not self._ranks.stopping:
            self._samples.take()
        self._look_left()
        self._look_free()
        if self._coordinator is not None:
            self._coordinate(now)

    def _report(self) -> None:
        """Tell the first node what has become of this node's ranks."""
        for said in self._ranks.reap():
            self._note()
            self._say(said)

    @property
    def _alone(self) -> bool:
        """Whether this node is not the first and was never connected to it."""
        return self._coordinator is None and not self._peers.joined

    def _exchange(self, patience_s: float) -> float:
        """Handle what arrives within `patience_s`, and return the time."""
        events = self._selector.select(patience_s)
        now = time.monotonic()
        if now - self._turned_at > 2 * BEAT_SECONDS:  # we ourselves stood still: nobody was silent to us
            self._peers.stood_still(now)
        self._turned_at = now
        for key, _ in events:
            if key.fileobj is self._wake:
                self._wake.recv(4096)
            else:
                self._peers.take(key.data, now)
        self._peers.tick(now)
        heard, self._peers.heard = self._peers.heard, []
        lost, self._peers.lost = self._peers.lost, []
        for node, message in heard:
            if self._coordinator is not None:
                self._coordinator.hear(node, Said.from_json(message), now=now)
            else:
                self._obey(read_order(message))
        for node, why, kind in lost:
            if self._coordinator is not None:
                self._coordinator.lose(node, why, kind)
            else:
                self._abandon(f"it lost node{node} ({why})", kind=kind)
        return now

    # ---- to and from the first node

    def _ask_to_end(self) -> None:
        """Ask the first node to end the job; the ranks of this node are stopped at once."""
        asked = self._sent = self._asked
        assert asked is not None
        if asked.lost is not None:  # a client knows that the first node is gone
            self._abandon(f"it lost node{self._first} ({asked.lost})", kind=asked.kind)
            return
        self._own.cause = self._own.cause or asked.cause
        self._write()
        if self._silent and asked.state == "cancelled":
            self._inspect()
        self._ranks.stop(asked.grace)
        if self._alone:
            self._abandon("it was cancelled before it had started", state=asked.state)
        self._say(Said(kind="stop", ending=asked))

    def _abandon(self, why: str, *, state: str = "failed", kind: str = "node_lost") -> None:
        """End this node's part without the first node, and write it to this node's document."""
        if self._verdict is not None:
            return
        self._verdict = state if self._asked is None else self._asked.state
        if self._verdict == "failed":
            why = f"node{self._me} ended its ranks: {why}"
            self._own.cause = cause_of_node(self._request, self._first, kind, why=why)
        if not self._ranks.stopping:
            self._ranks.stop(FAILED_GRACE)

    def _say(self, said: Said) -> None:
        """Tell the first node, which may be this one."""
        if self._coordinator is not None:
            self._coordinator.hear(self._me, said, now=time.monotonic())
        else:
            self._peers.send(said.to_json())

    def _obey(self, order: Order) -> None:
        if order.do == "go" and not self._ranks.stopping:
            self._own.state = "running"
            self._ranks.start()
            self._note()
            self._say(Said(kind="started", reports=list(self._ranks.reports.values())))
        elif order.do == "stop" and order.node in (None, self._me):
            self._ranks.stop(order.grace)
        elif order.do == "stacks":
            self._say(Said(kind="stacks", answer=self._inspect()))
        elif order.do == "silence":
            self._silent = order.silent
        elif order.do == "end":
            self._end = order.whole

    def _report_output(self, now: float) -> None:
        """Tell the first node, now and then, that a rank has written to its log."""
        if now < self._report_at or self._gone:
            return
        limit = self._request.hang_after or SILENT_SECONDS
        self._report_at = now + min(_REPORT_SECONDS, limit / 4)
        sizes = self._folder.log_sizes()
        if sizes != self._sizes:
            self._sizes = sizes
            self._say(Said(kind="output"))

    def _inspect(self) -> Answer:
        """Return what the ranks do, and leave it in the run folder: a job that hangs is about to end."""
        answer = stacks(self._request)
        with contextlib.suppress(OSError):
            write_json(self._folder.run / DUMP, answer)
        return answer

    def _note(self) -> None:
        """Write the state of this node's ranks; the first node writes that of all ranks."""
        if self._coordinator is None:
            self._own.ranks = rank_lines(self._request.layout, self._ranks.reports)
            self._write()

    def _look_left(self) -> None:
        """Report once that nothing of the job is left on this node."""
        if not self._gone and self._ranks.gone():
            self._report()  # what a worker has noted at its end
            self._gone = True
            self._say(Said(kind="gone"))
        if self._gone and self._verdict is not None:
            own = self._own
            self._end = Whole(state=self._verdict, cause=own.cause, ranks=own.ranks, complete=False)

    def _look_free(self) -> None:
        """Report once that the jobs that this one waits for have ended on this node, however they ended."""
        if self._after and not any(folder.active() for folder in self._after):
            self._after = []
            self._say(Said(kind="free"))

    def _coordinate(self, now: float) -> None:
        assert self._coordinator is not None
        self._coordinator.tick(now=now)
        orders, self._coordinator.orders = self._coordinator.orders, []
        for order in orders:
            self._peers.send(plain(order))
            self._obey(order)
        whole = self._coordinator.document()
        if self._coordinator.done:
            self._peers.send(plain(Order("end", whole=whole)))
            self._end = whole
        elif not vars(whole).items() <= vars(self._own).items():
            self._own.take(whole)
            self._write()

    def _write(self) -> None:
        """Write the document. A full disk must not end the job; the next change tries again."""
        with contextlib.suppress(OSError):
            write_json(self._folder.state, self._own)

    def _farewell(self) -> None:
        """Wait until the other supervisors have read the end; a SIGTERM ends the wait."""
        if self._coordinator is None:
            return
        asked, end = self._asked, time.monotonic() + self._request.silent_s
        while self._peers.unread and self._asked is asked and time.monotonic() < end:
            self._exchange(0.1)


def shutdown(request: Launch, file: Path = _REASON) -> Ending:
    """Return how the job is to end at a shutdown of this node: its state, grace (s) and cause."""
    try:
        word, _, moment = file.read_text(encoding="ascii", errors="replace").strip().partition(" ")
    except OSError:
        word, moment = "", ""
    kind, reason = _REASONS.get(word, ("interrupted", "its supervisor got SIGTERM"))
    at = f" at {moment}" if moment else ""
    why = f"node{request.node} was shut down while the job ran: {reason}{at}"
    when = {"time": moment} if moment else {}
    cause = cause_of_node(request, request.node, kind, why=why, **when)
    return Ending(state="interrupted", grace=min(request.grace, LIMIT_SECONDS), cause=cause)
