"""Reads the pages of indexes and the folders of this machine: a node gets the links to packages alone."""

import contextlib
import gzip
import io
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from awsddp.nodes.catalog import METADATA
from awsddp.nodes.upstream import Grant, RefusedError

PAGE_BYTES = 32 * 2**20
_TAG_BYTES = 256 * 1024
_LINKS = 50_000
_CHUNK = 64 * 1024
_SUFFIXES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_KEPT = ("data-requires-python", "data-yanked", "data-core-metadata", "data-dist-info-metadata")
"""What a link says of its file (PEP 503, 592, 658, 714)."""


def is_package(path: str) -> bool:
    """Return whether a path, of a URL or a file, has the name of a package."""
    return path.lower().endswith(_SUFFIXES)


def write_links(out: IO[bytes], page: Any, base: str, shown: Callable[[str], str]) -> None:
    """Write the links of a page of HTML, compressed; `shown` names each URL, "" for none.

    Its memory has a bound for any page. Raises ValueError for one that is too long.
    """
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as zipped:
        links, size = _Links(base, shown, zipped), 0
        while data := page.read(_CHUNK):
            size += len(data)
            links.feed(data.decode(errors="replace"))
            if size > PAGE_BYTES or links.count > _LINKS or len(links.rawdata) > _TAG_BYTES:
                raise ValueError(
                    f"a page of more than {PAGE_BYTES} bytes or {_LINKS} links, or a tag without end"
                )
        links.close()


class _Links(HTMLParser):
    def __init__(self, url: str, shown: Callable[[str], str], out: Any) -> None:
        super().__init__()
        self.base, self.shown, self.out, self.count = url, shown, out, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the first URL of the page's links, or write a link."""
        values = {name: value or "" for name, value in attrs}
        with contextlib.suppress(ValueError):  # no URL
            url = urljoin(self.base, values.get("href", ""))
            if tag == "base":
                self.base = url
            elif tag == "a" and (href := self.shown(url)):
                self.count += 1
                kept = "".join(f' {name}="{escape(values[name])}"' for name in _KEPT if name in values)
                name = escape(unquote(urlsplit(url).path.rpartition("/")[2]))
                self.out.write(f'<a href="{escape(href)}"{kept}>{name}</a><br>\n'.encode())


def open_folder(grant: Grant, url: str) -> IO[bytes]:
    """Return the page of a granted folder, else the list of its files. Raises FileNotFoundError."""
    path, root = _path_of(url).resolve(), _path_of(grant.url).resolve()
    page = path / "index.html" if path.is_dir() and grant.kind == "index" else path
    if not page.resolve().is_relative_to(root):
        raise FileNotFoundError(path)
    if page.is_file() or not path.is_dir():
        return page.open("rb")
    names = sorted(one.name for one in path.iterdir())
    return io.BytesIO("".join(f'<a href="{quote(name)}"></a>' for name in names).encode())


def open_package(grants: list[Grant], url: str) -> IO[bytes]:
    """Open a package in a granted folder, or beside an index. Raises FileNotFoundError for another one, and
    RefusedError for one that lies elsewhere, behind a symbolic link.
    """
    named = _path_of(url)
    path = named.resolve()
    is_granted = any(path.is_relative_to(one.folder) for one in grants if one.is_folder)
    if not path.is_file():
        raise FileNotFoundError(path)
    if not is_granted:
        raise RefusedError(str(named), "a link that leads out of its folder")
    if not is_package(path.name.removesuffix(METADATA)):
        raise FileNotFoundError(path)
    return path.open("rb")


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
