"""A node that installs packages through the mirror, and replies of an index."""

import base64
import contextlib
import dataclasses
import gzip
import html
import http.client
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from awsddp.nodes.catalog import Catalog
from awsddp.nodes.package_mirror import Mirror
from awsddp.util.parallel import run_in_thread
from tests.support.servers import Reply, page


@dataclasses.dataclass
class Node:
    """A program on a node that sends requests to a mirror."""

    mirror: Mirror
    port: int

    def request(
        self,
        url: str,
        method: str = "GET",
        body: bytes = b"",
        login: str = "",
        headers: Mapping[str, str] = {},
    ) -> tuple[int, bytes]:
        """Return the status and the content of the response."""
        login = "Basic " + base64.b64encode((login or self.mirror.login).encode()).decode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, url, body or None, {"Proxy-Authorization": login, **headers})
            response = connection.getresponse()
            content = response.read()
        is_zipped = response.headers["Content-Encoding"] == "gzip"
        return response.status, gzip.decompress(content) if is_zipped and content else content

    def links(self, url: str) -> list[str]:
        """Return the links of a page."""
        status, text = self.request(url)
        assert status == 200
        return [html.unescape(link) for link in re.findall(r'href="([^"]*)"', text.decode())]


class _Channel:
    """A connection of a node, with the interface of paramiko's channel."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def get_transport(self) -> str:
        return "node0"

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


@contextlib.contextmanager
def serve_through_mirror(catalog: Catalog, *, proxy: str = "") -> Iterator[Node]:
    """Serve a catalog to a node through a mirror."""
    with socket.create_server(("127.0.0.1", 0)) as server, Mirror(catalog, ca="", proxy=proxy) as mirror:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    channel: Any = _Channel(server.accept()[0])
                    mirror.serve(channel)

        run_in_thread(accept)
        yield Node(mirror, server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


REPLIES = {
    "/simple/small/": Reply(status=301, headers={"location": "/moved/small/"}),
    "/moved/small/": page(
        *("../../files/small-1.0.tar.gz#sha256=ab", "/files/small-2.0.whl"),
        *("https://elsewhere.example/small-3.0.whl", "index.html", "/simple/other/", "ftp://x/y.whl"),
        *("file:///etc/small-4.0.whl", "http://[::1/small-5.0.whl", "mailto:x.whl"),
    ),
    "/files/small-1.0.tar.gz": Reply(b"one"),
    "/files/small-2.0.whl": Reply(b"two"),
    "/files/small-2.0.whl.metadata": Reply(b"metadata"),
}


def resolve_host(
    getaddrinfo: Callable[..., Any], host: str, port: int, *options: Any, **keywords: Any
) -> Any:
    """Return the addresses of a host; private.example has a public and a private one."""
    if host != "private.example":
        return getaddrinfo(host, port, *options, **keywords)
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("93.184.215.14", "10.0.0.1")]
