"""Lends this machine's internet to nodes while they install: an HTTP proxy behind a forward of SSH.

It serves clients that know its password, through this machine's own proxies and certificates, and reaches
only the hosts that packages come from. A node sees each index as a host below `awsddp.invalid` (RFC 6761): an
index may be a folder of this machine, its password stays here, and hosts of files that it names are allowed.
"""

import base64
import contextlib
import gzip
import http.server
import re
import secrets
import shutil
import socket
import ssl
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent import futures
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import paramiko

from awsddp.parallel import soon

_ANSWER_S = 60.0
_END_S = 5.0
_HOPS = 5
_LOOK_S = 10.0
_CHUNK = 256 * 1024
_HOST = "awsddp.invalid"
_URL = re.compile(r"https?://[^\s\"'<>#;,]+")
_LOGIN = re.compile(r"(https?://)[^/@\s\"']+@")
_HREF = re.compile(r"href=[\"']([^\"'#]+)")
_PACKAGES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".zip", ".metadata", ".html")
"""What is served of a folder of this machine."""
_FAULTS = (OSError, EOFError, ValueError, HTTPException, paramiko.SSHException)
_OWN_HEADER = re.compile(
    "(proxy-)?(connection|authorization)|host|server|date|accept-encoding|transfer-encoding|content-length",
    re.IGNORECASE,
)
"""What each of two connections says for itself."""


class _AsItIs(urllib.request.HTTPErrorProcessor):
    """Leaves redirects and refusals to the client."""

    def http_response(self, request: Any, response: Any) -> Any:
        """Return the answer."""
        return response

    https_response = http_response


