"""How an error is shown."""

import errno
import sys

import click
import pytest

from awsddp.cli import command_line, failures
from awsddp.cli.command_line import WATCH, Globals
from awsddp.errors import ConfigError
from tests.support.narrow_terminal import narrow


def test_an_error_that_holds_a_long_blank_line_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow(monkeypatch, 80)
    failures.show(ConfigError("failed", f"before\n{' ' * 200}\nafter", "awsddp status"))
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
    monkeypatch.setattr(WATCH, "options", Globals(cluster=name))
    monkeypatch.setenv("NO_COLOR", "1")
    narrow(monkeypatch, 80)
    command = "awsddp train --env requirements.txt"
    failures.show(
        ConfigError("word " * 20, "why " * 40, f"{command}   # {'comment ' * 12}\nor look " + "at it " * 20)
    )
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith("       ")] == [
        "error: " + ("word " * 14).strip(),
        "  why: " + ("why " * 18).strip(),
        " next: " + command_line.named(command),
    ]
    assert all(line.lstrip().startswith("# ") for line in lines if "comment" in line)


@pytest.mark.parametrize(
    ("error", "next"),
    [
        (OSError(errno.EACCES, "Permission denied", "runs/j/job.json"), "your user"),
        (OSError(errno.EROFS, "Read-only file system", "runs"), "another folder"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    ],
)
def test_fault_of_this_machine_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, next: str
) -> None:
    @click.command()
    def verb() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["awsddp"])
    assert failures.run(verb) == 3
    shown = capsys.readouterr().err
    assert "bug" not in shown
    assert f"{error.strerror}" in shown
    assert next in shown
