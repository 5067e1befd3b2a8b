"""Which checkpoint is complete, from the lists of the nodes; and how pending folders are listed."""

import json
from typing import Any

from awsddp.agent.s3.checkpoint_index import CheckpointIndex, checkpoint_keys
from awsddp.agent.s3.uploader import _folders
from tests.support.saved_rows import make_row

MARK, PART = "node0/run/step-1/.metadata", "node1/run/step-1/__1_0.distcp"


def make_list(scan: int, *pending: str, **changes: Any) -> dict[str, Any]:
    return {"look": scan, "pending": list(pending), **changes}


def get_name(index: CheckpointIndex) -> str | None:
    return index.checkpoint["name"] if index.checkpoint else None


def test_folder_is_complete_once_it_is_unchanged_for_two_scans_of_every_node() -> None:
    index, files = CheckpointIndex(), {MARK: make_row(), PART: make_row()}
    for first, second in ((1, 1), (2, 2), (9, 2), (2, 9)):
        index.update({0: make_list(first), 1: make_list(second)}, files, {})
        assert get_name(index) is None, (first, second)
    index.update({0: make_list(3), 1: make_list(3)}, files, {})
    assert get_name(index) == "run/step-1"
    assert index.checkpoint is not None and index.checkpoint["files"] == files


def test_folder_with_pending_files_is_never_complete() -> None:
    for pending in ("node1/run/step-1", "node1/run/step-1/deep", "node1/run/", "node1/"):
        index, files = CheckpointIndex(), {MARK: make_row(), PART: make_row()}
        for scan in range(9):
            index.update({0: make_list(scan), 1: make_list(scan, pending)}, files, {})
        assert get_name(index) is None, pending
    for pending in ("node1/run", "node1/run/step-10", "node0/other"):
        index = CheckpointIndex()
        for scan in range(9):
            index.update({0: make_list(scan), 1: make_list(scan, pending)}, files, {})
        assert get_name(index) == "run/step-1", pending


def test_folder_is_not_complete_before_every_node_has_a_list() -> None:
    index = CheckpointIndex()
    for scan in range(9):
        index.update({0: make_list(scan), 1: {}}, {MARK: make_row()}, {})
    assert get_name(index) is None


def test_changed_folder_must_be_unchanged_for_two_more_scans() -> None:
    index = CheckpointIndex()
    index.update({0: make_list(1)}, {MARK: make_row()}, {})
    index.update({0: make_list(9)}, {MARK: make_row(modified=2)}, {})
    assert get_name(index) is None
    index.update({0: make_list(11)}, {MARK: make_row(modified=2)}, {})
    assert get_name(index) == "run/step-1"


def test_older_checkpoint_does_not_replace_a_newer_one_that_was_removed() -> None:
    index = CheckpointIndex()
    old, new = {"node0/run/a.pt": make_row(1)}, {"node0/run/b.pt": make_row(2, "b")}
    index.update({0: make_list(1)}, {**old, **new}, {})
    index.update({0: make_list(2)}, old, {})
    assert get_name(index) == "run/b.pt" and checkpoint_keys(index.checkpoint) == {"b"}
    index.update({0: make_list(3)}, {"node0/run/c.pt": make_row(2)}, {})
    assert get_name(index) == "run/c.pt"


def test_torn_files_and_files_outside_a_nodes_folder_are_no_checkpoints() -> None:
    index = CheckpointIndex()
    index.update(
        {0: make_list(1)},
        {"node0/run/a.pt": make_row(torn=True), "logs/b.pt": make_row(), "node0/c.txt": make_row()},
        {},
    )
    assert get_name(index) is None


def test_link_called_latest_selects_the_checkpoint() -> None:
    index = CheckpointIndex()
    files = {"node0/run/a.pt": make_row(1), "node0/run/b.pt": make_row(2)}
    index.update({0: make_list(1)}, files, {"node0/run/latest": "node0/run/a.pt"})
    assert get_name(index) == "run/a.pt"


def test_many_pending_folders_are_listed_as_one_above_them() -> None:
    assert _folders(["node0/run/a", "node0/run/b", "node0/x/c"]) == ["node0/run", "node0/x"]
    many = [f"node0/cache/{number}/file" for number in range(5000)]
    assert _folders([*many, "node0/run/a"]) == ["node0/cache/", "node0/run"]
    assert len(json.dumps(_folders([f"{number}/x" for number in range(5000)]))) < 1000
