"""Pages on a narrow terminal."""

import pytest

from awsddp.cli import doctor_page, table


def set_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Set the width of the terminal for the pages."""
    for module in (table, doctor_page):
        monkeypatch.setattr(module, "width", lambda *, stderr=False: columns)


def find_long_lines(text: str, columns: int) -> list[str]:
    """Return the lines that do not fit, except commands and paths, which users copy, and lines of ranks."""
    return [
        line
        for line in text.splitlines()
        if len(line) > columns
        and "awsddp " not in line
        and not line.startswith(("  export ", "  git checkout ", "  | "))
        and len(line.split()) > 2
    ]
