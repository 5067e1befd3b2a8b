"""What happened, as documents and text. Pure: it reads records and returns values; cli/ prints them."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from awsddp.records import ClusterState, Frozen, Listed, RankProgress, RankUsage, Saving


@dataclass(frozen=True)
class Event:
    """Progress of a verb: `who` is at `text`: "node1", "" for what the verb does now, None for its messages.

    `fraction` of it is done; where it is a transfer, of `size` bytes.
    """

    text: str
    who: str | None = None
    fraction: float | None = None
    size: int | None = None


OnEvent = Callable[[Event], None]


def node_name(node: int) -> str:
    """Return how a node is called everywhere: node0, node1, ..."""
    return f"node{node}"


def size_text(size: int) -> str:
    """Return a number of bytes for display: 12 kB."""
    for unit, scale, digits in (("GB", 1e9, 1), ("MB", 1e6, 1), ("kB", 1e3, 0)):
        if size >= scale:
            return f"{size / scale:.{digits}f} {unit}"
    return f"{size} bytes"


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return a count of things: "1 node", "2 nodes"; `ending` is that of the plural."""
    return f"{count} {noun}{ending * (count != 1)}"


def amount(files: int, size: int) -> str:
    """Return how much travels: "1 file, 12 kB"; `size` is in bytes."""
    return f"{counted(files, 'file')}, {size_text(size)}"


def saving_text(saving: Saving) -> str:
    """Return how far results are in S3, and what keeps them from it: "5 files, 2 MB in S3, 1 file left"."""
    parts = [f"{amount(saving.files, saving.bytes)} in S3"]
    if saving.pending_files:
        parts.append(f"{amount(saving.pending_files, saving.pending_bytes)} left")
    if saving.unasked:
        parts.append(f"{', '.join(map(node_name, saving.unasked))} cannot be asked")
    if saving.error:
        parts.append(f"not saved: {saving.error}")
    if saving.is_silent:
        parts.append(f"nothing is saved any more (no sign of life for {duration(saving.silent_s)})")
    return ", ".join(parts)


def cluster_state(
    cluster: Listed | None, *, prepared: frozenset[str] | None, launching: bool, size: int | None = None
) -> ClusterState:
    """Return the state of a cluster from the states of its nodes.

    `prepared` holds the instance ids that this machine has seen ready (None: it knows nothing of them);
    `launching` tells that a launch was written down and has not answered; `size` is how many nodes were asked
    for, so that one which was lost before the cluster became smaller is not missed (None: it is not known).
    """
    states = {node.state for node in cluster.live} if cluster else set()
    if cluster is None or not states:
        if launching:
            return "launching"
        ending = cluster is not None and any(node.state == "shutting-down" for node in cluster.nodes)
        return "ending" if ending or (cluster and cluster.leftovers) else "absent"
    if states <= {"stopped", "stopping"}:
        return "stopped"
    missed = {node.node for node in cluster.nodes if size is None or node.node < size}
    if missed - {node.node for node in cluster.live} or states - {"pending", "running"}:
        return "partial"
    if "pending" in states:
        return "launching"
    ready = prepared is None or {node.instance_id for node in cluster.live} <= prepared
    return "ready" if ready else "preparing"


def utc(moment: datetime) -> str:
    """Return a moment as tags and documents write it: 2026-11-21T08:45:00Z."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def iso(moment: datetime | None) -> str | None:
    """Return a UTC moment as `utc` does, None for none."""
    return utc(moment) if moment else None


_COLUMNS = (
    ("step", "step", "{}", None),
    ("done", "fraction", "{:.0%}", None),
    ("steps/s", "steps_per_second", "{:.3g}", None),
    ("loss", "loss", "{:.4g}", None),
    ("CPU", "cpu_percent", "{:.0f}%", 10.0),
    ("GPU", "gpu_percent", "{:.0f}%", 10.0),
    ("GPU memory", "gpu_memory_bytes", "{}", 256 << 20),
    ("node's network", "network_bytes_per_second", "{}/s", 1e6),
)
"""What ranks write down and what they use: heading, key, form, and up to which difference usage is alike."""


class Column(Frozen):
    """A column of a table of ranks: what the ranks have under `key`, by rank, and how it is shown."""

    heading: str
    key: str
    source: str
    values: dict[int, float]
    shown: dict[int, str]


def rank_columns(progress: Iterable[RankProgress], usage: Iterable[RankUsage]) -> Iterator[Column]:
    """Yield metrics and usage of a job's ranks; usage that is far from that of the others has a star."""
    rows: tuple[RankProgress | RankUsage, ...] = (*progress, *usage)
    for heading, key, form, noise in _COLUMNS:
        values = {row.rank: value for row in rows if (value := getattr(row, key, None)) is not None}
        far = frozenset() if noise is None else far_from_others(values, noise=noise)
        shown = {
            rank: form.format(size_text(int(value)) if "bytes" in key else value) + " *" * (rank in far)
            for rank, value in values.items()
        }
        if values:
            source = "metrics" if noise is None else "samples"
            yield Column(heading=heading, key=key, source=source, values=values, shown=shown)


def far_from_others(values: Mapping[int, float], *, noise: float) -> frozenset[int]:
    """Return the ranks whose value is more than half of the median away from it, and more than `noise`.

    None where half of them are: then nothing is usual.
    """
    middle = sorted(values.values())[len(values) // 2] if values else 0.0
    limit = max(middle / 2, noise)
    far = frozenset(rank for rank, value in values.items() if abs(value - middle) > limit)
    return far if 2 * len(far) < len(values) else frozenset()


def duration(seconds: float) -> str:
    """Return a duration for display: 12.3 s, 4 min 5 s, 23 h 59 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def elapsed(since: str | None, until: str | None = None) -> float | None:
    """Return the seconds between two moments that `utc` wrote (None: now); None where it did not begin."""
    if since is None:
        return None
    end = datetime.fromisoformat(until) if until else datetime.now(UTC)
    return max(0.0, (end - datetime.fromisoformat(since)).total_seconds())


def age(moment: str | None) -> str:
    """Return how long ago a moment was, in one unit: 48 s, 2 h, 3 days; "" for none."""
    if (seconds := elapsed(moment)) is None:
        return ""
    units = (("days", 172800, 86400), ("h", 3600, 3600), ("min", 60, 60), ("s", 0, 1))
    return next(f"{seconds // size:.0f} {unit}" for unit, least, size in units if seconds >= least)


def money(usd: float | None) -> str:
    """Return an amount for display; "unknown" without a price."""
    return "unknown" if usd is None else f"${usd:,.2f}"


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl or a ledger; a line that is not a JSON object is skipped."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                rows.append(row)
    return rows


def values_of(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the numbers under `key` in the rows of the first rank that has some: those of the job.

    A row that names no rank is of rank 0.
    """
    by_rank: dict[float, list[float]] = {}
    for row in rows:
        if (value := number(row.get(key))) is not None:
            by_rank.setdefault(number(row.get("rank")) or 0.0, []).append(value)
    return by_rank[min(by_rank)] if by_rank else []


def last_value(rows: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Return the last of `values_of`."""
    values = values_of(rows, key)
    return values[-1] if values else None


def number(value: object) -> float | None:
    """Return a finite number below 1e15 as a float, None for anything else (docs/results.md)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
        return float(value)
    return None
