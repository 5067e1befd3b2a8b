"""Which checkpoint is whole, by what the nodes list; and lists in pages."""

import json
from typing import Any, cast

import pytest

from awsddp.agent.s3.checkpoint_index import Shelf, keys
from awsddp.agent.s3.list_pages import MOST_PAGES, PageReader, Pages
from awsddp.agent.s3.store import MOST_BYTES, Changed, Place, Store, Thing
from awsddp.agent.s3.uploader import _folders

MARK, PART = "node0/run/step-1/.metadata", "node1/run/step-1/__1_0.distcp"


def row(modified: int = 1, key: str = "k", **more: Any) -> dict[str, Any]:
    return {"size": 1, "modified": modified, "sample": "", "parts": [[key, 1, "e", ""]], **more}


def tell(look: int, *pending: str, **more: Any) -> dict[str, Any]:
    return {"look": look, "pending": list(pending), **more}


def chosen(shelf: Shelf) -> str | None:
    return shelf.checkpoint["name"] if shelf.checkpoint else None


def test_a_folder_is_whole_once_it_has_rested_for_two_looks_of_every_node() -> None:
    shelf, files = Shelf(), {MARK: row(), PART: row()}
    for first, second in ((1, 1), (2, 2), (9, 2), (2, 9)):
        shelf.take({0: tell(first), 1: tell(second)}, files, {})
        assert chosen(shelf) is None, (first, second)
    shelf.take({0: tell(3), 1: tell(3)}, files, {})
    assert chosen(shelf) == "run/step-1"
    assert shelf.checkpoint is not None and shelf.checkpoint["files"] == files


def test_a_folder_with_pending_files_is_not_whole_however_long_it_rests() -> None:
    for pending in ("node1/run/step-1", "node1/run/step-1/deep", "node1/run/", "node1/"):
        shelf, files = Shelf(), {MARK: row(), PART: row()}
        for look in range(9):
            shelf.take({0: tell(look), 1: tell(look, pending)}, files, {})
        assert chosen(shelf) is None, pending
    for pending in ("node1/run", "node1/run/step-10", "node0/other"):
        shelf = Shelf()
        for look in range(9):
            shelf.take({0: tell(look), 1: tell(look, pending)}, files, {})
        assert chosen(shelf) == "run/step-1", pending


def test_a_folder_waits_for_a_node_that_has_told_nothing_yet() -> None:
    shelf = Shelf()
    for look in range(9):
        shelf.take({0: tell(look), 1: {}}, {MARK: row()}, {})
    assert chosen(shelf) is None


def test_a_folder_that_changes_rests_anew() -> None:
    shelf = Shelf()
    shelf.take({0: tell(1)}, {MARK: row()}, {})
    shelf.take({0: tell(9)}, {MARK: row(modified=2)}, {})
    assert chosen(shelf) is None
    shelf.take({0: tell(11)}, {MARK: row(modified=2)}, {})
    assert chosen(shelf) == "run/step-1"


def test_an_older_checkpoint_does_not_take_the_place_of_a_newer_one_that_was_removed() -> None:
    shelf = Shelf()
    old, new = {"node0/run/a.pt": row(1)}, {"node0/run/b.pt": row(2, "b")}
    shelf.take({0: tell(1)}, {**old, **new}, {})
    shelf.take({0: tell(2)}, old, {})
    assert chosen(shelf) == "run/b.pt" and keys(shelf.checkpoint) == {"b"}
    shelf.take({0: tell(3)}, {"node0/run/c.pt": row(2)}, {})
    assert chosen(shelf) == "run/c.pt"


def test_what_is_torn_or_no_result_of_a_node_is_no_checkpoint() -> None:
    shelf = Shelf()
    shelf.take({0: tell(1)}, {"node0/run/a.pt": row(torn=True), "logs/b.pt": row(), "node0/c.txt": row()}, {})
    assert chosen(shelf) is None


