"""What the first node of a job decides where torch's elastic agent starts and restarts the ranks.

An agent restarts its workers, and finds the other agents again, by itself. The job fails when a worker fails
whose agent has no restart left, when an agent fails, and when fewer nodes than MIN are left. Logs and reports
go by the numbers of the layout; in a round a worker may have another rank (`number`).
"""

from __future__ import annotations

from typing import Any

from awsddp.jobs.supervisor.coordinator import FAILED_GRACE, Coordinator


class Elastic(Coordinator):
    """The job as a whole, in rounds: a round is a set of workers that started together."""

    def __init__(self, request: dict[str, Any], *, now: float) -> None:
        super().__init__(request, now=now)
        self._min: int = request["elastic"]["min_nodes"]
        self._max_restarts: int = request["elastic"]["max_restarts"]
        self._round = 0
        self._numbers: dict[int, int] = {}  # of this round: the rank of each log
        self._world_size = 0
        self._past: list[tuple[int, list[dict[str, Any]]]] = []
        self._agents: dict[int, int] = {}  # exit codes, by node
        self._away: dict[int, dict[str, Any]] = {}  # nodes that were lost, without which the job goes on

    def hear(self, node: int, message: dict[str, Any], *, now: float) -> None:
        """Take in what the supervisor of `node` says."""
        kind = message.get("is")
        if kind == "worker":
            self._started(message)
        elif kind == "here" and "life" in message:
            self._replaced(node)
        elif kind == "agent":
            self._agent(node, message)
        else:
            super().hear(node, message, now=now)

    def lose(self, node: int, why: str, kind: str = "node_lost") -> None:
        """Handle the loss of `node`; while MIN nodes are left the job continues."""
        if node not in self._left:
            return
        if self._stopping or len(self._members() - {node}) < self._min:
            super().lose(node, why, kind)
            return
        self._left.discard(node)
        self._busy.discard(node)
        self._away[node] = self._lost = self._cause_of_loss(node, why, kind)
        self._finish()

    def _replaced(self, node: int) -> None:
        """Let the machine that took the place of a lost one join: its agent has the others begin a round.

        In a job that waits it waits, too.
        """
        self.lose(node, "its machine was replaced")
        self._left.add(node)
        self._away.pop(node, None)
        self._agents.pop(node, None)
        if not (self._begun or self._stopping):
            self._busy |= {node} if self._request.get("after") else set()
            return
        order = {"do": "stop", "grace": FAILED_GRACE} if self._stopping else {"do": "go"}
        self.orders.append({**order, "node": node})

    def document(self) -> dict[str, Any]:
        """Return the whole job; `restarts` tells what ended each round but the last, and for which time."""
        return {**super().document(), "restarts": [self._restart(*one) for one in self._past if one[1]]}

    def _members(self) -> set[int]:
        """Return the nodes whose agent runs, or has done its work."""
        return {node for node in self._left - self._absent if self._agents.get(node, 0) == 0}

    def _started(self, message: dict[str, Any]) -> None:
        """Take in that a worker has started; one that cannot belong to this round begins the next.

        A job that ends has no next round: what ended it would be forgotten.
        """
        slot, number = message["slot"], message["rank"]
        others = (slot in self._numbers, number in self._numbers.values())
        if not self._stopping and (any(others) or message["world_size"] != self._world_size):
            self._next_round(message["world_size"])
        self._numbers[slot] = number
        known = {"round": self._round, "number": number, "started": message["started"]}
        self._reports[slot] = {"exit_code": None, "seconds": 0.0, **known}

    def _next_round(self, world_size: int) -> None:
        if self._round:
            self._past.append((self._round, self._failures))
        self._round, self._world_size = self._round + 1, world_size
        self._numbers, self._failures, self._zero_at, self._lost = {}, [], {}, None

    def _exit(self, node: int, report: dict[str, Any], now: float) -> None:
        before = self._reports[report["rank"]]
        which = {"round": before["round"], "number": before["number"]}
        self._reports[report["rank"]] = {**report, **which}
        if report["exit_code"] == 0:
            self._zero_at[which["number"]] = now
        elif report["fault"] != "stopped" or self._stopping:
            self._failed(node, {**report, **which}, now)

    def _failed(self, node: int, report: dict[str, Any], now: float) -> None:
        """Note a failure in its round, which may be over; without a restart left it ends the job."""
        words = self._words(report, now)
        failure = {**report, "rank": report["number"], "node": node, "cause": words}
        rounds = {**dict(self._past), self._round: self._failures}
        rounds[report["round"]].append(failure)
        if report["restart"] >= self._max_restarts:
            self._fail(now)

    def _agent(self, node: int, report: dict[str, Any]) -> None:
        """Take in that an agent has ended: 0 when its workers, and all others, have done their work."""
        code = self._agents[node] = report["exit_code"]
        if self._stopping:
            return
        if code == 0:
            self._finish()
            return
        words = {**report["cause"], "next": ""}
        words["explanation"] = f"torch's elastic agent on node{node} failed: {words['explanation']}"
        if not any(failure["fault"] == "own" for failure in self._failures):
            self._failures.append({**report, "rank": None, "node": node, "cause": words})
        if node == self._nodes[0] or report["exit_code"] > 0 or len(self._members()) < self._min:
            self._fail()
            return
        self._away[node] = words
        self.orders.append({"do": "stop", "grace": FAILED_GRACE, "node": node})
        self._finish()

    def _finish(self) -> None:
        """End the job when every agent that is left has done its work."""
        if not self._stopping and self._members() <= self._agents.keys():
            self._stop(None, None, FAILED_GRACE)

    def _restart(self, number: int, failures: list[dict[str, Any]]) -> dict[str, Any]:
        first = self._first(failures)
        return {
            "round": number,
            "restart": max(failure.get("restart", 0) for failure in failures) + 1,
            "max_restarts": self._max_restarts,
            "rank": first["rank"],
            "node": first["node"],
            "explanation": first["cause"]["explanation"],
        }

    def _rank(self, rank: int, local_rank: int, node: int) -> dict[str, Any]:
        report = self._reports.get(rank, {})
        found = super()._rank(rank, local_rank, node)
        return {**found, "round": report.get("round"), "number": report.get("number")}
