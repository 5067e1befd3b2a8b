"""What a job's first node decides: when all ranks start, when all must end, and why the job ended.

A coordinator receives messages from the nodes and queues orders for all of them. The coordinator does no I/O
and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp.agent.diagnosis.hang import diagnose
from awsddp.agent.diagnosis.hang_watch import HangWatch, find_place
from awsddp.agent.diagnosis.job_causes import (
    NODE_FAULTS,
    TIMED_OUT,
    WAITED,
    Cause,
    cause_of_node,
    explain_early_exit,
    with_address,
    with_node,
)
from awsddp.agent.diagnosis.stacks import NodeStacks, read_stacks
from awsddp.agent.job_folder import Ending, JobSummary, RankReport, rank_rows, read_report
from awsddp.agent.messages import OmitsUnset, list_reader, make_reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awsddp.agent.messages import Launch

FAILED_GRACE = 1.0
"""Seconds between TERM and KILL for the other ranks when a rank has failed."""
INSPECT_SECONDS = 3.0
"""How long the nodes may take to send their ranks' stacks before a job that hangs is ended."""
SILENT_SECONDS = 120.0
"""After this many seconds without output, a cancel also makes the nodes write their ranks' stacks."""
_FAULTS = ("own", "echo", "stopped")
_SEEN = " No file of the results changed, and two looks at the ranks found nothing that moved."


class Order(NamedTuple):
    """An order to all nodes, or to one `node`. `do` has one of these values.

    - "go": start the ranks.
    - "stop": end the ranks within `grace` seconds.
    - "stacks": send the ranks' stacks.
    - "look": send the ranks' stacks, and whether results have changed in the last `seconds`.
    - "silence": note whether the job is now silent (`silent`).
    - "end": note that the job has ended with the summary `whole`.
    """

    do: str
    grace: float = 0.0
    node: int | None = None
    silent: bool = False
    whole: JobSummary | None = None
    seconds: float = 0.0


read_order = make_reader(Order, whole=JobSummary.from_json)


class Message(OmitsUnset):
    """A message from a node's agent to the first node's agent. `kind` has one of these values.

    - "here": the agent is running.
    - "free": the jobs that this job waits for have ended on the node.
    - "started": the node's ranks have started (`reports`).
    - "exit": a rank has ended.
    - "worker": a worker of torchrun's elastic agent has started.
    - "agent": the node's elastic agent has ended.
    - "output": a rank has written to its log.
    - "stacks", "look": the message has the ranks' stacks (`answer`).
    - "stop": the node requests the end of the job (`ending`).
    - "gone": none of the job's processes is left on the node.
    """

    parts = {"reports": list_reader(read_report), "answer": read_stacks, "ending": Ending.from_json}
    kind: str
    reports: Sequence[RankReport] = ()
    world_size: int = 0
    answer: NodeStacks | None = None
    ending: Ending | None = None


class Failure(NamedTuple):
    """A rank or an elastic agent that ended with an exit code other than 0."""

    cause: Cause
    fault: str
    restart: int


