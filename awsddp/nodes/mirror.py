"""Serves packages to nodes while they install: a mirror behind a port forward of SSH.

A node sees the host of each index, repository and channel under a name of our own below `awsddp.invalid`
(RFC 6761), and each file that an index page names as a link that this machine has signed. It gets what the
user's configuration names and what those pages link to; it names no address, and its password is for one
installation. Programs find the mirror as their HTTP proxy: whatever else they ask for is refused by its name.
"""

import base64
import contextlib
import gzip
import hashlib
import hmac
import http.server
import io
import json
import os
import re
import secrets
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from functools import partial
from html import escape
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import paramiko

from awsddp.nodes.upstream import (
    Asked,
    Grant,
    Kind,
    RefusedError,
    Upstream,
    depth_below,
    is_below,
    origin,
    place_of,
    without_login,
)
from awsddp.parallel import soon

_PATIENCE_S = 60
"""How long programs of a node wait: longer than this machine does."""
_IDLE_S = 120.0
_END_S = 5.0
_CHUNK = 64 * 1024
_HEAD_BYTES = 64 * 1024
_PAGE_BYTES = 32 * 2**20
_TAG_BYTES = 256 * 1024
_BODY_BYTES = 16 * 2**20
_CONNECTIONS = 64
"""How many connections of a node are served at once; uv opens as many as it may."""
_NOTES = 5
_NAMED = 200
"""How much of a URL is told."""
_HOST = "awsddp.invalid"
_FILES = f"files.{_HOST}"
_CONDA = "https://conda.anaconda.org"
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_URL = re.compile(r"https?://[^\s\"'<>#;,\\]+")
_SOURCE = re.compile(rf"(?P<git>git\+)?(?P<url>{_URL.pattern})")
_LOGIN = re.compile(r"(https?://)([^/@\s]+)@")
_SHOWN_FILE = re.compile(rf"http://{re.escape(_FILES)}/[0-9a-f]+/([\w-]+)/[^\s\"'<>)]*")
_CHANNEL = re.compile(r"^(\S+?)::|\[.*\bchannel=['\"]?([^,'\"\]]+)")
"""The channel of a package of an environment.yml: conda-forge::numpy, numpy[channel=conda-forge]."""
_SUFFIXES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_METADATA = ".metadata"
_KEPT = ("data-requires-python", "data-yanked", "data-core-metadata", "data-dist-info-metadata")
_GIT = {"GET": "/info/refs?service=git-upload-pack", "POST": "/git-upload-pack"}
_ASKED = (
    *("Accept", "Accept-Encoding", "User-Agent", "Range", "If-Range", "If-None-Match", "If-Modified-Since"),
    *("Content-Type", "Content-Encoding", "Content-Length", "Git-Protocol"),
)
_ANSWERED = (
    *("Content-Type", "Content-Encoding", "Content-Length", "Content-Range", "Accept-Ranges"),
    *("Cache-Control", "ETag", "Last-Modified", "Expires", "Retry-After"),
)
_FOR_PAGES = {"Accept": "application/vnd.pypi.simple.v1+html, text/html;q=0.9, */*;q=0.1"}
_FAULTS = (OSError, EOFError, ValueError, HTTPException, paramiko.SSHException)


