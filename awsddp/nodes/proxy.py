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
from collections.abc import Callable, Iterable
from concurrent import futures
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import paramiko

from awsddp.parallel import soon
from awsddp.plan.requirements import canonical

T = TypeVar("T")
_ANSWER_S = 30.0
_PATIENCE_S = 60
"""How long programs of a node wait: longer than this machine does."""
_LOOK_S = 10.0
_END_S = 5.0
_HOPS = 5
_CHUNK = 256 * 1024
_HOST = "awsddp.invalid"
_URL = re.compile(r"https?://[^\s\"'<>#;,\\]+")
_LOGIN = re.compile(r"(https?://)[^/@\s]+@")
_PACKAGES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".zip", ".metadata", ".html")
"""What is served of a folder of this machine."""
_FAULTS = (OSError, EOFError, ValueError, HTTPException, paramiko.SSHException)
_OWN_HEADER = re.compile(
    "(proxy-)?(connection|authorization)|host|server|date|location|accept-encoding|transfer-encoding|content-length",
    re.IGNORECASE,
)
"""What each of two connections says for itself."""


class _AsItIs(urllib.request.HTTPErrorProcessor):
    def http_response(self, request: Any, response: Any) -> Any:
        """Leave redirects and refusals to the client."""
        return response

    https_response = http_response


class Proxy:
    """The proxy of one installation, as a context manager; its connections end with it.

    `everything` that nodes fetch comes through it, or only what `show` renames. `ca` holds certificates
    beside the system's; `proxy` replaces this machine's own proxies.
    """

    def __init__(self, *, everything: bool, ca: str, proxy: str) -> None:
        self.everything = everything
        self.login = f"awsddp:{secrets.token_hex(16)}@"
        self.roots: list[str] = []
        self.places: set[str] = set()
        self.refused: set[str] = set()
        own = everything and proxy
        self._proxies = {"http": proxy, "https": proxy} if own else urllib.request.getproxies()
        context = ssl.create_default_context(cadata=ca or None)
        context.load_default_certs()
        handlers = urllib.request.ProxyHandler(self._proxies), urllib.request.HTTPSHandler(context=context)
        self.open = partial(urllib.request.build_opener(*handlers, _AsItIs).open, timeout=_ANSWER_S)
        self._served: dict[paramiko.Channel, futures.Future[None]] = {}

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for channel in list(self._served):
            channel.close()
        futures.wait(self._served.values(), 0 if error else _END_S)

    def environ(self, port: int, urls: Iterable[str]) -> dict[str, str]:
        """Return the variables by which programs of a node come here through its `port`."""
        hosts = {urlsplit(url).hostname or "" for url in urls}
        around = [] if self.everything else sorted(hosts - set(self.names))
        found = {"http_proxy": f"http://{self.login}127.0.0.1:{port}", "no_proxy": ",".join(around)}
        if self.everything:
            found["https_proxy"] = found["http_proxy"]
        upper = {name.upper(): value for name, value in found.items()}
        patience = dict.fromkeys(("PIP_DEFAULT_TIMEOUT", "UV_HTTP_TIMEOUT"), str(_PATIENCE_S))
        return found | upper | patience | {"GIT_HTTP_PROXY_AUTHMETHOD": "basic"}

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts that `show` made."""
        return tuple(f"{number}.{_HOST}" for number in range(len(self.roots)))

    def show(self, place: str) -> str:
        """Return how a node names a URL or a folder: as a host of this proxy, or as it is."""
        if not (is_here(place) or _LOGIN.match(place) or (self.everything and _URL.fullmatch(place))):
            return place
        if _URL.match(place) and not _place(place):  # whoever installs says what is wrong with it
            return place
        url = urlsplit(place if "://" in place else Path(place).resolve().as_uri())
        path = url.path if url.netloc or not Path(unquote(url.path)).is_dir() else url.path.rstrip("/") + "/"
        root = f"{url.scheme}://{url.netloc}{'' if url.netloc else path}"
        if root not in self.roots:
            self.roots.append(root)
            self.places.update([_place(root)] if url.netloc else [])
        return f"http://{self.roots.index(root)}.{_HOST}{path}" + (f"?{url.query}" if url.query else "")

    def show_logins(self, text: str) -> str:
        """Return a text in which no URL has a login."""
        return _URL.sub(lambda url: self.show(url[0]) if _LOGIN.match(url[0]) else url[0], text)

    def translate(self, text: str) -> str:
        """Return what a node's program said, with the real names of indexes; and the refused hosts."""
        for name, root in zip(self.names, self.roots, strict=True):
            real = "file://" if root.startswith("file:") else _LOGIN.sub(r"\1", root)
            text = text.replace(f"http://{name}", real)
        return "\n".join([text, *sorted(self.refused)])

    def allow(self, url: str, *, hops: int = _HOPS) -> None:
        """Allow the host of a URL, and those to which it redirects."""
        if (urlsplit(url).hostname or "").endswith(_HOST):
            return
        self.places.add(_place(url))
        look = urllib.request.Request(url, method="HEAD")
        with contextlib.suppress(*_FAULTS), self.open(look, timeout=_LOOK_S) as answer:
            further = urljoin(url, answer.headers.get("Location", url))
            if further != url and hops:
                self.allow(further, hops=hops - 1)

    def page(self, text: str, root: str) -> str:
        """Return a page of an index as a node gets it, and allow the hosts of the files that it names."""
        if root:
            text = text.replace(_LOGIN.sub(r"\1", root) + "/", self.show(root + "/"))
        for place, url in {_place(url): url for url in urls_in(text)}.items():
            if place not in self.places:
                self.allow(url)
        return text

    def dial(self, host: str, port: int) -> socket.socket:
        """Return a socket to a host, through this machine's own proxy where there is one. Raises OSError."""
        proxy = "" if urllib.request.proxy_bypass(host) else self._proxies.get("https", "")
        place = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        way = HTTPConnection(place.hostname or host, place.port or (80 if proxy else port), _ANSWER_S)
        if proxy:
            way.set_tunnel(host, port, _authorization("Proxy-Authorization", place.netloc))
        way.connect()
        way.sock.settimeout(None)
        return way.sock

    def serve(self, channel: paramiko.Channel) -> None:
        """Serve the client behind a channel, on a thread of its own."""
        self._served[channel] = soon(self._serve, channel)

    def _serve(self, channel: paramiko.Channel) -> None:
        with contextlib.closing(channel):
            _Client(self, channel)


