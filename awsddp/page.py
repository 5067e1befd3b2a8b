"""The pages of `report`: one HTML file each, with style and plots inside and nothing from elsewhere. Pure.

What a node sent is text to the template, which escapes it; jinja2 and pygal are imported when a page is made.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from awsddp import harmless, report
from awsddp.resources import template

_MOST_POINTS = 300
_SPOKEN = re.compile(r"\x1b\[[0-9;:]*m")
_COLORS = tuple(
    f"var(--line{number}, {color})"
    for number, color in enumerate(
        ("#0969da", "#bf5700", "#1a7f37", "#8250df", "#cf222e", "#057a85", "#9a6700", "#bf3989")
    )
)
_MOST_LINES = len(_COLORS)

Rows = Sequence[Mapping[str, Any]]
Points = list[tuple[float, float]]


def job_page(document: Mapping[str, Any], rows: Rows) -> str:
    """Return the page of a job: its `report` document, and the rows of all its metrics."""
    return _rendered(
        "report.html",
        document=document,
        progress={one["rank"]: one for one in document["progress"]},
        usage=_usage(document["usage"]),
        plots=plots(rows, document["slowest_rank"]),
    )


def _usage(rows: Rows) -> dict[str, dict[int, tuple[float, bool]]]:
    """Return by key what each rank used, and whether that is far from what the others used."""
    found = {}
    for key in report.USAGE_NOISE:
        values = [row[key] for row in rows]
        far = report.far_from_others(key, values)
        if any(value is not None for value in values):
            found[key] = {
                row["rank"]: (value, one)
                for row, value, one in zip(rows, values, far, strict=True)
                if value is not None
            }
    return found


def jobs_page(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of all jobs: the documents of `report` without a job."""
    return _rendered("reports.html", documents=documents)


def _rendered(name: str, **values: Any) -> str:
    return str(_templates().get_template(name).render(**values))


@functools.cache
def _templates() -> Any:
    """Return the templates of the pages; each is compiled once."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters |= {
        "duration": report.duration,
        "money": report.money,
        "size": report.size_text,
        "moment": _moment,
        "number": _number,
    }
    return environment


def _harmless(value: Any) -> Any:
    """Return a text without colours, its other control characters visible: no node hides text on a page."""
    if type(value) is not str:
        return value
    return harmless.lines(_SPOKEN.sub("", value))


def _moment(text: str | None) -> str:
    """Return a UTC time as 2026-11-22 12:00:00."""
    return "" if text is None else f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"


def _number(value: float) -> str:
    """Return a number in at most four digits, or all of a whole one."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def plots(rows: Rows, outlier: int | None = None) -> dict[str, str]:
    """Return the plots that metrics give, as SVG by title: loss, accuracy, and steps per second by rank.

    At most eight ranks are drawn, among them `outlier`.
    """
    drawn = {
        "Loss": _by_rank(rows, "loss"),
        "Accuracy": _by_rank(rows, "accuracy"),
        "Steps per second": {rank: _pace(some) for rank, some in _ranks(rows).items()},
    }
    return {
        title: _plot({f"rank {rank}": points[rank] for rank in chosen})
        for title, points in drawn.items()
        if (chosen := _chosen([rank for rank, some in points.items() if len(some) > 1], outlier))
    }


def loss_plot(rows: Rows, *, title: str) -> str | None:
    """Return an SVG of the training loss over the steps, None where no rank has two points."""
    points = {rank: some for rank, some in _by_rank(rows, "loss").items() if len(some) > 1}
    chosen = _chosen(list(points), None)
    return _plot({f"rank {rank}": points[rank] for rank in chosen}, title=title) if chosen else None


def _ranks(rows: Rows) -> dict[int, Rows]:
    """Return the rows by rank."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        rank = row.get("rank", 0)
        if type(rank) is int:
            found.setdefault(rank, []).append(row)
    return dict(sorted(found.items()))


def _by_rank(rows: Rows, key: str) -> dict[int, Points]:
    """Return (step, value) by rank; rows without a step are counted."""
    return {
        rank: [
            (index if (step := report.number(row.get("step"))) is None else step, value)
            for index, row in enumerate(some)
            if (value := report.number(row.get(key))) is not None
        ]
        for rank, some in _ranks(rows).items()
    }


def _pace(rows: Rows) -> Points:
    """Return (step, steps per second since the row before), where both rows have a step and a later time."""
    told = [
        (step, time)
        for row in rows
        if (step := report.number(row.get("step"))) is not None
        and (time := report.number(row.get("time"))) is not None
    ]
    told = told[:: max(1, len(told) // _MOST_POINTS)]
    return [
        (step, (step - before) / (time - since))
        for (before, since), (step, time) in pairwise(told)
        if time > since and step > before
    ]


def _chosen(ranks: list[int], outlier: int | None) -> list[int]:
    first = sorted(ranks, key=lambda rank: (rank != outlier, rank))[:_MOST_LINES]
    return sorted(first)


def _thinned(points: Points) -> Points:
    """Return at most about 300 of the points, the first and the last among them."""
    apart = max(1, len(points) // _MOST_POINTS)
    return [*points[:-1:apart], points[-1]]


def _plot(lines: Mapping[str, Points], *, title: str | None = None) -> str:
    import pygal
    from pygal.style import Style

    rule = "var(--rule, #d0d7de)"
    style = Style(
        background="var(--page, white)",
        plot_background="transparent",
        foreground="var(--muted, #57606a)",
        foreground_strong="var(--text, black)",
        foreground_subtle=rule,
        guide_stroke_color=rule,
        major_guide_stroke_color=rule,
        colors=_COLORS,
        font_family="inherit",
        label_font_size=13,
        major_label_font_size=13,
        legend_font_size=13,
        title_font_size=13,
        opacity="1",
        stroke_width="2",
    )
    chart = pygal.XY(
        style=style,
        width=480,
        height=250,
        js=(),
        show_dots=False,
        show_legend=len(lines) > 1,
        legend_at_bottom=True,
        legend_at_bottom_columns=4,
        legend_box_size=10,
        x_title="step",
        title=title,
        max_scale=6,
        truncate_legend=-1,
        margin=8,
        disable_xml_declaration=True,
    )
    for name, points in lines.items():
        chart.add(name, _thinned(points))
    return _still(chart.render())


def _still(svg: str) -> str:
    """Return an SVG without the script and the comments that pygal writes into it."""
    return re.sub(r"<script\b.*?</script>|<script\b[^>]*/>|<!--.*?-->", "", svg, flags=re.DOTALL)


def extremes(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, float] | None:
    """Return the first, last, least and most value of a metric; None where no row has it."""
    values = [value for row in rows if (value := report.number(row.get(key))) is not None]
    if not values:
        return None
    return {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
