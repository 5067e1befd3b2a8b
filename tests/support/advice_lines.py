"""Every line of a text in the product that begins as a command, and how one is typed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from awsddp.cli.main import VERBS
from tests.support.command_lines import parse

PACKAGE = Path(__file__).resolve().parents[2] / "awsddp"
_COMMAND = re.compile(rf"(sudo )?awsddp (-|(?:{'|'.join(VERBS)})\b)")
_NEXT = re.compile(r"(?: && |; )(?=(?:[^']*'[^']*')*[^']*$)")
"""What stands between two commands, in no quotes."""
_REGEX = re.compile(r"\(--|\(\?")


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a message: of each line that begins with one, without its comment."""
    for line in text.split("\n"):
        if _COMMAND.match(line):
            yield from _NEXT.split(line.partition("   #")[0].removeprefix("sudo "))


def type_in(text: str) -> list[str]:
    """Parse every command of a message as the command line does, and return them."""
    found = list(commands(text))
    for line in found:
        parse(line)
    return found


def texts(value: str) -> Iterator[tuple[str, str]]:
    """Yield each text of the product that is no docstring, and where; `value` stands for what is put in."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        apart = {
            id(one.body[0].value)
            for one in ast.walk(tree)
            if isinstance(one, ast.Module | ast.ClassDef | ast.FunctionDef)
            and one.body
            and isinstance(one.body[0], ast.Expr)
        }
        apart |= {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr) for part in one.values}
        for one in ast.walk(tree):
            text = _text(one, value) if id(one) not in apart else None
            if text and not _REGEX.search(text):
                yield f"{file.relative_to(PACKAGE)}:{getattr(one, 'lineno', 0)}", text


def _text(one: ast.AST, value: str) -> str | None:
    if isinstance(one, ast.Constant) and isinstance(one.value, str):
        return one.value
    if isinstance(one, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in one.values)
    return None
