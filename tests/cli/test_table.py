"""A terminal of 80 columns: every help page, every verb's page and every error fits in it.

recorded.json has documents of the verbs of a loopback cluster with a long name and long job names.
"""

import functools
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from awsddp.cli import doctor_page, local, pages, table
from awsddp.cli.main import cli
from awsddp.cli.overview import overview_page
from tests.support.narrow_terminal import find_long_lines, set_width
from tests.support.schema import DOCUMENTS, verb_of

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text())
PAGES: dict[str, Callable[[Any], None]] = {
    "awsddp": overview_page,
    "status": pages.cluster_page,
    "status -v": pages.cluster_page,
    "status --all": pages.clusters_page,
    "sync": pages.sync_page,
    "sync -v": functools.partial(pages.sync_page, verbose=True),
    "train": pages.job_page,
    "jobs": pages.jobs_page,
    "jobs -v": functools.partial(pages.jobs_page, verbose=True),
    "doctor": doctor_page.health_page,
    "why": doctor_page.why_page,
    "why -v": functools.partial(doctor_page.why_page, verbose=True),
    "report": pages.report_page,
    "down": pages.down_page,
    "local status": local.local_page,
    "local fault list": local.faults_page,
}


def commands(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and those below it, by name."""
    yield " ".join(names), command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            yield from commands(child, *names, name)


def render_help(columns: int) -> Iterator[tuple[str, list[str]]]:
    for name, command in commands(cli, "awsddp"):
        context = click.Context(command, info_name=name, terminal_width=columns - 2)
        yield name, command.get_help(context).splitlines()


def test_every_help_page_fits_80_columns_without_a_cut_summary() -> None:
    shown = dict(render_help(80))
    assert len(shown) > 24
    assert {
        name: long for name, lines in shown.items() if (long := [line for line in lines if len(line) > 80])
    } == {}
    cut = [line for lines in shown.values() for line in lines if line.endswith("...") and line[0] == " "]
    assert cut == []


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("verb", PAGES)
def test_a_page_fits_the_terminal(
    verb: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_width(monkeypatch, columns)
    PAGES[verb](msgspec.convert(RECORDED[verb], DOCUMENTS[verb_of(tuple(verb.split()))]))
    shown = capsys.readouterr()
    assert shown.out + shown.err
    assert find_long_lines(shown.out + shown.err, columns) == []


@pytest.mark.parametrize("columns", [80, 60])
def test_a_label_stands_above_a_command_that_is_too_long(columns: int) -> None:
    command = shlex.join(["awsddp", "-c", "c" * 31, "logs", "-f", "j" * 40])
    assert table.wrap_lines(f"  follow it: {command}", columns=columns) == ["  follow it:", f"    {command}"]
    assert table.wrap_lines(f"  | {'x ' * 60}", columns=columns) == [f"  | {'x ' * 60}"]
    assert table.wrap_lines("spent\nWarning: " + "now " * 30, columns=columns)[0] == "spent"
