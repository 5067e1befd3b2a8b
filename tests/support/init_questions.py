"""Runs `awsddp init` at a terminal and answers its questions."""

import contextlib
import os
import pty
import tomllib
from pathlib import Path

import pytest

from awsddp.cli.failures import run_command
from awsddp.cli.main import cli


def run_init(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str | None, answers: str
) -> tuple[dict[str, dict[str, object]], str]:
    """Return the configuration that `init` wrote into the folder, and the output on the terminal."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["awsddp", "init", *([option] if option else [])])
    master, slave = pty.openpty()
    os.write(master, answers.encode())
    with os.fdopen(slave) as typed, os.fdopen(os.dup(slave), "w") as shown:
        monkeypatch.setattr("sys.stdin", typed)
        monkeypatch.setattr("sys.stderr", shown)
        assert run_command(cli) == 0
        shown.flush()
        os.set_blocking(master, False)
        pieces = []
        with contextlib.suppress(BlockingIOError):
            while True:
                pieces.append(os.read(master, 1 << 16))
    os.close(master)
    return tomllib.loads((folder / "awsddp.toml").read_text()), b"".join(pieces).decode()
