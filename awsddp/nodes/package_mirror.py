"""Serves packages to nodes while they install: a mirror behind a port forward of SSH.

A node gets what the user's configuration names, and the files that those pages link to (catalog.py). It names
no address, and its password is for one installation. Programs find the mirror as their HTTP proxy, and are
refused whatever else they ask for.
"""

import base64
import contextlib
import gzip
import http.server
import os
import secrets
import shutil
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent import futures
from functools import partial
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import paramiko

from awsddp.nodes.catalog import FILES, Catalog
from awsddp.nodes.index_pages import is_package, open_folder, open_package, write_links
from awsddp.nodes.upstream import (
    Grant,
    NodeRequest,
    RefusedError,
    Upstream,
    depth_below,
    host_port,
    is_below,
    origin,
    without_login,
)
from awsddp.util.parallel import soon

_PATIENCE_S = 60
"""How long programs of a node wait: longer than this machine does."""
_IDLE_S = 120.0
_END_S = 5.0
_CHUNK = 64 * 1024
_HEAD_BYTES = 64 * 1024
_BODY_BYTES = 16 * 2**20
_CONNECTIONS = 64
"""How many connections of a node are served at once."""
_NOTES = 5
_NAMED = 200
"""How much of a URL an error holds."""
_GIT = {"GET": "/info/refs?service=git-upload-pack", "POST": "/git-upload-pack"}
_REQUEST_HEADERS = (
    *("Accept", "Accept-Encoding", "User-Agent", "Range", "If-Range", "If-None-Match", "If-Modified-Since"),
    "Git-Protocol",
)
_BODY_HEADERS = ("Content-Type", "Content-Encoding", "Content-Length")
_RESPONSE_HEADERS = (
    *("Content-Type", "Content-Encoding", "Content-Length", "Content-Range", "Accept-Ranges"),
    *("Cache-Control", "ETag", "Last-Modified", "Expires", "Retry-After"),
)
_PAGE_HEADERS = {"Accept": "application/vnd.pypi.simple.v1+html, text/html;q=0.9, */*;q=0.1"}
_FAULTS = (OSError, EOFError, ValueError, HTTPException, paramiko.SSHException)


