"""Commands in the texts of the product, and their check by the command line's parser."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from awsddp.cli.main import VERBS
from tests.support.command_lines import parse

PACKAGE = Path(__file__).resolve().parents[2] / "awsddp"
_COMMAND = re.compile(rf"(sudo )?awsddp (-|(?:{'|'.join(VERBS)})\b)")
_NEXT = re.compile(r"(?: && |; )(?=(?:[^']*'[^']*')*[^']*$)")
"""A separator between two commands, outside quotes."""
_REGEX = re.compile(r"\(--|\(\?")


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a message: of each line that begins with one, without its comment."""
    for line in text.split("\n"):
        if _COMMAND.match(line):
            yield from _NEXT.split(line.partition("   #")[0].removeprefix("sudo "))


def parse_commands(text: str) -> list[str]:
    """Parse every command of a message as the command line does; return the commands."""
    lines = list(commands(text))
    for line in lines:
        parse(line)
    return lines


def texts(value: str) -> Iterator[tuple[str, str]]:
    """Yield (location, text) of each string of the product but docstrings; `value` fills placeholders."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        skipped = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        f_strings = (node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
        skipped |= {id(part) for parts in f_strings for part in parts}
        for node in ast.walk(tree):
            text = _text(node, value) if id(node) not in skipped else None
            if text and not _REGEX.search(text):
                yield f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", text


def _text(node: ast.AST, value: str) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in node.values)
    return None
