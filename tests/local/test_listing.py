"""The names of a bucket, page by page."""

from hypothesis import given
from hypothesis import strategies as some

from awsddp.local.listing import Listing
from awsddp.local.s3_files import ObjectInfo

NAMES = some.lists(some.text("ab/\x00\U0010ffff", min_size=1, max_size=6), max_size=20)


def plainly(names: set[str], prefix: str, delimiter: str) -> list[tuple[str, bool]]:
    """Each name that a listing shows, in order, and whether it is cut."""
    shown = {}
    for name in names:
        if name.startswith(prefix):
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            shown[prefix + head + found if found else name] = bool(found)
    return sorted(shown.items())


@given(
    NAMES, NAMES, some.text("ab/", max_size=2), some.sampled_from(["", "/", "a", "//"]), some.integers(1, 4)
)
def test_the_pages_of_a_listing_show_every_name_once_and_in_order(
    put: list[str], dropped: list[str], prefix: str, delimiter: str, room: int
) -> None:
    made = Listing({name: ObjectInfo(name) for name in put[::2]})
    for name in put:
        made.put(name, ObjectInfo(name, 1))
    for name in dropped:
        made.drop(name)
    seen: list[tuple[str, bool]] = []
    more, after = True, ""
    while more:
        page, more = made.page(prefix, after=after, limit=room, delimiter=delimiter)
        assert len(page) == room or not more
        assert all(one is None or (one.key, one.size) == (name, 1) for name, one in page.items())
        seen += [(name, one is None) for name, one in page.items()]
        after = seen[-1][0] if seen else ""
    assert seen == plainly(set(put) - set(dropped), prefix, delimiter)


def test_a_page_without_room_is_empty_and_the_last_one() -> None:
    assert Listing({"a": ObjectInfo("a")}).page("", after="", limit=0) == ({}, False)