class Mirror:
    """The mirror of one installation, as a context manager; its connections end with it.

    `everything` that nodes fetch comes through it, or only folders of this machine and what has a login.
    `ca` holds certificates besides the system's; `proxy` replaces this machine's own proxies. `key` signs
    links: with the same one a file has the same URL next time, and a node may have it in its cache.
    """

    def __init__(self, *, everything: bool, ca: str, proxy: str, key: bytes) -> None:
        self.everything = everything
        self.login = f"awsddp:{secrets.token_hex(16)}"
        self.refused: set[str] = set()
        self.origins: dict[str, str] = {}
        own = everything and proxy
        proxies = {"http": proxy, "https": proxy} if own else urllib.request.getproxies()
        self.upstream = Upstream(ca=ca, proxies=proxies)
        self._key = key
        self._served: dict[paramiko.Channel, futures.Future[None]] = {}

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        served = dict(self._served)
        for channel in served:
            channel.close()
        futures.wait(served.values(), 0 if error else _END_S)

    def environ(self, port: int, urls: Iterable[str]) -> dict[str, str]:
        """Return the variables by which programs of a node find the mirror at its `port`."""
        hosts = {urlsplit(url).hostname or "" for url in urls}
        around = [] if self.everything else sorted(hosts - set(self.names))
        found = {"http_proxy": f"http://{self.login}@127.0.0.1:{port}", "no_proxy": ",".join(around)}
        if self.everything:
            found["https_proxy"] = found["http_proxy"]
        upper = {name.upper(): value for name, value in found.items()}
        patience = dict.fromkeys(("PIP_DEFAULT_TIMEOUT", "UV_HTTP_TIMEOUT"), str(_PATIENCE_S))
        own = {"GIT_HTTP_PROXY_AUTHMETHOD": "basic", "UV_CONCURRENT_DOWNLOADS": "16"}
        return found | upper | patience | own

    @property
    def names(self) -> tuple[str, ...]:
        """The host names by which nodes know the mirror."""
        return (_FILES, *self.origins) if self.upstream.grants else ()

    def name(self, url: str) -> str:
        """Return how a node names a URL, which is granted or not."""
        of = origin(url)
        host = f"{hashlib.sha256(of.encode()).hexdigest()[:12]}.{_HOST}"
        parts = urlsplit(url)
        self.origins[host] = f"{parts.scheme}://{parts.netloc}"
        return f"http://{host}{parts.path}" + (f"?{parts.query}" if parts.query else "")

    def grant(self, kind: Kind, url: str) -> str:
        """Grant a URL, which may hold a login, and return how a node names it. Raises ValueError."""
        plain, login = without_login(url), _LOGIN.match(url)
        one = Grant(kind, plain, login[2] if login else "")
        if one not in self.upstream.grants:
            self.upstream.grants.append(one)
        return self.link(plain, is_named=True) if kind == "file" else self.name(plain)

    def show(self, place: str, kind: Kind) -> str:
        """Return how a node names a URL or a folder, which is granted: by a name of our own, or as it is."""
        if not (is_here(place) or _LOGIN.match(place) or (self.everything and _URL.fullmatch(place))):
            return place
        if _URL.match(place):
            # whoever installs says what is wrong with a malformed one
            return self.grant(kind, place) if place_of(place) else place
        path = Path(unquote(urlsplit(place).path) if place.startswith("file:") else place).resolve()
        return self.grant(kind, path.as_uri() + "/" * path.is_dir())

    def show_index(self, place: str) -> str:
        """Return how a node names an index."""
        return self.show(place, "index")

    def show_links(self, place: str) -> str:
        """Return how a node names a page, or a folder, of links."""
        return self.show(place, "page")

    def show_line(self, line: str) -> str:
        """Return a requirement as a node gets it: with the name of its URL, and its revision as it is."""

        def shown(found: re.Match[str]) -> str:
            url = found["url"]
            if not found["git"]:
                return self.show(url, "file")
            head, at, revision = url.rpartition("@")
            has_revision = bool(at) and "/" in urlsplit(head).path
            return f"git+{self.show(head if has_revision else url, 'git')}" + f"@{revision}" * has_revision

        return _SOURCE.sub(shown, line)

    def show_conda(self, text: str) -> str:
        """Return an environment.yml as a node gets it; its channels are granted."""
        try:
            document = json.loads(text)
        except ValueError:
            return text
        channels = document.get("channels", [])
        document["channels"] = [self.show_channel(one) for one in channels]
        packages = []
        for one in document["dependencies"]:
            if isinstance(one, dict):
                one = {"pip": [self.show_line(line) for line in one["pip"]]}
            elif found := _CHANNEL.search(one):
                channel = found[1] or found[2]
                one = one.replace(channel, self.show_channel(channel), 1)
            packages.append(one)
        return json.dumps(
            {key: value for key, value in document.items() if value} | {"dependencies": packages}
        )

    def show_channel(self, channel: str) -> str:
        """Return a channel as a node gets it: conda finds one without a URL by `conda_environ`."""
        if "://" not in channel and self.everything and not channel.startswith(("/", ".", "~")):
            for url in _DEFAULTS if channel == "defaults" else [f"{_CONDA}/{channel}"]:
                self.grant("tree", url)
        return self.show(channel, "tree") if _URL.match(channel) else channel

    def conda_environ(self) -> dict[str, str]:
        """Return the variables by which conda finds the channels of no URL."""
        for channel in ("conda-forge", "defaults"):
            self.show_channel(channel)
        defaults = ",".join(self.name(url) for url in _DEFAULTS)
        return {"CONDA_CHANNEL_ALIAS": self.name(_CONDA), "CONDA_DEFAULT_CHANNELS": defaults}

    def translate(self, text: str) -> str:
        """Return what a node's program said, with the real names of indexes; and what was refused."""
        return "\n".join([self.real_names(text), *sorted(self.refused)])

    def real_names(self, text: str) -> str:
        """Return a text with the real names of indexes and files."""
        text = _SHOWN_FILE.sub(lambda shown: _decode(shown[1])[1:], text)
        for host, real in self.origins.items():
            text = text.replace(f"http://{host}", real)
        return text

    def link(self, url: str, *, is_named: bool) -> str:
        """Return a link that this machine signs; `is_named`: its host may have a private address."""
        told = ("+" if is_named else "-") + url
        text = base64.urlsafe_b64encode(told.encode()).decode().rstrip("=")
        return f"http://{_FILES}/{self._sign(text)}/{text}/{urlsplit(url).path.rpartition('/')[2]}"

    def read_link(self, path: str) -> tuple[str, bool]:
        """Return the URL of a link that was signed, and whether its host is named. Raises RefusedError."""
        _, signature, text, name, *_ = [*path.split("/"), "", "", "", ""]
        if not hmac.compare_digest(signature.encode(), self._sign(text).encode()):
            raise RefusedError(_FILES, "no page has this link")
        told = _decode(text)
        return told[1:] + _METADATA * name.endswith(_METADATA), told.startswith("+")

    def write_page(self, out: IO[bytes], grant: Grant, url: str) -> int:
        """Write the links of a page, compressed, and return the status that its host gave.

        Raises RefusedError for what is no page of HTML, and what `fetch` does.
        """
        with contextlib.ExitStack() as stack:
            base, page, status = url, self._open_folder(grant, url) if grant.is_folder else None, 200
            if page is None:
                page, base = self.upstream.fetch(url, Asked("GET", _FOR_PAGES), is_named=True)
                status = page.status
            page = stack.enter_context(page)
            if status == 200:
                if not grant.is_folder and "html" not in page.headers.get("Content-Type", ""):
                    raise RefusedError(url, "its page is not HTML")
                is_zipped = not grant.is_folder and page.headers.get("Content-Encoding") == "gzip"
                text: Any = gzip.GzipFile(fileobj=page) if is_zipped else page
                with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as zipped:
                    _Links(base, partial(self._show_link, grant), zipped).read(text)
            return int(status)

    def _show_link(self, grant: Grant, url: str) -> str:
        """Return how a node names a file that a granted page links to, "" for what is no package."""
        plain, _, fragment = url.partition("#")
        is_package = unquote(urlsplit(plain).path).lower().endswith(_SUFFIXES)
        if not is_package or not origin(plain) or plain.startswith("file:") > grant.is_folder:
            return ""
        plain = without_login(plain)
        is_named = origin(plain) == origin(grant.url) or self.upstream.is_granted(plain)
        return self.link(plain, is_named=is_named) + (f"#{fragment}" if fragment else "")

    def _open_folder(self, grant: Grant, url: str) -> IO[bytes]:
        """Return the page of a folder, or the list of its files. Raises FileNotFoundError."""
        path, root = _path_of(url).resolve(), _path_of(grant.url).resolve()
        if not path.is_relative_to(root):
            raise FileNotFoundError(path)
        if path.is_dir() and not (grant.kind == "index" and (path / "index.html").is_file()):
            names = sorted(one.name for one in path.iterdir())
            return io.BytesIO("".join(f'<a href="{quote(name)}"></a>' for name in names).encode())
        return (path / "index.html" if path.is_dir() else path).open("rb")

    def open_file(self, url: str) -> IO[bytes]:
        """Open a package that a folder of this machine holds, or that its pages link to, beside it at most.

        Raises FileNotFoundError for what lies elsewhere, also behind a link.
        """
        path = _path_of(url).resolve()
        is_package = path.name.removesuffix(_METADATA).lower().endswith(_SUFFIXES)
        if (
            not is_package
            or not path.is_file()
            or not any(
                grant.is_folder and path.is_relative_to(grant.folder) for grant in self.upstream.grants
            )
        ):
            raise FileNotFoundError(path)
        return path.open("rb")

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()[:32]

    def serve(self, channel: paramiko.Channel) -> None:
        """Serve the client behind a channel, on a thread of its own; a node has a number of them."""
        node = channel.get_transport()
        if sum(one.get_transport() is node for one in list(self._served)) >= _CONNECTIONS:
            channel.close()
            return
        self._served[channel] = served = soon(self._serve, channel)
        served.add_done_callback(lambda _: self._served.pop(channel, None))

    def _serve(self, channel: paramiko.Channel) -> None:
        with contextlib.closing(channel), contextlib.suppress(*_FAULTS):
            _Client(self, channel)


