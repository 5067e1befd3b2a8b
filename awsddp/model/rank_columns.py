"""Table columns with the metrics and usage of a job's ranks."""

from collections.abc import Iterable, Iterator, Mapping

from awsddp.model.records import Frozen, RankProgress, RankUsage
from awsddp.util.formatting import size_text

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
"""The heading, key and format of each column. A usage column also has the largest difference from the median
that does not make a rank an outlier.
"""


class Column(Frozen):
    """A column in a table with one row per rank: the values under `key` and the texts to show, by rank."""

    heading: str
    key: str
    source: str
    values: dict[int, float]
    shown: dict[int, str]


def make_rank_columns(progress: Iterable[RankProgress], usage: Iterable[RankUsage]) -> Iterator[Column]:
    """Yield the columns for a job's ranks; outliers in usage are marked with a star."""
    rows: tuple[RankProgress | RankUsage, ...] = (*progress, *usage)
    for heading, key, form, noise in _COLUMNS:
        values = {row.rank: value for row in rows if (value := getattr(row, key, None)) is not None}
        outliers = frozenset() if noise is None else find_outliers(values, noise=noise)
        shown = {
            rank: form.format(size_text(int(value)) if "bytes" in key else value) + " *" * (rank in outliers)
            for rank, value in values.items()
        }
        if values:
            source = "metrics" if noise is None else "samples"
            yield Column(heading=heading, key=key, source=source, values=values, shown=shown)


def find_outliers(values: Mapping[int, float], *, noise: float) -> frozenset[int]:
    """Return the ranks whose value differs from the median by more than half the median and more than
    `noise`.

    Returns an empty set if at least half of the ranks differ by that much.
    """
    median = sorted(values.values())[len(values) // 2] if values else 0.0
    limit = max(median / 2, noise)
    outliers = frozenset(rank for rank, value in values.items() if abs(value - median) > limit)
    return outliers if 2 * len(outliers) < len(values) else frozenset()
