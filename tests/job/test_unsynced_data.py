"""Data that .gitignore excludes and the script names: a question before anything is sent or launched."""

from pathlib import Path

import pytest

from awsddp.cli.command_line import Globals
from awsddp.cli.screen import Screen
from awsddp.settings.loader import job_arguments
from tests.support.project_with_data import READS, Project


def test_a_yes_sends_the_data_for_this_run_and_names_the_line_for_awsddp_toml(project: Project) -> None:
    session = project.answer_questions(True)
    assert project.questions == [
        "data/ (5 bytes x 2 nodes) is in .gitignore and train.py mentions it: send it?"
    ]
    assert project.synced_paths(session) == {".gitignore", "data/train.csv", "train.py"}
    assert 'sync.ignore=["!/data/"]' in job_arguments(session.job_spec), "the job's record runs it again"
    assert project.messages == [
        'data/: to answer for all jobs: ignore = ["!/data/"] in [sync] of awsddp.toml'
    ]


def test_a_no_sends_nothing_and_names_the_setting_that_decides_for_all_jobs(project: Project) -> None:
    assert project.synced_paths(project.answer_questions(False)) == {".gitignore", "train.py"}
    assert project.messages == ['data/: to answer for all jobs: ignore = ["/data/"] in [sync] of awsddp.toml']
    project.questions.clear()
    project.answer_questions(True, sync__ignore=["/data/"])
    assert not project.questions


def test_without_an_answer_the_data_is_not_sent_and_a_warning_is_printed(project: Project) -> None:
    assert project.synced_paths(project.answer_questions(None)) == {".gitignore", "train.py"}
    assert project.messages == [
        "data/ (5 bytes x 2 nodes) is in .gitignore and train.py mentions it: not sent; to send it: "
        'ignore = ["!/data/"] in [sync] of awsddp.toml'
    ]


@pytest.mark.parametrize("options", [{"yes": True}, {"json": True}, {}])
def test_a_screen_asks_nothing_with_yes_with_json_or_without_a_terminal(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: bool(options), raising=False)
    assert Screen(Globals(**options)).ask("send it?") is None


def test_only_a_part_of_a_large_folder_is_counted(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awsddp.job.unsynced_data._MOST_FILES", 3)
    project.add({f"data/{number}": "x" * 1_000_000 for number in range(6)})
    (project.folder / "data" / "train.csv").unlink()
    project.answer_questions(True)
    assert project.questions[0].startswith("data/ (more than 3 MB x 2 nodes) is in")


def test_a_link_is_not_counted_as_data(project: Project, tmp_path: Path) -> None:
    project.add({".gitignore": "data\nmore/\n", "train.py": "open('data/x'), open('more/x')"})
    (project.folder / "data").rename(tmp_path / "far")
    (project.folder / "data").symlink_to(tmp_path / "far")
    (project.folder / "more").mkdir()
    (project.folder / "more" / "x").symlink_to(tmp_path / "far" / "train.csv")
    project.answer_questions(True)
    assert not project.questions


LAST = "runs/train/exp/weights/last.pt"


@pytest.mark.parametrize(
    ("files", "keys", "path", "reason", "remedy"),
    [
        ({LAST: "x"}, {"job__args": ["--weights", LAST]}, LAST, "runs/ never is", f"cp -r {LAST} ."),
        ({LAST: "x"}, {"job__args": [f"--weights=./{LAST}"]}, LAST, "runs/ never is", f"cp -r {LAST} ."),
        ({LAST: "x", "train.py": f"load({LAST!r})"}, {}, LAST, "runs/ never is", f"cp -r {LAST} ."),
        ({LAST: "x"}, {"job__args": ["runs/train/exp"]}, "runs/train/exp", "runs/ never is", "cp -r runs/"),
        (
            {".awsddpignore": "data/\n", "data/train.csv": "x", "train.py": READS},
            {},
            "data/train.csv",
            "data/ is in .awsddpignore",
            "!/data/ in .awsddpignore",
        ),
        (
            {".awsddpignore": "*.pt\n", "w.pt": "x"},
            {"job__args": ["w.pt"]},
            "w.pt",
            "w.pt is in .awsddpignore",
            "!/w.pt in .awsddpignore",
        ),
        (
            {"w.pt": "x"},
            {"job__args": ["w.pt"], "sync__ignore": ["w.pt"]},
            "w.pt",
            "w.pt is in sync.ignore",
            "remove w.pt from sync.ignore",
        ),
    ],
)
def test_a_local_path_that_the_job_names_and_is_not_sent_is_reported(
    project: Project, files: dict[str, str], keys: dict[str, object], path: str, reason: str, remedy: str
) -> None:
    project.add({"train.py": "", **files})
    project.answer_questions(None, **keys)
    (line,) = project.messages
    assert line.startswith(
        f"{path} is here and is not sent ({reason}): a node has what an earlier job left there, or nothing; "
        f"to send it: {remedy}"
    )


def test_a_link_that_is_not_sent_and_that_an_argument_names_is_reported(project: Project) -> None:
    project.add({"train.py": "", "real/w.pt": "x"})
    (project.folder / "link").symlink_to(project.folder / "real")
    project.answer_questions(None, job__args=["link/w.pt"])
    assert project.messages[0].startswith(
        "link/w.pt is here and is not sent (a link into the folder by a path"
    )


@pytest.mark.parametrize(
    ("files", "args"),
    [
        ({"runs/a/log": "x"}, ["--project", "runs", "1", "-x", "", "--name="]),
        ({"w.pt": "x"}, ["w.pt", "train.py"]),
        ({}, ["runs/none.pt", "/etc/hostname", ".."]),
    ],
)
def test_sent_paths_and_results_folders_are_not_reported(
    project: Project, files: dict[str, str], args: list[str]
) -> None:
    project.add({"train.py": "", **files})
    project.answer_questions(None, job__args=args)
    assert not (project.messages or project.questions)
