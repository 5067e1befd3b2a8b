"""A long list in S3, in pages."""

from typing import cast

import pytest

from awsddp.agent.s3.list_pages import MOST_PAGES, PageReader, Pages
from awsddp.agent.s3.store import MOST_BYTES, ObjectChanged, S3Object, S3Uri, Store
from tests.support.saved_rows import make_row


class Bucket:
    """Objects by key, each with an ETag of its own; it replaces a store."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.puts = 0

    def put(self, uri: S3Uri, name: str, body: bytes) -> str:
        self.puts += 1
        self.objects[uri.key(name)] = body, f"etag{self.puts}"
        return f"etag{self.puts}"

    def read_object(self, uri: S3Uri, s3_object: S3Object) -> bytes:
        body, etag = self.objects.get(uri.key(s3_object.key), (b"", ""))
        if (len(body), etag) != (s3_object.size, s3_object.etag):
            raise ObjectChanged(s3_object.key)
        return body


AT = S3Uri("bucket", "runs/job-1")


def test_published_list_stays_readable_until_the_next_one_is_published() -> None:
    bucket, pages = Bucket(), Pages("lists/node0")
    store = cast(Store, bucket)
    for number in range(20_000):
        pages.set("files", f"node0/many/{number}", make_row(key="k" * 100))
    pages.set("links", "node0/l", "node0/many/1")
    first = pages.write(store, AT)
    pages.publish()
    assert 2 < len(first) < MOST_PAGES and max(size for _, size, _ in first) <= MOST_BYTES
    read = PageReader().read(store, AT, first)
    assert len(read["files"]) == 20_000 and read["links"] == {"node0/l": "node0/many/1"}
    puts = bucket.puts
    for turn in range(3):  # written three times, and not published
        pages.set("files", "node0/many/7", make_row(turn + 5))
        unpublished = pages.write(store, AT)
        assert PageReader().read(store, AT, first) == read
        assert PageReader().read(store, AT, unpublished)["files"]["node0/many/7"]["modified"] == turn + 5
    assert bucket.puts == puts + 3, "pages that did not change were written"
    pages.publish()
    pages.remove("files", "node0/many/7")
    last = pages.write(store, AT)
    assert "node0/many/7" not in PageReader().read(store, AT, last)["files"]
    with pytest.raises(ObjectChanged):
        PageReader().read(store, AT, first)


def test_added_and_removed_rows_leave_no_empty_pages() -> None:
    bucket, pages = Bucket(), Pages("lists/node0")
    for number in range(30_000):
        pages.set("files", f"node0/{number}", "x" * 500)
        if number >= 100:
            pages.remove("files", f"node0/{number - 100}")
    assert len(pages.write(cast(Store, bucket), AT)) == 1


def test_list_with_too_many_pages_is_not_written() -> None:
    pages = Pages("lists/node0")
    for number in range(MOST_PAGES + 1):
        pages.set("files", f"node0/{number}", "x" * (MOST_BYTES // 2 + 1))
    with pytest.raises(ValueError, match="more than the list has room for"):
        pages.write(cast(Store, Bucket()), AT)


def test_names_of_any_bytes_are_read_back() -> None:
    bucket, pages = Bucket(), Pages("lists/node0")
    for name in ("node0/\udcff", "node0/\N{GRINNING FACE}", 'node0/"\\\n', "node0/é"):
        pages.set("files", name, make_row())
    rows = PageReader().read(cast(Store, bucket), AT, pages.write(cast(Store, bucket), AT))
    assert set(rows["files"]) == {"node0/\udcff", "node0/\N{GRINNING FACE}", 'node0/"\\\n', "node0/é"}
