"""`awsddp init`: a few questions at a terminal, none without one."""

import os
import pty
import tomllib
from pathlib import Path

import pytest

from awsddp.cli.failures import run
from awsddp.cli.main import cli


@pytest.mark.parametrize(
    ("option", "env"),
    [
        (None, {"file": "needs.txt"}),
        ("-y", {"file": "needs.txt"}),
    ],
)
def test_questions_are_asked_at_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str | None, env: dict[str, str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["awsddp", "init", *([option] if option else [])])
    master, slave = pty.openpty()
    os.write(master, f"\n4\n\n25\n\n{env['file']}\n".encode())
    with os.fdopen(slave) as typed, os.fdopen(os.dup(slave), "w") as shown:
        monkeypatch.setattr("sys.stdin", typed)
        monkeypatch.setattr("sys.stderr", shown)
        assert run(cli) == 0
    os.close(master)
    written = tomllib.loads((tmp_path / "awsddp.toml").read_text())
    if option:
        assert not any(written.values())
        return
    assert written["cluster"] == {"nodes": 4, "instance_type": "g6.xlarge", "budget_usd": 25.0}
    assert (written["job"], written["env"]) == ({"script": "train.py"}, env)