def test_a_link_called_latest_decides() -> None:
    shelf = Shelf()
    files = {"node0/run/a.pt": row(1), "node0/run/b.pt": row(2)}
    shelf.take({0: tell(1)}, files, {"node0/run/latest": "node0/run/a.pt"})
    assert chosen(shelf) == "run/a.pt"


class Bucket:
    """Objects by key, each with an ETag of its own; it stands in for a store."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.puts = 0

    def put(self, where: Place, name: str, body: bytes) -> str:
        self.puts += 1
        self.objects[where.key(name)] = body, f"etag{self.puts}"
        return f"etag{self.puts}"

    def content(self, where: Place, thing: Thing) -> bytes:
        body, etag = self.objects.get(where.key(thing.key), (b"", ""))
        if (len(body), etag) != (thing.size, thing.etag):
            raise Changed(thing.key)
        return body


AT = Place("bucket", "runs/job-1")


def test_a_list_that_was_read_stays_whole_until_the_next_one_is_named() -> None:
    bucket, pages = Bucket(), Pages("lists/node0")
    store = cast(Store, bucket)
    for number in range(20_000):
        pages.set("files", f"node0/many/{number}", row(key="k" * 100))
    pages.set("links", "node0/l", "node0/many/1")
    first = pages.write(store, AT)
    pages.publish()
    assert 2 < len(first) < MOST_PAGES and max(size for _, size, _ in first) <= MOST_BYTES
    read = PageReader().read(store, AT, first)
    assert len(read["files"]) == 20_000 and read["links"] == {"node0/l": "node0/many/1"}
    puts = bucket.puts
    for turn in range(3):  # written again and again, and never named
        pages.set("files", "node0/many/7", row(turn + 5))
        named = pages.write(store, AT)
        assert PageReader().read(store, AT, first) == read
        assert PageReader().read(store, AT, named)["files"]["node0/many/7"]["modified"] == turn + 5
    assert bucket.puts == puts + 3, "pages that did not change were written"
    pages.publish()
    pages.remove("files", "node0/many/7")
    last = pages.write(store, AT)
    assert "node0/many/7" not in PageReader().read(store, AT, last)["files"]
    with pytest.raises(Changed):
        PageReader().read(store, AT, first)


def test_rows_that_come_and_go_leave_no_empty_pages_behind() -> None:
    bucket, pages = Bucket(), Pages("lists/node0")
    for number in range(30_000):
        pages.set("files", f"node0/{number}", "x" * 500)
        if number >= 100:
            pages.remove("files", f"node0/{number - 100}")
    assert len(pages.write(cast(Store, bucket), AT)) == 1


def test_a_list_that_no_reader_would_take_is_not_written() -> None:
    pages = Pages("lists/node0")
    for number in range(MOST_PAGES + 1):
        pages.set("files", f"node0/{number}", "x" * (MOST_BYTES // 2 + 1))
    with pytest.raises(ValueError, match="more than the list has room for"):
        pages.write(cast(Store, Bucket()), AT)


def test_names_of_any_bytes_survive_a_page() -> None:
    bucket, pages = Bucket(), Pages("lists/node0")
    for name in ("node0/\udcff", "node0/\N{GRINNING FACE}", 'node0/"\\\n', "node0/é"):
        pages.set("files", name, row())
    found = PageReader().read(cast(Store, bucket), AT, pages.write(cast(Store, bucket), AT))
    assert set(found["files"]) == {"node0/\udcff", "node0/\N{GRINNING FACE}", 'node0/"\\\n', "node0/é"}


def test_folders_with_pending_files_are_named_and_where_there_are_many_some_above_them() -> None:
    assert _folders(["node0/run/a", "node0/run/b", "node0/x/c"]) == ["node0/run", "node0/x"]
    many = [f"node0/cache/{number}/file" for number in range(5000)]
    assert _folders([*many, "node0/run/a"]) == ["node0/cache/", "node0/run"]
    assert len(json.dumps(_folders([f"{number}/x" for number in range(5000)]))) < 1000
