"""`awsddp init`: a few questions at a terminal, none without one."""

import contextlib
import os
import pty
import re
import tomllib
from pathlib import Path

import pytest

from awsddp.cli.failures import run
from awsddp.cli.main import cli


def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str | None, answers: str
) -> tuple[dict[str, dict[str, object]], str]:
    """Return what `init` wrote into the folder, and what the terminal showed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["awsddp", "init", *([option] if option else [])])
    master, slave = pty.openpty()
    os.write(master, answers.encode())
    with os.fdopen(slave) as typed, os.fdopen(os.dup(slave), "w") as shown:
        monkeypatch.setattr("sys.stdin", typed)
        monkeypatch.setattr("sys.stderr", shown)
        assert run(cli) == 0
        shown.flush()
        os.set_blocking(master, False)
        pieces = []
        with contextlib.suppress(BlockingIOError):
            while True:
                pieces.append(os.read(master, 1 << 16))
    os.close(master)
    return tomllib.loads((folder / "awsddp.toml").read_text()), b"".join(pieces).decode()


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
    written, shown = started(tmp_path, monkeypatch, option, f"\n4\n\n25\n\n{env['file']}\n")
    script = " train.py" if option else ""
    last = f"Next: awsddp run --local{script} (free, on this machine), then awsddp plan"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is back: the screen was closed"
    assert last in re.sub(r"\x1b\[[?\d]*\w", "", shown).splitlines()
    if option:
        assert not any(written.values())
        return
    assert written["cluster"] == {"nodes": 4, "instance_type": "g6.xlarge", "budget_usd": 25.0}
    assert (written["job"], written["env"]) == ({"script": "train.py"}, env)


@pytest.mark.parametrize(("answer", "sync"), [("y", {"ignore": ["!/data/"]}), ("n", {})])
def test_folder_of_data_that_git_ignores_is_asked_about_and_sent_after_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, sync: dict[str, object]
) -> None:
    for name in ("data/a", "data/b", "runs/a", ".cache/a", "env2/pyvenv.cfg", "src/data/a", "small/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(1000 if name == "small/a" else 150_500_000)
    (tmp_path / ".gitignore").write_text("data/\nruns/\n.cache/\nenv2/\nsmall/\n")
    written, shown = started(tmp_path, monkeypatch, None, "\n" * 6 + f"{answer}\n")
    assert written["sync"] == sync
    assert shown.count("send it to the nodes?") == 1
    assert "data/ (301 MB) is in .gitignore: send it to the nodes? [y/N]:" in shown


def test_home_page_shows_the_cheap_line_first_and_its_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cheap = "train.py --nodes 2 --instance-type g6.xlarge --budget 2"
    for words in ([], ["--help"]):
        monkeypatch.setattr("sys.argv", ["awsddp", *words])
        assert run(cli) == 0
        lines = [one.strip() for one in capsys.readouterr().out.splitlines() if one.startswith("  ")]
        shown = [one for one in lines if one.startswith("awsddp ")]
        assert shown[:2] == [f"awsddp run --local {cheap}", f"awsddp run {cheap}"]
