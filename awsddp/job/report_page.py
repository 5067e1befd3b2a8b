"""Render a job's page: one self-contained HTML file. No I/O.

Text from nodes is escaped. `<data title=...>` names the source of each number.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from string import Template
from typing import TYPE_CHECKING

from awsddp.model.metric_rows import read_values
from awsddp.model.rank_columns import make_rank_columns
from awsddp.model.recovery_text import describe_recoveries
from awsddp.storage.loss_plot import Rows, plot_loss
from awsddp.util.formatting import duration, money
from awsddp.util.html import Html, tag, to_html
from awsddp.util.shipped_files import template

if TYPE_CHECKING:
    from awsddp.model.documents import JobReport


def _number(value: float, shown: object, source: str) -> Html:
    return tag("data", shown, value=value, title=source)


def render_job_page(job: "JobReport", rows: Rows) -> str:
    """Return a job's page, made from its `report` document and the rows of its metrics."""
    plot = plot_loss(rows, title="loss", outlier=job.slowest_rank)
    body = [
        tag("h1", tag("code", job.job), " ", tag("span", job.state, class_=f"state {job.state}")),
        tag("p", tag("code", " ".join([job.script or "unknown script", *job.args]))),
        tag("dl", *(tag("div", tag("dt", name), tag("dd", *shown)) for name, shown in _facts(job))),
        *_cause(job),
        plot and tag("h2", "Training") + plot,
        tag("h2", "Ranks"),
        _ranks(job),
        tag("h2", "Run it again"),
        tag("pre", "\n".join(job.again)),
        tag("p", "The commit does not contain the uncommitted changes.") if job.dirty else None,
    ]
    title = to_html(f"{job.job}: {job.state}")
    return Template(template("page.html")).substitute(title=title, body="\n".join(filter(None, body)))


def _facts(job: "JobReport") -> Iterator[tuple[str, Sequence[object]]]:
    """Yield a job's nodes, ranks, code, times, results and cost, each as a heading and its content."""
    count, kind = len(job.nodes), job.instance_type or "unknown type"
    location = ("the local cloud" if job.target == "local" else "AWS", " ", tag("code", job.region))
    suffix = (", ", *location) if job.region else ()
    yield "Nodes", (_number(count, count, "job.json: nodes, counted"), " x ", tag("code", kind), *suffix)
    ranks = _number(job.world_size, job.world_size, "job.json: world_size")
    yield "Ranks", (ranks, ", launcher ", tag("code", job.launcher))
    changed = " with uncommitted changes" if job.dirty else ""
    commit = ("commit ", tag("code", job.commit[:12]), changed) if job.commit else None
    yield "Code", commit or ("no commit was recorded",)
    if job.resumed:
        yield "Resumed from", (tag("code", job.resumed),)
    if job.started:
        shown = f"{datetime.fromisoformat(job.started):%Y-%m-%d %H:%M:%S}"
        yield "Started", (tag("time", shown, datetime=job.started), " UTC")
    if job.started and job.seconds is not None:
        yield "Time", (_number(job.seconds, duration(job.seconds), "job.json: ended less started"),)
    for name, values in job.measures.items():
        last, best = (_number(values[key], f"{values[key]:.4g}", f"metrics: {name}.{key}") for key in values)
        data = f" ({job.data})" if name == "accuracy" and job.data else ""
        yield name.capitalize(), ("last ", last, ", best ", best, data)
    if job.checkpoint:
        resume = tag("code", f"--resume {job.job}")
        yield "Checkpoint", (resume, " continues from ", tag("code", job.checkpoint))
    for text in describe_recoveries(job):
        yield "Recovery", (text,)
    if job.job_usd is not None:
        source = "job.json: price_usd_per_hour over the time"
        note = ", a rehearsal, not billed" if job.target == "local" else ""
        yield "Cost of the job", (_number(job.job_usd, money(job.job_usd), source), note)


def _cause(job: "JobReport") -> Sequence[Html | None]:
    """Return the cause of a job's end as a list, which is empty if there is no cause."""
    cause = job.cause
    if cause is None:
        return []
    failed_at = [
        Html(f"{key} {_number(value, value, f'job.json: cause.{key}')} ")
        for key, value in (("rank", cause.rank), ("node", cause.node))
        if value is not None
    ]
    return [
        tag("h2", "Why it failed" if job.state == "failed" else "Why it ended"),
        tag("p", *failed_at, tag("code", cause.kind)),
        tag("pre", cause.explanation),
        tag("pre", "\n".join(cause.tail)) if cause.tail else None,
        tag("p", "Next: ", tag("code", cause.next)) if cause.next else None,
    ]


def _row(cell: str, values: Iterable[object]) -> Html:
    return tag("tr", *(tag(cell, value) for value in values))


def _ranks(job: "JobReport") -> Html:
    """Return a table with one row per rank; the slowest rank is marked."""
    columns = list(make_rank_columns(job.progress, job.usage))
    rows = [_row("th", ("rank", "node", "time", "exit", *(column.heading for column in columns), ""))]
    for index, rank in enumerate(job.ranks):
        cells: list[object] = []
        for key in ("rank", "node", "seconds", "exit_code"):
            value = getattr(rank, key)
            shown = duration(value) if key == "seconds" else value
            cells.append(
                "runs" if value is None else _number(value, shown, f"job.json: ranks[{index}].{key}")
            )
        for column in columns:
            value, source = column.values.get(rank.rank), f"{column.source}: rank {rank.rank}.{column.key}"
            cells.append("" if value is None else _number(value, column.shown[rank.rank], source))
        rows.append(_row("td", (*cells, "slowest" if rank.rank == job.slowest_rank else "")))
    return tag("div", tag("table", *rows), class_="wide")


def summarize_metrics(rows: Rows) -> dict[str, dict[str, float]]:
    """Return the last and the best loss and accuracy (`read_values`), if the rows have them."""
    summary = {}
    for key, best in (("loss", min), ("accuracy", max)):
        if values := read_values(rows, key):
            summary[key] = {"last": values[-1], "best": best(values)}
    return summary
