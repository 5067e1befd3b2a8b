"""tests/ mirrors the tree: a test is in the folder of the code that it tests, and has its name.

`tests/storage/test_datasets.py` and `tests/storage/test_datasets_WHAT.py` test `awsddp/storage/datasets.py`,
`tests/ROOM/test_ROOM.py` a package itself. The same holds for train/, tools/, templates/,
docs/, benchmarks/. End-to-end tests are in tests/system, helpers in tests/support.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "awsddp"
WHOLE = {"house", "mirror", "plain_words"}
"""Tests of the tree as a whole, in tests/ itself."""
FREE = {"support", "system"}
OTHERS = ("benchmarks", "docs", "templates", "tools", "train")
NO_CODE = {"__init__", "__main__"}

ELSEWHERE = {
    "cli/test_main.py": "cli/command_line",
    "cluster/test_up.py": "model/cluster_state",
    "docs/test_index_and_other_pages.py": "util/version",
    "job/test_report.py": "util/html",
    "job/test_unsynced_data.py": "session/context",
    "nodes/test_provision.py": "model/events",
    "session/test_next_steps.py": "settings/verbs",
    "storage/test_checkpoints.py": "agent/s3/checkpoints",
    "system/test_hosts.py": "local/cgroups",
    "system/test_main_job.py": "cluster/prepare",
    "system/test_recovery_campaign.py": "cluster/run_state cluster/train",
    "system/test_verbs.py": "cli/cluster cli/node cluster/remote cluster/sync",
}
"""Modules without a test file of their own, by the test that runs them."""


def list_names(room: Path) -> set[str]:
    """Return the names that a test in `tests/ROOM` may have: its modules and packages, and the room's own."""
    if not room.parts:
        return {path.stem for path in PACKAGE.glob("[a-z]*.py")} | WHOLE
    source = PACKAGE / room if (PACKAGE / room).is_dir() else ROOT / room
    if not source.is_dir() or (source.parent == ROOT and source.name not in OTHERS):
        return set()
    inside = {path.stem.lower() for path in source.iterdir() if path.name[0] not in "._"}
    return inside | {source.name}


def find_subject(test: str, names: set[str]) -> str | None:
    """Return the longest of `names` that `test` begins with, as in `test_NAME` and `test_NAME_ASPECT`."""
    matches = [name for name in names if f"{test}_".startswith(f"test_{name}_")]
    return max(matches, key=len, default=None)


def find_misplaced(tests: Path) -> list[str]:
    """Return the Python files below `tests` that have no name of code in their folder."""
    wrong = []
    for path in sorted(tests.rglob("*.py")):
        room = path.relative_to(tests).parent
        exempt = path.stem in {"__init__", "conftest"} or {*room.parts[:1]} & FREE
        if not exempt and find_subject(path.stem, list_names(room)) is None:
            wrong.append(path.relative_to(tests).as_posix())
    return wrong


def test_every_test_file_is_in_the_folder_of_its_code() -> None:
    assert find_misplaced(TESTS) == []


def test_tests_system_has_only_tests_and_tests_support_has_none() -> None:
    for path in (TESTS / "system").rglob("*.py"):
        assert path.parent.name == "system" and path.stem.startswith(("test_", "conftest", "__init__")), path
    assert [*(TESTS / "support").rglob("test_*.py")] == []


@pytest.mark.parametrize(
    "name",
    [
        "storage/test_nothing.py",
        "nowhere/test_it.py",
        "storage/helper.py",
        "test_plan.py",
        "s3/test_store.py",
    ],
)
def test_a_misplaced_test_file_is_detected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert find_misplaced(tmp_path) == [name]


def test_every_module_has_a_test_file_or_a_row_of_elsewhere() -> None:
    modules = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.stem not in NO_CODE
    }
    tested = set()
    for path in TESTS.rglob("test_*.py"):
        room = path.relative_to(TESTS).parent
        if (PACKAGE / room).is_dir():
            tested.add((room / str(find_subject(path.stem, list_names(room)))).as_posix())
    elsewhere = {module: test for test, names in ELSEWHERE.items() for module in names.split()}
    assert modules - tested == set(elsewhere), "without a test, or in ELSEWHERE though it has one or is gone"
    assert [test for test in ELSEWHERE if not (TESTS / test).is_file()] == []