class _Client(http.server.SimpleHTTPRequestHandler):
    """The requests of one client."""

    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: Proxy, channel: Any) -> None:
        self.proxy = proxy
        nobody: Any = None
        super().__init__(channel, nobody, nobody, directory="/")

    def parse_request(self) -> bool:
        """Return whether a request came, from a client that knows the password."""
        if not super().parse_request():
            return False
        wanted = _authorization("", self.proxy.login)[""]
        if secrets.compare_digest(wanted.encode(), self.headers.get("Proxy-Authorization", "").encode()):
            return True
        self.send_error(407)
        return False

    def do_CONNECT(self) -> None:
        """Connect the client to a host."""
        place = _place(f"https://{self.path}")
        host, _, port = place.rpartition(":")
        upstream = self._reach(place, lambda: self.proxy.dial(host, int(port)))
        if upstream is None:
            return
        self.close_connection = True
        with upstream:
            self.send_response_only(200, "Connection established")
            self.end_headers()
            back = soon(_copy, upstream, self.connection)
            _copy(self.connection, upstream)
            with contextlib.suppress(OSError):
                upstream.shutdown(socket.SHUT_RDWR)
            back.result()

    def do_GET(self) -> None:
        """Answer with what an index, a host or a folder of this machine has."""
        url = urlsplit(self.path)
        host = url.hostname or ""
        root = dict(zip(self.proxy.names, self.proxy.roots, strict=True)).get(host, "")
        if root.startswith("file:"):
            self._show_folder(url.path, Path(unquote(urlsplit(root).path)))
        elif root:
            self._fetch(root + self.path.partition(host)[2], root)
        else:
            self._fetch(self.path if url.scheme == "http" else "", "")

    do_HEAD = do_POST = do_GET  # git posts

    def _show_folder(self, path: str, root: Path) -> None:
        """Answer with what a folder holds, or as an index (PEP 503) names beside it."""
        self.path, file = path, Path(self.translate_path(path))
        is_inside = file.is_relative_to(root) or _names(root, file)
        if is_inside and (file.is_dir() or file.name.endswith(_PACKAGES)):
            getattr(super(), f"do_{self.command}")()
        else:
            self.send_error(404)

    def _fetch(self, url: str, root: str) -> None:
        """Pass a request on, to an index with its login, and pass the answer back."""
        headers = _passed_on(self.headers) | _authorization("Authorization", urlsplit(url).netloc)
        size = int(self.headers.get("Content-Length", 0))
        data = self.rfile.read(size) if self.command == "POST" else None
        url = _LOGIN.sub(r"\1", url)
        ask = partial(urllib.request.Request, method=self.command)
        if answer := self._reach(_place(url), lambda: self.proxy.open(ask(url, data, headers))):
            with answer:
                self._pass_back(answer, root)

    def _pass_back(self, answer: Any, root: str) -> None:
        page: bytes | None = None
        headers = _passed_on(answer.headers)
        length = answer.headers["Content-Length"]
        if location := answer.headers["Location"]:
            headers["Location"] = self.proxy.page(location, root)
        if root and self.command == "GET" and re.search("html|json", headers.get("Content-Type", "")):
            text = answer.read().decode(errors="surrogateescape")
            page = self.proxy.page(text, root).encode(errors="surrogateescape")
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                page, headers["Content-Encoding"] = gzip.compress(page, 1), "gzip"
            length = len(page)
        else:
            headers["Connection"] = "close"
        self.send_response(answer.status, answer.reason)
        for name, value in (headers | ({} if length is None else {"Content-Length": str(length)})).items():
            self.send_header(name, value)
        self.end_headers()
        if page is not None:
            self.wfile.write(page)
        elif self.command != "HEAD":
            shutil.copyfileobj(answer, self.wfile, _CHUNK)

    def _reach(self, place: str, opened: Callable[[], T]) -> T | None:
        """Return what is opened at a place that packages come from; else answer why there is nothing."""
        code, why = 403, "no packages come from there"
        if place in self.proxy.places:
            try:
                return opened()
            except _FAULTS as error:
                code, why = 504, f"not reached from here: {' '.join(str(error).split())}"
        if len(self.proxy.refused) < _HOPS:
            self.proxy.refused.add(f"{place}: {why}")
        self.send_error(code, f"awsddp: {place}: {why}")
        return None

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def is_here(place: str) -> bool:
    """Tell whether an index or a place of links is a folder or a file of this machine."""
    path = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
    return bool(place) and path.exists()


