"""The commands in the tables of docs/training.md, and options that shorten them for tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """A command of a table, options that shorten it, and patterns of lines that it must print."""

    command: str
    short_options: str
    patterns: tuple[str, ...]

    def missing(self, shown: str) -> list[str]:
        """Return the patterns that the output lacks."""
        return [pattern for pattern in self.patterns if not re.search(pattern, shown, re.MULTILINE)]


def commands(*, on_nodes: bool) -> set[str]:
    """Return the commands of the table for two nodes, or for a single machine."""
    text = (ROOT / "docs" / "training.md").read_text()
    commands = re.findall(r"^\| S\d [^|]*\| (?:[^`|]*)`([^`]*)` \|", text, re.MULTILINE)
    return {command for command in commands if command.startswith("awsddp ") == on_nodes}
