"""The decisions of the first node of a job: when the ranks start, when all must end, and the cause.

It receives messages of the nodes and returns orders for all of them. It does no I/O and reads no clock, so
that each decision can be tested alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from awsddp.agent.diagnosis.hang import diagnose
from awsddp.agent.diagnosis.job_causes import (
    TIMED_OUT,
    WAITED,
    Cause,
    cause_of_kind,
    left_early,
    located,
    with_address,
)
from awsddp.agent.diagnosis.stacks import Answer, read_stacks
from awsddp.agent.job_folder import Ending, Report, Whole, rank_lines, read_report
from awsddp.agent.messages import Sparse, each, reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awsddp.agent.messages import Launch

FAILED_GRACE = 1.0
"""Seconds between TERM and KILL for the others when a rank has failed."""
INSPECT_SECONDS = 3.0
"""How long the nodes have to write down what their ranks do, before a job is ended for hanging."""
SILENT_SECONDS = 120.0
"""After these a cancel has the nodes write that down, too."""
_FAULTS = ("own", "echo", "stopped")


class Order(NamedTuple):
    """What all nodes, or one `node`, are to do.

    "go": start the ranks; "stop": end them within `grace` seconds; "stacks": write down what they do;
    "silence": know whether the job is `silent`; "end": the job has ended, as `whole` says.
    """

    do: str
    grace: float = 0.0
    node: int | None = None
    silent: bool = False
    whole: Whole | None = None


read_order = reader(Order, whole=Whole.from_json)


class Said(Sparse):
    """What the supervisor of a node tells the first one.

    "here": it runs; "free": the jobs that this one waits for have ended there; "started": its ranks have, as
    `reports` say; "exit": one has ended; "worker", "agent": a worker of torch's agent has started, or the
    agent has ended; "output": a rank has written to its log; "stacks": what they do is `answer`; "stop": the
    job is to end as `ending` says; "gone": nothing of it is left there.
    """

    parts = {"reports": each(read_report), "answer": read_stacks, "ending": Ending.from_json}
    kind: str
    reports: Sequence[Report] = ()
    world_size: int = 0
    answer: Answer | None = None
    ending: Ending | None = None


class Failure(NamedTuple):
    """The end of a rank, or of an agent, with another exit code than 0."""

    cause: Cause
    fault: str
    restart: int


def first_of(failures: list[Failure]) -> Failure:
    """Return the failure that the others are due to: one by a fault of its own before all.

    A rank that timed out says more than one that lost it.
    """
    return min(failures, key=lambda one: (_FAULTS.index(one.fault), one.cause.kind == "peer_lost"))


class Coordinator:
    """The job as a whole. `now` is in seconds of one monotonic clock throughout.

    `orders` are to be carried out by all nodes, oldest first; the caller takes them away. `done` is true
    when nothing of the job is left on any node that answers; `document()` is final from then on.
    """

    def __init__(self, request: Launch, *, now: float) -> None:
        self._request = request
        self._nodes = [one.node for one in request.nodes]
        self._join_by: float | None = now + request.join_s
        self._end_by: float | None = None
        self._absent = set(self._nodes)
        self._busy = set(self._nodes) if request.after else set()  # with jobs that this one waits for
        self._begun = False
        self._left = set(self._nodes)  # nodes on which something of the job may still be
        self._reports: dict[int, Report] = {}
        self._zero_at: dict[int, float] = {}  # ranks that ended with 0, and when
        self._failures: list[Failure] = []
        self._cause: Cause | None = None
        self._lost: Cause | None = None
        self._verdict: str | None = None
        self._stopping = False
        self._spoke_at: float | None = None  # when a rank wrote to its log, as far as was reported
        self._silent = False
        self._pending: Cause | None = None  # for which the job ends, once it was inspected
        self._inspect_by: float | None = None  # None: it is not being inspected
        self._answers: dict[int, Answer] = {}
        self.orders: list[Order] = []

    @property
    def done(self) -> bool:
        """Whether the job has ended everywhere."""
        return self._stopping and not self._left

    def hear(self, node: int, said: Said, *, now: float) -> None:
        """Handle what the supervisor of `node` has said."""
        if said.kind == "here":
            self._join(node, now)
        elif said.kind == "free":
            self._busy.discard(node)
            self._begin(now)
        elif said.kind == "started":
            for report in said.reports:
                self._reports.setdefault(report.rank, report)
        elif said.kind == "exit":
            self._exit(node, said.reports[0], now)
        elif said.kind == "gone":
            self._left.discard(node)
        elif said.kind == "output":
            self._spoke_at = now
        elif said.answer is not None:
            self._answers[node] = said.answer
        elif said.ending is not None:
            self._stop(said.ending.state, said.ending.cause, said.ending.grace)

    def lose(self, node: int, why: str, kind: str = "node_lost") -> None:
        """Handle the loss of the supervisor of `node`: the job has failed. `kind` is that of the cause."""
        if node not in self._left:
            return
        self._left.discard(node)
        did = "ran" if self._begun else "waited"
        cause = cause_of_kind(kind, why=f"node{node} left the job while it {did}: {why}")
        self._lost = self._lost or located(self._request, node, cause)
        self._go_on_without(node)

    def _go_on_without(self, _: int) -> None:
        """End the job, which needs all its nodes."""
        self._fail()

    def tick(self, *, now: float) -> None:
        """Check the deadlines, and whether the ranks may start without a node that was lost."""
        self._begin(now)
        if self._join_by is not None and now >= self._join_by and not self._stopping:
            names = ", ".join(f"node{node}" for node in sorted(self._absent))
            why = f"The supervisor of {names} did not report within {self._request.join_s:g} s"
            lost = located(self._request, min(self._absent), cause_of_kind("node_lost", why=why))
            self._stop("failed", lost, FAILED_GRACE)
        if self._request.timeout is not None and self._end_by is not None and now >= self._end_by:
            self._inspect("timeout", self._request.timeout, now)
        if self._spoke_at is not None:
            self._tick_silence(now - self._spoke_at, now)
        if self._inspect_by is not None and not self._stopping:
            self._end_inspected(now >= self._inspect_by)

    def _tick_silence(self, seconds: float, now: float) -> None:
        limit = self._request.hang_after
        if limit is not None and seconds >= limit:
            self._inspect("hang", limit, now)
        if self._silent != (seconds >= SILENT_SECONDS):
            self._silent = not self._silent
            self.orders.append(Order("silence", silent=self._silent))

    def _inspect(self, kind: str, seconds: float, now: float) -> None:
        """End the job for `kind`, once all nodes have written down what their ranks do."""
        if self._inspect_by is not None or self._stopping:
            return
        cause = cause_of_kind(kind, seconds=seconds, job=self._request.job)
        self._pending = cause._replace(explanation=self._early(now) + cause.explanation)
        self._look(now)

    def _look(self, now: float) -> None:
        """Have all nodes write down what their ranks do; then the job ends."""
        self._inspect_by = now + INSPECT_SECONDS
        self.orders.append(Order("stacks"))

    def _end_inspected(self, is_late: bool) -> None:
        if not (is_late or self._left <= self._answers.keys()):
            return
        codes = {rank: one.exit_code for rank, one in self._reports.items() if self._ended(rank)}
        found = diagnose(self._request.layout, self._answers, exit_codes=codes)
        if self._pending is None:
            if found.behind and not is_late and codes.keys().isdisjoint(found.behind):
                first = first_of(self._failures)
                explanation = f"{first.cause.explanation} {found.explanation}"
                explained = first._replace(cause=first.cause._replace(explanation=explanation))
                self._failures[self._failures.index(first)] = explained
            self._stop("failed", None, FAILED_GRACE)
            return
        cause = self._pending
        if found.behind and not (found.moving or self._zero_at):
            cause = cause._replace(explanation=f"{cause.explanation} {found.explanation}".rstrip())
            if len(found.behind) == 1:
                rank = found.ranks[found.behind[0]]
                cause = located(self._request, rank.node, cause._replace(rank=rank.rank, values={}))
        self._stop("failed", cause, self._request.grace)

    def document(self) -> Whole:
        """Return the whole job now."""
        return Whole(
            state=(self._verdict or "succeeded") if self.done else "waiting" if self._busy else "running",
            cause=self._named_cause(),
            ranks=rank_lines(self._request.layout, self._reports),
            complete=True,
        )

    def _join(self, node: int, now: float) -> None:
        self._absent.discard(node)
        if self._stopping:
            self.orders.append(Order("stop", FAILED_GRACE))
        elif not self._absent:
            self._join_by = None
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Have the ranks start, once, when all nodes are here and the jobs that this one waits for ended."""
        if self._absent or self._busy or self._stopping or self._begun:
            return
        self._begun, self._spoke_at = True, now
        if self._request.timeout is not None:
            self._end_by = now + self._request.timeout
        self.orders.append(Order("go"))

    def _exit(self, node: int, report: Report, now: float) -> None:
        self._reports[report.rank] = report
        if report.cause is not None:
            self._failures.append(self._failure(node, report, report.cause, now))
            self._fail(now)
            return
        self._zero_at[report.rank] = now
        if all(self._ended(rank) for rank, _, _ in self._request.layout):
            self._stop(None, None, FAILED_GRACE)

    def _fail(self, now: float | None = None) -> None:
        """End the job. One that is ending already keeps its grace, in which the other ranks may save.

        With `now` it is first inspected where ranks have only waited for others in vain: those may still run.
        """
        if self._stopping:
            return
        kinds = {failure.cause.kind for failure in self._failures}
        in_vain = bool(kinds) and kinds <= TIMED_OUT | {"peer_lost"}
        if in_vain and self._inspect_by is None and now is not None:
            self._look(now)
        elif not in_vain or self._inspect_by is None or self._pending is not None:
            self._stop("failed", None, FAILED_GRACE)

    def _ended(self, rank: int) -> bool:
        return rank in self._reports and self._reports[rank].exit_code is not None

    def _stop(self, verdict: str | None, cause: Cause | None, grace: float) -> None:
        """End the job on all nodes. The first cause counts; a later call can only shorten the grace."""
        if not self._stopping:
            self._left -= self._absent  # there is nothing of the job on them yet, and now never will be
            self._stopping, self._verdict, self._cause = True, verdict, cause
        self.orders.append(Order("stop", grace))

    def _named_cause(self) -> Cause | None:
        """Return the cause: the first rank with a fault of its own, else a lost node, else the first rank."""
        if self._verdict != "failed" or self._cause is not None:
            return self._cause
        first = first_of(self._failures) if self._failures else None
        if first is None or (first.fault != "own" and self._lost is not None):
            return self._lost
        return with_address(first.cause, (failure.cause for failure in self._failures))

    def _failure(self, node: int, report: Report, cause: Cause, now: float) -> Failure:
        """Return why a rank failed; if it waited for one that had ended with 0, that is why."""
        early = self._early(now)
        if early and cause.kind in WAITED:
            found = left_early(cause, early)
        else:
            found = cause._replace(explanation=early + cause.explanation)
        return Failure(located(self._request, node, found), report.fault, report.restart)

    def _early(self, now: float) -> str:
        """Name the ranks that had ended with exit code 0 before: they are often why the others fail."""
        if not self._zero_at:
            return ""
        ranks = ", ".join(map(str, sorted(self._zero_at)))
        seconds = now - max(self._zero_at.values())
        return (
            f"Rank{'s'[: len(self._zero_at) > 1]} {ranks} had ended with exit code 0 {seconds:.0f} s before; "
            "a rank that waits for another that has ended fails or hangs. "
        )


