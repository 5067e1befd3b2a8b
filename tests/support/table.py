"""The commands of docs/training.md's tables, and what makes them short here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """A command of a table; what makes it short here; and patterns of lines that must be seen."""

    command: str
    more: str
    seen: tuple[str, ...]

    def missing(self, shown: str) -> list[str]:
        """Return the patterns that are not in what was shown."""
        return [pattern for pattern in self.seen if not re.search(pattern, shown, re.MULTILINE)]


def commands(*, on_nodes: bool) -> set[str]:
    """Return the commands of the table of two nodes, or of the one of a single machine."""
    text = (ROOT / "docs" / "training.md").read_text()
    found = re.findall(r"^\| S\d [^|]*\| (?:[^`|]*)`([^`]*)` \|", text, re.MULTILINE)
    return {command for command in found if command.startswith("awsddp ") == on_nodes}
