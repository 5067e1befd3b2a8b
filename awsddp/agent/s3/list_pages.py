"""A list in S3 that is split into pages, so that no object exceeds a document's maximum size.

A document names the pages, each as [key, size, ETag]. A changed page is written to a key that the document
does not name, so that the published list stays readable until the next list is published.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from awsddp.agent.s3.store import MOST_BYTES, ObjectChanged, S3Object, S3Uri, Store, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PAGE_BYTES = MOST_BYTES // 2
"""Maximum size of a page; only a page with a single row can be larger."""
MOST_PAGES = 64


class _Page:
    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], str] = {}
        self.size = 0
        self.is_written = False
        self.named: list[Any] | None = None
        self.next: list[Any] | None = None

    def body(self) -> bytes:
        """Return the page as JSON: {kind: {name: row}}."""
        kinds: dict[str, list[str]] = {}
        for (kind, name), row in self.rows.items():
            kinds.setdefault(kind, []).append(f"{json.dumps(name)}:{row}")
        members = (f'"{kind}":{{{",".join(rows)}}}' for kind, rows in kinds.items())
        return f"{{{','.join(members)}}}".encode()


class Pages:
    """A list's rows, each with a kind and a name. The pages' keys begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pages: list[_Page] = []
        self._page_of: dict[tuple[str, str], _Page] = {}

    def set(self, kind: str, name: str, row: object) -> None:
        """Add a row, or replace the row that has this kind and name."""
        text = json.dumps(row)
        page = self._page_of.get((kind, name))
        if page is not None and page.rows[kind, name] == text:
            return
        self.remove(kind, name)
        size = _estimate_length(kind, name, text)
        with_room = (page for page in self._pages if not page.rows or page.size + size <= PAGE_BYTES)
        page = next(with_room, None)
        if page is None:
            page = _Page()
            self._pages.append(page)
        page.rows[kind, name], self._page_of[kind, name] = text, page
        page.size += size
        page.is_written = False

    def remove(self, kind: str, name: str) -> None:
        """Remove a row if the list contains it."""
        page = self._page_of.pop((kind, name), None)
        if page is not None:
            page.size -= _estimate_length(kind, name, page.rows.pop((kind, name)))
            page.is_written = False

    def write(self, store: Store, uri: S3Uri) -> list[list[Any]]:
        """Write the changed pages, and return [key, size, ETag] for every page.

        Raises ClientError, BotoCoreError, or ValueError if the list exceeds MOST_PAGES.
        """
        if len(self._pages) > MOST_PAGES:
            raise ValueError(f"{len(self._page_of):,} results are more than the list has room for")
        for number, page in enumerate(self._pages):
            if not page.is_written:
                body, names = page.body(), [f"{self._prefix}-{number}~{version}" for version in (1, 2)]
                name = next(name for name in names if page.named is None or name != page.named[0])
                page.next = [name, len(body), store.put(uri, name, body)]
                page.is_written = True
        return [page.next for page in self._pages if page.next is not None]

    def rewrite_missing(self, objects: Mapping[str, tuple[int, str]]) -> None:
        """Mark the pages that the next `write` must write again.

        `objects` maps the keys in S3 to (size, ETag). A page is marked unless its object in S3 is as it was
        written.
        """
        for page in self._pages:
            if page.next is not None and objects.get(page.next[0]) != tuple(page.next[1:]):
                page.is_written = False

    def publish(self) -> None:
        """Record that a document names the pages that were last written."""
        for page in self._pages:
            page.named = page.next


def _estimate_length(kind: str, name: str, row: str) -> int:
    """Return a row's estimated length in a page. In JSON, a character takes up to 6 bytes, rarely 12."""
    return len(row) + 6 * len(name) + len(kind) + 8


class PageReader:
    """Reads pages, and caches the pages that have not changed."""

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], Any] = {}

    def read(self, store: Store, uri: S3Uri, page_list: Iterable[Sequence[Any]]) -> dict[str, dict[str, Any]]:
        """Return {kind: {name: row}} from the pages that a document names.

        Raises ObjectChanged if a page was replaced, ValueError if a page is invalid, and ClientError or
        BotoCoreError if a request fails.
        """
        previous, self._read = self._read, {}
        rows_by_kind: dict[str, dict[str, Any]] = {}
        for key, size, etag in page_list:
            if (page := previous.get((key, size, etag))) is None:
                if size > MOST_BYTES:
                    raise ObjectChanged(key)
                page = parse_json(store.read_object(uri, S3Object(key, size, etag)))
            self._read[key, size, etag] = page
            for kind, rows in page.items():
                rows_by_kind.setdefault(kind, {}).update(rows)
        return rows_by_kind
