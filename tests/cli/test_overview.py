"""`awsddp init` and the overview; questions are asked only at a terminal."""

import io
import os
import re
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from awsddp.cli.command_line import Globals
from awsddp.cli.failures import run_command
from awsddp.cli.main import cli
from awsddp.cli.screen import Screen
from awsddp.errors import UsageError
from awsddp.model.records import JobRecord
from tests.support.init_questions import run_init
from tests.support.terminal import CTRL_C, Terminal


@pytest.mark.parametrize(
    ("option", "env"),
    [
        (None, {"file": "needs.txt"}),
        ("-y", {"file": "needs.txt"}),
    ],
)
def test_init_asks_questions_only_at_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str | None, env: dict[str, str]
) -> None:
    for name in ("train.py", "needs.txt"):
        (tmp_path / name).touch()
    written, shown = run_init(tmp_path, monkeypatch, option, f"\n4\n\n25\n\n{env['file']}\n")
    script = " train.py" if option else ""
    last = f"Next: awsddp run --local{script} (free, on this machine), then awsddp plan"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is back: the screen was closed"
    assert last in re.sub(r"\x1b\[[?\d]*\w", "", shown).splitlines()
    if option:
        assert not any(written.values())
        return
    assert written["cluster"] == {"nodes": 4, "instance_type": "g6.xlarge", "budget_usd": 25.0}
    assert (written["job"], written["env"]) == ({"script": "train.py"}, env)


def test_interrupted_questions_write_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Terminal(tmp_path, {**os.environ, "AWSDDP_HOME": str(tmp_path / "home")}).type(
        "awsddp init", [("AWS region", "\n"), ("Number of nodes", CTRL_C)]
    )
    assert result.code == 130
    assert result.lines[-1] == "interrupted: no awsddp.toml was written"
    assert not (tmp_path / "awsddp.toml").exists()


@pytest.mark.parametrize(("answer", "sync"), [("y", {"ignore": ["!/data/"]}), ("n", {})])
def test_init_offers_to_sync_a_data_folder_that_git_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, sync: dict[str, object]
) -> None:
    for name in ("data/a", "data/b", "runs/a", ".cache/a", "env2/pyvenv.cfg", "src/data/a", "small/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(1000 if name == "small/a" else 150_500_000)
    (tmp_path / ".gitignore").write_text("data/\nruns/\n.cache/\nenv2/\nsmall/\n")
    written, shown = run_init(tmp_path, monkeypatch, None, "\n" * 6 + f"{answer}\n")
    assert written["sync"] == sync
    assert shown.count("send it to the nodes?") == 1
    assert "data/ (301 MB) is in .gitignore: send it to the nodes? [y/N]:" in shown


def test_the_overview_names_the_last_job_after_its_cluster_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = JobRecord(job="train-4", state="cancelled", cause=None, ranks=(), home="runs/train-4")
    (tmp_path / "runs" / "train-4").mkdir(parents=True)
    (tmp_path / "runs" / "train-4" / "job.json").write_bytes(
        msgspec.json.encode({"schema": 1, **asdict(job)})
    )
    monkeypatch.setattr("sys.argv", ["awsddp"])
    assert run_command(cli) == 0
    shown = capsys.readouterr().out
    assert "The last job, train-4: cancelled. Its page: awsddp report train-4" in shown
    assert "To begin:" not in shown


def test_a_question_without_a_terminal_is_an_error_that_names_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    ask = Screen(Globals()).question("Terminate?", "nothing was terminated")
    with pytest.raises(UsageError) as refused:
        ask("Cluster ci-a: 2 x g6.xlarge will be terminated.")
    assert (
        refused.value.message == "a question needs an answer, but stdin is not a terminal: nothing was done"
    )
    question = "the question is: Cluster ci-a: 2 x g6.xlarge will be terminated. Terminate?"
    assert (refused.value.why, refused.value.next) == (question, "pass --yes")


def test_the_overview_shows_a_rehearsal_and_a_cheap_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cheap = "train.py --nodes 2 --instance-type g6.xlarge --budget 2"
    for arguments in ([], ["--help"]):
        monkeypatch.setattr("sys.argv", ["awsddp", *arguments])
        assert run_command(cli) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        shown = [line for line in lines if line.startswith("awsddp ")]
        assert shown[:2] == [f"awsddp run --local {cheap}", f"awsddp run {cheap}"]