class Mirror:
    """The mirror of one installation, as a context manager; its connections end with it.

    `ca` holds certificates besides the system's; `proxy` replaces this machine's own proxies.
    """

    def __init__(self, catalog: Catalog, *, ca: str, proxy: str) -> None:
        self.catalog = catalog
        self.login = f"awsddp:{secrets.token_hex(16)}"
        self.refused: set[str] = set()
        own = catalog.everything and proxy
        proxies = {"http": proxy, "https": proxy} if own else urllib.request.getproxies()
        self.upstream = Upstream(catalog.grants, ca=ca, proxies=proxies)
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
        direct = [] if self.catalog.everything else sorted(hosts - set(self.catalog.names))
        variables = {"http_proxy": f"http://{self.login}@127.0.0.1:{port}", "no_proxy": ",".join(direct)}
        if self.catalog.everything:
            variables["https_proxy"] = variables["http_proxy"]
        upper = {name.upper(): value for name, value in variables.items()}
        timeouts = dict.fromkeys(("PIP_DEFAULT_TIMEOUT", "UV_HTTP_TIMEOUT"), str(_PATIENCE_S))
        own = {"GIT_HTTP_PROXY_AUTHMETHOD": "basic", "UV_CONCURRENT_DOWNLOADS": "16"}
        return variables | upper | timeouts | own

    def translate(self, text: str) -> str:
        """Return what a node's program said, with the real names of indexes; and what was refused."""
        return "\n".join([self.catalog.real_names(text), *sorted(self.refused)])

    def open_page(self, grant: Grant, url: str) -> tuple[Any, str, int]:
        """Return a page of HTML, its URL, and the status that its host gave. Raises what `fetch` does."""
        if grant.is_folder:
            return open_folder(grant, url), url, 200
        page, base = self.upstream.fetch(url, NodeRequest("GET", _PAGE_HEADERS), is_named=True)
        if page.status == 200 and "html" not in page.headers.get("Content-Type", ""):
            page.close()
            raise RefusedError(url, "its page is not HTML")
        is_zipped = page.headers.get("Content-Encoding") == "gzip"
        return gzip.GzipFile(fileobj=page) if is_zipped else page, base, page.status

    def show_link(self, grant: Grant, url: str) -> str:
        """Return how a node names a file that a granted page links to, "" for what is no package."""
        url, _, fragment = url.partition("#")
        scheme = urlsplit(url).scheme
        is_fetched = scheme in ("http", "https") or (scheme == "file" and grant.is_folder)
        if not is_fetched or not is_package(unquote(urlsplit(url).path)):
            return ""
        url = without_login(url)
        is_named = origin(url) == origin(grant.url) or self.upstream.is_granted(url)
        return self.catalog.link(url, is_named=is_named) + (f"#{fragment}" if fragment else "")

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
        expected = "Basic " + base64.b64encode(self.mirror.login.encode()).decode()
        if secrets.compare_digest(expected.encode(), self.headers.get("Proxy-Authorization", "").encode()):
            return True
        self.send_error(407)
        return False

    def do_CONNECT(self) -> None:
        """Refuse: no program of a node gets a connection of its own."""
        self._refuse(RefusedError(host_port(f"https://{self.path}"), "no packages come from there"))

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
        real = self.mirror.catalog.origins.get(host)
        if host == FILES and self.command != "POST":
            url, is_named = self.mirror.catalog.read_link(parts.path)
            is_granted = origin(url) in {origin(grant.url) for grant in self.mirror.catalog.grants}
            self._send_file(url, is_named=is_named and is_granted)
        elif real is None:
            raise RefusedError(host_port(self.path), "no packages come from there")
        else:
            self._send(real + parts.path, f"?{parts.query}" if parts.query else "")

    def _send(self, url: str, query: str) -> None:
        """Answer for a URL by the grant that has it."""
        for grant in self.mirror.catalog.grants:
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
        request = NodeRequest(self.command, self._headers(), data, grant)
        response, final_url = upstream.fetch(base + suffix, request, is_named=is_named)
        if self.command == "GET" and final_url.endswith(suffix):
            upstream.moved[grant] = final_url.removesuffix(suffix)
        self._pass_back(response)

    def _body(self, size: int) -> Iterator[bytes]:
        while size:
            data = self.rfile.read(min(size, _CHUNK))
            if not data:
                raise ConnectionError("the request was cut short")
            size -= len(data)
            yield data

    def _headers(self) -> dict[str, str]:
        names = (*_REQUEST_HEADERS, *_BODY_HEADERS) if self.command == "POST" else _REQUEST_HEADERS
        return {name: self.headers[name] for name in names if name in self.headers}

    def _send_file(self, url: str, *, is_named: bool) -> None:
        """Answer with a file of a folder or of a host."""
        if url.startswith("file:"):
            with open_package(self.mirror.catalog.grants, url) as stream:
                size = os.fstat(stream.fileno()).st_size
                self._begin(200, {"Content-Type": "application/octet-stream", "Content-Length": str(size)})
                self._copy(stream)
        else:
            request = NodeRequest(self.command, self._headers())
            self._pass_back(self.mirror.upstream.fetch(url, request, is_named=is_named)[0])

    def _pass_back(self, response: Any) -> None:
        """Pass a file or an answer for git on, of a failure its number alone."""
        with response:
            if response.status not in (200, 206, 304):
                self.send_error(response.status)
                return
            headers = {name: response.headers[name] for name in _RESPONSE_HEADERS if name in response.headers}
            self._begin(response.status, headers | {"Connection": "close"})
            self._copy(response)

    def _send_page(self, grant: Grant, url: str) -> None:
        """Answer with the links of a page that lead to packages."""
        page, base, status = self.mirror.open_page(grant, url)
        with page, tempfile.TemporaryFile() as links:
            if status != 200:
                self.send_error(status)
                return
            write_links(links, page, base, partial(self.mirror.show_link, grant))
            size = links.tell()
            links.seek(0)
            headers = {"Content-Type": "text/html; charset=utf-8", "Content-Encoding": "gzip"}
            self._begin(200, headers | {"Content-Length": str(size)})
            self._copy(links)

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
        status, reason = 504, f"{self.path[:_NAMED]}: not reached from here: {' '.join(str(error).split())}"
        if isinstance(error, RefusedError):
            status, reason = 403, str(error)
        if len(self.mirror.refused) < _NOTES:
            self.mirror.refused.add(self.mirror.catalog.real_names(reason))
        self.send_error(status, f"awsddp: {reason}".encode("ascii", "replace").decode())

    def log_message(self, *args: object) -> None:
        """Say nothing."""
