"""The names in a bucket, sorted, in memory: read once from the files, then updated with them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from itertools import islice

from awsddp.local.s3_files import Stored


class Listing:
    """Descriptions by name. Not thread-safe."""

    def __init__(self, described: Mapping[str, Stored]) -> None:
        self._described = dict(described)
        self._names = sorted(self._described)  # by code points, which is the order of their UTF-8, too

    def put(self, name: str, one: Stored) -> None:
        """Add a name, or replace its description."""
        if name not in self._described:
            insort(self._names, name)
        self._described[name] = one

    def drop(self, name: str) -> None:
        """Remove a name, if it is there."""
        if self._described.pop(name, None) is not None:
            del self._names[bisect_left(self._names, name)]

    def page(
        self, prefix: str, *, after: str, room: int, delimiter: str = ""
    ) -> tuple[dict[str, Stored | None], bool]:
        """Return at most `room` names with a prefix that come after another name, and whether there are more.

        A name is cut behind the first delimiter that follows the prefix; it has no description then.
        """
        found = list(islice(self._entries(prefix, after, delimiter), room + 1))
        return dict(found[:room]), len(found) > room > 0

    def _entries(self, prefix: str, after: str, delimiter: str) -> Iterator[tuple[str, Stored | None]]:
        names = self._names
        at = max(bisect_left(names, prefix), bisect_right(names, after))
        while at < len(names) and names[at].startswith(prefix):
            name = names[at]
            end = name.find(delimiter, len(prefix)) if delimiter else -1
            if end < 0:
                yield name, self._described[name]
                at += 1
                continue
            common = name[: end + len(delimiter)]
            if common > after:
                yield common, None
            at = self._end(common, at)

    def _end(self, prefix: str, at: int) -> int:
        """Return where the names end that begin with a prefix, as the one at this place does."""
        return bisect_left(self._names, True, at, key=lambda one: not one.startswith(prefix))
