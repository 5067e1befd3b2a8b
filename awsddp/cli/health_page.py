"""What a person reads of the health of a cluster: each check; nodes with the same outcome share a row."""

import itertools
from typing import Any

from awsddp.cli.render import line, table
from awsddp.cluster import write_numbers
from awsddp.report import node_name

_OUTCOMES = {True: "ok", False: "FAILED", None: "-"}


def health_page(report: dict[str, Any]) -> None:
    """Show the checks in a table, failed ones with what was expected, then how to replace their nodes."""
    found = sorted(report["checks"], key=_outcome)  # stable: the order of the checks within an outcome
    names = list(dict.fromkeys(check["name"] for check in report["checks"]))
    found.sort(key=lambda check: names.index(check["name"]))
    rows = []
    for (name, ok, *_), alike in itertools.groupby(found, key=_outcome):
        checks = list(alike)
        rows.append((name, _nodes(checks), _OUTCOMES[ok], _value(checks)))
    table(("check", "nodes", "", "found"), rows)
    for hint in dict.fromkeys(check["hint"] for check in report["checks"] if check["hint"]):
        line(hint)


def _outcome(check: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key that folds nodes into one row: those that passed a check; others stand alone."""
    node = None if check["ok"] else check["node"]
    return check["name"], check["ok"], -1 if node is None else node


def _nodes(checks: list[dict[str, Any]]) -> str:
    numbers = [check["node"] for check in checks if check["node"] is not None]
    return node_name(numbers[0]) if len(numbers) == 1 else write_numbers(numbers) or "all"


def _value(checks: list[dict[str, Any]]) -> str:
    values = list(dict.fromkeys(check["value"] for check in checks))
    text = values[0] if len(values) == 1 else f"{values[0]} and others"
    expected = checks[0]["expected"]
    return f"{text} (expected: {expected})" if checks[0]["ok"] is not True and expected else text
