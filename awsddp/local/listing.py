"""A sorted in-memory index of the names in a bucket. The index is built from the bucket's files once, and is
then updated as files change."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from itertools import islice

from awsddp.local.s3_files import ObjectInfo


class Listing:
    """Holds the objects' descriptions, sorted by name. The class is not thread-safe."""

    def __init__(self, described: Mapping[str, ObjectInfo]) -> None:
        self._described = dict(described)
        self._names = sorted(self._described)  # by code points, which sort in the same order as their UTF-8

    def put(self, name: str, info: ObjectInfo) -> None:
        """Add a name, or replace its description."""
        if name not in self._described:
            insort(self._names, name)
        self._described[name] = info

    def drop(self, name: str) -> None:
        """Remove a name if the index has it."""
        if self._described.pop(name, None) is not None:
            del self._names[bisect_left(self._names, name)]

    def page(
        self, prefix: str, *, after: str, limit: int, delimiter: str = ""
    ) -> tuple[dict[str, ObjectInfo | None], bool]:
        """Return at most `limit` names that have a prefix and sort after `after`, and True if there are more.

        A name with a delimiter after the prefix is cut after the delimiter. Shortened names that are equal
        are listed once, without a description.
        """
        entries = list(islice(self._entries(prefix, after, delimiter), limit + 1))
        return dict(entries[:limit]), len(entries) > limit > 0

    def _entries(self, prefix: str, after: str, delimiter: str) -> Iterator[tuple[str, ObjectInfo | None]]:
        names = self._names
        index = max(bisect_left(names, prefix), bisect_right(names, after))
        while index < len(names) and names[index].startswith(prefix):
            name = names[index]
            end = name.find(delimiter, len(prefix)) if delimiter else -1
            if end < 0:
                yield name, self._described[name]
                index += 1
                continue
            common = name[: end + len(delimiter)]
            if common > after:
                yield common, None
            index = self._end_of_prefix(common, index)

    def _end_of_prefix(self, prefix: str, start: int) -> int:
        """Return the index after the last name with a prefix; the name at `start` must have the prefix."""
        return bisect_left(self._names, True, start, key=lambda name: not name.startswith(prefix))
