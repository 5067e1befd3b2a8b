"""The commit that a job ran."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from awsddp.job.script import read_commit


def git(folder: Path, *args: str) -> str:
    config = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", folder, *config, *args], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_read_commit_returns_the_commit_and_if_the_tree_is_dirty(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert read_commit(tmp_path, results="runs") == (None, None)
    workdir = tmp_path / "my project"
    workdir.mkdir()
    (workdir / "train.py").write_text("pass\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (workdir / "runs").mkdir()
    (workdir / "runs" / "x").write_text("a result")
    assert read_commit(workdir, results="runs") == (commit, False)
    assert read_commit(workdir, results="../out") == (commit, True)
    (workdir / "train.py").write_text("changed\n")
    assert read_commit(workdir, results="runs") == (commit, True)


def test_read_commit_prints_nothing_without_a_repository_or_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_commit(tmp_path, results="runs") == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_commit(tmp_path, results="runs") == (None, None)
    assert capfd.readouterr() == ("", "")


def test_a_git_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("awsddp.job.script._GIT_S", 0.2)
    start = time.monotonic()
    assert read_commit(tmp_path, results="runs") == (None, None)
    assert time.monotonic() - start < 10
