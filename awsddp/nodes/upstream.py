"""Fetch granted URLs for nodes, and URLs at public addresses that index pages link to.

A grant is a URL from the user's configuration or from a table in catalog.py. A grant's login is sent only to
URLs under the grant's path. Addresses are checked after name resolution, and connections use the checked
address.
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
"""Hosts that have the files for public indexes, channels and releases.

For https, these hosts count as configured hosts. They can therefore be reached through a proxy, or at private
addresses if a company's DNS points to a local mirror.
"""


class RefusedError(OSError):
    """A URL is not fetched for a node. `explain` in plan/environment.py matches the text of `why`."""

    def __init__(self, subject: str, why: str) -> None:
        super().__init__(f"{subject}: {why}")


@dataclass(frozen=True)
class Grant:
    """A URL (without login) that nodes can request, and the `login` (USER:PASSWORD) for URLs under it.

    `kind` limits the allowed requests. "index" allows the index's pages, "page" and "file" allow only the URL
    itself, "tree" allows all URLs under the URL, and "git" allows the requests of `git clone`.
    """

    kind: Kind
    url: str
    login: str = ""

    def covers(self, url: str) -> bool:
        """Return True if the login may be sent to a URL and the URL may have a private address."""
        return is_below(self._scope, url) or (self.kind == "git" and is_below(f"{self.url}.git", url))

    @property
    def is_folder(self) -> bool:
        """True if the URL belongs to a local path."""
        return self.url.startswith("file:")

    @property
    def folder(self) -> Path:
        """The local folder that contains the files that pages may link to."""
        return Path(unquote(urlsplit(self._scope).path)).resolve()

    @property
    def _scope(self) -> str:
        """The URL that has all granted URLs under it.

        For an index, this is the parent of `simple`, because the parent also contains the files. For a page,
        this is the page's folder.
        """
        above, _, last = self.url.rstrip("/").rpartition("/")
        is_file = self.kind == "page" and not self.url.endswith("/")
        return above if is_file or (self.kind == "index" and last in _SIMPLE) else self.url


@dataclass(frozen=True)
class NodeRequest:
    """A node's request.

    If the request is from `git clone`, `git` is the repository's grant, and only this grant's login may be
    sent.
    """

    method: str
    headers: Mapping[str, str]
    data: Any = None
    git: Grant | None = None


class Upstream:
    """Fetches URLs through `proxies`, and trusts the certificates `ca` in addition to the system's."""

    def __init__(self, grants: list[Grant], *, ca: str, proxies: Mapping[str, str]) -> None:
        self.grants = grants
        self.moved: dict[Grant, str] = {}
        self._proxies = proxies
        context = ssl.create_default_context(cadata=ca or None)
        context.load_default_certs()
        self._opener = urllib.request.OpenerDirector()  # without redirects, and without file: and ftp: URLs
        for handler in (urllib.request.ProxyHandler(dict(proxies)), _Handler(context)):
            self._opener.add_handler(handler)

    def is_granted(self, url: str) -> bool:
        """Return True if a grant covers a URL."""
        return any(grant.covers(url) for grant in self.grants)

    def fetch(self, url: str, request: NodeRequest, *, is_named: bool) -> tuple[Any, str]:
        """Follow redirects, and return the response and its URL.

        `is_named` is True if the configuration names the host, which may then have a private address. Raises
        RefusedError, OSError, HTTPException, ValueError.
        """
        for _ in range(_HOPS):
            url = strip_login(url)
            headers = {**request.headers, **self._login(url, request.git)}
            sent = urllib.request.Request(url, request.data, headers, method=request.method)
            response = self._open(sent, is_named)
            location = response.headers["Location"] if response.status in _REDIRECTS else None
            if not location or request.data is not None:
                return response, url
            response.close()
            target = urljoin(url, location)
            is_named = self.is_granted(target) or (is_named and origin(target) == origin(url))
            url = target
        raise RefusedError(host_port(url), "too many redirects")

    def _login(self, url: str, git: Grant | None) -> dict[str, str]:
        """Return a header with the login from the grant with the longest path, or {} if there is no login."""
        candidates = [git] if git else [grant for grant in self.grants if grant.kind != "git"]
        covering = [grant for grant in candidates if grant.login and grant.covers(url)]
        if not covering:
            return {}
        login = unquote(max(covering, key=lambda grant: len(grant.url)).login)
        return {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}

    def _open(self, request: urllib.request.Request, is_named: bool) -> Any:
        parts = urlsplit(request.full_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RefusedError(host_port(request.full_url), "not an http or https URL")
        is_named = is_named or (parts.scheme == "https" and parts.netloc in _FILE_HOSTS)
        is_proxied = bool(self._proxies.get(parts.scheme)) and not urllib.request.proxy_bypass(parts.netloc)
        if is_proxied and not is_named:
            raise RefusedError(
                host_port(request.full_url), "no configuration names it, and a proxy resolves it"
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
    """Opens http and https URLs over connections from the request's `dial`, which checks addresses."""

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
    """Connect to a host whose addresses are all public. Raises RefusedError, OSError."""
    host, port = address
    addresses = [str(name[0]) for *_, name in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not any_address and not all(map(is_public, addresses)):
        raise RefusedError(f"{host}:{port}", "its address is not public")
    last_error = OSError(f"{host} has no address")
    for candidate in addresses:
        try:
            return socket.create_connection((candidate, port), timeout)
        except OSError as error:
            last_error = error
    raise last_error


def is_public(address: str) -> bool:
    """Return True if an IP address, and any IPv4 address embedded in it, are public."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None,))[-1]
        if any(ip in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner and not is_public(str(inner)):
            return False
    return ip.is_global and not ip.is_multicast


def is_below(prefix: str, url: str) -> bool:
    """Return True if `url` is `prefix` or under it."""
    if origin(prefix) != origin(url):
        return False
    upper, lower = _segments(prefix), _segments(url)
    return lower is not None and upper is not None and lower[: len(upper)] == upper


def depth_below(prefix: str, url: str) -> int:
    """Return how many path segments `url` has in addition to `prefix`."""
    return len(_segments(url) or ()) - len(_segments(prefix) or ())


def _segments(url: str) -> list[str] | None:
    """Return the segments in a URL's path, or None if servers may interpret the path differently."""
    path = urlsplit(url).path
    while path != (path := unquote(path)):
        pass
    segments = [segment for segment in path.split("/") if segment]
    is_plain = not {".", ".."} & set(segments) and "\\" not in path and path.isprintable()
    return segments if is_plain else None


def origin(url: str) -> str:
    """Return the scheme, host and port of a URL, or "" if the URL is invalid."""
    host = host_port(url)
    return f"{urlsplit(url).scheme}://{host}" if host else "file://" * url.startswith("file:///")


def host_port(url: str) -> str:
    """Return the host and port of a URL, or "" if the URL has no host."""
    try:
        parts = urlsplit(url)
        port = parts.port or (80 if parts.scheme == "http" else 443)
        return f"{parts.hostname}:{port}" if parts.hostname else ""
    except ValueError:  # the port is invalid, or there is a [ without a ]
        return ""


def strip_login(url: str) -> str:
    """Return a URL without its login and fragment. Raises ValueError."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, path=parts.path or "/", fragment=""))
