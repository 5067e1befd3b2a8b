"""During an installation, serve packages to nodes through an HTTP mirror behind an SSH port forward.

Nodes can request only the URLs in the user's configuration and the files that pages at those URLs link to
(catalog.py). The mirror's password is valid for one installation. Programs on a node use the mirror as their
HTTP proxy. The mirror refuses all other requests.
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

from awsddp.nodes.catalog import FILES_HOST, Catalog
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
    strip_login,
)
from awsddp.util.parallel import run_in_thread

_PATIENCE_S = 60
"""The timeout in seconds for programs on a node. It is longer than this machine's timeouts."""
_IDLE_S = 120.0
_END_S = 5.0
_CHUNK = 64 * 1024
_HEAD_BYTES = 64 * 1024
_BODY_BYTES = 16 * 2**20
_CONNECTIONS = 64
"""The maximum number of a node's concurrent connections."""
_MOST_REASONS = 5
_URL_CHARACTERS = 200
"""The maximum length of a URL in an error message."""
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
    """The mirror for one installation, as a context manager that closes the mirror's connections on exit.

    `ca`: certificates in addition to the system's. `proxy` replaces this machine's proxies.
    """

    def __init__(self, catalog: Catalog, *, ca: str, proxy: str) -> None:
        self.catalog = catalog
        self.login = f"awsddp:{secrets.token_hex(16)}"
        self.refused: set[str] = set()
        has_proxy = catalog.everything and proxy
        proxies = {"http": proxy, "https": proxy} if has_proxy else urllib.request.getproxies()
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
        """Return the variables that make programs on a node use the mirror at the node's `port`."""
        hosts = {urlsplit(url).hostname or "" for url in urls}
        direct = [] if self.catalog.everything else sorted(hosts - set(self.catalog.host_names))
        variables = {"http_proxy": f"http://{self.login}@127.0.0.1:{port}", "no_proxy": ",".join(direct)}
        if self.catalog.everything:
            variables["https_proxy"] = variables["http_proxy"]
        uppercase = {name.upper(): value for name, value in variables.items()}
        timeouts = dict.fromkeys(("PIP_DEFAULT_TIMEOUT", "UV_HTTP_TIMEOUT"), str(_PATIENCE_S))
        options = {"GIT_HTTP_PROXY_AUTHMETHOD": "basic", "UV_CONCURRENT_DOWNLOADS": "16"}
        return variables | uppercase | timeouts | options

    def explain_output(self, text: str) -> str:
        """Return the output of a program on a node, with the original URLs, followed by the refused
        requests."""
        return "\n".join([self.catalog.restore_urls(text), *sorted(self.refused)])

    def open_page(self, grant: Grant, url: str) -> tuple[Any, str, int]:
        """Return an HTML page, its URL, and the HTTP status. Raises the same errors as `Upstream.fetch`."""
        if grant.is_folder:
            return open_folder(grant, url), url, 200
        page, base = self.upstream.fetch(url, NodeRequest("GET", _PAGE_HEADERS), is_named=True)
        if page.status == 200 and "html" not in page.headers.get("Content-Type", ""):
            page.close()
            raise RefusedError(url, "its page is not HTML")
        is_zipped = page.headers.get("Content-Encoding") == "gzip"
        return gzip.GzipFile(fileobj=page) if is_zipped else page, base, page.status

    def rewrite_link(self, grant: Grant, url: str) -> str:
        """Return the nodes' URL for a package that a granted page links to, or "" for any other file."""
        url, _, fragment = url.partition("#")
        scheme = urlsplit(url).scheme
        is_fetched = scheme in ("http", "https") or (scheme == "file" and grant.is_folder)
        if not is_fetched or not is_package(unquote(urlsplit(url).path)):
            return ""
        url = strip_login(url)
        is_named = origin(url) == origin(grant.url) or self.upstream.is_granted(url)
        return self.catalog.sign_link(url, is_named=is_named) + (f"#{fragment}" if fragment else "")

    def serve(self, channel: paramiko.Channel) -> None:
        """Serve a channel's client on a new thread; close the channel if the node has too many
        connections."""
        transport = channel.get_transport()
        if sum(served.get_transport() is transport for served in list(self._served)) >= _CONNECTIONS:
            channel.close()
            return
        self._served[channel] = ended = run_in_thread(self._serve, channel)
        ended.add_done_callback(lambda _: self._served.pop(channel, None))

    def _serve(self, channel: paramiko.Channel) -> None:
        with contextlib.closing(channel), contextlib.suppress(*_FAULTS):
            _Client(self, channel)