class _Head:
    """The lines of a request, as many as fit into `left` bytes."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.left = stream, _HEAD_BYTES

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self.stream.readline(min(size, self.left) if size >= 0 else self.left)
        self.left -= len(line)
        if self.left <= 0:
            raise ConnectionError("the request has no end")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Client(http.server.BaseHTTPRequestHandler):
    """The requests of one client."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def __init__(self, mirror: Mirror, channel: Any) -> None:
        self.mirror = mirror
        nobody: Any = None
        super().__init__(channel, nobody, nobody)

    def handle_one_request(self) -> None:
        """Handle a request, whose head is bounded."""
        self.rfile: Any = _Head(getattr(self.rfile, "stream", self.rfile))
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Return whether a request came, from a client that knows the password."""
        if not super().parse_request():
            return False
        wanted = "Basic " + base64.b64encode(self.mirror.login.encode()).decode()
        if secrets.compare_digest(wanted.encode(), self.headers.get("Proxy-Authorization", "").encode()):
            return True
        self.send_error(407)
        return False

    def do_CONNECT(self) -> None:
        """Refuse: no program of a node gets a connection of its own."""
        self._refuse(RefusedError(place_of(f"https://{self.path}"), "no packages come from there"))

    def do_GET(self) -> None:
        """Answer with a page, a file or a repository that is granted, or linked by such a page."""
        self.is_begun = False
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body of a POST is read, no other
        try:
            self._answer()
        except _FAULTS as error:
            if self.is_begun:
                raise
            self._refuse(error)

    do_HEAD = do_POST = do_GET

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        host = parts.hostname or ""
        real = self.mirror.origins.get(host)
        if host == _FILES and self.command != "POST":
            url, is_named = self.mirror.read_link(parts.path)
            self._send_file(url, is_named)
        elif real is None:
            raise RefusedError(place_of(self.path), "no packages come from there")
        else:
            self._send(real + parts.path, f"?{parts.query}" if parts.query else "")

    def _send(self, url: str, query: str) -> None:
        """Answer for a URL by the grant that has it."""
        for grant in self.mirror.upstream.grants:
            depth = depth_below(grant.url, url) if is_below(grant.url, url) else -1
            if grant.kind == "git" and f"{url}{query}" == grant.url + _GIT.get(self.command, "!"):
                return self._send_git(grant)
            if self.command == "POST":
                continue
            if grant.kind == "page" and depth == 0:
                return self._send_page(grant, grant.url)
            if grant.kind == "index" and depth in (0, 1):
                return self._send_page(grant, url)
            if grant.kind == "tree" and depth >= 0:
                return self._send_file(url, is_named=True)
        raise RefusedError(url[:_NAMED], "only what the configuration names")

    def _send_git(self, grant: Grant) -> None:
        """Answer with what a clone reads of a repository, wherever its host has moved it."""
        upstream, suffix = self.mirror.upstream, _GIT[self.command]
        size = int(self.headers.get("Content-Length", 0))
        if "Transfer-Encoding" in self.headers or not 0 <= size <= _BODY_BYTES:
            raise RefusedError(grant.url, f"a request of more than {_BODY_BYTES} bytes")
        base = upstream.moved.get(grant, grant.url)
        data = self._body(size) if self.command == "POST" else None
        is_named = origin(base) == origin(grant.url)
        asked = Asked(self.command, self._headers(), data, grant)
        response, last = upstream.fetch(base + suffix, asked, is_named=is_named)
        if self.command == "GET" and last.endswith(suffix):
            upstream.moved[grant] = last.removesuffix(suffix)
        self._pass_back(response)

    def _body(self, size: int) -> Iterator[bytes]:
        while size:
            data = self.rfile.read(min(size, _CHUNK))
            if not data:
                raise ConnectionError("the request was cut short")
            size -= len(data)
            yield data

    def _headers(self) -> dict[str, str]:
        return {name: self.headers[name] for name in _ASKED if name in self.headers}

    def _send_file(self, url: str, is_named: bool) -> None:
        """Answer with a file of a folder or of a host."""
        if url.startswith("file:"):
            with self.mirror.open_file(url) as stream:
                size = os.fstat(stream.fileno()).st_size
                self._begin(200, {"Content-Type": "application/octet-stream", "Content-Length": str(size)})
                self._copy(stream)
        else:
            asked = Asked(self.command, self._headers())
            self._pass_back(self.mirror.upstream.fetch(url, asked, is_named=is_named)[0])

    def _pass_back(self, response: Any) -> None:
        """Pass a file or an answer for git on, of a failure its number alone."""
        with response:
            if response.status not in (200, 206, 304):
                self.send_error(response.status)
                return
            found = {name: response.headers[name] for name in _ANSWERED if name in response.headers}
            self._begin(response.status, found | {"Connection": "close"})
            self._copy(response)

    def _send_page(self, grant: Grant, url: str) -> None:
        """Answer with the links of a page that lead to packages."""
        with tempfile.TemporaryFile() as page:
            status = self.mirror.write_page(page, grant, url)
            if status != 200:
                self.send_error(status)
                return
            size = page.tell()
            page.seek(0)
            headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(size)}
            self._begin(200, headers | {"Content-Encoding": "gzip"})
            self._copy(page)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.is_begun = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, " ".join(value.split()))
        self.end_headers()

    def _copy(self, stream: IO[bytes]) -> None:
        if self.command != "HEAD":
            shutil.copyfileobj(stream, self.wfile, _CHUNK)

    def _refuse(self, error: Exception) -> None:
        """Answer why there is nothing, and note it for the user."""
        if isinstance(error, FileNotFoundError):
            self.send_error(404)
            return
        code, words = 504, f"{self.path[:_NAMED]}: not reached from here: {' '.join(str(error).split())}"
        if isinstance(error, RefusedError):
            code, words = 403, str(error)
        if len(self.mirror.refused) < _NOTES:
            self.mirror.refused.add(self.mirror.real_names(words))
        self.send_error(code, f"awsddp: {words}")

    def log_message(self, *words: object) -> None:
        """Say nothing."""


class _Links(HTMLParser):
    """Writes the links of a page that lead to packages, as `shown` names each URL ("": not at all)."""

    def __init__(self, url: str, shown: Callable[[str], str], out: Any) -> None:
        super().__init__()
        self.base, self.shown, self.out = url, shown, out

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the first URL of the page's links, or write a link."""
        values = {name: value or "" for name, value in attrs}
        with contextlib.suppress(ValueError):  # no URL
            url = urljoin(self.base, values.get("href", ""))
            if tag == "base":
                self.base = url
            elif tag == "a" and (href := self.shown(url)):
                kept = "".join(f' {name}="{escape(values[name])}"' for name in _KEPT if name in values)
                name = escape(unquote(urlsplit(url).path.rpartition("/")[2]))
                self.out.write(f'<a href="{escape(href)}"{kept}>{name}</a><br>\n'.encode())

    def read(self, stream: Any) -> None:
        """Read a page, at most _PAGE_BYTES of it. Raises ValueError."""
        size = 0
        while data := stream.read(_CHUNK):
            size += len(data)
            self.feed(data.decode(errors="replace"))
            if size > _PAGE_BYTES or len(self.rawdata) > _TAG_BYTES:
                raise ValueError(f"a page of more than {_PAGE_BYTES} bytes, or a tag of {_TAG_BYTES}")
        self.close()


def is_here(place: str) -> bool:
    """Tell whether an index or a place of links is a folder or a file of this machine."""
    path = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
    return bool(place) and path.exists()


def urls_in(text: str) -> list[str]:
    """Return the URLs of a text that name a host."""
    return list(filter(place_of, _URL.findall(text)))


def signing_key(folder: Path) -> bytes:
    """Return the key that signs links, which is kept in a folder of this machine."""
    file = folder / "mirror.key"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        file.touch(mode=0o600)
        file.write_bytes(secrets.token_bytes(32))
    return file.read_bytes()


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _decode(text: str) -> str:
    """Return the text of a link, "" for none."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return ""
