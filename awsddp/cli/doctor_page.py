"""The pages of `doctor` and `why`: checks of nodes and before a launch, and where a job hangs."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from awsddp.agent.diagnosis.hang import ranges
from awsddp.cli.command_line import named
from awsddp.cli.pages import job_lines
from awsddp.cli.table import line, table_lines, width, wrapped
from awsddp.model.records import Check, ProcessStack, RankStack, write_numbers
from awsddp.util import terminal_safe
from awsddp.util.format import duration, node_name

if TYPE_CHECKING:
    from awsddp.model.documents import DoctorDocument, WhyDocument

_COLUMNS, _MARK = 80, 8
_STACKS, _FRAMES = 4, 12
_PLACES = re.compile(r": |(?<! ago\))\. Ranks? ")
"""What follows the first sentence of an explanation: places, which the table shows."""
_FUNCTION = re.compile(r" in [^ \n]*")
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
        text = f"{' '.join(filter(None, (kind, ', '.join(names))))}: {terminal_safe.line(value)}"
        shown = wrapped(text, columns, label=f"{_OUTCOMES[ok]:{_MARK}}", whole=False)
        label = f"{' ' * _MARK}next: "
        for remedy in terminal_safe.lines(hint).splitlines():
            shown += wrapped(remedy, columns, label=label)
            label = " " * len(label)
        print("\n".join(shown))


def _kind(check: Check) -> tuple[str, bool | None, str, str]:
    """Return the key that merges checks into one row: permissions with the same outcome."""
    kind, _, rest = check.name.partition(" ")
    return kind if rest and kind == "permission" else "", check.ok, check.value, check.hint


def _columns() -> int:
    return min(width() or _COLUMNS, _COLUMNS)


def why_page(found: "WhyDocument", *, verbose: bool = False) -> None:
    """Show where each rank is, ranks that are in the same place in one line, those behind first.

    `verbose`: also their stacks. Of a job that has ended: its cause and what to type next.
    """
    if found.result is not None:
        line(*job_lines(found.result))
    else:
        silent = "" if found.silent_s is None else f"no output for {duration(found.silent_s)}. "
        summary = _PLACES.split(found.explanation)[0].rstrip(". ") + "."
        line(f"Job {found.job}: {silent}{summary}")
    rows = list(_rows(found))
    names, places = (max((len(row[at]) for row in rows), default=0) for at in (0, 1))
    for who, where, source, waits in rows:
        line(f"  {who:{names}}  {where:{places}}  {source}"[: width()].rstrip())
        line(*[f"  {'':{names}}  {waits}"] * bool(waits))
    stacks = _folded(found, lambda one: tuple(one.stack))
    for stack, ranks in stacks[:_STACKS] if verbose else ():
        line(_numbers([one.rank for one in ranks]), *(f"  | {frame}" for frame in stack[-_FRAMES:]))
    if found.ranks and (len(stacks) > _STACKS or not verbose):
        line(named(f"  stacks: awsddp why {found.job} {'--json' if verbose else '-v'}"))
    if found.result is None:
        line(named(f"  end it: awsddp cancel {found.job}"))


def _rows(found: "WhyDocument") -> Iterator[list[str]]:
    """Yield who is where, that line of the program, and what they wait in."""
    for (state, call, place, *workers), ranks in _folded(found, _place):
        nodes = sorted({one.node for one in ranks})
        names = ", ".join(map(node_name, nodes)) if len(nodes) <= 3 else f"nodes {ranges(nodes)}"
        is_behind = not found.behind or ranks[0].rank in found.behind
        waits = f"waits {'' if is_behind else f'for {_numbers(found.behind)} '}in {call}" if call else ""
        yield [f"{_numbers([one.rank for one in ranks])} ({names}){state}", *place.split("\n"), waits]
        yield from (["  worker processes", *worker.split("\n"), ""] for worker in workers)


def _folded(
    found: "WhyDocument", key: Callable[[RankStack], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[RankStack]]]:
    """Return the ranks by `key`, those behind first, else in the order of the first rank of each."""
    groups: dict[tuple[str, ...], list[RankStack]] = {}
    for one in sorted(found.ranks, key=lambda one: one.rank not in found.behind):
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())


def _place(one: RankStack) -> tuple[str, ...]:
    """Return a rank's state, what it waits in, and where it and its children are, each with its line."""
    call = f"{one.collective.operation} {one.collective.number}" if one.collective else ""
    if not call and any(frame.endswith(" in init_process_group") for frame in one.stack):
        call = "init_process_group"
    seen: tuple[RankStack | ProcessStack, ...] = (one, *(child for child in one.workers if child.where))
    places = [f"{at.where or ''}\n{at.source or ''}" for at in seen]
    state = "" if one.state == "running" else f": {one.state}"
    return state, call, *dict.fromkeys(_FUNCTION.sub("", place, count=1) for place in places)


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(list(ranks))}"
