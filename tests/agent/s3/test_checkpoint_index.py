"""Which checkpoint is whole, by what the nodes list; and lists in pages."""

import json
from typing import Any

from awsddp.agent.s3.checkpoint_index import CheckpointIndex, checkpoint_keys
from awsddp.agent.s3.uploader import _folders
from tests.support.saved_rows import row

MARK, PART = "node0/run/step-1/.metadata", "node1/run/step-1/__1_0.distcp"


def tell(look: int, *pending: str, **more: Any) -> dict[str, Any]:
    return {"look": look, "pending": list(pending), **more}


def chosen(shelf: CheckpointIndex) -> str | None:
    return shelf.checkpoint["name"] if shelf.checkpoint else None


def test_a_folder_is_whole_once_it_has_rested_for_two_looks_of_every_node() -> None:
    shelf, files = CheckpointIndex(), {MARK: row(), PART: row()}
    for first, second in ((1, 1), (2, 2), (9, 2), (2, 9)):
        shelf.update({0: tell(first), 1: tell(second)}, files, {})
        assert chosen(shelf) is None, (first, second)
    shelf.update({0: tell(3), 1: tell(3)}, files, {})
    assert chosen(shelf) == "run/step-1"
    assert shelf.checkpoint is not None and shelf.checkpoint["files"] == files


def test_a_folder_with_pending_files_is_not_whole_however_long_it_rests() -> None:
    for pending in ("node1/run/step-1", "node1/run/step-1/deep", "node1/run/", "node1/"):
        shelf, files = CheckpointIndex(), {MARK: row(), PART: row()}
        for look in range(9):
            shelf.update({0: tell(look), 1: tell(look, pending)}, files, {})
        assert chosen(shelf) is None, pending
    for pending in ("node1/run", "node1/run/step-10", "node0/other"):
        shelf = CheckpointIndex()
        for look in range(9):
            shelf.update({0: tell(look), 1: tell(look, pending)}, files, {})
        assert chosen(shelf) == "run/step-1", pending


def test_a_folder_waits_for_a_node_that_has_told_nothing_yet() -> None:
    shelf = CheckpointIndex()
    for look in range(9):
        shelf.update({0: tell(look), 1: {}}, {MARK: row()}, {})
    assert chosen(shelf) is None


def test_a_folder_that_changes_rests_anew() -> None:
    shelf = CheckpointIndex()
    shelf.update({0: tell(1)}, {MARK: row()}, {})
    shelf.update({0: tell(9)}, {MARK: row(modified=2)}, {})
    assert chosen(shelf) is None
    shelf.update({0: tell(11)}, {MARK: row(modified=2)}, {})
    assert chosen(shelf) == "run/step-1"


def test_an_older_checkpoint_does_not_take_the_place_of_a_newer_one_that_was_removed() -> None:
    shelf = CheckpointIndex()
    old, new = {"node0/run/a.pt": row(1)}, {"node0/run/b.pt": row(2, "b")}
    shelf.update({0: tell(1)}, {**old, **new}, {})
    shelf.update({0: tell(2)}, old, {})
    assert chosen(shelf) == "run/b.pt" and checkpoint_keys(shelf.checkpoint) == {"b"}
    shelf.update({0: tell(3)}, {"node0/run/c.pt": row(2)}, {})
    assert chosen(shelf) == "run/c.pt"


def test_what_is_torn_or_no_result_of_a_node_is_no_checkpoint() -> None:
    shelf = CheckpointIndex()
    shelf.update(
        {0: tell(1)}, {"node0/run/a.pt": row(torn=True), "logs/b.pt": row(), "node0/c.txt": row()}, {}
    )
    assert chosen(shelf) is None


def test_a_link_called_latest_decides() -> None:
    shelf = CheckpointIndex()
    files = {"node0/run/a.pt": row(1), "node0/run/b.pt": row(2)}
    shelf.update({0: tell(1)}, files, {"node0/run/latest": "node0/run/a.pt"})
    assert chosen(shelf) == "run/a.pt"


def test_folders_with_pending_files_are_named_and_where_there_are_many_some_above_them() -> None:
    assert _folders(["node0/run/a", "node0/run/b", "node0/x/c"]) == ["node0/run", "node0/x"]
    many = [f"node0/cache/{number}/file" for number in range(5000)]
    assert _folders([*many, "node0/run/a"]) == ["node0/cache/", "node0/run"]
    assert len(json.dumps(_folders([f"{number}/x" for number in range(5000)]))) < 1000
