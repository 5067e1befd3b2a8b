"""The hosts and addresses to which the mirror connects for nodes."""

import socket
from functools import partial
from typing import Any

import pytest

from awsddp.nodes.catalog import Catalog
from awsddp.nodes.upstream import NodeRequest, Upstream, is_public
from tests.support.mirrored_node import REPLIES, resolve_host, serve_through_mirror
from tests.support.servers import Reply, page, serve_proxy, serve_replies


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07::1", True),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("fd00:ec2::254", False),
        ("fe80::1%1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::5db8:d70e", True),
    ],
)
def test_is_public_accepts_only_addresses_of_the_internet(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_mirror_connects_to_the_address_that_it_checked(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second lookup with another answer (DNS rebinding) has no effect."""
    addresses: list[str] = []
    answers = iter(("93.184.215.14", "127.0.0.1", "127.0.0.1"))

    def resolve(host: str, port: int, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    def connect(address: tuple[str, int], *_: Any) -> socket.socket:
        addresses.append(address[0])
        raise OSError("not in a test")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="not in a test"):
        patch.setattr(socket, "getaddrinfo", resolve)
        patch.setattr(socket, "create_connection", connect)
        upstream = Upstream(catalog.grants, ca="", proxies={})
        upstream.fetch("http://turns.example/x.whl", NodeRequest("GET", {}), is_named=False)
    assert addresses == ["93.184.215.14"]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "private.example",
    ],
)
@pytest.mark.parametrize("by", ["link", "redirect"])
def test_link_or_redirect_to_a_private_address_is_refused(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, host: str, by: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", partial(resolve_host, socket.getaddrinfo))
    with serve_replies({"/small-1.0.whl": Reply(b"secret")}) as other:
        url = f"http://{host}:{other.port}/small-1.0.whl"
        redirect = {"/files/small-1.0.whl": Reply(status=302, headers={"location": url})}
        replies = {"/simple/small/": page(url if by == "link" else "/files/small-1.0.whl"), **redirect}
        with serve_replies(replies) as server, serve_through_mirror(catalog) as node:
            links = node.links(catalog.rewrite_index(f"{server.url}/simple") + "/small/")
            status, text = node.request(links[0])
            assert status == 403 and b"secret" not in text and not other.requests
            assert f"{other.port}: its address is not public" in node.mirror.explain_output("")
            catalog.rewrite_links_page(f"http://{host}:{other.port}/")  # now the user names it
            if host in ("127.0.0.1", "localhost"):
                assert (
                    node.request(node.links(catalog.rewrite_index(f"{server.url}/simple") + "/small/")[0])[0]
                    == 200
                )


def test_only_configured_hosts_are_reached_through_a_proxy(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy resolves the names, so that their addresses cannot be checked here."""
    with serve_replies(REPLIES) as files, serve_proxy() as upstream:
        replies = {"/simple/small/": page(f"http://localhost:{files.port}/files/small-2.0.whl")}
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{upstream.port}")
        with serve_replies(replies) as server, serve_through_mirror(catalog) as node:
            index = catalog.rewrite_index(f"{server.url}/simple") + "/small/"
            assert node.request(node.links(index)[0])[0] == 403 and not files.requests
            assert "localhost" in node.mirror.explain_output("")
            catalog.rewrite_links_page(f"http://localhost:{files.port}/files/")
            assert node.request(node.links(index)[0]) == (200, b"two")
            assert f"GET http://localhost:{files.port}/files/small-2.0.whl" in upstream.requests
