"""Pages on a terminal of few columns."""

import pytest

from awsddp.cli import doctor_page, table


def narrow(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let the pages believe that they are on a terminal of so many columns."""
    for module in (table, doctor_page):
        monkeypatch.setattr(module, "width", lambda *, stderr=False: columns)


def too_long(text: str, columns: int) -> list[str]:
    """Return the lines that do not fit, but commands and paths, to be copied whole, and lines of a rank."""
    return [
        line
        for line in text.splitlines()
        if len(line) > columns
        and "awsddp " not in line
        and not line.startswith(("  export ", "  git checkout ", "  | "))
        and len(line.split()) > 2
    ]
