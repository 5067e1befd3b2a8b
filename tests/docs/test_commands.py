"""docs/commands.md has the help pages; `python -m tests.docs.test_commands` rewrites it."""

import functools
import os
import re
from pathlib import Path

from awsddp import errors
from awsddp.cli.main import VERBS
from tests.support import quick_start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
_REPEATED = re.compile(r"(\nOptions:)?\n  -h, --help +Show this message and exit\.|\n  Global options \(.*")
"""The parts that each verb's help repeats; they are only in the section of `awsddp`."""
_OPTION = re.compile(r"^  -.*\n(?: {8,}.*\n)*", re.MULTILINE)
GROUPS = {
    ("local",): ("start", "status", "stop", "fault"),
    ("local", "fault"): ("add", "list", "clear"),
}


@functools.cache
def render_page() -> str:
    """Return the page with new sections; the text before them is unchanged."""
    sections = [PAGE.read_text().partition("\n## awsddp\n")[0], _section()]
    sections += [_section(verb) for verb in VERBS]
    sections += [_section(*group, verb) for group, verbs in GROUPS.items() for verb in verbs]
    return "\n".join(sections)


def _section(*command: str) -> str:
    text = _help(*command)
    if command:
        text = _REPEATED.sub("", text)
    if command in {("plan",), ("run",)}:
        repeated = {_squeezed(option) for verb in ("up", "train") for option in _OPTION.findall(_help(verb))}
        text = _OPTION.sub(lambda option: "" if _squeezed(option[0]) in repeated else option[0], text)
    return f"## {' '.join(('awsddp', *command))}\n\n```\n{text.rstrip()}\n```\n"


def _squeezed(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def _help(*command: str) -> str:
    environ = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100"}
    return quick_start.run([*command, "--help"], cwd=PAGE.parent, env=environ, text="", timeout=60).stdout


def test_commands_md_has_the_output_of_help() -> None:
    assert PAGE.read_text() == render_page(), "run: python -m tests.docs.test_commands"


def test_the_design_names_every_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.AwsddpError)}
    text = (PAGE.parent / "design.md").read_text()
    assert codes <= {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}


def test_no_help_page_shows_more_than_18_options() -> None:
    for verb in VERBS:
        options = [
            line for line in _help(verb).splitlines() if line.startswith("  -") and "--help" not in line
        ]
        assert len(options) <= 18, verb


if __name__ == "__main__":
    PAGE.write_text(render_page())