def find_root_failure(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others.

    A rank's own fault takes precedence over an echo of another rank's fault. Of the echoes, a failed GPU
    or network takes precedence, and a timeout takes precedence over a lost connection.
    """

    def order(failure: Failure) -> tuple[int, bool, bool]:
        kind, is_echo = failure.cause.kind, failure.fault == "echo"
        return _FAULTS.index(failure.fault), is_echo and kind not in NODE_FAULTS, kind == "peer_lost"

    return min(failures, key=order)


class Coordinator:
    """The state of the whole job. `now` is always in seconds on the same monotonic clock.

    `orders` holds the orders for the nodes, oldest first. The first node's agent removes and executes them.
    Once none of the job's processes is left on any node that responds, `done` is true and `document()` is
    final.
    """

    def __init__(self, request: Launch, *, now: float) -> None:
        self._request = request
        self._nodes = [node.node for node in request.nodes]
        self._join_by: float | None = now + request.join_s
        self._end_by: float | None = None
        self._absent = set(self._nodes)
        self._busy = set(self._nodes) if request.after else set()  # nodes with jobs that this job waits for
        self._has_begun = False
        self._remaining = set(self._nodes)  # nodes that may still run processes of the job
        self._reports: dict[int, RankReport] = {}
        self._zero_at: dict[int, float] = {}  # when the ranks with exit code 0 ended
        self._failures: list[Failure] = []
        self._cause: Cause | None = None
        self._lost: Cause | None = None
        self._verdict: str | None = None
        self._stopping = False
        self._output_at: float | None = None  # when a node last reported output
        self._is_silent = False
        self._pending: Cause | None = None  # why the job will end after its inspection
        self._inspect_by: float | None = None  # None: the job is not being inspected
        self._stacks: dict[int, NodeStacks] = {}
        self._watch = HangWatch(request.layout, request.looks)
        self.orders: list[Order] = []

    @property
    def done(self) -> bool:
        """True once the job has ended on all nodes."""
        return self._stopping and not self._remaining

    def receive(self, node: int, message: Message, *, now: float) -> None:
        """Handle a message from the agent of `node`."""
        if message.kind == "here":
            self._join(node, now)
        elif message.kind == "free":
            self._busy.discard(node)
            self._start_if_ready(now)
        elif message.kind == "started":
            for report in message.reports:
                self._reports.setdefault(report.rank, report)
        elif message.kind == "exit":
            self._rank_ended(node, message.reports[0], now)
        elif message.kind == "gone":
            self._remaining.discard(node)
        elif message.kind == "output":
            self._output_at = now
            self._watch.reset(now)
        elif message.kind == "look" and message.answer is not None:
            self._watch.receive(node, message.answer)
        elif message.answer is not None:
            self._stacks[node] = message.answer
        elif message.ending is not None:
            self._stop(message.ending.state, message.ending.cause, message.ending.grace)

    def lose(self, node: int, why: str, kind: str = "node_lost") -> None:
        """Handle the loss of the agent on `node` for the reason `why`; `kind` is the kind of the cause."""
        if node not in self._remaining:
            return
        self._remaining.discard(node)
        activity = "ran" if self._has_begun else "waited"
        why = f"node{node} left the job while it {activity}: {why}"
        self._lost = self._lost or cause_of_node(self._request, node, kind, why=why)
        self._continue_without(node)

    def _continue_without(self, _: int) -> None:
        """End the job, because it needs all its nodes."""
        self._fail()

    def tick(self, *, now: float) -> None:
        """Check the deadlines, and start the ranks if the job no longer has to wait for a lost node."""
        self._start_if_ready(now)
        if self._join_by is not None and now >= self._join_by and not self._stopping:
            names = ", ".join(f"node{node}" for node in sorted(self._absent))
            why = f"The agent of {names} did not report within {self._request.join_s:g} s"
            lost = cause_of_node(self._request, min(self._absent), "node_lost", why=why)
            self._stop("failed", lost, FAILED_GRACE)
        if self._request.timeout is not None and self._end_by is not None and now >= self._end_by:
            self._end_after_inspection("timeout", self._request.timeout, now)
        if self._output_at is not None:
            self._tick_silence(now - self._output_at, now)
            self._tick_looks(now - self._output_at, now)
        if self._inspect_by is not None and not self._stopping:
            self._finish_inspection(now >= self._inspect_by)

    def _tick_silence(self, seconds: float, now: float) -> None:
        limit = self._request.hang_after
        if limit is not None and seconds >= limit:
            self._end_after_inspection("hang", limit, now)
        if self._is_silent != (seconds >= SILENT_SECONDS):
            self._is_silent = not self._is_silent
            self.orders.append(Order("silence", silent=self._is_silent))

    def _tick_looks(self, seconds: float, now: float) -> None:
        """Look at a silent job's ranks. End the job if it hangs and was launched to end then."""
        if self._inspect_by is not None or self._stopping:
            return
        if self._watch.is_due(now):
            self.orders.append(Order("look", seconds=seconds))
        is_new = self._watch.conclude(now, self._remaining - self._absent, self._exit_codes())
        verdict = self._watch.verdict
        if is_new and verdict is not None and verdict.state == "hung" and self._request.ends_when_hung:
            self._end_after_inspection("hang", round(seconds), now, seen=_SEEN)

    def _exit_codes(self) -> dict[int, int | None]:
        return {rank: report.exit_code for rank, report in self._reports.items() if self._has_ended(rank)}

    def _end_after_inspection(self, kind: str, seconds: float, now: float, seen: str = "") -> None:
        """End the job with a cause of `kind`, once all nodes have sent their ranks' stacks."""
        if self._inspect_by is not None or self._stopping:
            return
        cause = cause_of_node(self._request, None, kind, seconds=seconds)
        self._pending = cause._replace(
            explanation=f"{self._describe_early_exits(now)}{cause.explanation}{seen}"
        )
        self._request_stacks(now)

    def _request_stacks(self, now: float) -> None:
        """Order all nodes to send their ranks' stacks. The job ends when all stacks have arrived, or when the
        time for them is over.
        """
        self._inspect_by = now + INSPECT_SECONDS
        self.orders.append(Order("stacks"))

    def _finish_inspection(self, is_late: bool) -> None:
        if not (is_late or self._remaining <= self._stacks.keys()):
            return
        exit_codes = self._exit_codes()
        diagnosis = diagnose(self._request.layout, self._stacks, exit_codes=exit_codes)
        if self._pending is None:
            if diagnosis.behind and not is_late and exit_codes.keys().isdisjoint(diagnosis.behind):
                first = find_root_failure(self._failures)
                explanation = f"{first.cause.explanation} {diagnosis.explanation}"
                explained = first._replace(cause=first.cause._replace(explanation=explanation))
                self._failures[self._failures.index(first)] = explained
            self._stop("failed", None, FAILED_GRACE)
            return
        cause = self._pending
        if diagnosis.behind and not (diagnosis.moving or self._zero_at):
            cause = cause._replace(explanation=f"{cause.explanation} {diagnosis.explanation}".rstrip())
            if len(diagnosis.behind) == 1:
                rank = diagnosis.ranks[diagnosis.behind[0]]
                cause = with_node(self._request, rank.node, cause._replace(rank=rank.rank, values={}))
        place = find_place(diagnosis)
        if cause.kind == "hang" and place:
            cause = cause._replace(values={"place": place})
        self._stop("failed", cause, self._request.grace)

    def document(self) -> JobSummary:
        """Return the current state of the whole job."""
        return JobSummary(
            state=(self._verdict or "succeeded") if self.done else "waiting" if self._busy else "running",
            cause=self._resolve_cause(),
            ranks=rank_rows(self._request.layout, self._reports),
            complete=True,
            hang=None if self.done else self._describe_hang(),
        )

    def _describe_hang(self) -> dict[str, Any] | None:
        """Return what the last looks at a silent job found, and since when the job is silent (Unix time)."""
        verdict = self._watch.verdict
        return verdict and {**verdict._asdict(), "since": self._watch.since}

    def _join(self, node: int, now: float) -> None:
        self._absent.discard(node)
        if self._stopping:
            self.orders.append(Order("stop", FAILED_GRACE))
        elif not self._absent:
            self._join_by = None
            self._start_if_ready(now)

    def _start_if_ready(self, now: float) -> None:
        """Order all nodes to start their ranks, if all have joined and the jobs to wait for have ended."""
        if self._absent or self._busy or self._stopping or self._has_begun:
            return
        self._has_begun, self._output_at = True, now
        self._watch.reset(now)
        if self._request.timeout is not None:
            self._end_by = now + self._request.timeout
        self.orders.append(Order("go"))

    def _rank_ended(self, node: int, report: RankReport, now: float) -> None:
        self._reports[report.rank] = report
        if report.cause is not None:
            self._failures.append(self._make_failure(node, report, report.cause, now))
            self._fail(now)
            return
        self._zero_at[report.rank] = now
        if all(self._has_ended(rank) for rank, _, _ in self._request.layout):
            self._stop(None, None, FAILED_GRACE)

    def _fail(self, now: float | None = None) -> None:
        """End the job. If the job is already ending, keep its grace, so that the other ranks can save.

        A rank that failed while it waited for another rank does not show why the other rank was late. If all
        failed ranks waited for other ranks, and `now` is not None, inspect the job first.
        """
        if self._stopping:
            return
        kinds = {failure.cause.kind for failure in self._failures}
        only_waited = bool(kinds) and kinds <= TIMED_OUT | {"peer_lost"}
        if only_waited and self._inspect_by is None and now is not None:
            self._request_stacks(now)
        elif not only_waited or self._inspect_by is None or self._pending is not None:
            self._stop("failed", None, FAILED_GRACE)

    def _has_ended(self, rank: int) -> bool:
        return rank in self._reports and self._reports[rank].exit_code is not None

    def _stop(self, verdict: str | None, cause: Cause | None, grace: float) -> None:
        """End the job on all nodes. Later calls can shorten the grace, but do not change the cause."""
        if not self._stopping:
            self._remaining -= self._absent  # nodes that have not joined will not start ranks
            self._stopping, self._verdict, self._cause = True, verdict, cause
        self.orders.append(Order("stop", grace))

    def _resolve_cause(self) -> Cause | None:
        """Return the cause: a rank's own fault, or else a lost node, or else the root failure."""
        if self._verdict != "failed" or self._cause is not None:
            return self._cause
        first = find_root_failure(self._failures) if self._failures else None
        if first is None or (first.fault != "own" and self._lost is not None):
            return self._lost
        return with_address(first.cause, (failure.cause for failure in self._failures))

    def _make_failure(self, node: int, report: RankReport, cause: Cause, now: float) -> Failure:
        """Return a rank's failure. If the rank waited for a rank that had ended early, the cause says so."""
        early_exits = self._describe_early_exits(now)
        if early_exits and cause.kind in WAITED:
            explained = explain_early_exit(cause, early_exits)
        else:
            explained = cause._replace(explanation=early_exits + cause.explanation)
        return Failure(with_node(self._request, node, explained), report.fault, report.restart)

    def _describe_early_exits(self, now: float) -> str:
        """Return a sentence that names the ranks that ended early with exit code 0, or "" if there are none.

        Ranks that wait for such a rank often fail.
        """
        if not self._zero_at:
            return ""
        ranks = ", ".join(map(str, sorted(self._zero_at)))
        seconds = now - max(self._zero_at.values())
        noun = "Rank" if len(self._zero_at) == 1 else "Ranks"
        return (
            f"{noun} {ranks} had ended {seconds:.0f} s before, with exit code 0; "
            "a rank that waits for a rank that has ended fails or hangs. "
        )


class ElasticCoordinator(Coordinator):
    """A job in which torchrun's elastic agents start the ranks, and restart all ranks after a failure.

    The elastic agents restart their workers and find each other without help from this class. The job fails
    when a worker fails and its elastic agent has no restarts left, when an elastic agent fails, or when fewer
    than MIN nodes remain. A rank keeps its number in the layout, although torch renumbers ranks after a node
    loss.
    """

    def __init__(self, request: Launch, *, now: float) -> None:
        super().__init__(request, now=now)
        limits = request.elastic or {}
        self._min, self._max_restarts = limits["min_nodes"], limits["max_restarts"]
        self._world_size = 0
        self._restarts: list[str] = []
        self._agent_codes: dict[int, int] = {}  # exit codes of elastic agents, by node

    def receive(self, node: int, message: Message, *, now: float) -> None:
        """Handle a message from the agent of `node`."""
        if message.kind == "worker":
            self._worker_started(message.reports[0], message.world_size)
        elif message.kind == "agent":
            self._agent_ended(node, message.reports[0])
        else:
            super().receive(node, message, now=now)

    def _continue_without(self, node: int) -> None:
        """End the job if fewer than MIN nodes remain."""
        if self._stopping or len(self._running_nodes()) < self._min:
            self._fail()
            return
        self._busy.discard(node)
        self._stop_if_finished()

    def document(self) -> JobSummary:
        """Return the current state of the whole job. `restarts` describes each restart and its cause."""
        summary = super().document()
        summary.restarts = list(self._restarts)
        return summary

    def _running_nodes(self) -> set[int]:
        """Return the nodes whose elastic agent is still running or has ended with exit code 0."""
        return {node for node in self._remaining - self._absent if self._agent_codes.get(node, 0) == 0}

    def _worker_started(self, report: RankReport, world_size: int) -> None:
        """Handle the start of a worker.

        A restart after a failure or a node loss clears earlier failures, unless the job is already ending.
        """
        failed = {failure.cause.rank for failure in self._failures}
        if not self._stopping and (report.rank in failed or world_size != self._world_size):
            if self._failures and self._world_size:
                self._restarts.append(self._describe_restart())
            self._failures, self._zero_at, self._lost, self._world_size = [], {}, None, world_size
        self._reports[report.rank] = report

    def _rank_ended(self, node: int, report: RankReport, now: float) -> None:
        self._reports[report.rank] = report
        if report.cause is None:
            self._zero_at[report.rank] = now
        elif report.fault != "stopped" or self._stopping:
            self._failures.append(self._make_failure(node, report, report.cause, now))
            if report.restart >= self._max_restarts:
                self._fail(now)

    def _agent_ended(self, node: int, report: RankReport) -> None:
        """Handle the end of an elastic agent. Its exit code is 0 if the workers on all nodes succeeded."""
        code = self._agent_codes[node] = report.exit_code or 0
        if self._stopping:
            return
        if report.cause is None:
            self._stop_if_finished()
            return
        if not any(failure.fault == "own" for failure in self._failures):
            explanation = f"torch's elastic agent on node{node} failed: {report.cause.explanation}"
            cause = report.cause._replace(rank=None, next="", explanation=explanation)
            self._failures.append(
                Failure(with_node(self._request, node, cause), report.fault, report.restart)
            )
        if node == self._nodes[0] or code > 0 or len(self._running_nodes()) < self._min:
            self._fail()
            return
        self.orders.append(Order("stop", FAILED_GRACE, node))
        self._stop_if_finished()

    def _stop_if_finished(self) -> None:
        """End the job when every remaining elastic agent has ended with exit code 0."""
        if not self._stopping and self._running_nodes() <= self._agent_codes.keys():
            self._stop(None, None, FAILED_GRACE)

    def _describe_restart(self) -> str:
        """Return text with the next restart's number and the root failure that caused the restart."""
        first = find_root_failure(self._failures).cause
        rank = "" if first.rank is None else f"rank {first.rank} @ "
        count = max(failure.restart for failure in self._failures) + 1
        return f"{count} of {self._max_restarts}: {rank}node{first.node}: {first.explanation}"
