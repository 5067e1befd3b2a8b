"""Metrics and usage of the ranks of a job, as the columns of a table."""

from collections.abc import Iterable, Iterator, Mapping

from awsddp.model.records import Frozen, RankProgress, RankUsage
from awsddp.util.format import size_text

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
