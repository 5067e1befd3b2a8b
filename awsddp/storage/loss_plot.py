"""Draw the loss over the training steps as SVG."""

from collections.abc import Mapping, Sequence
from typing import Any

from awsddp.model.metric_rows import as_number
from awsddp.util.html import Html, tag

_MOST_LINES, _MOST_POINTS = 8, 300
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 300, 60, 24
_RIGHT, _BOTTOM = _WIDTH - 12, _HEIGHT - 62
_LINES = ("#0969da", "#bf5700", "#1a7f37", "#8250df", "#cf222e", "#057a85", "#9a6700", "#bf3989")
Rows = Sequence[Mapping[str, Any]]
Points = list[tuple[float, float]]


def plot_loss(rows: Rows, *, title: str, outlier: int | None = None) -> str | None:
    """Return an SVG of the loss over the steps, with lines for up to eight ranks, including `outlier`.

    Returns None if no rank has two points. A row without a rank belongs to rank 0. Rows without a step are
    numbered.
    """
    points: dict[int, Points] = {}
    for row in rows:
        rank, value, step = row.get("rank", 0), as_number(row.get("loss")), as_number(row.get("step"))
        if type(rank) is int and value is not None:
            rank_points = points.setdefault(rank, [])
            rank_points.append((len(rank_points) if step is None else step, value))
    ranks = [rank for rank, rank_points in points.items() if len(rank_points) > 1]
    drawn = sorted(ranks, key=lambda rank: (rank != outlier, rank))[:_MOST_LINES]
    return _plot({rank: _thin_out(points[rank]) for rank in sorted(drawn)}, title) if drawn else None


def _thin_out(points: Points) -> Points:
    """Return at most about 300 of the points, including the first and the last."""
    return [*points[: -1 : max(1, len(points) // _MOST_POINTS)], points[-1]]


def _plot(lines: Mapping[int, Points], title: str) -> str:
    steps, values = zip(*(point for points in lines.values() for point in points), strict=True)
    first, low = min(steps), min(values)
    across, up = (max(steps) - first) or 1.0, (max(values) - low) or 1.0

    def text(x: float, y: float, shown: object, **more: object) -> Html:
        return tag("text", shown, x=x, y=y, **{"fill": "var(--muted, #57606a)", **more})

    middle = (_LEFT + _RIGHT) / 2
    marks = [text(_LEFT, _TOP - 8, title), text(middle, _BOTTOM + 18, "step", text_anchor="middle")]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _BOTTOM - part * (_BOTTOM - _TOP)
        marks.append(tag("path", d=f"M{_LEFT},{y}H{_RIGHT}", stroke="var(--rule, #d0d7de)"))
        marks.append(text(_LEFT - 6, y + 4, f"{low + part * up:.4g}", text_anchor="end"))
    for x, anchor, step in ((_LEFT, "start", first), (_RIGHT, "end", first + across)):
        marks.append(text(x, _BOTTOM + 18, f"{step:.6g}", text_anchor=anchor))
    for index, (rank, points) in enumerate(lines.items()):
        color = f"var(--line{index}, {_LINES[index]})"
        path = " ".join(
            f"{_LEFT + (step - first) / across * (_RIGHT - _LEFT):.1f},"
            f"{_BOTTOM - (value - low) / up * (_BOTTOM - _TOP):.1f}"
            for step, value in points
        )
        marks.append(tag("polyline", points=path, fill="none", stroke=color, stroke_width=2))
        if len(lines) > 1:
            x, y = _LEFT + index % 4 * 120, _BOTTOM + 38 + index // 4 * 16
            marks.append(text(x, y, f"rank {rank}", fill=color))
    space, box = "http://www.w3.org/2000/svg", f"0 0 {_WIDTH} {_HEIGHT}"
    return tag("svg", *marks, xmlns=space, viewBox=box, font_size=13, font_family="sans-serif")