def urls_in(text: str) -> list[str]:
    """Return the URLs of a text that name a host."""
    return list(filter(_place, _URL.findall(text)))


def _place(url: str) -> str:
    """Return the host and the port of a URL, "" for what has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or (80 if parts.scheme == "http" else 443)
        return f"{parts.hostname}:{port}" if parts.hostname else ""
    except ValueError:  # no such port; [ without ]
        return ""


def _names(root: Path, file: Path) -> bool:
    """Tell whether an index names a file that lies beside it, by the page of its project."""
    projects = {file.name.partition("-")[0], file.name.rpartition("-")[0]}  # of a wheel, of a source
    pages = [root / canonical(name) / "index.html" for name in projects]
    return any(page.is_file() and file.name.removesuffix(".metadata") in page.read_text() for page in pages)


def _passed_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if not _OWN_HEADER.fullmatch(name)}


def _authorization(header: str, netloc: str) -> dict[str, str]:
    """Return the header for the login of USER:PASSWORD@HOST, none where there is no login."""
    words, at, _ = netloc.rpartition("@")
    return {header: "Basic " + base64.b64encode(unquote(words).encode()).decode()} if at else {}


def _copy(source: Any, target: Any) -> None:
    """Copy what comes from a channel or a socket to another until one of them ends, and end the other."""
    with contextlib.suppress(*_FAULTS):
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
