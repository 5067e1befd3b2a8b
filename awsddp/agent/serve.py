"""The running agent: one thread that waits for its ranks, for signals and for the other nodes' agents."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time

from awsddp.agent.changes import ChangeSearch
from awsddp.agent.coordinator import (
    FAILED_GRACE,
    SILENT_SECONDS,
    Coordinator,
    ElasticCoordinator,
    Message,
    Order,
    read_order,
)
from awsddp.agent.diagnosis.evidence import describe_full_disk
from awsddp.agent.diagnosis.job_causes import cause_of_node
from awsddp.agent.diagnosis.stacks import DUMP, NodeStacks, stacks
from awsddp.agent.job_folder import (
    Ending,
    JobFolder,
    JobSummary,
    initial_document,
    rank_rows,
    read_json,
    write_json,
)
from awsddp.agent.messages import Launch, to_json_value
from awsddp.agent.peers import BEAT_SECONDS, Peers, report_lost
from awsddp.agent.processes import Ranks, Workers, adopt_orphans, sweep
from awsddp.agent.samples import Samples
from awsddp.agent.shutdown import Shutdown, grace_at_shutdown, read_shutdown

_REPORT_SECONDS = 10.0
_SHUTDOWN_CAUSES = {
    "expires": ("expired", "it expired (cluster.expires)"),
    "spot": ("spot_interruption", "AWS reclaims the spot instance"),
    "reboot": ("interrupted", "it was rebooted"),
    "poweroff": ("interrupted", "it was powered off, from the node itself or by a stop of the instance"),
}


def run_guarded(request: Launch, folder: JobFolder, listener: socket.socket | None, ready: int) -> None:
    """Run the agent in a child process, and kill the job's remaining processes when the agent has ended.

    This process is the guard: it reports a crash of the agent to the first node. The guard and the agent both
    hold the job's lock. The agent writes to the pipe `ready` (a descriptor) once it is running.
    """
    adopt_orphans("awsddp-guard")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the ranks would inherit
    child = os.fork()
    if child == 0:
        adopt_orphans("awsddp-job")
        Agent(request, folder, listener).run(ready)
        return
    os.close(ready)
    if listener is not None:
        listener.close()
    exited = (0, 0)
    while exited[0] != child:
        exited = os.waitpid(-1, 0)
    sweep()
    if exited[1] != 0 and listener is None:
        why = f"its agent {_describe_exit(exited[1])} {describe_full_disk(folder.path)}"
        report_lost(request, request.node, why.rstrip(" ."), seconds=request.silent_s)


def _describe_exit(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed (signal {os.WTERMSIG(status)})."
    return "failed: see supervisor.log on the node."


class Agent:
    """Runs this node's part of the job and, on the first node, coordinates all nodes."""

    def __init__(self, request: Launch, folder: JobFolder, listener: socket.socket | None) -> None:
        now, elastic = time.monotonic(), request.elastic
        self._request = request
        self._folder = folder
        self._node, self._first_node = request.node, request.first_node.node
        self._poll_s = 0.1 if elastic else 0.25  # shorter if elastic: no signal reports a worker's note
        self._ranks = Workers(request, folder) if elastic else Ranks(request, folder)
        self._samples = Samples(request, folder)
        coordinator_type = ElasticCoordinator if elastic else Coordinator
        self._coordinator = coordinator_type(request, now=now) if listener is not None else None
        self._selector = selectors.DefaultSelector()
        self._peers = Peers(request, self._selector, listener, now=now)
        self._after = [JobFolder(job) for job in request.after]
        self._join_by = now + request.join_s
        self._polled_at = now
        self._is_gone = False
        self._is_silent = False  # none of the job's ranks has written to its log for a while
        self._report_at = 0.0
        self._look: tuple[NodeStacks, ChangeSearch] | None = None
        self._sizes: dict[str, int] = {}
        self._requested: Ending | None = None  # set by a cancel or by the node's shutdown
        self._forwarded: Ending | None = None  # the last `_requested` that was handled
        self._summary: JobSummary | None = None
        self._local_state: str | None = None  # this node's final state, if the first node is lost
        self._document = initial_document(request)
        self._document.pid = os.getpid()

    def run(self, ready: int) -> None:
        """Run until none of the job's processes is left on this node and the document is final."""
        self._listen_to_signals()
        self._write()
        os.write(ready, b"1")
        os.close(ready)
        self._send_to_first(Message(kind="here"))
        while self._summary is None:
            self._run_once()
        self._document.update(self._summary)
        with contextlib.suppress(OSError):
            self._folder.reserve.unlink()
        self._write()
        self._wait_for_peers()

    def _listen_to_signals(self) -> None:
        self._wake_reader, writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        writer.setblocking(False)
        self._wake_writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    def _on_term(self, *_: object) -> None:
        """Record how cancel.json ends the job. SIGTERM without cancel.json means that the node shuts down.

        A node that shuts down sends SIGTERM every 5 s; the first one sets the ranks' grace.
        """
        written = read_json(self._folder.cancel)
        requested = (
            Ending.from_json(written) if written else ending_of_shutdown(self._request, read_shutdown())
        )
        if not written and self._requested and self._requested.cause == requested.cause:
            return
        if requested.lost is not None and self._requested:  # an earlier request decides how the job ends
            requested.update(self._requested)
        self._requested = requested

    def _run_once(self) -> None:
        """Wait for an event or the next check of the deadlines, and handle it."""
        # Poll often while the ranks are being stopped, and until the first node has opened its port.
        is_busy = self._ranks.stopping or self._is_alone
        now = self._exchange(0.02 if is_busy else self._poll_s)
        if self._requested != self._forwarded:
            self._request_end()
        if self._is_alone and now >= self._join_by:
            self._end_alone(f"node{self._first_node} could not be reached ({self._peers.error})")
        self._report_output(now)
        self._report_look()
        self._report_ranks()
        if self._ranks.alive and not self._ranks.stopping:
            self._samples.take()
        self._report_if_gone()
        self._report_if_free()
        if self._coordinator is not None:
            self._coordinate(now)

    def _report_ranks(self) -> None:
        """Report the ranks that have ended on this node to the first node."""
        for message in self._ranks.reap():
            self._write_own_ranks()
            self._send_to_first(message)

    @property
    def _is_alone(self) -> bool:
        """True if this node is not the first node, and has never been connected to the first node."""
        return self._coordinator is None and not self._peers.joined

    def _exchange(self, poll_s: float) -> float:
        """Handle all events during the next `poll_s` seconds, and return the time."""
        events = self._selector.select(poll_s)
        now = time.monotonic()
        # If this process was suspended, the silence is not the peers' fault.
        if now - self._polled_at > 2 * BEAT_SECONDS:
            self._peers.reset_clocks(now)
        self._polled_at = now
        for key, _ in events:
            if key.fileobj is self._wake_reader:
                self._wake_reader.recv(4096)
            else:
                self._peers.handle_event(key.data, now)
        self._peers.tick(now)
        messages, self._peers.received = self._peers.received, []
        lost, self._peers.lost = self._peers.lost, []
        for node, message in messages:
            if self._coordinator is not None:
                self._coordinator.receive(node, Message.from_json(message), now=now)
            else:
                self._execute(read_order(message))
        for node, why, kind in lost:
            if self._coordinator is not None:
                self._coordinator.lose(node, why, kind)
            else:
                self._end_alone(f"it lost node{node} ({why})", kind=kind)
        return now

    # ---- messages to the first node, and orders from it

    def _request_end(self) -> None:
        """Ask the first node to end the job, and stop this node's ranks immediately."""
        requested = self._forwarded = self._requested
        assert requested is not None
        if requested.lost is not None:  # a client has reported that the first node is gone
            self._end_alone(f"it lost node{self._first_node} ({requested.lost})", kind=requested.kind)
            return
        self._document.cause = self._document.cause or requested.cause
        self._write()
        if self._is_silent and requested.state == "cancelled":
            self._dump_stacks()
        self._ranks.stop(requested.grace)
        if self._is_alone:
            self._end_alone("it was cancelled before it had started", state=requested.state)
        self._send_to_first(Message(kind="stop", ending=requested))

    def _end_alone(self, why: str, *, state: str = "failed", kind: str = "node_lost") -> None:
        """End this node's ranks without the first node, and write the cause to this node's document."""
        if self._local_state is not None:
            return
        self._local_state = state if self._requested is None else self._requested.state
        if self._local_state == "failed":
            why = f"node{self._node} ended its ranks: {why}"
            self._document.cause = cause_of_node(self._request, self._first_node, kind, why=why)
        if not self._ranks.stopping:
            self._ranks.stop(FAILED_GRACE)

    def _send_to_first(self, message: Message) -> None:
        """Send a message to the first node, which may be this node."""
        if self._coordinator is not None:
            self._coordinator.receive(self._node, message, now=time.monotonic())
        else:
            self._peers.send(message.to_json())

    def _execute(self, order: Order) -> None:
        if order.do == "go" and not self._ranks.stopping:
            self._document.state = "running"
            self._ranks.start()
            self._write_own_ranks()
            self._send_to_first(Message(kind="started", reports=list(self._ranks.reports.values())))
        elif order.do == "stop" and order.node in (None, self._node):
            self._ranks.stop(order.grace)
        elif order.do == "stacks":
            self._send_to_first(Message(kind="stacks", answer=self._dump_stacks()))
        elif order.do == "look" and self._look is None:
            silent_s = order.seconds - min(2 * _REPORT_SECONDS, order.seconds / 4)  # output is reported late
            with contextlib.suppress(OSError):  # for example, too many processes
                self._look = stacks(self._request), ChangeSearch(self._request, self._folder, silent_s)
        elif order.do == "silence":
            self._is_silent = order.silent
        elif order.do == "end":
            self._summary = order.whole

    def _report_output(self, now: float) -> None:
        """Report to the first node, at intervals, that a rank has written to its log."""
        if now < self._report_at or self._is_gone:
            return
        limit = min([self._request.hang_after or SILENT_SECONDS, *self._request.looks[:1]])
        self._report_at = now + min(_REPORT_SECONDS, limit / 4)
        sizes = self._folder.log_sizes()
        if sizes != self._sizes:
            self._sizes = sizes
            self._send_to_first(Message(kind="output"))

    def _report_look(self) -> None:
        """Send the first node the stacks of a look, once the search for changed results is over."""
        if self._look is not None and self._look[1].is_over():
            answer, search = self._look
            self._look = None
            self._send_to_first(Message(kind="look", answer=answer._replace(changed=search.changed)))

    def _dump_stacks(self) -> NodeStacks:
        """Write the ranks' stacks to the run folder before the job ends, and return them."""
        answer = stacks(self._request)
        with contextlib.suppress(OSError):
            write_json(self._folder.run / DUMP, answer)
        return answer

    def _write_own_ranks(self) -> None:
        """Write the state of this node's ranks, except on the first node, which writes all ranks' states."""
        if self._coordinator is None:
            self._document.ranks = rank_rows(self._request.layout, self._ranks.reports)
            self._write()

    def _report_if_gone(self) -> None:
        """When none of the job's processes is left on this node, report that once."""
        if not self._is_gone and self._ranks.finish_stop():
            self._report_ranks()  # reads the workers' last notes
            self._is_gone = True
            self._send_to_first(Message(kind="gone"))
        if self._is_gone and self._local_state is not None:
            document = self._document
            self._summary = JobSummary(
                state=self._local_state, cause=document.cause, ranks=document.ranks, complete=False
            )

    def _report_if_free(self) -> None:
        """When the jobs that this job waits for have ended on this node, in any state, report that once."""
        if self._after and not any(folder.is_active() for folder in self._after):
            self._after = []
            self._send_to_first(Message(kind="free"))

    def _coordinate(self, now: float) -> None:
        assert self._coordinator is not None
        self._coordinator.tick(now=now)
        orders, self._coordinator.orders = self._coordinator.orders, []
        for order in orders:
            self._peers.send(to_json_value(order))
            self._execute(order)
        summary = self._coordinator.document()
        if self._coordinator.done:
            self._peers.send(to_json_value(Order("end", whole=summary)))
            self._summary = summary
        elif not vars(summary).items() <= vars(self._document).items():
            self._document.update(summary)
            self._write()

    def _write(self) -> None:
        """Write the document. A full disk must not end the job; the next change triggers another write."""
        with contextlib.suppress(OSError):
            write_json(self._folder.state, self._document)

    def _wait_for_peers(self) -> None:
        """Wait until the other agents have been notified of the job's end; a SIGTERM ends the wait."""
        if self._coordinator is None:
            return
        requested, end = self._requested, time.monotonic() + self._request.silent_s
        while self._peers.has_unacknowledged and self._requested is requested and time.monotonic() < end:
            self._exchange(0.1)
        self._document.acknowledged = self._peers.all_acknowledged
        self._write()


def ending_of_shutdown(request: Launch, shutdown: Shutdown) -> Ending:
    """Return how the job ends if this node is shut down."""
    kind, text = _SHUTDOWN_CAUSES.get(shutdown.reason, ("interrupted", "its agent received SIGTERM"))
    suffix = f" at {shutdown.at}" if shutdown.at else ""
    why = f"node{request.node} was shut down while the job ran: {text}{suffix}"
    values = {"time": shutdown.at} if shutdown.at else {}
    cause = cause_of_node(request, request.node, kind, why=why, **values)
    grace = grace_at_shutdown(request.grace, shutdown.seconds_left(), saves=bool(request.saving))
    return Ending(state="interrupted", grace=grace, cause=cause)
