"""The one place that renders output: lines, tables, JSON documents and transfer progress."""

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
from awsddp.util.format import duration, size_text

Rows = Iterable[Sequence[Any]]
_GAP = 2
_LEAST = 8
"""How many columns are worth a text that is cut."""
_COMMAND = re.compile(r"(?:^ *|: )(awsddp [^;,#]*?)(?: +# (.*))?$")
"""A command to copy at the end of a line, and its comment."""
_JOIN = "\0"


def no_color() -> bool:
    """Whether NO_COLOR is set (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def width(*, stderr: bool = False) -> int | None:
    """Return the terminal's columns; None without a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return (os.get_terminal_size(stream.fileno()).columns or None) if stream.isatty() else None


def line(*texts: str, stderr: bool = False) -> None:
    """Print each text as a line, wrapped between words on a terminal; a rank's ("  | ...") is never wrapped.

    It is one line whatever a node put into it, so that no word of a node begins a line of ours.
    """
    for text in texts:
        for part in lines(terminal_safe.line(text), columns=width(stderr=stderr)):
            print(part, file=sys.stderr if stderr else sys.stdout)


def lines(text: str, *, columns: int | None) -> list[str]:
    """Return a text as lines of at most `columns` (None: unlimited), without control characters."""
    parts = terminal_safe.lines(text).split("\n")
    return [one for part in parts for one in ([part] if part[:3] == "  |" else wrapped(part, columns))]


def wrapped(text: str, columns: int | None, *, label: str = "", whole: bool = True) -> list[str]:
    """Return `label` and a line of text, wrapped between words, or unless `whole` also within a long one.

    A command stays whole, to be copied; its comment then gets lines of its own.
    """
    if columns is None or len((label + text).rstrip()) <= columns:
        return [label + text]
    rest = " " * (len(label) or len(text) - len(text.lstrip()) + 2)
    if not (found := _COMMAND.search(text)):
        return _filled(text, columns, label, rest, whole=whole)
    command = found[1].replace(" ", _JOIN)
    shown = _filled(text[: found.start(1)] + command, columns, label, rest)
    shown = [one.replace(_JOIN, " ") for one in shown]
    margin = " " * (len(shown[-1]) - len(command)) + "# "
    return shown + _filled(found[2] or "", columns, margin, margin)


def _filled(text: str, columns: int, first: str, rest: str, *, whole: bool = True) -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=not whole,
    )


def table(headings: Sequence[str], rows: Rows, *, stderr: bool = False, cut: bool = False) -> None:
    """Print a table that fits the terminal; `cut` as for `table_lines`."""
    for text in table_lines(headings, rows, columns=width(stderr=stderr), cut=cut):
        print(text, file=sys.stderr if stderr else sys.stdout)


def place_name(target: str, region: str | None) -> str:
    """Return where a cluster is: its region, or the local cloud."""
    return "the local cloud" if target == "local" else str(region)


def table_lines(headings: Sequence[str], rows: Rows, *, columns: int | None, cut: bool = False) -> list[str]:
    """Return a table as lines of at most `columns` (None: unlimited). Words are never broken.

    The widest columns are wrapped first. Where the longest words do not fit side by side, each cell gets its
    own line. With `cut` the last column has the room that the others leave: what is longer is cut, and the
    column left out where that is next to nothing.
    """
    cells = [["" if cell is None else terminal_safe.line(str(cell)) for cell in row] for row in rows]
    by_column = list(zip(headings, *cells, strict=True))
    least = [max(map(len, " ".join(column).split()), default=0) for column in by_column]
    widths = [max(map(len, column)) for column in by_column]
    room = sys.maxsize if columns is None else columns - _GAP * (len(widths) - 1)
    if cut and sum(widths) > room:
        left = room - sum(widths[:-1])
        if left < _LEAST:
            return table_lines(headings[:-1], [row[:-1] for row in cells], columns=columns)
        ends = [end if len(end) <= left else f"{end[: left - 1]}…" for *_, end in (headings, *cells)]
        first, *rest = [[*row[:-1], end] for row, end in zip((headings, *cells), ends, strict=True)]
        return table_lines(first, rest, columns=columns)
    if sum(least) > room:
        return _stacked(cells, headings, columns or 0)
    while sum(widths) > room:
        wide = [at for at, width in enumerate(widths) if width > least[at]]
        widths[max(wide, key=lambda at: (widths[at], at))] -= 1
    lines = []
    for row in ([headings] if any(headings) else []) + cells:
        parts = [
            [cell] if len(cell) <= width else _filled(cell, width, "", "")
            for cell, width in zip(row, widths, strict=True)
        ]
        for texts in itertools.zip_longest(*parts, fillvalue=""):
            aligned = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
            lines.append((" " * _GAP).join(aligned).rstrip())
    return lines


def _stacked(cells: list[list[str]], headings: Sequence[str], columns: int) -> list[str]:
    """Return each cell as a line of its own, wrapped behind its heading."""
    margin = max(map(len, headings)) + 2 + _GAP
    return [
        one
        for row in cells
        for index, (heading, cell) in enumerate(zip(headings, row, strict=True))
        if cell
        for one in wrapped(cell, columns, label=f"{'  ' * (index > 0)}{heading}".ljust(margin))
    ]


def document(value: Any) -> None:
    """Print one JSON document on stdout; each document, also in a list, carries its schema version."""
    value = msgspec.to_builtins(value)
    if isinstance(value, list):
        value = [{"schema": SCHEMA, **one} for one in value]
    else:
        value = {"schema": SCHEMA, **value}
    print(json.dumps(value, indent=2))


def progress(event: Event, elapsed_s: float) -> str:
    """Return percent, rate and time left of a transfer: "43 %, 12.3 MB/s, 40.0 s left"."""
    done = event.fraction or 0.0
    parts = [f"{done:.0%}".replace("%", " %")]
    if done > 0 and elapsed_s > 0:
        parts += [f"{size_text(int(event.size * done / elapsed_s))}/s"] if event.size else []
        parts.append(f"{duration(elapsed_s * (1 - done) / done)} left")
    return ", ".join(parts)
