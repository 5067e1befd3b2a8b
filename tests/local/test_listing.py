"""Pages of a bucket's listing."""

from hypothesis import given
from hypothesis import strategies as some

from awsddp.local.listing import Listing
from awsddp.local.s3_files import ObjectInfo

NAMES = some.lists(some.text("ab/\x00\U0010ffff", min_size=1, max_size=6), max_size=20)


def list_expected(names: set[str], prefix: str, delimiter: str) -> list[tuple[str, bool]]:
    """Return the names of a listing in order, each with True if it ends at the delimiter."""
    entries = {}
    for name in names:
        if name.startswith(prefix):
            head, separator, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            entries[prefix + head + separator if separator else name] = bool(separator)
    return sorted(entries.items())


@given(
    NAMES, NAMES, some.text("ab/", max_size=2), some.sampled_from(["", "/", "a", "//"]), some.integers(1, 4)
)
def test_the_pages_of_a_listing_show_every_name_once_and_in_order(
    put: list[str], dropped: list[str], prefix: str, delimiter: str, page_size: int
) -> None:
    listing = Listing({name: ObjectInfo(name) for name in put[::2]})
    for name in put:
        listing.put(name, ObjectInfo(name, 1))
    for name in dropped:
        listing.drop(name)
    entries: list[tuple[str, bool]] = []
    has_more, after = True, ""
    while has_more:
        page, has_more = listing.page(prefix, after=after, limit=page_size, delimiter=delimiter)
        assert len(page) == page_size or not has_more
        assert all(entry is None or (entry.key, entry.size) == (name, 1) for name, entry in page.items())
        entries += [(name, entry is None) for name, entry in page.items()]
        after = entries[-1][0] if entries else ""
    assert entries == list_expected(set(put) - set(dropped), prefix, delimiter)


def test_a_page_of_limit_0_is_empty_and_the_last() -> None:
    assert Listing({"a": ObjectInfo("a")}).page("", after="", limit=0) == ({}, False)
