"""The pages of `doctor`: checks of nodes and before a launch, and where a job hangs, alike stacks folded."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from awsddp import harmless
from awsddp.cli.render import line, table, table_lines, width, wrapped
from awsddp.jobs.supervisor.hang import ranges
from awsddp.records import Check, RankStack, write_numbers
from awsddp.report import duration, node_name

if TYPE_CHECKING:
    from awsddp.returns import DoctorDocument, WhyDocument

_COLUMNS, _MARK = 80, 8
_STACKS, _FRAMES = 4, 12
_OUTCOMES = {True: "ok", False: "FAILED", None: "-"}


def health_page(report: "DoctorDocument") -> None:
    """Show the checks of nodes in at most 80 columns, then the commands that replace failed nodes.

    Nodes with the same outcome share a row.
    """
    names = list(dict.fromkeys(check.name for check in report.checks))
    ordered = sorted(report.checks, key=lambda check: (names.index(check.name), _outcome(check)))
    rows = []
    for (name, outcome, _), alike in itertools.groupby(ordered, key=_outcome):
        checks = list(alike)
        rows.append((name, _nodes(checks), outcome, _value(checks)))
    line(*table_lines(("check", "nodes", "", "found"), rows, columns=_columns()))
    line(*dict.fromkeys(check.hint for check in report.checks if check.hint))


def _outcome(check: Check) -> tuple[str, str, int]:
    """Return the key that folds nodes into one row: those that passed a check; others stand alone."""
    node = -1 if check.ok or check.node is None else check.node
    return check.name, _OUTCOMES[check.ok], node


def _nodes(checks: list[Check]) -> str:
    numbers = [check.node for check in checks if check.node is not None]
    return node_name(numbers[0]) if len(numbers) == 1 else write_numbers(numbers) or "all"


def _value(checks: list[Check]) -> str:
    values = list(dict.fromkeys(check.value for check in checks))
    text = values[0] if len(values) == 1 else f"{values[0]} and others"
    expected = checks[0].expected
    return f"{text} (expected: {expected})" if checks[0].ok is not True and expected else text


def checks_page(report: "DoctorDocument") -> None:
    """Show each check before a launch, its outcome and the next step, in at most 80 columns."""
    columns = _columns()
    for (kind, ok, value, hint), alike in itertools.groupby(report.checks, key=_kind):
        names = [check.name.removeprefix(f"{kind} ") for check in alike]
        text = f"{' '.join(filter(None, (kind, ', '.join(names))))}: {harmless.line(value)}"
        shown = wrapped(text, columns, label=f"{_OUTCOMES[ok]:{_MARK}}", whole=False)
        label = f"{' ' * _MARK}next: "
        for remedy in harmless.lines(hint).splitlines():
            shown += wrapped(remedy, columns, label=label)
            label = " " * len(label)
        print("\n".join(shown))


def _kind(check: Check) -> tuple[str, bool | None, str, str]:
    """Return the key that merges checks into one row: permissions with the same outcome."""
    kind, _, rest = check.name.partition(" ")
    return kind if rest and kind == "permission" else "", check.ok, check.value, check.hint


def _columns() -> int:
    return min(width() or _COLUMNS, _COLUMNS)


def why_page(found: "WhyDocument") -> None:
    """Show where each rank is, ranks that are in the same place in one line, then their stacks."""
    output = "" if found.silent_s is None else f", no output for {duration(found.silent_s)}"
    line(f"Job {found.job}: {found.state}{output}")
    line(found.explanation)
    headings = ("ranks", "nodes", "state", "at", "in", "worker processes at")
    table(headings, [(*_who(ranks), *place) for place, ranks in _folded(found.ranks, _place)])
    stacks = _folded((one for one in found.ranks if one.stack), lambda one: tuple(one.stack))
    behind = set(found.behind)
    stacks.sort(key=lambda item: not behind & {one.rank for one in item[1]})
    for stack, ranks in stacks[:_STACKS]:
        line(f"ranks {_who(ranks)[0]}" if len(ranks) > 1 else f"rank {ranks[0].rank}")
        line(*(f"  | {frame}" for frame in stack[-_FRAMES:]))
    if len(stacks) > _STACKS:
        line(f"{len(stacks) - _STACKS} more stacks: awsddp doctor --why {found.job} --json")


def _folded(
    ranks: Iterable[RankStack], key: Callable[[RankStack], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[RankStack]]]:
    """Return the ranks by `key`, in the order of the first rank of each."""
    groups: dict[tuple[str, ...], list[RankStack]] = {}
    for one in ranks:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())


def _place(one: RankStack) -> tuple[str, ...]:
    waits = f"{one.collective.operation} {one.collective.number}" if one.collective else ""
    workers = sorted({worker.where for worker in one.workers if worker.where})
    return one.state, one.where or "", waits, ", ".join(workers)


def _who(ranks: Sequence[RankStack]) -> tuple[str, str]:
    nodes = sorted({one.node for one in ranks})
    names = ", ".join(map(node_name, nodes)) if len(nodes) <= 3 else f"nodes {ranges(nodes)}"
    return ranges([one.rank for one in ranks]), names