class Proxy:
    """The proxy of one installation, as a context manager; all its connections end with it.

    `ca` holds certificates beside the system's; `proxy` replaces this machine's own proxies. `refused` holds
    each host that was not reached, and why.
    """

    def __init__(self, *, ca: str = "", proxy: str = "") -> None:
        self.password = secrets.token_hex(16)
        self.roots: list[str] = []
        self.hosts: set[str] = set()
        self.linked: set[str] = set()
        self.refused: dict[str, str] = {}
        self._proxies = {"http": proxy, "https": proxy} if proxy else urllib.request.getproxies()
        context = ssl.create_default_context(cadata=ca or None)
        context.load_default_certs()
        handlers = urllib.request.ProxyHandler(self._proxies), urllib.request.HTTPSHandler(context=context)
        self.open = partial(urllib.request.build_opener(*handlers, _AsItIs).open, timeout=_ANSWER_S)
        self._is_over = False
        self._ends: set[Any] = set()
        self._serving: list[futures.Future[None]] = []

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for end in list(self._ends):
            _close(end)
        futures.wait(self._serving, _END_S)

    def url(self, port: int) -> str:
        """Return how programs of a node find this proxy behind a port of the node."""
        return f"http://awsddp:{self.password}@127.0.0.1:{port}"

    def show(self, url: str) -> str:
        """Return how a node names an index, or a folder of this machine."""
        place = urlsplit(url if "://" in url else Path(url).absolute().as_uri())
        root = f"{place.scheme}://{place.netloc}" if place.netloc else place.geturl()
        if root not in self.roots:
            self.roots.append(root)
        slash = "/" if not place.netloc and Path(unquote(place.path)).is_dir() else ""
        return f"http://{self.roots.index(root)}.{_HOST}{place.path.rstrip('/' if slash else '')}{slash}"

    def show_text(self, text: str) -> str:
        """Return a text in which no URL has a password, and allow the hosts of its URLs."""
        shown = _URL.sub(lambda url: self.show(url[0]) if _LOGIN.match(url[0]) else url[0], text)
        self.allow(_URL.findall(shown))
        return shown

    def hide(self, text: str) -> str:
        """Return what a program of a node said, with the real names of indexes."""
        for number, root in enumerate(self.roots):
            name = "file://" if root.startswith("file:") else _LOGIN.sub(r"\1", root)
            text = text.replace(f"http://{number}.{_HOST}", name)
        return text

    def allow(self, urls: Iterable[str]) -> None:
        """Allow the hosts of URLs, and those to which they redirect."""
        for url in set(urls):
            for _ in range(_HOPS):
                host = urlsplit(url).hostname or ""
                if host.endswith(_HOST):
                    break
                self.hosts.add(host)
                look = urllib.request.Request(url, method="HEAD")
                with contextlib.suppress(*_FAULTS), self.open(look, timeout=_LOOK_S) as answer:
                    url = urljoin(url, answer.headers.get("Location", url))
                if urlsplit(url).hostname == host:
                    break

    def page(self, text: str, root: str) -> str:
        """Return a page of an index as a node gets it, and allow the hosts of the files that it names."""
        if root:
            text = text.replace(_LOGIN.sub(r"\1", root) + "/", self.show(root + "/"))
        hosts = {urlsplit(url).hostname: url for url in _URL.findall(text)}
        self.allow(url for host, url in hosts.items() if host not in self.hosts)
        return text

    def dial(self, host: str, port: int) -> socket.socket:
        """Return a socket to a host, through this machine's own proxy where there is one. Raises OSError."""
        proxy = "" if urllib.request.proxy_bypass(host) else self._proxies.get("https", "")
        place = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        way = HTTPConnection(place.hostname or host, place.port or (80 if proxy else port), _ANSWER_S)
        if proxy:
            words = {"Proxy-Authorization": login(place.netloc)} if "@" in place.netloc else {}
            way.set_tunnel(host, port, words)
        way.connect()
        way.sock.settimeout(None)
        return way.sock

    def serve(self, channel: paramiko.Channel) -> None:
        """Serve the client behind a channel, on a thread of its own."""
        self._serving.append(soon(self._serve, channel))

    def _serve(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(*_FAULTS), self.closing(channel):
            _Client(self, channel)

    @contextlib.contextmanager
    def closing(self, end: Any) -> Iterator[None]:
        """Close a channel or a socket after its use, at the latest with the proxy."""
        self._ends.add(end)
        try:
            if self._is_over:
                raise EOFError
            yield
        finally:
            _close(end)
            self._ends.discard(end)


class _Client(http.server.SimpleHTTPRequestHandler):
    """The requests of one client."""

    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: Proxy, channel: Any) -> None:
        self.proxy = proxy
        nobody: Any = None
        super().__init__(channel, nobody, nobody, directory="/")

    def parse_request(self) -> bool:
        """Return whether a request came from a client that knows the password."""
        if not super().parse_request():
            return False
        given = self.headers.get("Proxy-Authorization", "").encode()
        if secrets.compare_digest(given, login(f"awsddp:{self.proxy.password}@").encode()):
            return True
        self.send_response(407)
        self.send_header("Proxy-Authenticate", 'Basic realm="awsddp"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def do_CONNECT(self) -> None:
        """Connect the client to a host."""
        host, _, port = self.path.rpartition(":")
        self.close_connection = True
        if self._refuses(host):
            return
        try:
            upstream = self.proxy.dial(host, int(port))
        except _FAULTS as error:
            self._fail(502, host, error)
            return
        with self.proxy.closing(upstream):
            self.send_response_only(200, "Connection established")
            self.end_headers()
            back = soon(_copy, upstream, self.connection)
            _copy(self.connection, upstream)
            back.result()

    def do_GET(self) -> None:
        """Answer with what an index, a host or a folder of this machine has."""
        url = urlsplit(self.path)
        number, _, index = (url.hostname or "").partition(".")
        root = self.proxy.roots[int(number)] if index == _HOST else ""
        if root.startswith("file:"):
            self.path = url.path
            self._show_folder(unquote(urlsplit(root).path))
        elif root:
            self._fetch(root + self.path.partition(index)[2], root)
        elif not self._refuses(url.hostname or "" if url.scheme == "http" else self.path):
            self._fetch(self.path)

    do_HEAD = do_POST = do_GET  # git posts

    def _show_folder(self, root: str) -> None:
        path = Path(self.translate_path(self.path))
        page = path / "index.html" if path.is_dir() else path
        is_inside = path.is_relative_to(root)
        if is_inside and page.name.endswith(".html") and page.is_file():
            for link in _HREF.findall(page.read_text(errors="replace")):
                self.proxy.linked.add(self.translate_path(urljoin(self.path, link)))
        is_named = is_inside or str(path).removesuffix(".metadata") in self.proxy.linked
        if is_named and (path.is_dir() or path.name.endswith(_PACKAGES)):
            getattr(super(), f"do_{self.command}")()
        else:
            self.send_error(404)

    def _fetch(self, url: str, root: str = "") -> None:
        """Pass a request on, to an index with its login, and pass the answer back."""
        headers = {name: value for name, value in self.headers.items() if not _OWN_HEADER.fullmatch(name)}
        if _LOGIN.match(url):
            headers["Authorization"] = login(urlsplit(url).netloc)
        posted = int(self.headers.get("Content-Length", 0)) if self.command == "POST" else None
        data = None if posted is None else self.rfile.read(posted)
        url = _LOGIN.sub(r"\1", url)
        try:
            answer = self.proxy.open(urllib.request.Request(url, data, headers, method=self.command))
        except _FAULTS as error:
            self._fail(502, urlsplit(url).hostname or "", error)
            return
        with answer:
            self._pass_back(answer, root)

    def _pass_back(self, answer: Any, root: str) -> None:
        page: bytes | None = None
        length = answer.headers["Content-Length"]
        self.send_response(answer.status, answer.reason)
        for name, value in answer.headers.items():
            if not _OWN_HEADER.fullmatch(name):
                self.send_header(name, self.proxy.page(value, root) if name.lower() == "location" else value)
        if root and self.command == "GET" and re.search("html|json", answer.headers.get("Content-Type", "")):
            text = answer.read().decode(errors="surrogateescape")
            page = self.proxy.page(text, root).encode(errors="surrogateescape")
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                page = gzip.compress(page, 1)
                self.send_header("Content-Encoding", "gzip")
            length = len(page)
        else:
            self.send_header("Connection", "close")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if page is not None:
            self.wfile.write(page)
        elif self.command != "HEAD":
            shutil.copyfileobj(answer, self.wfile, _CHUNK)

    def _refuses(self, host: str) -> bool:
        if host not in self.proxy.hosts:
            self._fail(403, host, "no packages come from there")
        return host not in self.proxy.hosts

    def _fail(self, code: int, host: str, why: object) -> None:
        reason = " ".join(str(why).split())
        if len(self.proxy.refused) < _HOPS:
            self.proxy.refused[host] = reason
        self.send_error(code, f"awsddp: {host}: {reason}")

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def login(netloc: str) -> str:
    """Return the header of the login in a URL's USER:PASSWORD@HOST."""
    words = unquote(netloc.rpartition("@")[0])
    return "Basic " + base64.b64encode(words.encode()).decode()


def _copy(source: Any, target: Any) -> None:
    """Copy what comes from a channel or socket to another until it ends, and tell the other of the end."""
    with contextlib.suppress(*_FAULTS):
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _close(end: Any) -> None:
    """Close a channel or a socket, and wake who reads it."""
    with contextlib.suppress(*_FAULTS):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
