"""Lines and tables that fit the terminal."""

import itertools
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from awsddp.cli import harmless, screen

Rows = Sequence[Sequence[Any]]


def line(text: str, *, stderr: bool = False) -> None:
    """Print a line; on a terminal it is folded between words, unless it is what a rank said."""
    text = harmless.lines(text)
    width = None if text.startswith("  |") else screen.width(stderr=stderr)
    if width is not None and len(text) > width:
        text = textwrap.fill(
            text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
    print(text, file=sys.stderr if stderr else sys.stdout)


def table(headings: Sequence[str], rows: Rows, *, stderr: bool = False) -> None:
    """Print a table as wide as its words need; on a narrow terminal its widest columns are folded."""
    for text in table_lines(headings, rows, width=screen.width(stderr=stderr)):
        print(text, file=sys.stderr if stderr else sys.stdout)


def table_lines(headings: Sequence[str], rows: Rows, *, width: int | None) -> list[str]:
    """Return a table as lines no wider than `width` (None: as wide as they need), its headings first.

    Words stay whole, to be copied. Where that leaves no room, each row becomes a few lines.
    """
    shown = (headings, *rows) if any(headings) else rows
    cells = [["" if cell is None else harmless.line(str(cell)) for cell in row] for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    least = [max(map(_longest_word, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        room = width - 2 * len(widths) + 2
        if sum(least) > room:
            return _one_below_the_other(cells if any(headings) else [list(headings), *cells])
        while sum(widths) > room:
            foldable = [column for column in range(len(widths)) if widths[column] > least[column]]
            widths[max(foldable, key=widths.__getitem__)] -= 1
    lines = []
    for row in cells:
        folded = [_fold(cell, room) for cell, room in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            padded = (part.ljust(room) for part, room in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return lines


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


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
    return textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
