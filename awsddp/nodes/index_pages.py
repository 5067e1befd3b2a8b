"""Read index pages and local folders, and reduce them to links to packages."""

import contextlib
import gzip
import io
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from awsddp.nodes.catalog import METADATA_SUFFIX
from awsddp.nodes.upstream import Grant, RefusedError

PAGE_BYTES = 32 * 2**20
_TAG_BYTES = 256 * 1024
_LINKS = 50_000
_CHUNK = 64 * 1024
_SUFFIXES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_LINK_ATTRIBUTES = ("data-requires-python", "data-yanked", "data-core-metadata", "data-dist-info-metadata")
"""A link's attributes that describe its file (PEP 503, 592, 658, 714)."""


def is_package(path: str) -> bool:
    """Return True if the path in a URL, or a file's path, ends with a package suffix."""
    return path.lower().endswith(_SUFFIXES)


def write_links(out: IO[bytes], page: Any, base: str, rewrite: Callable[[str], str]) -> None:
    """Write the links from an HTML page, gzipped. `rewrite` returns a link's URL for nodes, or "" to omit it.

    The memory that this needs is limited for every page. Raises ValueError for a page that is too long.
    """
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as zipped:
        links, size = _Links(base, rewrite, zipped), 0
        while data := page.read(_CHUNK):
            size += len(data)
            links.feed(data.decode(errors="replace"))
            if size > PAGE_BYTES or links.count > _LINKS or len(links.rawdata) > _TAG_BYTES:
                raise ValueError(
                    f"a page of more than {PAGE_BYTES} bytes or {_LINKS} links, or a tag without end"
                )
        links.close()


class _Links(HTMLParser):
    def __init__(self, url: str, rewrite: Callable[[str], str], out: Any) -> None:
        super().__init__()
        self.base, self.rewrite, self.out, self.count = url, rewrite, out, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Apply the page's base URL, or write a link."""
        values = {name: value or "" for name, value in attrs}
        with contextlib.suppress(ValueError):  # the URL may be invalid
            url = urljoin(self.base, values.get("href", ""))
            if tag == "base":
                self.base = url
            elif tag == "a" and (href := self.rewrite(url)):
                self.count += 1
                attributes = "".join(
                    f' {name}="{escape(values[name])}"' for name in _LINK_ATTRIBUTES if name in values
                )
                name = escape(unquote(urlsplit(url).path.rpartition("/")[2]))
                self.out.write(f'<a href="{escape(href)}"{attributes}>{name}</a><br>\n'.encode())


def open_folder(grant: Grant, url: str) -> IO[bytes]:
    """Return the index.html of a granted folder, or a page that lists its files. Raises FileNotFoundError."""
    path, root = _path_of(url).resolve(), _path_of(grant.url).resolve()
    page = path / "index.html" if path.is_dir() and grant.kind == "index" else path
    if not page.resolve().is_relative_to(root):
        raise FileNotFoundError(path)
    if page.is_file() or not path.is_dir():
        return page.open("rb")
    names = sorted(file.name for file in path.iterdir())
    return io.BytesIO("".join(f'<a href="{quote(name)}"></a>' for name in names).encode())


def open_package(grants: list[Grant], url: str) -> IO[bytes]:
    """Open a package in a granted folder or next to a granted index.

    Raises FileNotFoundError for other files, and RefusedError for a link that leads out of the folder.
    """
    requested = _path_of(url)
    path = requested.resolve()
    is_granted = any(path.is_relative_to(grant.folder) for grant in grants if grant.is_folder)
    if not path.is_file():
        raise FileNotFoundError(path)
    if not is_granted:
        raise RefusedError(str(requested), "a link that leads out of its folder")
    if not is_package(path.name.removesuffix(METADATA_SUFFIX)):
        raise FileNotFoundError(path)
    return path.open("rb")


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
