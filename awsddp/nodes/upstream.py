"""Fetches for nodes what the user's configuration names, and what index pages name at public addresses.

A grant is a URL that the configuration or a table of ours gives. Its login is sent below its own path alone.
An address is checked, and then the very address that was checked is connected to.
"""

import base64
import http.client
import ipaddress
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

Kind = Literal["index", "page", "tree", "git", "file"]
_TIMEOUT_S = 30.0
_REDIRECTS = (301, 302, 303, 307, 308)
_HOPS = 6
_SIMPLE = ("simple", "+simple")
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48")))
"""IPv6 prefixes whose last four bytes are an IPv4 address (RFC 6052, RFC 8215)."""
_FILE_HOSTS = frozenset(
    {
        *("files.pythonhosted.org", "download.pytorch.org", "download-r2.pytorch.org", "github.com"),
        *("objects.githubusercontent.com", "release-assets.githubusercontent.com", "codeload.github.com"),
        *("conda.anaconda.org", "repo.anaconda.com", "binstar-cio-packages-prod.s3.amazonaws.com"),
    }
)
"""Where the public indexes, channels and releases keep their files: reached through a proxy, too."""


class RefusedError(OSError):
    """A URL is not fetched for a node: where, and why, which environment.explain knows."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}: {why}")


@dataclass(frozen=True)
class Grant:
    """A URL, without a login, that nodes may ask for, and the `login` (USER:PASSWORD) of requests below it.

    Of an "index" pages, of a "page" itself, of a "tree" all below it, of a "git" repository what a clone
    reads, of a "file" itself.
    """

    kind: Kind
    url: str
    login: str = ""

    def covers(self, url: str) -> bool:
        """Return whether a URL may have the login, and a private address."""
        return is_below(self._scope, url) or (self.kind == "git" and is_below(f"{self.url}.git", url))

    @property
    def is_folder(self) -> bool:
        """Whether it is one of this machine."""
        return self.url.startswith("file:")

    @property
    def folder(self) -> Path:
        """The folder of this machine in which the files are, which pages may link to."""
        return Path(unquote(urlsplit(self._scope).path)).resolve()

    @property
    def _scope(self) -> str:
        """The URL itself; of an index the folder of its `simple`, beside which the files are."""
        above, _, last = self.url.rstrip("/").rpartition("/")
        is_file = self.kind == "page" and not self.url.endswith("/")
        return above if is_file or (self.kind == "index" and last in _SIMPLE) else self.url


@dataclass(frozen=True)
class Asked:
    """A request of a node; `git` has the only login that one of a repository may have."""

    method: str
    headers: Mapping[str, str]
    data: Any = None
    git: Grant | None = None


class Upstream:
    """The internet as this machine reaches it: through `proxies`, and with more certificates, `ca`."""

    def __init__(self, grants: list[Grant], *, ca: str, proxies: Mapping[str, str]) -> None:
        self.grants = grants
        self.moved: dict[Grant, str] = {}
        self._proxies = proxies
        context = ssl.create_default_context(cadata=ca or None)
        context.load_default_certs()
        self._opener = urllib.request.OpenerDirector()  # no redirects, no file: or ftp:
        for handler in (urllib.request.ProxyHandler(dict(proxies)), _Handler(context)):
            self._opener.add_handler(handler)

    def is_granted(self, url: str) -> bool:
        """Return whether the configuration names a URL, or a path above it."""
        return any(grant.covers(url) for grant in self.grants)

    def fetch(self, url: str, asked: Asked, *, is_named: bool) -> tuple[Any, str]:
        """Return the response behind all redirects, and its URL.

        `is_named`: the configuration names its host, which then may be private. Raises RefusedError, OSError,
        HTTPException, ValueError.
        """
        for _ in range(_HOPS):
            url = without_login(url)
            headers = {**asked.headers, **self._login(url, asked.git)}
            request = urllib.request.Request(url, asked.data, headers, method=asked.method)
            response = self._open(request, is_named)
            location = response.headers["Location"] if response.status in _REDIRECTS else None
            if not location or asked.data is not None:
                return response, url
            response.close()
            further = urljoin(url, location)
            is_named = self.is_granted(further) or (is_named and origin(further) == origin(url))
            url = further
        raise RefusedError(place_of(url), "too many redirects")

    def _login(self, url: str, git: Grant | None) -> dict[str, str]:
        """Return the header with the login of the longest path that was given one."""
        givers = [git] if git else [one for one in self.grants if one.kind != "git"]
        fits = [one for one in givers if one.login and one.covers(url)]
        if not fits:
            return {}
        login = unquote(max(fits, key=lambda one: len(one.url)).login)
        return {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}

    def _open(self, request: urllib.request.Request, is_named: bool) -> Any:
        parts = urlsplit(request.full_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RefusedError(place_of(request.full_url), "not a URL of http or https")
        is_proxied = bool(self._proxies.get(parts.scheme)) and not urllib.request.proxy_bypass(parts.netloc)
        if is_proxied and not is_named and parts.hostname not in _FILE_HOSTS:
            raise RefusedError(
                place_of(request.full_url), "no configuration names it, and a proxy resolves it"
            )
        any_address = is_named or is_proxied
        setattr(request, "dial", partial(_dial, any_address=any_address))  # noqa: B010
        try:
            return self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.URLError as error:
            if isinstance(error.reason, OSError):
                raise error.reason from error
            raise


class _Handler(urllib.request.HTTPSHandler):
    """Opens http and https over connections to addresses that are checked."""

    http_request = urllib.request.AbstractHTTPHandler.do_request_

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._secure = partial(http.client.HTTPSConnection, context=context)

    def http_open(self, request: Any) -> Any:
        return self.do_open(partial(_connection, http.client.HTTPConnection, request), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(partial(_connection, self._secure, request), request)


def _connection(kind: Any, request: Any, host: str, **more: Any) -> Any:
    connection = kind(host, **more)
    connection._create_connection = request.dial
    return connection


def _dial(
    address: tuple[str, int], timeout: float, source: object = None, *, any_address: bool
) -> socket.socket:
    """Return a connection to a host, all of whose addresses are public. Raises RefusedError, OSError."""
    host, port = address
    found = [place for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not any_address and not all(is_public(str(place[0])) for place in found):
        raise RefusedError(f"{host}:{port}", "its address is not public")
    failed = OSError(f"{host} has no address")
    for place in found:
        try:
            return socket.create_connection((str(place[0]), port), timeout)
        except OSError as error:
            failed = error
    raise failed


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the internet, and holds none that is not."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None,))[-1]
        if any(ip in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner and not is_public(str(inner)):
            return False
    return ip.is_global and not ip.is_multicast


def is_below(prefix: str, url: str) -> bool:
    """Return whether a URL is another one, or lies below it."""
    if origin(prefix) != origin(url):
        return False
    upper, lower = _segments(prefix), _segments(url)
    return lower is not None and upper is not None and lower[: len(upper)] == upper


def depth_below(prefix: str, url: str) -> int:
    """Return how many names a URL has more than one above it."""
    return len(_segments(url) or ()) - len(_segments(prefix) or ())


def _segments(url: str) -> list[str] | None:
    """Return the names of a URL's path, None where a server may read another path."""
    path = urlsplit(url).path
    while path != (path := unquote(path)):
        pass
    names = [name for name in path.split("/") if name]
    is_plain = not {".", ".."} & set(names) and "\\" not in path and path.isprintable()
    return names if is_plain else None


def origin(url: str) -> str:
    """Return scheme, host and port of a URL; "" for what is none."""
    place = place_of(url)
    return f"{urlsplit(url).scheme}://{place}" if place else "file://" * url.startswith("file:///")


def place_of(url: str) -> str:
    """Return the host and the port of a URL, "" for what has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or (80 if parts.scheme == "http" else 443)
        return f"{parts.hostname}:{port}" if parts.hostname else ""
    except ValueError:  # no such port; [ without ]
        return ""


def without_login(url: str) -> str:
    """Return a URL without login and fragment. Raises ValueError."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, path=parts.path or "/", fragment=""))
