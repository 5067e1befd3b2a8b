"""The ranks of this node under torch's elastic agent, which starts and restarts them."""

from __future__ import annotations

import json
from typing import Any

from awsddp.jobs.supervisor.diagnose import read_tail
from awsddp.jobs.supervisor.folder import NOT_STARTED, JobFolder
from awsddp.jobs.supervisor.processes import Process, Ranks

_HARD_KILL_SECONDS = 0.5  # a worker kills its rank at the end of the grace; then it still has to say so


class Workers(Ranks):
    """The agent of this node, and what its workers have noted."""

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
