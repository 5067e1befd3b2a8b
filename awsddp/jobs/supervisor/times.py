"""When each rank said what: the lengths of its log by the clock, so that it can be shown from a moment on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from awsddp.jobs.supervisor.folder import JobFolder, local_ranks

_EVERY_SECONDS = 10.0
_LINE = 1 << 16  # bytes before a position in which the beginning of its line is looked for


class Times:
    """Notes how long the logs of this node's ranks are, every 10 s and at the end, where that has changed."""

    def __init__(self, request: dict[str, Any], folder: JobFolder) -> None:
        self._logs = {str(rank): folder.log(rank) for rank in local_ranks(request)}
        self._path = folder.times
        self._noted: dict[str, int] = {}
        self._next = 0.0

    def lengths(self) -> dict[str, int]:
        """Return how long each log is now."""
        return {rank: path.stat().st_size for rank, path in self._logs.items() if path.exists()}

    def note(self, *, last: bool = False) -> None:
        """Write the lengths down where it is time. A full disk ends no job: the next note has all."""
        if time.monotonic() < self._next and not last:
            return
        self._next = time.monotonic() + _EVERY_SECONDS
        lengths = self.lengths()
        if lengths == self._noted:
            return
        try:
            with self._path.open("a", encoding="ascii") as file:
                file.write(json.dumps([round(time.time(), 3), lengths]) + "\n")
            self._noted = lengths
        except OSError:
            return


def positions(times: Path, logs: Path, since: float) -> dict[int, int]:
    """Return, by rank, where in its log (`logs`/rank3.log) begins what it has said `since` (s since 1970).

    Rather up to 10 s more than less; always the beginning of a line. Ranks of which nothing was noted before
    are left out: all that they said counts.
    """
    lengths: dict[str, int] = {}
    try:
        text = times.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        text = ""
    for line in text.splitlines():
        try:
            moment, known = json.loads(line)
        except ValueError:  # cut in half by a full disk
            continue
        if moment > since:
            break
        lengths.update(known)
    return {int(rank): _line_start(logs / f"rank{rank}.log", length) for rank, length in lengths.items()}


def _line_start(log: Path, position: int) -> int:
    """Return where the line begins that the byte at `position` belongs to."""
    first = max(0, position - _LINE)
    try:
        descriptor = os.open(str(log), os.O_RDONLY)
    except FileNotFoundError:
        return position
    try:
        before = os.pread(descriptor, position - first, first)
    finally:
        os.close(descriptor)
    return first + before.rfind(b"\n") + 1 if b"\n" in before or first == 0 else position