class Elastic(Coordinator):
    """A job whose ranks torch's elastic agents start, and all of them again where one has failed.

    An agent restarts its workers, and finds the other agents again, by itself. The job fails when a worker
    fails whose agent has no restart left, when an agent fails, and when fewer nodes than MIN are left. A rank
    keeps the number that it has in the layout; without a node that was lost torch numbers the others anew.
    """

    def __init__(self, request: Launch, *, now: float) -> None:
        super().__init__(request, now=now)
        agents = request.elastic or {}
        self._min, self._max_restarts = agents["min_nodes"], agents["max_restarts"]
        self._world_size = 0
        self._restarts: list[str] = []
        self._agents: dict[int, int] = {}  # exit codes, by node

    def hear(self, node: int, said: Said, *, now: float) -> None:
        """Take in what the supervisor of `node` says."""
        if said.kind == "worker":
            self._started(said.reports[0], said.world_size)
        elif said.kind == "agent":
            self._agent(node, said.reports[0])
        else:
            super().hear(node, said, now=now)

    def _go_on_without(self, node: int) -> None:
        """End the job when fewer than MIN nodes are left."""
        if self._stopping or len(self._members()) < self._min:
            self._fail()
            return
        self._busy.discard(node)
        self._finish()

    def document(self) -> Whole:
        """Return the whole job; `restarts` tells which each restart was, and what failed before it."""
        whole = super().document()
        whole.restarts = list(self._restarts)
        return whole

    def _members(self) -> set[int]:
        """Return the nodes whose agent runs, or has done its work."""
        return {node for node in self._left - self._absent if self._agents.get(node, 0) == 0}

    def _started(self, report: Report, world_size: int) -> None:
        """Take in that a worker has started: after its own failure, or without a lost node, all start anew.

        In a job that ends what ended it is not forgotten.
        """
        failed = {failure.cause.rank for failure in self._failures}
        if not self._stopping and (report.rank in failed or world_size != self._world_size):
            if self._failures and self._world_size:
                self._restarts.append(self._restart())
            self._failures, self._zero_at, self._lost, self._world_size = [], {}, None, world_size
        self._reports[report.rank] = report

    def _exit(self, node: int, report: Report, now: float) -> None:
        self._reports[report.rank] = report
        if report.cause is None:
            self._zero_at[report.rank] = now
        elif report.fault != "stopped" or self._stopping:
            self._failures.append(self._failure(node, report, report.cause, now))
            if report.restart >= self._max_restarts:
                self._fail(now)

    def _agent(self, node: int, report: Report) -> None:
        """Take in that an agent has ended: 0 when its workers, and all others, have done their work."""
        code = self._agents[node] = report.exit_code or 0
        if self._stopping:
            return
        if report.cause is None:
            self._finish()
            return
        if not any(failure.fault == "own" for failure in self._failures):
            explanation = f"torch's elastic agent on node{node} failed: {report.cause.explanation}"
            cause = report.cause._replace(rank=None, next="", explanation=explanation)
            self._failures.append(Failure(located(self._request, node, cause), report.fault, report.restart))
        if node == self._nodes[0] or code > 0 or len(self._members()) < self._min:
            self._fail()
            return
        self.orders.append(Order("stop", FAILED_GRACE, node))
        self._finish()

    def _finish(self) -> None:
        """End the job when every agent that is left has done its work."""
        if not self._stopping and self._members() <= self._agents.keys():
            self._stop(None, None, FAILED_GRACE)

    def _restart(self) -> str:
        """Return which restart comes after the failures, and which of them was the first."""
        first = first_of(self._failures).cause
        rank = "" if first.rank is None else f"rank {first.rank} @ "
        count = max(failure.restart for failure in self._failures) + 1
        return f"{count} of {self._max_restarts}: {rank}node{first.node}: {first.explanation}"
