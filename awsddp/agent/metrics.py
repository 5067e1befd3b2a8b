"""Read the ranks' progress from the rows that they append to $AWSDDP_RUN_DIR/metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from awsddp.agent.file_tree import open_file
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import Response

_BYTES = 64 * 1024
"""How many bytes are read at the end of the file. The rows in these bytes give the steps per second."""


def read_metrics(folder: JobFolder) -> list[Response]:
    """Return the progress of every rank that has rows.

    A row without `rank` belongs to the node's first rank.
    """
    return read_progress(folder.run / "metrics.jsonl", folder.request().own_ranks)


def read_progress(path: Path, ranks: list[int]) -> list[Response]:
    """Return the progress of a node's `ranks`, read from a file's rows."""
    by_rank: dict[int, list[dict[str, float]]] = {}
    for values in read_rows(path):
        row = {key: value for key, value in values.items() if _is_number(value)}
        by_rank.setdefault(int(row.get("rank", ranks[0])), []).append(row)
    return [_progress(rank, by_rank[rank]) for rank in ranks if rank in by_rank]


def read_rows(path: Path) -> list[Any]:
    """Return the complete rows (JSON objects) at the end of a file."""
    try:
        with open_file(path) as file:
            file.seek(max(0, path.stat().st_size - _BYTES))
            lines = file.read(_BYTES).split(b"\n")
    except OSError:
        return []
    values = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [row for row in values if isinstance(row, dict)]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15


def _progress(rank: int, rows: list[dict[str, float]]) -> Response:
    last = {key: value for row in rows for key, value in row.items()}
    step, fraction = last.get("step"), None
    for done, total in (("step", "total_steps"), ("epoch", "epochs")):
        if fraction is None and done in last and last.get(total, 0) > 0:
            fraction = min(1.0, max(0.0, last[done] / last[total]))
    step = None if step is None else int(step)
    return Response(
        rank=rank, step=step, loss=last.get("loss"), steps_per_second=_rate(rows), fraction=fraction
    )


def _rate(rows: list[dict[str, float]]) -> float | None:
    """Return the steps per second over the last rows in which neither the step nor the time decreases."""
    points = [(row["time"], row["step"]) for row in rows if "time" in row and "step" in row]
    first = len(points) - 1
    while first > 0 and points[first - 1][0] < points[first][0] and points[first - 1][1] <= points[first][1]:
        first -= 1
    if first >= len(points) - 1:
        return None
    seconds, steps = points[-1][0] - points[first][0], points[-1][1] - points[first][1]
    return round(steps / seconds, 3)
