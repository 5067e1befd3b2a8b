"""An error's text and exit code."""

import errno
import subprocess
import sys

import click
import pytest

from awsddp import errors
from awsddp.cli import command_line, failures
from awsddp.cli.command_line import COMMAND, Globals
from awsddp.errors import ConfigError
from tests.support.exit_codes import CODES
from tests.support.narrow_terminal import set_width

CLASSES = {name: getattr(errors, name) for name in CODES}


def test_an_error_with_a_long_blank_line_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_width(monkeypatch, 80)
    failures.show_error(ConfigError("failed", f"before\n{' ' * 200}\nafter", "awsddp status"))
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines() if line.strip()] == [
        "failed",
        "before",
        "after",
        "status",
    ]


def test_an_error_is_wrapped_and_its_commands_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a-cluster-with-a-name-that-long"
    monkeypatch.setattr(COMMAND, "options", Globals(cluster=name))
    monkeypatch.setenv("NO_COLOR", "1")
    set_width(monkeypatch, 80)
    command = "awsddp train --env requirements.txt"
    failures.show_error(
        ConfigError("word " * 20, "why " * 40, f"{command}   # {'comment ' * 12}\nor look " + "at it " * 20)
    )
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith("       ")] == [
        "error: " + ("word " * 14).strip(),
        "  why: " + ("why " * 18).strip(),
        " next: " + command_line.with_global_options(command),
    ]
    assert all(line.lstrip().startswith("# ") for line in lines if "comment" in line)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.EACCES, "Permission denied", "runs/j/job.json"), "your user"),
        (OSError(errno.EROFS, "Read-only file system", "runs"), "another folder"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    ],
)
def test_an_error_of_the_client_machine_is_not_reported_as_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, hint: str
) -> None:
    @click.command()
    def verb() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["awsddp"])
    assert failures.run_command(verb) == 3
    shown = capsys.readouterr().err
    assert "bug" not in shown
    assert f"{error.strerror}" in shown
    assert hint in shown


@pytest.mark.parametrize("name", CODES)
def test_a_command_that_raises_an_error_has_its_exit_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise CLASSES[name]("it failed", "because", "try again")

    monkeypatch.setattr(sys, "argv", ["awsddp"])
    assert failures.run_command(click.Command("awsddp", callback=fail)) == CODES[name]
    assert capsys.readouterr().err == "error: it failed\n  why: because\n next: try again\n"


def test_a_closed_pipe_is_exit_code_128_plus_the_signal() -> None:
    line = f"{sys.executable} -m awsddp --help | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("141\n", "")
