"""The search for results that have changed: where it looks, and that it gets in nobody's way."""

import os
import time
from pathlib import Path

import pytest

from awsddp.agent import changes
from awsddp.agent.changes import ChangeSearch, has_changed
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import Launch
from tests.support.fleet import make_launch
from tests.support.waiting import until


class Project:
    """A job's folders, whose files were all written before `since_ns`."""

    def __init__(self, top: Path) -> None:
        self.top, self.folder = top, JobFolder("job", top / "job")
        for path in ("job/run/deep", "work/wandb/run-1", "work/__pycache__", "scratch"):
            (top / path).mkdir(parents=True)
        self.write("job/run/deep/model.pt", "work/train.py")
        self.since_ns = (top / "work/train.py").stat().st_ctime_ns

    def write(self, *paths: str) -> None:
        for path in paths:
            (self.top / path).write_text("x")

    @property
    def launch(self) -> Launch:
        return make_launch(workdir=str(self.top / "work"), outputs=["../scratch", "none", "~/none"])

    def has_changed(self) -> bool:
        return has_changed(self.launch, self.folder, self.since_ns)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def wait_for_clock(path: Path, since_ns: int) -> None:
    """Wait until the file system's clock, which ticks every few ms, has advanced."""
    until(lambda: (path.write_text("x"), path.stat().st_ctime_ns > since_ns)[1])


@pytest.mark.parametrize("path", ["job/run/deep/model.pt", "work/new.pt", "scratch/data", "work/wandb"])
def test_file_that_was_written_since_then_is_a_change(project: Project, path: str) -> None:
    assert not project.has_changed()
    wait_for_clock(project.top / "clock", project.since_ns)
    if path.endswith("wandb"):
        path = "work/wandb.txt"
    project.write(path)
    assert project.has_changed()


@pytest.mark.parametrize(
    "path", ["work/wandb/run-1/run.wandb", "work/__pycache__/train.pyc", "job/state.json"]
)
def test_files_that_do_not_come_from_the_ranks_work_are_no_change(project: Project, path: str) -> None:
    wait_for_clock(project.top / "clock", project.since_ns)
    project.write(path)
    assert not project.has_changed()


def test_change_time_counts_and_not_a_modification_time_that_a_program_sets(project: Project) -> None:
    wait_for_clock(project.top / "clock", project.since_ns)
    project.write("work/old.pt")
    os.utime(project.top / "work/old.pt", (1, 1))
    assert project.has_changed()


def test_search_runs_in_another_process_with_the_lowest_priority(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report_niceness(*_: object) -> bool:
        (project.top / "niceness").write_text(str(os.nice(0)))
        return True

    monkeypatch.setattr(changes, "has_changed", report_niceness)
    search = ChangeSearch(project.launch, project.folder, 60.0)
    until(search.is_over)
    assert search.changed is True
    assert (project.top / "niceness").read_text() == "19"


@pytest.mark.parametrize("changed", [True, False])
def test_search_finds_changes_of_the_last_seconds(project: Project, changed: bool) -> None:
    wait_for_clock(project.top / "clock", project.since_ns)
    seconds = time.time() - project.since_ns / 1e9 + (60.0 if changed else 0.0)
    search = ChangeSearch(project.launch, project.folder, seconds)
    until(search.is_over)
    assert search.changed is changed


def test_search_that_takes_too_long_or_cannot_read_a_folder_does_not_know(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_SEARCH_SECONDS", 1)
    monkeypatch.setattr(changes, "has_changed", lambda *_: time.sleep(60))
    search = ChangeSearch(project.launch, project.folder, 60.0)
    until(search.is_over)
    assert search.changed is None


def test_unreadable_folder_is_an_error(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(path: str) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("awsddp.agent.file_tree.os.scandir", scandir)
    with pytest.raises(OSError, match="cannot be read"):
        project.has_changed()
