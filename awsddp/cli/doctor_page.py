"""The pages that `doctor` (node checks, checks before a launch) and `why` (where a job hangs) print."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from awsddp.agent.diagnosis.hang import format_ranges
from awsddp.cli.command_line import with_global_options
from awsddp.cli.pages import job_lines
from awsddp.cli.table import line, table_lines, width, wrap
from awsddp.model.records import Check, ProcessStack, RankStack, format_node_numbers
from awsddp.util import terminal_safe
from awsddp.util.formatting import duration, node_name

if TYPE_CHECKING:
    from awsddp.model.documents import DoctorDocument, WhyDocument

_COLUMNS, _MARK = 80, 8
_STACKS, _FRAMES = 4, 12
_AFTER_SUMMARY = re.compile(r": |(?<! ago\))\. Ranks? ")
"""Matches the end of an explanation's first sentence. The page omits the ranks' positions in the rest of the
explanation, because a table shows the positions."""
_FUNCTION = re.compile(r" in [^ \n]*")
_OUTCOMES = {True: "ok", False: "FAILED", None: "-"}


def health_page(report: "DoctorDocument") -> None:
    """Show the node checks in at most 80 columns, then the commands that replace failed nodes.

    Nodes with the same outcome share a row.
    """
    names = list(dict.fromkeys(check.name for check in report.checks))
    ordered = sorted(report.checks, key=lambda check: (names.index(check.name), _outcome(check)))
    rows = []
    for (name, outcome, _), group in itertools.groupby(ordered, key=_outcome):
        checks = list(group)
        rows.append((name, _node_names(checks), outcome, _result(checks)))
    line(*table_lines(("check", "nodes", "", "found"), rows, columns=_columns()))
    line(*dict.fromkeys(check.hint for check in report.checks if check.hint))


def _outcome(check: Check) -> tuple[str, str, int]:
    """Return the key that groups checks into rows.

    Nodes that passed share one key; every other node has its own.
    """
    node = -1 if check.ok or check.node is None else check.node
    return check.name, _OUTCOMES[check.ok], node


def _node_names(checks: list[Check]) -> str:
    numbers = [check.node for check in checks if check.node is not None]
    return node_name(numbers[0]) if len(numbers) == 1 else format_node_numbers(numbers) or "all"


def _result(checks: list[Check]) -> str:
    values = list(dict.fromkeys(check.value for check in checks))
    text = values[0] if len(values) == 1 else f"{values[0]} and others"
    expected = checks[0].expected
    return f"{text} (expected: {expected})" if checks[0].ok is not True and expected else text


def checks_page(report: "DoctorDocument") -> None:
    """Show each check made before a launch, with its outcome and next step, in at most 80 columns."""
    columns = _columns()
    for (kind, ok, value, hint), group in itertools.groupby(report.checks, key=_merge_key):
        names = [check.name.removeprefix(f"{kind} ") for check in group]
        text = f"{' '.join(filter(None, (kind, ', '.join(names))))}: {terminal_safe.escape_line(value)}"
        shown = wrap(text, columns, label=f"{_OUTCOMES[ok]:{_MARK}}", whole=False)
        label = f"{' ' * _MARK}next: "
        for step in terminal_safe.escape_lines(hint).splitlines():
            shown += wrap(step, columns, label=label)
            label = " " * len(label)
        print("\n".join(shown))


def _merge_key(check: Check) -> tuple[str, bool | None, str, str]:
    """Return the key that groups checks into rows: permissions with the same outcome share a row."""
    kind, _, name = check.name.partition(" ")
    return kind if name and kind == "permission" else "", check.ok, check.value, check.hint


def _columns() -> int:
    return min(width() or _COLUMNS, _COLUMNS)


def why_page(document: "WhyDocument", *, verbose: bool = False) -> None:
    """Show each rank's position. Ranks at the same position share a line; ranks that are behind come first.

    If `verbose`, the ranks' stacks are shown too. If the job has ended, its cause and the next step
    come first.
    """
    if document.result is not None:
        line(*job_lines(document.result))
    else:
        silent = "" if document.silent_s is None else f"no output for {duration(document.silent_s)}. "
        line(f"Job {document.job}: {silent}{_summary(document.explanation)}")
        line(*[f"  {_summary(document.hang.text)}"] if document.hang else [])
    rows = list(_position_rows(document))
    names, positions = (max((len(row[index]) for row in rows), default=0) for index in (0, 1))
    for ranks_text, position, source, waits in rows:
        line(f"  {ranks_text:{names}}  {position:{positions}}  {source}"[: width()].rstrip())
        line(*[f"  {'':{names}}  {waits}"] * bool(waits))
    stacks = _group_ranks(document, lambda rank: tuple(rank.stack))
    for stack, ranks in stacks[:_STACKS] if verbose else ():
        line(_rank_numbers([rank.rank for rank in ranks]), *(f"  | {frame}" for frame in stack[-_FRAMES:]))
    if document.ranks and (len(stacks) > _STACKS or not verbose):
        line(with_global_options(f"  stacks: awsddp why {document.job} {'--json' if verbose else '-v'}"))
    if document.result is None:
        line(with_global_options(f"  end it: awsddp cancel {document.job}"))


def _summary(explanation: str) -> str:
    return _AFTER_SUMMARY.split(explanation)[0].rstrip(". ") + "."


def _position_rows(document: "WhyDocument") -> Iterator[list[str]]:
    """Yield the table's rows for each group of ranks and for the worker processes in that group.

    A row has the ranks, their position, the line of code at that position, and the call in which the ranks
    wait.
    """
    for (state, call, position, *workers), ranks in _group_ranks(document, _position):
        nodes = sorted({rank.node for rank in ranks})
        names = ", ".join(map(node_name, nodes)) if len(nodes) <= 3 else f"nodes {format_ranges(nodes)}"
        is_behind = not document.behind or ranks[0].rank in document.behind
        others = "" if is_behind else f"for {_rank_numbers(document.behind)} "
        waits = f"waits {others}in {call}" if call else ""
        numbers = _rank_numbers([rank.rank for rank in ranks])
        yield [f"{numbers} ({names}){state}", *position.split("\n"), waits]
        yield from (["  worker processes", *worker.split("\n"), ""] for worker in workers)


def _group_ranks(
    document: "WhyDocument", key: Callable[[RankStack], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[RankStack]]]:
    """Return the ranks grouped by `key`.

    Groups that are behind come first, then all other groups. Both parts are sorted by each group's first
    rank.
    """
    groups: dict[tuple[str, ...], list[RankStack]] = {}
    for rank in sorted(document.ranks, key=lambda rank: rank.rank not in document.behind):
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.items())


def _position(rank: RankStack) -> tuple[str, ...]:
    """Return a rank's state, the call in which it waits, its position and its child processes' positions.

    A position is a text with two lines: first the file, line number and function, then the line of code.
    """
    call = f"{rank.collective.operation} {rank.collective.number}" if rank.collective else ""
    if not call and any(frame.endswith(" in init_process_group") for frame in rank.stack):
        call = "init_process_group"
    children = (child for child in rank.workers if child.where)
    processes: tuple[RankStack | ProcessStack, ...] = (rank, *children)
    positions = [f"{process.where or ''}\n{process.source or ''}" for process in processes]
    state = "" if rank.state == "running" else f": {rank.state}"
    return state, call, *dict.fromkeys(_FUNCTION.sub("", position, count=1) for position in positions)


def _rank_numbers(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(list(ranks))}"
