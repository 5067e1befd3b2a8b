"""What a person reads when a verb is done: tables on stdout."""

import itertools
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from awsddp.cli import screen
from awsddp.report import duration, money

if TYPE_CHECKING:
    from awsddp.verbs.run import RunResult

Rows = Sequence[Sequence[Any]]
_NARROWEST = 8  # a column is not folded below this: rather let the terminal break the line


def _table(headings: Sequence[str], rows: Rows, *, stderr: bool = False) -> None:
    """Print a table as wide as its words need; on a narrow terminal its widest columns are folded."""
    for line in table_lines(headings, rows, width=screen.width(stderr=stderr)):
        print(line, file=sys.stderr if stderr else sys.stdout)


def table_lines(headings: Sequence[str], rows: Rows, *, width: int | None) -> list[str]:
    """Return a table as lines no wider than `width` (None: as wide as they need), its headings first.

    Where not even its narrowest form has room, each row becomes a few lines.
    """
    shown = (headings, *rows) if any(headings) else rows
    cells = [["" if cell is None else str(cell) for cell in row] for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while width is not None and sum(widths) + 2 * len(widths) - 2 > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    if width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        return _one_below_the_other(cells if any(headings) else [list(headings), *cells])
    lines = []
    for row in cells:
        folded = [_fold(cell, room) for cell, room in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            padded = (part.ljust(room) for part, room in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return lines


def _one_below_the_other(cells: list[list[str]]) -> list[str]:
    """Return a table that a terminal has no room for: a row after the other, a line a cell."""
    names, rows = cells[0], cells[1:]
    room = max(map(len, names))
    return [
        f"{'  ' * (column > 0)}{name.ljust(room)}  {cell}"
        for row in rows
        for column, (name, cell) in enumerate(zip(names, row, strict=True))
        if cell
    ]


def _fold(text: str, room: int) -> list[str]:
    return textwrap.wrap(text, room, break_on_hyphens=False) or [""]


def _line(text: str, *, stderr: bool = False) -> None:
    """Print a line; on a terminal it is folded between words, unless it is what a rank said."""
    width = None if text.startswith("  |") else screen.width(stderr=stderr)
    if width is not None and len(text) > width:
        text = textwrap.fill(
            text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
    print(text, file=sys.stderr if stderr else sys.stdout)


def cluster_page(result: dict[str, Any]) -> None:
    """Show a cluster: its nodes, its jobs, what it costs and until when."""
    name, state = result["cluster"], result["state"]
    if state == "absent":
        _line(f"Cluster {name}: absent. Looked in: {', '.join(result['looked']) or 'no place'}.")
        return
    where = "the local cloud" if result["target"] == "local" else result["region"]
    _line(f"Cluster {name}: {state}, {len(result['nodes'])} x {result['instance_type']} in {where}")
    _table(
        ("node", "instance", "state", "public", "private", "nic", "gpus"),
        [
            [f"node{node['node']}"]
            + [node[key] for key in ("instance_id", "state", "public_ip", "private_ip", "nic", "gpus")]
            for node in result["nodes"]
        ],
    )
    if result["jobs"]:
        _table(
            ("job", "state", "results"), [(job["job"], job["state"], job["home"]) for job in result["jobs"]]
        )
    _line(_bill(result))


def _bill(result: dict[str, Any]) -> str:
    if result["state"] == "stopped":
        return "Stopped: only the disks cost. Start them: awsddp up. End them: awsddp down"
    would = "would cost" if result["target"] == "local" else "costs"
    text = f"{would} {money(result['price_usd_per_hour'])} an hour on EC2, {money(result['cost_usd'])} so far"
    if result["expires"]:
        left = datetime.fromisoformat(result["expires"]) - datetime.now(UTC)
        text += f"; ends itself in {duration(max(0.0, left.total_seconds()))}"
    return text + ". End it now: awsddp down"


def job_page(result: dict[str, Any]) -> None:
    """Show how a job ended, why, and where its results are."""
    for line in job_lines(result):
        _line(line, stderr=True)


def _cause(cause: dict[str, Any] | None) -> str:
    if cause is None:
        return ""
    who = "the job" if cause["node"] is None else f"node{cause['node']}"
    if cause["rank"] is not None:
        who = f"rank {cause['rank']} @ {who}"
    return f"{who}: {cause['explanation']}"


def job_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines that say how a job ended, why, and where its results are."""
    lines = [f"Job {result['job']}: {result['state']}"]
    if result["state"] == "running":
        name = result["job"]
        return [*lines, f"  follow it: awsddp logs -f {name}", f"  end it: awsddp cancel {name}"]
    if result["cause"]:
        lines.append(f"  cause: {_cause(result['cause'])}")
        lines += [f"  | {line}" for line in result["cause"]["tail"]]
    if result.get("accuracy") is not None:
        lines.append(f"  accuracy on held-out data: {result['accuracy']:.2%}")
    lines.append(f"  results: {result['home']}/")
    return lines


def jobs_page(result: list[dict[str, Any]]) -> None:
    """Show jobs, the newest last."""
    if not result:
        _line("No job has run on this cluster. Start one: awsddp train")
        return
    rows = [
        (
            job["job"],
            job["state"],
            len(job["ranks"]),
            duration(max((rank["seconds"] for rank in job["ranks"]), default=0.0)),
            _cause(job["cause"]),
        )
        for job in result
    ]
    _table(("job", "state", "ranks", "time", "cause"), rows)


def report_page(result: dict[str, Any]) -> None:
    """Show a job: how it ended, each rank, and what lies at home."""
    for line in job_lines(result):
        _line(line)
    keys = ("rank", "local_rank", "node", "exit_code", "seconds")
    _table(keys, [[rank[key] for key in keys] for rank in result["ranks"]])
    if result["metrics"]:
        said = ", ".join(
            f"{key} {value:g}" for key, value in result["metrics"].items() if isinstance(value, int | float)
        )
        _line(f"last metrics: {said}")
    if result["files"]:
        _table(("file at home", "bytes"), [(name, f"{size:,}") for name, size in result["files"]])


def cost_page(result: dict[str, Any]) -> None:
    """Show what each cluster cost, and all of them."""
    if not result["clusters"]:
        _line("This machine has not made any cluster.")
        return
    rows = [
        (
            bill["cluster"],
            "local cloud" if bill["target"] == "local" else bill["region"],
            f"{bill['nodes']} x {bill['instance_type']}",
            str(bill["from"])[:16].replace("T", " "),
            "still there" if bill["to"] is None else str(bill["to"])[:16].replace("T", " "),
            money(bill["cost_usd"]) + (" (not billed)" if bill["target"] == "local" else ""),
        )
        for bill in result["clusters"]
    ]
    _table(("cluster", "where", "machines", "from", "to", "list price"), rows)
    _line(
        f"On AWS: {money(result['total_usd'])}, by list price and this machine's ledger. "
        f"Rehearsed for nothing: {money(result['would_have_cost_usd'])}."
    )


def sync_page(result: dict[str, Any]) -> None:
    """Show what travelled, a node a line."""
    _table(
        ("node", "files", "bytes"),
        [(f"node{node['node']}", node["files"], f"{node['bytes']:,}") for node in result["nodes"]],
    )
    if result.get("home"):
        _line(f"Results: {result['home']}/")


def down_page(result: dict[str, Any]) -> None:
    """Show what was ended, and that nothing is left."""
    if not result["terminated"] and not result["removed"]:
        looked = ", ".join(result["looked"]) or "no place"
        _line(f"Cluster {result['cluster']}: nothing to end. Looked in: {looked}.")
        return
    count = len(result["terminated"])
    _line(
        f"Cluster {result['cluster']}: {count} instance{'s' * (count != 1)} terminated, nothing is left. "
        f"{_what_it_cost(result)}"
    )


def _what_it_cost(result: dict[str, Any]) -> str:
    verb = "It would have cost" if result["target"] == "local" else "It cost"
    return f"{verb} {money(result['cost_usd'])} on EC2 (list price)."


def run_page(result: "RunResult") -> None:
    """Show the whole run: accuracy, the time of each stage, what it cost, and that nothing is left."""
    if result.train:
        for line in job_lines(result.train):
            _line(line)
    _table(("stage", "time"), [(stage, duration(seconds)) for stage, seconds in result.seconds.items()])
    if result.down:
        down_page(result.down)


def local_page(result: dict[str, Any]) -> None:
    """Show the local cloud as any EC2 client may use it."""
    _line(f"Local cloud in {result['mode']} mode: {result['why']}")
    _line("For any EC2 client:")
    for variable, key in (
        ("AWS_ENDPOINT_URL", "endpoint"),
        ("AWS_DEFAULT_REGION", "region"),
        ("AWS_ACCESS_KEY_ID", "access_key_id"),
        ("AWS_SECRET_ACCESS_KEY", "secret_access_key"),
    ):
        print(f"  export {variable}={result[key]}")  # whole on any terminal: to be copied
    living = [one for one in result["instances"] if one["state"] != "terminated"]
    ended = len(result["instances"]) - len(living)
    if living:
        keys = ("instance_id", "name", "state", "instance_type", "private_ip", "region")
        headings = ("instance", "name", "state", "type", "address", "region")
        _table(headings, [[one[key] for key in keys] for one in living])
    else:
        _line("No instances.")
    if ended:
        _line(f"{ended} terminated within the last hour.")
    if result["faults"]:
        faults_page(result["faults"])


def faults_page(faults: Sequence[dict[str, Any]]) -> None:
    """Show the faults of the local cloud that are in force."""
    if not faults:
        _line("No faults.")
        return
    keys = ("id", "operation", "effect", "times", "seconds", "only")
    rows = [[one[key] if key != "times" else one[key] or "always" for key in keys] for one in faults]
    _table(("fault", *keys[1:]), rows)