class _Head:
    """A stream for reading a request's head, which is limited to `remaining` bytes."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.remaining = stream, _HEAD_BYTES

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self.stream.readline(min(size, self.remaining) if size >= 0 else self.remaining)
        self.remaining -= len(line)
        if self.remaining <= 0:
            raise ConnectionError("the request has no end")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Client(http.server.BaseHTTPRequestHandler):
    """Handles all requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def __init__(self, mirror: Mirror, channel: Any) -> None:
        self.mirror = mirror
        unused: Any = None
        super().__init__(channel, unused, unused)

    def handle_one_request(self) -> None:
        """Handle a request, but read only a limited number of bytes from its head."""
        self.rfile: Any = _Head(getattr(self.rfile, "stream", self.rfile))
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Parse a request, and return True if it has the password."""
        if not super().parse_request():
            return False
        expected = "Basic " + base64.b64encode(self.mirror.login.encode()).decode()
        if secrets.compare_digest(expected.encode(), self.headers.get("Proxy-Authorization", "").encode()):
            return True
        self.send_error(407)
        return False

    def do_CONNECT(self) -> None:
        """Refuse to open a tunnel."""
        self._refuse(RefusedError(host_port(f"https://{self.path}"), "no packages come from there"))

    def do_GET(self) -> None:
        """Respond with a granted page, file or repository, or with a file that a granted page links to."""
        self.is_begun = False
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # only a POST's body is read
        try:
            self._respond()
        except _FAULTS as error:
            if self.is_begun:
                raise
            self._refuse(error)

    do_HEAD = do_POST = do_GET

    def _respond(self) -> None:
        parts = urlsplit(self.path)
        host = parts.hostname or ""
        original = self.mirror.catalog.origins.get(host)
        if host == FILES_HOST and self.command != "POST":
            url, is_named = self.mirror.catalog.verify_link(parts.path)
            is_granted = origin(url) in {origin(grant.url) for grant in self.mirror.catalog.grants}
            self._send_file(url, is_named=is_named and is_granted)
        elif original is None:
            raise RefusedError(host_port(self.path), "no packages come from there")
        else:
            self._send(original + parts.path, f"?{parts.query}" if parts.query else "")

    def _send(self, url: str, query: str) -> None:
        """Respond to a request for a URL according to the first grant that covers the URL."""
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
        raise RefusedError(url[:_URL_CHARACTERS], "only what the configuration names")

    def _send_git(self, grant: Grant) -> None:
        """Respond to a request from `git clone`, and remember the repository's redirects."""
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
        self._forward(response)

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
        """Respond with a local file or a file from a host."""
        if url.startswith("file:"):
            with open_package(self.mirror.catalog.grants, url) as stream:
                size = os.fstat(stream.fileno()).st_size
                self._begin(200, {"Content-Type": "application/octet-stream", "Content-Length": str(size)})
                self._copy(stream)
        else:
            request = NodeRequest(self.command, self._headers())
            self._forward(self.mirror.upstream.fetch(url, request, is_named=is_named)[0])

    def _forward(self, response: Any) -> None:
        """Forward a response to the node; if the response is an error, forward only its status."""
        with response:
            if response.status not in (200, 206, 304):
                self.send_error(response.status)
                return
            headers = {name: response.headers[name] for name in _RESPONSE_HEADERS if name in response.headers}
            self._begin(response.status, headers | {"Connection": "close"})
            self._copy(response)

    def _send_page(self, grant: Grant, url: str) -> None:
        """Respond with a page's links to packages."""
        page, base, status = self.mirror.open_page(grant, url)
        with page, tempfile.TemporaryFile() as links:
            if status != 200:
                self.send_error(status)
                return
            write_links(links, page, base, partial(self.mirror.rewrite_link, grant))
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
        """Respond with an error, and record the reason for the user."""
        if isinstance(error, FileNotFoundError):
            self.send_error(404)
            return
        url, why = self.path[:_URL_CHARACTERS], " ".join(str(error).split())
        status, reason = 504, f"{url}: not reached from here: {why}"
        if isinstance(error, RefusedError):
            status, reason = 403, str(error)
        if len(self.mirror.refused) < _MOST_REASONS:
            self.mirror.refused.add(self.mirror.catalog.restore_urls(reason))
        self.send_error(status, f"awsddp: {reason}".encode("ascii", "replace").decode())

    def log_message(self, *args: object) -> None:
        """Do nothing, so that no request is logged."""
