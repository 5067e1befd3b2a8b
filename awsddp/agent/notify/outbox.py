"""The events of a job on a node, in a file that says which events were sent.

An event is sent at most twice, always with the same id. Every request is counted in the file before it is
sent, so that this also holds after a crash, and for the notifier and clients together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING, Any

from awsddp.agent.job_folder import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

MAX_REQUESTS = 2
_IN_FLIGHT_S = 30.0
"""After this time, a request that was counted and has no outcome counts as one without an answer."""
_OVER = ("delivered", "refused")


class Outbox:
    """The events in the file at `path` (mode 0600), oldest first.

    Each is an event with `requests` (how many were sent), `outcome` (of the last attempt; "" if there is
    none or it is in flight), `why` (the failure), `at` (Unix time of the last change) and `failing_since`
    (Unix time of the first failure, or None).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._is_written = True

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add the events whose ids the outbox does not have."""
        new = list(events)
        if not new:
            return
        with self._changing() as rows:
            ids = {row["id"] for row in rows}
            fresh = {"requests": 0, "outcome": "", "why": "", "at": 0.0, "failing_since": None}
            rows += [{**event, **fresh} for event in new if event["id"] not in ids]

    def open_events(self) -> list[dict[str, Any]]:
        """Return the events that are neither delivered nor given up."""
        return [row for row in self._read() if not _is_over(row)]

    def claim(self, event_id: str, *, most: int = MAX_REQUESTS) -> bool:
        """Count a request for an event that is about to be sent. Return False if it must not be sent.

        `most` is how many requests may be sent in all.
        """
        now = time.time()
        with self._changing() as rows:
            for row in rows:
                if row["id"] == event_id and not _is_over(row) and row["requests"] < most:
                    if not row["outcome"] and row["requests"] and now - row["at"] < _IN_FLIGHT_S:
                        return False
                    row.update(requests=row["requests"] + 1, outcome="", at=now)
                    return True
        return False

    def settle(self, event_id: str, outcome: str, why: str = "") -> None:
        """Record the outcome of an attempt (post.Outcome). "gave up" means that no other attempt follows."""
        now = time.time()
        with self._changing() as rows:
            for row in rows:
                if row["id"] == event_id and not _is_over(row):
                    row.update(outcome=outcome, why=why, at=now)
                    row["failing_since"] = row["failing_since"] or now

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the events to change, and write them. On a full disk, this process remembers them."""
        descriptor = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            rows = self._rows = self._read()
            try:
                yield rows
            finally:
                self._write(rows)
        finally:
            os.close(descriptor)

    def _read(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (read_json(self._path) or {"events": []})["events"]
        return rows if self._is_written else self._rows

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._is_written = False
        with contextlib.suppress(OSError):
            write_json(self._path, {"events": rows})
            self._is_written = True


def _is_over(row: Mapping[str, Any]) -> bool:
    is_unanswered = bool(row["outcome"]) or time.time() - row["at"] >= _IN_FLIGHT_S
    return row["outcome"] in (*_OVER, "gave up") or (row["requests"] >= MAX_REQUESTS and is_unanswered)
