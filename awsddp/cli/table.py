"""Render the output: lines, tables, JSON documents and transfer progress."""

import itertools
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from awsddp.errors import SCHEMA
from awsddp.model.events import Event
from awsddp.util import terminal_safe
from awsddp.util.formatting import duration, size_text

Rows = Iterable[Sequence[Any]]
_GAP = 2
_MIN_CUT_COLUMNS = 8
"""The last column is truncated to no less than this width; if less space remains, the column is omitted."""
_COMMAND = re.compile(r"(?:^ *|: )(awsddp [^;,#]*?)(?: +# (.*))?$")
"""Matches a command that the user may copy at the end of a line, and the comment after the command."""
_JOIN = "\0"
"""The character that replaces the spaces in a command, so that the command is not wrapped."""


def is_color_disabled() -> bool:
    """Return True if NO_COLOR is set (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def width(*, stderr: bool = False) -> int | None:
    """Return how many columns the terminal has, or None if the stream is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return (os.get_terminal_size(stream.fileno()).columns or None) if stream.isatty() else None


def line(*texts: str, stderr: bool = False) -> None:
    """Print each text as a line, wrapped on a terminal unless it is a rank's output (" | ...").

    Newlines in the texts are escaped, so that a node's output cannot imitate a line from awsddp.
    """
    for text in texts:
        for part in wrap_lines(terminal_safe.escape_line(text), columns=width(stderr=stderr)):
            print(part, file=sys.stderr if stderr else sys.stdout)


def wrap_lines(text: str, *, columns: int | None) -> list[str]:
    """Return text, with control characters escaped, as lines of at most `columns` (None means no limit)."""
    parts = terminal_safe.escape_lines(text).split("\n")
    return [row for part in parts for row in ([part] if part[:3] == "  |" else wrap(part, columns))]


def wrap(text: str, columns: int | None, *, label: str = "", whole: bool = True) -> list[str]:
    """Return `label` and a line of text, wrapped between words.

    Unless `whole` is set, long words are wrapped too.

    A command stays on one line, so that it can be copied; if the text is too long, the command's comment gets
    its own lines.
    """
    if columns is None or len((label + text).rstrip()) <= columns:
        return [label + text]
    indent = " " * (len(label) or len(text) - len(text.lstrip()) + 2)
    if not (match := _COMMAND.search(text)):
        return _wrap(text, columns, label, indent, whole=whole)
    command = match[1].replace(" ", _JOIN)
    rows = _wrap(text[: match.start(1)] + command, columns, label, indent)
    rows = [row.replace(_JOIN, " ") for row in rows]
    margin = " " * (len(rows[-1]) - len(command)) + "# "
    return rows + _wrap(match[2] or "", columns, margin, margin)


def _wrap(text: str, columns: int, first_indent: str, indent: str, *, whole: bool = True) -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=not whole,
    )


def table(headings: Sequence[str], rows: Rows, *, stderr: bool = False, cut: bool = False) -> None:
    """Print a table that fits the terminal; `cut` has the same meaning as in `table_lines`."""
    for text in table_lines(headings, rows, columns=width(stderr=stderr), cut=cut):
        print(text, file=sys.stderr if stderr else sys.stdout)


def place_name(target: str, region: str | None) -> str:
    """Return where a cluster is: its region's name, or "the local cloud"."""
    return "the local cloud" if target == "local" else str(region)


def table_lines(headings: Sequence[str], rows: Rows, *, columns: int | None, cut: bool = False) -> list[str]:
    """Return a table as lines of at most `columns` (None means no limit). Words are never broken.

    The widest columns are wrapped first. If the longest words do not fit next to each other, each cell gets
    its own line. If `cut`, no column is wrapped: instead, the last column is truncated to the remaining
    width, or omitted if this width is too small.
    """
    cells = [["" if cell is None else terminal_safe.escape_line(str(cell)) for cell in row] for row in rows]
    available = sys.maxsize if columns is None else columns - _GAP * (len(headings) - 1)
    by_column = list(zip(headings, *cells, strict=True))
    widths = [max(map(len, column)) for column in by_column]
    min_widths = [max(map(len, " ".join(column).split()), default=0) for column in by_column]
    if cut and sum(widths) > available:
        first, *others = _cut_last_column([headings, *cells], available - sum(widths[:-1]))
        return table_lines(first, others, columns=columns)
    if sum(min_widths) > available:
        return _stack_cells(cells, headings, columns or 0)
    while sum(widths) > available:
        wide = [index for index, width in enumerate(widths) if width > min_widths[index]]
        widths[max(wide, key=lambda index: (widths[index], index))] -= 1
    lines = []
    for row in ([headings] if any(headings) else []) + cells:
        wrapped_cells = [
            [cell] if len(cell) <= width else _wrap(cell, width, "", "")
            for cell, width in zip(row, widths, strict=True)
        ]
        for texts in itertools.zip_longest(*wrapped_cells, fillvalue=""):
            aligned = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
            lines.append((" " * _GAP).join(aligned).rstrip())
    return lines


def _cut_last_column(rows: list[Sequence[str]], width: int) -> list[list[str]]:
    """Return rows with their last cell truncated to `width`, or without it if `width` is too small."""
    if width < _MIN_CUT_COLUMNS:
        return [[*row[:-1]] for row in rows]
    return [[*row[:-1], row[-1] if len(row[-1]) <= width else f"{row[-1][: width - 1]}…"] for row in rows]


def _stack_cells(cells: list[list[str]], headings: Sequence[str], columns: int) -> list[str]:
    """Return each cell as its own wrapped line, beginning with the column's heading."""
    margin = max(map(len, headings)) + 2 + _GAP
    return [
        text
        for row in cells
        for index, (heading, cell) in enumerate(zip(headings, row, strict=True))
        if cell
        for text in wrap(cell, columns, label=f"{'  ' * (index > 0)}{heading}".ljust(margin))
    ]


def print_document(value: Any) -> None:
    """Print a JSON document, or a list of documents, on stdout; each document includes the schema version."""
    value = msgspec.to_builtins(value)
    if isinstance(value, list):
        value = [{"schema": SCHEMA, **item} for item in value]
    else:
        value = {"schema": SCHEMA, **value}
    print(json.dumps(value, indent=2))


def progress_text(event: Event, elapsed_s: float) -> str:
    """Return a transfer's percentage, rate and remaining time: "43 %, 12.3 MB/s, 40.0 s left"."""
    done = event.fraction or 0.0
    parts = [f"{done:.0%}".replace("%", " %")]
    if done > 0 and elapsed_s > 0:
        parts += [f"{size_text(int(event.size * done / elapsed_s))}/s"] if event.size else []
        parts.append(f"{duration(elapsed_s * (1 - done) / done)} left")
    return ", ".join(parts)
