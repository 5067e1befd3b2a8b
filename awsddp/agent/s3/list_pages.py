"""A list in S3 that is split into pages, so that no document of it is longer than may be read.

A document names the pages: [key, size, ETag] of each. What changed is written under another key than the one
that is named, so that a list that was read stays whole until the next one is there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from awsddp.agent.s3.store import MOST_BYTES, Changed, Place, Store, Thing, parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PAGE_BYTES = MOST_BYTES // 2
"""From what size on rows go to another page; a single row may be longer."""
MOST_PAGES = 64


class _Page:
    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], str] = {}
        self.size = 0
        self.is_written = False
        self.named: list[Any] | None = None
        self.next: list[Any] | None = None

    def body(self) -> bytes:
        """Return the page: {kind: {name: row}}."""
        kinds: dict[str, list[str]] = {}
        for (kind, name), row in self.rows.items():
            kinds.setdefault(kind, []).append(f"{json.dumps(name)}:{row}")
        members = (f'"{kind}":{{{",".join(rows)}}}' for kind, rows in kinds.items())
        return f"{{{','.join(members)}}}".encode()


class Pages:
    """The rows of a list, each of a kind and with a name; `prefix` begins the keys of its pages."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pages: list[_Page] = []
        self._page_of: dict[tuple[str, str], _Page] = {}

    def set(self, kind: str, name: str, row: object) -> None:
        """Add a row, or replace it."""
        text = json.dumps(row)
        page = self._page_of.get((kind, name))
        if page is not None and page.rows[kind, name] == text:
            return
        self.remove(kind, name)
        size = _length(kind, name, text)
        page = next((one for one in self._pages if not one.rows or one.size + size <= PAGE_BYTES), None)
        if page is None:
            page = _Page()
            self._pages.append(page)
        page.rows[kind, name], self._page_of[kind, name] = text, page
        page.size += size
        page.is_written = False

    def remove(self, kind: str, name: str) -> None:
        """Remove a row, if it is there."""
        page = self._page_of.pop((kind, name), None)
        if page is not None:
            page.size -= _length(kind, name, page.rows.pop((kind, name)))
            page.is_written = False

    def write(self, store: Store, where: Place) -> list[list[Any]]:
        """Write the pages that changed, and return what names all of them.

        Raises ClientError, BotoCoreError, ValueError where the list is longer than a reader takes.
        """
        if len(self._pages) > MOST_PAGES:
            raise ValueError(f"{len(self._page_of):,} results are more than the list has room for")
        for number, page in enumerate(self._pages):
            if not page.is_written:
                body, names = page.body(), [f"{self._prefix}-{number}~{turn}" for turn in (1, 2)]
                name = next(one for one in names if page.named is None or one != page.named[0])
                page.next = [name, len(body), store.put(where, name, body)]
                page.is_written = True
        return [page.next for page in self._pages if page.next is not None]

    def rewrite_missing(self, there: Mapping[str, tuple[int, str]]) -> None:
        """Have the next `write` write the pages that S3 does not hold as they were written, by key."""
        for page in self._pages:
            if page.next is not None and there.get(page.next[0]) != tuple(page.next[1:]):
                page.is_written = False

    def publish(self) -> None:
        """Note that a document names the pages as they were last written."""
        for page in self._pages:
            page.named = page.next


def _length(kind: str, name: str, row: str) -> int:
    """Return about how long a row is in a page: JSON writes a character of a name as 6, rarely as 12."""
    return len(row) + 6 * len(name) + len(kind) + 8


class PageReader:
    """Reads pages, those that did not change only once."""

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], Any] = {}

    def read(self, store: Store, where: Place, named: Iterable[Sequence[Any]]) -> dict[str, dict[str, Any]]:
        """Return the rows of the pages that a document names, by kind and name.

        Raises Changed where a page is another one by now, ValueError, ClientError, BotoCoreError.
        """
        before, self._read = self._read, {}
        found: dict[str, dict[str, Any]] = {}
        for key, size, etag in named:
            if (page := before.get((key, size, etag))) is None:
                if size > MOST_BYTES:
                    raise Changed(key)
                page = parsed(store.content(where, Thing(key, size, etag)))
            self._read[key, size, etag] = page
            for kind, rows in page.items():
                found.setdefault(kind, {}).update(rows)
        return found
