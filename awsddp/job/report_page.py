"""The page of a job: one HTML file with its style and its plot inside, and nothing from elsewhere. Pure.

What a node sent is text, which is escaped. `<data title=...>` names the source of each number.
"""

import contextlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

from awsddp.model.metric_rows import number, values_of
from awsddp.model.rank_columns import rank_columns
from awsddp.util import terminal_safe
from awsddp.util.format import duration, money
from awsddp.util.shipped_files import template

if TYPE_CHECKING:
    from awsddp.model.documents import JobReport

_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
_MOST_LINES, _MOST_POINTS = 8, 300
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 300, 60, 24
_RIGHT, _BOTTOM = _WIDTH - 12, _HEIGHT - 62
_LINES = ("#0969da", "#bf5700", "#1a7f37", "#8250df", "#cf222e", "#057a85", "#9a6700", "#bf3989")

Rows = Sequence[Mapping[str, Any]]
Points = list[tuple[float, float]]


class _Html(str):
    """HTML; any other string is text."""


def _html(value: object) -> str:
    """Return HTML as it is, and a text escaped: without colors, other control characters visible."""
    return value if isinstance(value, _Html) else escape(terminal_safe.lines(_COLOR.sub("", str(value))))


def _tag(name: str, *content: object, **attributes: object) -> _Html:
    """Return an element; `class_` and names with "_" are attributes as in HTML."""
    given = "".join(
        f' {key.strip("_").replace("_", "-")}="{_html(value)}"' for key, value in attributes.items()
    )
    return _Html(f"<{name}{given}>{''.join(map(_html, content))}</{name}>")


def _data(value: float, shown: object, source: str) -> _Html:
    return _tag("data", shown, value=value, title=source)


def job_page(job: "JobReport", rows: Rows) -> str:
    """Return the page of a job: its `report` document, and the rows of its metrics."""
    plot = loss_plot(rows, title="loss", outlier=job.slowest_rank)
    body = [
        _tag("h1", _tag("code", job.job), " ", _tag("span", job.state, class_=f"state {job.state}")),
        _tag("p", _tag("code", " ".join([job.script or "unknown script", *job.args]))),
        _tag("dl", *(_tag("div", _tag("dt", name), _tag("dd", *shown)) for name, shown in _facts(job))),
        *_cause(job),
        plot and _tag("h2", "Training") + plot,
        _tag("h2", "Ranks"),
        _ranks(job),
        _tag("h2", "Run it again"),
        _tag("pre", "\n".join(job.again)),
        _tag("p", "The commit does not hold the uncommitted changes.") if job.dirty else None,
    ]
    title = _html(f"{job.job}: {job.state}")
    return Template(template("page.html")).substitute(title=title, body="\n".join(filter(None, body)))


def _facts(job: "JobReport") -> Iterator[tuple[str, Sequence[object]]]:
    """Yield what a job ran on, its times, its results and its cost: each with its name."""
    count, kind = len(job.nodes), job.instance_type or "unknown type"
    place = ("the local cloud" if job.target == "local" else "AWS", " ", _tag("code", job.region))
    where = (", ", *place) if job.region else ()
    yield "Nodes", (_data(count, count, "job.json: nodes, counted"), " x ", _tag("code", kind), *where)
    ranks = _data(job.world_size, job.world_size, "job.json: world_size")
    yield "Ranks", (ranks, ", launcher ", _tag("code", job.launcher))
    changed = " with uncommitted changes" if job.dirty else ""
    commit = ("commit ", _tag("code", job.commit[:12]), changed) if job.commit else None
    yield "Code", commit or ("no commit was recorded",)
    if job.resumed:
        yield "Resumed from", (_tag("code", job.resumed),)
    if job.started:
        shown = f"{datetime.fromisoformat(job.started):%Y-%m-%d %H:%M:%S}"
        yield "Started", (_tag("time", shown, datetime=job.started), " UTC")
    if job.started and job.seconds is not None:
        yield "Time", (_data(job.seconds, duration(job.seconds), "job.json: ended less started"),)
    for name, found in job.measures.items():
        last, best = (_data(found[key], f"{found[key]:.4g}", f"metrics: {name}.{key}") for key in found)
        data = f" ({job.data})" if name == "accuracy" and job.data else ""
        yield name.capitalize(), ("last ", last, ", best ", best, data)
    if job.checkpoint:
        again = _tag("code", f"--resume {job.job}")
        yield "Checkpoint", (again, " continues from ", _tag("code", job.checkpoint))
    if job.job_usd is not None:
        source = "job.json: price_usd_per_hour over the time"
        free = ", a rehearsal, not billed" if job.target == "local" else ""
        yield "Cost of the job", (_data(job.job_usd, money(job.job_usd), source), free)


def _cause(job: "JobReport") -> Sequence[_Html | None]:
    """Return why a job ended as it did; nothing for one that succeeded or runs."""
    cause = job.cause
    if cause is None:
        return []
    who = [
        _Html(f"{key} {_data(value, value, f'job.json: cause.{key}')} ")
        for key, value in (("rank", cause.rank), ("node", cause.node))
        if value is not None
    ]
    return [
        _tag("h2", "Why it failed" if job.state == "failed" else "Why it ended"),
        _tag("p", *who, _tag("code", cause.kind)),
        _tag("pre", cause.explanation),
        _tag("pre", "\n".join(cause.tail)) if cause.tail else None,
        _tag("p", "Next: ", _tag("code", cause.next)) if cause.next else None,
    ]


def _row(cell: str, values: Iterable[object]) -> _Html:
    return _tag("tr", *(_tag(cell, value) for value in values))


