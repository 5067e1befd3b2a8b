"""A job whose ranks torch's elastic agent starts and restarts: on each node, and what the first one decides.

An agent restarts its workers, and finds the other agents again, by itself. The job fails when a worker fails
whose agent has no restart left, when an agent fails, and when fewer nodes than MIN are left. A rank keeps the
number that it has in the layout; without a node that was lost torch numbers the others anew.
"""

from __future__ import annotations

import json
from typing import Any

from awsddp.jobs.supervisor.coordinator import FAILED_GRACE, Coordinator, weight
from awsddp.jobs.supervisor.diagnose import read_tail
from awsddp.jobs.supervisor.folder import NOT_STARTED, JobFolder
from awsddp.jobs.supervisor.processes import Process, Ranks

_HARD_KILL_SECONDS = 0.5  # a worker kills its rank at the end of the grace; then it still has to say so


class Elastic(Coordinator):
    """The job as a whole, whose agents start its workers, and all of them again where one has failed."""

    def __init__(self, request: dict[str, Any], *, now: float) -> None:
        super().__init__(request, now=now)
        self._min: int = request["elastic"]["min_nodes"]
        self._max_restarts: int = request["elastic"]["max_restarts"]
        self._world_size = 0
        self._restarts: list[str] = []
        self._agents: dict[int, int] = {}  # exit codes, by node

    def hear(self, node: int, message: dict[str, Any], *, now: float) -> None:
        """Take in what the supervisor of `node` says."""
        kind = message.get("is")
        if kind == "worker":
            self._started(message)
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
        self._lost = self._cause_of_loss(node, why, kind)
        self._finish()

    def document(self) -> dict[str, Any]:
        """Return the whole job; `restarts` tells which each restart was, and what failed before it."""
        return {**super().document(), "restarts": list(self._restarts)}

    def _members(self) -> set[int]:
        """Return the nodes whose agent runs, or has done its work."""
        return {node for node in self._left - self._absent if self._agents.get(node, 0) == 0}

    def _started(self, message: dict[str, Any]) -> None:
        """Take in that a worker has started: after its own failure, or without a lost node, all start anew.

        In a job that ends what ended it is not forgotten.
        """
        rank, size = message["rank"], message["world_size"]
        failed = {failure["rank"] for failure in self._failures}
        if not self._stopping and (rank in failed or size != self._world_size):
            if self._failures and self._world_size:
                self._restarts.append(self._restart())
            self._failures, self._zero_at, self._lost, self._world_size = [], {}, None, size
        self._reports[rank] = {**NOT_STARTED, "started": message["started"]}

    def _exit(self, node: int, report: dict[str, Any], now: float) -> None:
        self._reports[report["rank"]] = report
        if report["exit_code"] == 0:
            self._zero_at[report["rank"]] = now
        elif report["fault"] != "stopped" or self._stopping:
            self._failures.append({**report, "node": node, "cause": self._words(report, now)})
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
        if node == self._nodes[0] or code > 0 or len(self._members()) < self._min:
            self._fail()
            return
        self.orders.append({"do": "stop", "grace": FAILED_GRACE, "node": node})
        self._finish()

    def _finish(self) -> None:
        """End the job when every agent that is left has done its work."""
        if not self._stopping and self._members() <= self._agents.keys():
            self._stop(None, None, FAILED_GRACE)

    def _restart(self) -> str:
        """Return which restart comes after the failures, and which of them was the first."""
        first = min(self._failures, key=weight)
        rank = "" if first["rank"] is None else f"rank {first['rank']} @ "
        count = max(failure.get("restart", 0) for failure in self._failures) + 1
        cause = f"{rank}node{first['node']}: {first['cause']['explanation']}"
        return f"{count} of {self._max_restarts}: {cause}"


class Workers(Ranks):
    """The ranks of this node under their agent, by what its workers have noted."""

    def __init__(self, request: dict[str, Any], folder: JobFolder) -> None:
        super().__init__(request, folder)
        self._offset = 0  # in their notes
        self._entries: dict[int, dict[str, Any]] = {}

    def reap(self) -> list[dict[str, Any]]:
        """Return a report for each worker that has started or ended, and one for an agent that has ended."""
        ended = super().reap()
        return [self._taken(entry) for entry in self._noted()] + ended

    def entries(self) -> dict[int, dict[str, Any]]:
        return self._entries

    def stop(self, grace: float) -> None:
        """Ask the agent to end its workers, which give their ranks `grace` seconds."""
        (self._folder.path / "grace").write_text(str(grace), encoding="ascii")
        super().stop(grace + _HARD_KILL_SECONDS)

    def _reports(self, process: Process, code: int) -> list[dict[str, Any]]:
        """Return the agent's own report: its workers have noted theirs."""
        first, *_ = super()._reports(process, code)
        return [{**first, "is": "agent"}]

    def _noted(self) -> list[dict[str, Any]]:
        """Return what the workers have noted since the last call."""
        try:
            with self._folder.workers.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def _taken(self, entry: dict[str, Any]) -> dict[str, Any]:
        rank, started = entry["rank"], entry["started"]
        if entry["is"] == "start":
            self._entries[rank] = {**NOT_STARTED, "started": started}
            return {**entry, "is": "worker"}
        code = entry["exit_code"]
        self._entries[rank] = {"exit_code": code, "seconds": entry["seconds"], "started": started}
        report = {"is": "exit", "rank": rank, "restart": entry["restart"], **self._entries[rank]}
        if code != 0:
            said = read_tail(self._folder.log(rank), entry["offset"])
            report.update(self._failure(code, said, rank, asked_at=entry["stopped_at"] or 0.0))
        return report
