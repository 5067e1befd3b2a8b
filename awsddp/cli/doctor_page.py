"""The pages of `doctor`: checks of nodes and before a launch, and where a job hangs, alike stacks folded."""

import itertools
from typing import Any

from awsddp import harmless
from awsddp.cli.render import line, table, table_lines, width, wrapped
from awsddp.records import write_numbers
from awsddp.report import duration, node_name
from awsddp.verbs.why import ranges

_COLUMNS, _MARK = 80, 8
_STACKS, _FRAMES = 4, 12
_OUTCOMES = {True: "ok", False: "FAILED", None: "-"}


def health_page(report: dict[str, Any]) -> None:
    """Show the checks of nodes in at most 80 columns, then the commands that replace failed nodes.

    Nodes with the same outcome share a row.
    """
    names = list(dict.fromkeys(check["name"] for check in report["checks"]))
    ordered = sorted(report["checks"], key=lambda check: (names.index(check["name"]), _outcome(check)))
    rows = []
    for (name, outcome, _), alike in itertools.groupby(ordered, key=_outcome):
        checks = list(alike)
        rows.append((name, _nodes(checks), outcome, _value(checks)))
    for text in table_lines(("check", "nodes", "", "found"), rows, columns=_columns()):
        line(text)
    for hint in dict.fromkeys(check["hint"] for check in report["checks"] if check["hint"]):
        line(hint)


def _outcome(check: dict[str, Any]) -> tuple[str, str, int]:
    """Return the key that folds nodes into one row: those that passed a check; others stand alone."""
    node = None if check["ok"] else check["node"]
    return check["name"], _OUTCOMES[check["ok"]], -1 if node is None else node


def _nodes(checks: list[dict[str, Any]]) -> str:
    numbers = [check["node"] for check in checks if check["node"] is not None]
    return node_name(numbers[0]) if len(numbers) == 1 else write_numbers(numbers) or "all"


def _value(checks: list[dict[str, Any]]) -> str:
    values = list(dict.fromkeys(check["value"] for check in checks))
    text = values[0] if len(values) == 1 else f"{values[0]} and others"
    expected = checks[0]["expected"]
    return f"{text} (expected: {expected})" if checks[0]["ok"] is not True and expected else text


def checks_page(report: dict[str, Any]) -> None:
    """Show each check before a launch, its outcome and the next step, in at most 80 columns."""
    columns = _columns()
    for (kind, ok, value, hint), alike in itertools.groupby(report["checks"], key=_kind):
        names = [check["name"].removeprefix(f"{kind} ") for check in alike]
        text = f"{' '.join(filter(None, (kind, ', '.join(names))))}: {harmless.line(value)}"
        shown = wrapped(text, columns, label=f"{_OUTCOMES[ok]:{_MARK}}", whole=False)
        label = f"{' ' * _MARK}next: "
        for remedy in harmless.lines(hint).splitlines():
            shown += wrapped(remedy, columns, label=label)
            label = " " * len(label)
        print("\n".join(shown))


def _kind(check: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key that merges checks into one row: permissions with the same outcome."""
    kind, _, rest = check["name"].partition(" ")
    return (kind if rest and kind == "permission" else "", check["ok"], check["value"], check["hint"])


def _columns() -> int:
    return min(width() or _COLUMNS, _COLUMNS)


def why_page(found: dict[str, Any]) -> None:
    """Show where each rank is, ranks that are in the same place in one line, then their stacks."""
    silent = found["silent_s"]
    output = "" if silent is None else f", no output for {duration(silent)}"
    line(f"Job {found['job']}: {found['state']}{output}")
    line(found["explanation"])
    headings = ("ranks", "nodes", "state", "at", "in", "worker processes at")
    folded = _folded(found["ranks"], _place)
    table(headings, [(*_who(ranks), *place) for place, ranks in folded])
    stacks = _folded([one for one in found["ranks"] if one["stack"]], lambda one: tuple(one["stack"]))
    behind = set(found["behind"])
    stacks.sort(key=lambda item: not behind & {one["rank"] for one in item[1]})
    for stack, ranks in stacks[:_STACKS]:
        line(f"ranks {_who(ranks)[0]}" if len(ranks) > 1 else f"rank {ranks[0]['rank']}")
        for frame in stack[-_FRAMES:]:
            line(f"  | {frame}")
    if len(stacks) > _STACKS:
        line(f"{len(stacks) - _STACKS} more stacks: awsddp doctor --why {found['job']} --json")


def _folded(ranks: list[dict[str, Any]], key: Any) -> list[tuple[Any, list[dict[str, Any]]]]:
    """Return the ranks by `key`, in the order of the first rank of each."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for one in ranks:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())


def _place(one: dict[str, Any]) -> tuple[str, ...]:
    collective = one["collective"]
    waits = f"{collective['operation']} {collective['number']}" if collective else ""
    workers = sorted({worker["where"] for worker in one["workers"] if worker["where"]})
    return one["state"], one["where"] or "", waits, ", ".join(workers)


def _who(ranks: list[dict[str, Any]]) -> tuple[str, str]:
    nodes = sorted({one["node"] for one in ranks})
    names = ", ".join(map(node_name, nodes)) if len(nodes) <= 3 else f"nodes {ranges(nodes)}"
    return ranges([one["rank"] for one in ranks]), names