def _ranks(job: "JobReport") -> _Html:
    """Return a row for each rank; the slowest is marked."""
    columns = list(rank_columns(job.progress, job.usage))
    rows = [_row("th", ("rank", "node", "time", "exit", *(one.heading for one in columns), ""))]
    for index, one in enumerate(job.ranks):
        cells: list[object] = []
        for key in ("rank", "node", "seconds", "exit_code"):
            value = getattr(one, key)
            shown = duration(value) if key == "seconds" else value
            cells.append("runs" if value is None else _data(value, shown, f"job.json: ranks[{index}].{key}"))
        for column in columns:
            value, source = column.values.get(one.rank), f"{column.source}: rank {one.rank}.{column.key}"
            cells.append("" if value is None else _data(value, column.shown[one.rank], source))
        rows.append(_row("td", (*cells, "slowest" if one.rank == job.slowest_rank else "")))
    return _tag("div", _tag("table", *rows), class_="wide")


def loss_plot(rows: Rows, *, title: str, outlier: int | None = None) -> str | None:
    """Return an SVG of the loss over the steps: a line for each of at most eight ranks, `outlier` among them.

    None where no rank has two points. A row without a rank is of rank 0; one without a step is counted.
    """
    points: dict[int, Points] = {}
    for row in rows:
        rank, value, step = row.get("rank", 0), number(row.get("loss")), number(row.get("step"))
        if type(rank) is int and value is not None:
            some = points.setdefault(rank, [])
            some.append((len(some) if step is None else step, value))
    ranks = [rank for rank, some in points.items() if len(some) > 1]
    drawn = sorted(ranks, key=lambda rank: (rank != outlier, rank))[:_MOST_LINES]
    return _plot({rank: _thinned(points[rank]) for rank in sorted(drawn)}, title) if drawn else None


def _thinned(points: Points) -> Points:
    """Return at most about 300 of the points, the first and the last among them."""
    return [*points[: -1 : max(1, len(points) // _MOST_POINTS)], points[-1]]


def _plot(lines: Mapping[int, Points], title: str) -> str:
    steps, values = zip(*(point for points in lines.values() for point in points), strict=True)
    first, low = min(steps), min(values)
    across, up = (max(steps) - first) or 1.0, (max(values) - low) or 1.0

    def text(x: float, y: float, shown: object, **more: object) -> _Html:
        return _tag("text", shown, x=x, y=y, **{"fill": "var(--muted, #57606a)", **more})

    middle = (_LEFT + _RIGHT) / 2
    marks = [text(_LEFT, _TOP - 8, title), text(middle, _BOTTOM + 18, "step", text_anchor="middle")]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _BOTTOM - part * (_BOTTOM - _TOP)
        marks.append(_tag("path", d=f"M{_LEFT},{y}H{_RIGHT}", stroke="var(--rule, #d0d7de)"))
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
        marks.append(_tag("polyline", points=path, fill="none", stroke=color, stroke_width=2))
        if len(lines) > 1:
            x, y = _LEFT + index % 4 * 120, _BOTTOM + 38 + index // 4 * 16
            marks.append(text(x, y, f"rank {rank}", fill=color))
    space, box = "http://www.w3.org/2000/svg", f"0 0 {_WIDTH} {_HEIGHT}"
    return _tag("svg", *marks, xmlns=space, viewBox=box, font_size=13, font_family="sans-serif")


def event_rows(data: bytes) -> list[dict[str, float]]:
    """Return step and loss of a TensorBoard event file: of the first tag that names a loss.

    Records of TFRecord, each an Event: step is field 2, summary 5, of which a value has tag 1 and
    simple_value 2 (tensorboard/compat/proto in github.com/tensorflow/tensorboard). A torn end is left.
    """
    rows: list[dict[str, float]] = []
    chosen, at = b"", 0
    with contextlib.suppress(IndexError, struct.error):
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = _fields(data[at + 12 : at + 12 + size])
            at += size + 16
            for summary in event.get(5, ()):
                for scalar in map(_fields, _fields(summary).get(1, ())):
                    tag, value = scalar.get(1, [b""])[0], scalar.get(2, [b""])[0]
                    if len(value) == 4 and b"loss" in tag.lower() and (chosen := chosen or tag) == tag:
                        step = int.from_bytes(event.get(2, [b""])[0], "little")
                        rows.append({"step": step, "loss": struct.unpack("<f", value)[0]})
    return rows


def both_ends(data: bytes, most: int = 300) -> bytes:
    """Return an event file without its middle: at most its first and its last `most` records."""
    starts, at = [], 0
    while at + 12 <= len(data):
        starts.append(at)
        at += struct.unpack_from("<Q", data, at)[0] + 16
    return data if len(starts) <= 2 * most else data[: starts[most]] + data[starts[-most] :]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the fields of a protobuf message by number; a varint as its bytes, the lowest first."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size, at = _varint(message, at)
        if key & 7 == 0:
            value = (size & (1 << 64) - 1).to_bytes(8, "little")
        else:
            at, value = at + size, message[at : at + size]
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins there, 7 bits a byte, and where it ends."""
    last = next((n for n in range(at, at + 10) if message[n] < 128), at + 9)
    return sum((byte & 127) << 7 * n for n, byte in enumerate(message[at : last + 1])), last + 1


def measures(rows: Rows) -> dict[str, dict[str, float]]:
    """Return the last and the best value of loss and accuracy (`values_of`), where rows have them."""
    found = {}
    for key, best in (("loss", min), ("accuracy", max)):
        if values := values_of(rows, key):
            found[key] = {"last": values[-1], "best": best(values)}
    return found
