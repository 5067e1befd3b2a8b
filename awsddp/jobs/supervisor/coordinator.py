"""The decisions of the first node of a job: when the ranks start, when all must end, and the cause.

It receives messages of the nodes and returns orders for all of them. It does no I/O and reads no clock, so
that each decision can be tested alone.
"""

from __future__ import annotations

from typing import Any

from awsddp.jobs.supervisor.folder import NOT_STARTED, rank_lines
from awsddp.jobs.supervisor.job_causes import (
    TIMED_OUT,
    WAITED,
    cause,
    cause_of_node,
    left_early,
)

FAILED_GRACE = 1.0
"""Seconds between TERM and KILL for the others when a rank has failed."""
INSPECT_SECONDS = 3.0
"""How long the nodes have to write down what their ranks do, before a job is ended for hanging."""
SILENT_SECONDS = 120.0
"""After these a cancel has the nodes write that down, too."""
_FAULTS = ("own", "echo", "stopped")


class Coordinator:
    """The job as a whole. `now` is in seconds of one monotonic clock throughout.

    `orders` are to be carried out by all nodes, oldest first; the caller takes them away. `done` is true
    when nothing of the job is left on any node that answers; `document()` is final from then on.
    """

    def __init__(self, request: dict[str, Any], *, now: float) -> None:
        self._request = request
        self._nodes = [entry["node"] for entry in request["nodes"]]
        self._join_by: float | None = now + request["join_s"]
        self._end_by: float | None = None
        self._absent = set(self._nodes)
        self._busy = set(self._nodes) if request.get("after") else set()  # with jobs that this one waits for
        self._begun = False
        self._left = set(self._nodes)  # nodes on which something of the job may still be
        self._reports: dict[int, dict[str, Any]] = {}
        self._zero_at: dict[int, float] = {}  # ranks that ended with 0, and when
        self._failures: list[dict[str, Any]] = []
        self._cause: dict[str, Any] | None = None
        self._lost: dict[str, Any] | None = None
        self._verdict: str | None = None
        self._stopping = False
        self._spoke_at: float | None = None  # when a rank wrote to its log, as far as was reported
        self._silent = False
        self._pending: dict[str, Any] | None = None  # the cause for which the job ends, once it was inspected
        self._inspect_by: float | None = None  # None: it is not being inspected
        self._answers: dict[int, dict[str, Any]] = {}
        self.orders: list[dict[str, Any]] = []

    @property
    def done(self) -> bool:
        """Whether the job has ended everywhere."""
        return self._stopping and not self._left

    def hear(self, node: int, message: dict[str, Any], *, now: float) -> None:
        """Handle a message of the supervisor of `node`."""
        kind = message.get("is")
        if kind == "here":
            self._join(node, now)
        elif kind == "free":
            self._busy.discard(node)
            self._begin(now)
        elif kind == "started":
            for rank, started in message["ranks"]:
                self._reports.setdefault(rank, {**NOT_STARTED, "started": started})
        elif kind == "exit":
            self._exit(node, message, now)
        elif kind == "gone":
            self._left.discard(node)
        elif kind == "output":
            self._spoke_at = now
        elif kind == "stacks":
            self._answers[node] = message["answer"]
        elif kind == "stop":
            self._stop(message["state"], message.get("cause"), message["grace"])

    def lose(self, node: int, why: str, kind: str = "node_lost") -> None:
        """Handle the loss of the supervisor of `node`: the job has failed. `kind` is that of the cause."""
        if node not in self._left:
            return
        self._left.discard(node)
        self._lost = self._lost or self._cause_of_loss(node, why, kind)
        self._fail()

    def tick(self, *, now: float) -> None:
        """Check the deadlines, and whether the ranks may start without a node that was lost."""
        self._begin(now)
        if self._join_by is not None and now >= self._join_by and not self._stopping:
            names = ", ".join(f"node{node}" for node in sorted(self._absent))
            why = f"The supervisor of {names} did not report within {self._request['join_s']:g} s"
            lost = cause_of_node(self._request, min(self._absent), "node_lost", why=why)
            self._stop("failed", lost, FAILED_GRACE)
        if self._end_by is not None and now >= self._end_by:
            self._inspect("timeout", self._request["timeout"], now)
        if self._spoke_at is not None:
            self._tick_silence(now - self._spoke_at, now)
        if self._inspect_by is not None and not self._stopping:
            self._end_inspected(now >= self._inspect_by)

    def _tick_silence(self, seconds: float, now: float) -> None:
        limit = self._request.get("hang_after")
        if limit is not None and seconds >= limit:
            self._inspect("hang", limit, now)
        if self._silent != (seconds >= SILENT_SECONDS):
            self._silent = not self._silent
            self.orders.append({"do": "silence", "silent": self._silent})

    def _inspect(self, kind: str, seconds: float, now: float) -> None:
        """End the job for `kind`, once all nodes have written down what their ranks do."""
        if self._inspect_by is not None or self._stopping:
            return
        self._pending = cause_of_node(self._request, None, kind, seconds=seconds, job=self._request["job"])
        self._pending["explanation"] = self._early(now) + self._pending["explanation"]
        self._look(now)

    def _look(self, now: float) -> None:
        """Have all nodes write down what their ranks do; then the job ends."""
        self._inspect_by = now + INSPECT_SECONDS
        self.orders.append({"do": "stacks"})

    def _end_inspected(self, is_late: bool) -> None:
        if not (is_late or self._left <= self._answers.keys()):
            return
        from awsddp.jobs.supervisor.hang import diagnose

        pending, layout = self._pending, self._request["layout"]
        codes = {rank: one["exit_code"] for rank, one in self._reports.items() if self._ended(rank)}
        found = diagnose(layout, self._answers, exit_codes=codes)
        if pending is None:
            words = min(self._failures, key=weight)["cause"]
            if found["behind"] and not is_late and codes.keys().isdisjoint(found["behind"]):
                words["explanation"] += f" {found['explanation']}"
            self._stop("failed", None, FAILED_GRACE)
            return
        if found["behind"] and not (found["moving"] or self._zero_at):
            pending["explanation"] += f" {found['explanation']}".rstrip()
            if len(found["behind"]) == 1:
                rank = found["ranks"][found["behind"][0]]
                words = {key: pending[key] for key in ("kind", "retryable", "explanation", "next")}
                pending = cause(self._request, rank["node"], words, rank=rank["rank"])
        self._stop("failed", pending, self._request["grace"])

    def document(self) -> dict[str, Any]:
        """Return the state of the whole job now, in the keys that every node copies to its document."""
        return {
            "state": (self._verdict or "succeeded") if self.done else "waiting" if self._busy else "running",
            "cause": self._named_cause(),
            "ranks": rank_lines(self._request, self._reports),
            "complete": True,
        }

    def _join(self, node: int, now: float) -> None:
        self._absent.discard(node)
        if self._stopping:
            self.orders.append({"do": "stop", "grace": FAILED_GRACE})
        elif not self._absent:
            self._join_by = None
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Have the ranks start, once, when all nodes are here and the jobs that this one waits for ended."""
        if self._absent or self._busy or self._stopping or self._begun:
            return
        self._begun, self._spoke_at = True, now
        if self._request["timeout"] is not None:
            self._end_by = now + self._request["timeout"]
        self.orders.append({"do": "go"})

    def _exit(self, node: int, report: dict[str, Any], now: float) -> None:
        self._reports[report["rank"]] = report
        if report["exit_code"] != 0:
            self._failures.append({**report, "node": node, "cause": self._words(report, now)})
            self._fail(now)
            return
        self._zero_at[report["rank"]] = now
        if all(self._ended(rank) for rank, _, _ in self._request["layout"]):
            self._stop(None, None, FAILED_GRACE)

    def _fail(self, now: float | None = None) -> None:
        """End the job. One that is ending already keeps its grace, in which the other ranks may save.

        With `now` it is first inspected where ranks have only waited for others in vain: those may still run.
        """
        if self._stopping:
            return
        kinds = {failure["cause"]["kind"] for failure in self._failures}
        in_vain = bool(kinds) and kinds <= TIMED_OUT | {"peer_lost"}
        if in_vain and self._inspect_by is None and now is not None:
            self._look(now)
        elif not in_vain or self._inspect_by is None or self._pending is not None:
            self._stop("failed", None, FAILED_GRACE)

    def _ended(self, rank: int) -> bool:
        return self._reports.get(rank, {}).get("exit_code") is not None

    def _cause_of_loss(self, node: int, why: str, kind: str) -> dict[str, Any]:
        did = "ran" if self._begun else "waited"
        why = f"node{node} left the job while it {did}: {why}"
        return cause_of_node(self._request, node, kind, why=why)

    def _stop(self, verdict: str | None, cause: dict[str, Any] | None, grace: float) -> None:
        """End the job on all nodes. The first cause counts; a later call can only shorten the grace."""
        if not self._stopping:
            self._left -= self._absent  # there is nothing of the job on them yet, and now never will be
            self._stopping, self._verdict, self._cause = True, verdict, cause
        self.orders.append({"do": "stop", "grace": grace})

    def _named_cause(self) -> dict[str, Any] | None:
        """Return the cause: the first rank with a fault of its own, else a lost node, else the first rank."""
        if self._verdict != "failed" or self._cause is not None:
            return self._cause
        first = min(self._failures, key=weight, default=None)
        if first is None or (first["fault"] != "own" and self._lost is not None):
            return self._lost
        code = first["exit_code"]
        ended = {"exit_code": code, "signal": -code if code < 0 else None}
        return cause(
            self._request, first["node"], first["cause"], rank=first["rank"], tail=first["tail"], **ended
        )

    def _words(self, report: dict[str, Any], now: float) -> dict[str, Any]:
        """Return why a rank failed; if it waited for one that had ended with 0, that is why."""
        early = self._early(now)
        if early and report["cause"]["kind"] in WAITED:
            return left_early(report["cause"], report["tail"], early)
        return {**report["cause"], "explanation": early + report["cause"]["explanation"]}

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


def weight(failure: dict[str, Any]) -> tuple[int, bool]:
    """Order failures, the one that the others are due to first: a fault of its own before all.

    A rank that timed out says more than one that lost it.
    """
    return _FAULTS.index(failure["fault"]), failure["cause"]["kind"] == "peer_lost"
