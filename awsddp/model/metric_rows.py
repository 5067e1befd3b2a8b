"""Read the metrics that ranks write (docs/results.md)."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    """Return the rows in a metrics.jsonl or a ledger; a line that is not a JSON object is skipped."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                rows.append(row)
    return rows


def read_values(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the numbers under `key` from the lowest rank that has any; these numbers count as the job's.

    A row without a rank belongs to rank 0.
    """
    by_rank: dict[float, list[float]] = {}
    for row in rows:
        if (value := as_number(row.get(key))) is not None:
            by_rank.setdefault(as_number(row.get("rank")) or 0.0, []).append(value)
    return by_rank[min(by_rank)] if by_rank else []


def read_last_value(rows: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Return the last number that `read_values` returns, or None if there are no numbers."""
    values = read_values(rows, key)
    return values[-1] if values else None


def as_number(value: object) -> float | None:
    """Return a finite number below 1e15 as a float, or None for anything else (docs/results.md)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
        return float(value)
    return None
