"""What nodes fetch through this machine while they install: from where, by whose leave, and when it ends."""

import _thread
import base64
import contextlib
import dataclasses
import gzip
import html
import http.client
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from uv import find_uv_bin

from awsddp.errors import NodeError
from awsddp.nodes.catalog import Catalog, signing_key
from awsddp.nodes.fleet import Fleet
from awsddp.nodes.package_mirror import Mirror
from awsddp.nodes.upstream import NodeRequest, Upstream, is_public
from awsddp.plan.indexes import Indexes
from awsddp.util.parallel import each, soon
from tests.nodes.test_environments import PLAN, imported, index, made, no_settings, python
from tests.support.servers import (
    PASSWORD,
    Reply,
    certificate_only,
    make_certificate,
    make_repository,
    page,
    serve_folder,
    serve_git,
    serve_index,
    serve_proxy,
    serve_replies,
)
from tests.support.ssh_hosts import Lab, wait_until
from tests.support.wheels import wheel

__all__ = ["index", "no_settings", "python"]
MakeLab = Callable[[int], Lab]


def threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def curl(fleet: Fleet, environ: dict[str, str], *words: str) -> str:
    """Return the status that curl gets on node 0, and what it printed of an error."""
    argv = ["env", *(f"{name}={value}" for name, value in environ.items()), "curl", "-sS", "-m", "20"]
    done = fleet.run([*argv, "-o", "/dev/null", "-w", "%{http_code} %{http_connect}", *words], timeout_s=30)[
        0
    ]
    return (done.stdout + done.stderr).decode()


def test_files_on_another_host_come_by_tls_and_by_the_proxy_of_this_machine(
    lab: MakeLab, no_settings: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their certificate is known by env.ca_bundle alone; a name that only the proxy can resolve stays so."""
    certificate = make_certificate(tmp_path)
    here, before = lab(2), threads()
    with (
        serve_folder(no_settings, tls=certificate) as files,
        serve_index(no_settings, files=f"https://localhost:{files.port}") as server,
        serve_proxy(password=PASSWORD) as upstream,
    ):
        monkeypatch.setenv("no_proxy", "")
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://staff:{PASSWORD}@127.0.0.1:{upstream.port}")
        own = f"{server.url}/simple", (f"https://localhost:{files.port}/",)
        indexes = Indexes(index_url=own[0], find_links=own[1], ca=certificate_only(certificate))
        found = made(here, dataclasses.replace(PLAN, indexes=indexes), python)
    assert imported(found[1].python, "import small, tiny") == ""
    assert upstream.asked.count(f"CONNECT localhost:{files.port}") >= 4, "two files for each of two nodes"
    assert f"GET {server.url}/simple/small/" in upstream.asked
    assert sorted(set(files.asked))[0].startswith("GET /") and len(files.asked) >= 4
    wait_until(lambda: threads() <= before, "the end of all threads")


@dataclasses.dataclass
class Node:
    """A program of a node, whose requests come to a mirror."""

    mirror: Mirror
    port: int

    def ask(
        self,
        url: str,
        method: str = "GET",
        body: bytes = b"",
        login: str = "",
        headers: Mapping[str, str] = {},
    ) -> tuple[int, bytes]:
        """Return the status and the content of an answer."""
        known = base64.b64encode((login or self.mirror.login).encode()).decode()
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(line):
            line.request(method, url, body or None, {"Proxy-Authorization": f"Basic {known}", **headers})
            answer = line.getresponse()
            content = answer.read()
        is_zipped = answer.headers["Content-Encoding"] == "gzip"
        return answer.status, gzip.decompress(content) if is_zipped and content else content

    def links(self, url: str) -> list[str]:
        """Return the links of a page."""
        status, text = self.ask(url)
        assert status == 200
        return [html.unescape(link) for link in re.findall(r'href="([^"]*)"', text.decode())]


class _Channel:
    """A connection of a node, in the shape of paramiko's."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def get_transport(self) -> str:
        return "node0"

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


@contextlib.contextmanager
def mirrored(catalog: Catalog, *, proxy: str = "") -> Iterator[Node]:
    """Serve a catalog to a node."""
    with socket.create_server(("127.0.0.1", 0)) as server, Mirror(catalog, ca="", proxy=proxy) as mirror:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    channel: Any = _Channel(server.accept()[0])
                    mirror.serve(channel)

        soon(accept)
        yield Node(mirror, server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A catalog of all that nodes fetch; this machine has no proxy."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Catalog(everything=True, key=b"key")


def test_only_a_client_with_the_password_is_served_and_no_connection_is_its_own(
    lab: MakeLab, catalog: Catalog, tmp_path: Path
) -> None:
    wheel(tmp_path / "wheels", "tiny")
    shown = catalog.show_links(str(tmp_path / "wheels"))
    with (
        serve_folder(tmp_path) as server,
        Mirror(catalog, ca="", proxy="") as mirror,
        lab(1).fleet() as fleet,
    ):
        with fleet.forwarded([0], mirror.serve) as ports:
            environ = mirror.environ(ports[0], ())
            other = {name: value.replace("awsddp:", "awsddp:0") for name, value in environ.items()}
            assert curl(fleet, other, shown).startswith("407")
            assert curl(fleet, environ, shown).startswith("200")
            assert curl(fleet, environ, server.url).startswith("403")
            assert curl(fleet, environ, server.url.replace("http:", "https:")).startswith("000 403")
            assert not server.asked
        assert f"127.0.0.1:{server.port}: no packages come from there" in mirror.translate("")
        real = (tmp_path / "wheels").as_uri()
        assert mirror.translate(f"{shown}x.whl").startswith(f"{real}/x.whl\n")
        wait_until(lambda: not curl(fleet, environ, shown).startswith("200"), "the end of the forward")


def test_a_page_is_served_with_links_of_our_own_to_packages_alone(catalog: Catalog) -> None:
    """Relative links, those of another host, and what is said of a file; header names have no case."""
    with serve_replies(REPLIES) as server, mirrored(catalog) as node:
        shown = catalog.show_index(f"{server.url}/simple")
        links = node.links(f"{shown}/small/")
        hosts = [link.rpartition("/")[0].partition("://")[2].partition("/")[0] for link in links]
        assert hosts == ["files.awsddp.invalid"] * 3
        names = [link.rpartition("/")[2] for link in links]
        assert names == ["small-1.0.tar.gz#sha256=ab", "small-2.0.whl", "small-3.0.whl"]
        assert [node.ask(link.partition("#")[0]) for link in links[:2]] == [(200, b"one"), (200, b"two")]
        assert node.ask(f"{links[1]}.metadata") == (200, b"metadata")
        page = node.ask(f"{shown}/small/")[1].decode()
        assert page.count('data-requires-python="&gt;=3.8"') == 3 and server.url not in page
        assert catalog.show_index(f"{server.url}/simple") == shown, "a node finds a file in its cache"


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


def test_a_page_of_links_may_name_the_place_of_its_files(catalog: Catalog) -> None:
    with serve_replies({"/deep/f/small-1.0.whl": Reply(b"one")}) as files:
        replies = {"/links.html": page("f/small-1.0.whl", base=f"{files.url}/deep/")}
        with serve_replies(replies) as server, mirrored(catalog) as node:
            catalog.show_links(f"{files.url}/deep/")
            links = node.links(catalog.show_links(f"{server.url}/links.html"))
            assert node.ask(links[0]) == (200, b"one")


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
def test_a_page_leads_no_node_to_an_address_that_is_not_public(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, host: str, by: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", partial(resolved, socket.getaddrinfo))
    with serve_replies({"/small-1.0.whl": Reply(b"secret")}) as other:
        url = f"http://{host}:{other.port}/small-1.0.whl"
        moved = {"/files/small-1.0.whl": Reply(status=302, headers={"location": url})}
        replies = {"/simple/small/": page(url if by == "link" else "/files/small-1.0.whl"), **moved}
        with serve_replies(replies) as server, mirrored(catalog) as node:
            links = node.links(catalog.show_index(f"{server.url}/simple") + "/small/")
            status, text = node.ask(links[0])
            assert status == 403 and b"secret" not in text and not other.asked
            assert f"{other.port}: its address is not public" in node.mirror.translate("")
            catalog.show_links(f"http://{host}:{other.port}/")  # now the user names it
            if host in ("127.0.0.1", "localhost"):
                assert (
                    node.ask(node.links(catalog.show_index(f"{server.url}/simple") + "/small/")[0])[0] == 200
                )


def resolved(really: Callable[..., Any], host: str, port: int, *words: Any, **more: Any) -> Any:
    """Return the addresses of a host; of one all are private but the first."""
    if host != "private.example":
        return really(host, port, *words, **more)
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in ("93.184.215.14", "10.0.0.1")]


def test_the_address_that_was_checked_is_the_one_that_is_reached(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads elsewhere when it is asked again leads nobody there."""
    dialed: list[str] = []
    turns = iter(("93.184.215.14", "127.0.0.1", "127.0.0.1"))

    def resolve(host: str, port: int, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(turns), port))]

    def dial(address: tuple[str, int], *_: Any) -> socket.socket:
        dialed.append(address[0])
        raise OSError("not in a test")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="not in a test"):
        patch.setattr(socket, "getaddrinfo", resolve)
        patch.setattr(socket, "create_connection", dial)
        upstream = Upstream(catalog.grants, ca="", proxies={})
        upstream.fetch("http://turns.example/x.whl", NodeRequest("GET", {}), is_named=False)
    assert dialed == ["93.184.215.14"]


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
def test_addresses_of_the_internet(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_behind_a_proxy_the_names_of_the_configuration_count_alone(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which address a name has is then the proxy's to know."""
    with serve_replies(REPLIES) as files, serve_proxy() as upstream:
        replies = {"/simple/small/": page(f"http://localhost:{files.port}/files/small-2.0.whl")}
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{upstream.port}")
        with serve_replies(replies) as server, mirrored(catalog) as node:
            index = catalog.show_index(f"{server.url}/simple") + "/small/"
            assert node.ask(node.links(index)[0])[0] == 403 and not files.asked
            assert "localhost" in node.mirror.translate("")
            catalog.show_links(f"http://localhost:{files.port}/files/")
            assert node.ask(node.links(index)[0]) == (200, b"two")
            assert f"GET http://localhost:{files.port}/files/small-2.0.whl" in upstream.asked


@pytest.mark.parametrize(
    "path",
    [
        *("/private", "/simple/small/../../private", "/simple/%2e%2e/private", "/simple/%252e%252e/private"),
        *("/simple/..%5cprivate", "/simple/small/private/deep", "/simplest/small/", "/pypi/small/json"),
        "/files/small-2.0.whl",
    ],
)
def test_other_paths_of_an_indexs_host_are_refused(catalog: Catalog, path: str) -> None:
    with serve_replies(REPLIES) as server, mirrored(catalog) as node:
        host = catalog.show_index(f"{server.url}/simple").removesuffix("/simple")
        assert node.ask(f"{host}{path}")[0] == 403 and not server.asked
        assert "only what the configuration names" in node.mirror.translate("")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_sent_to_an_index(catalog: Catalog, method: str) -> None:
    with serve_replies(REPLIES) as server, mirrored(catalog) as node:
        index = catalog.show_index(f"http://reader:{PASSWORD}@127.0.0.1:{server.port}/simple")
        assert node.ask(f"{index}/small/", method, b"x")[0] in (403, 501) and not server.asked
        assert node.ask(f"{index}/small/", headers={"Content-Length": "5"})[0] == 200
        assert node.ask(node.links(f"{index}/small/")[1], headers={"Content-Length": "5"}) == (200, b"two")
        assert all(one.startswith("GET ") for one in server.asked)


def test_a_link_that_no_page_has_is_refused(catalog: Catalog) -> None:
    with serve_replies(REPLIES) as server, mirrored(catalog) as node:
        link = node.links(catalog.show_index(f"{server.url}/simple") + "/small/")[1]
        host, signature, text, name = link.removeprefix("http://").split("/")
        other = Catalog(everything=True, key=b"other").link(f"{server.url}/files/x.whl", is_named=True)
        for forged in (
            f"http://{host}/{'0' * 32}/{text}/{name}",
            f"http://{host}/{signature}/{text[:-4]}/x",
            other,
        ):
            assert node.ask(forged)[0] == 403
        with mirrored(Catalog(everything=True, key=b"key")) as later:
            assert later.ask(link)[0] == 403, "no configuration names that host any more"


def test_a_login_goes_only_to_the_path_that_it_was_given_for(catalog: Catalog) -> None:
    """By GET and HEAD, and not behind a redirect to another host."""
    with serve_replies({"/small-3.0.whl": Reply(b"three")}) as other:
        catalog.show_links(f"{other.url}/")
        to = {"location": f"{other.url}/small-3.0.whl"}
        replies = {
            "/team/simple/small/": page(
                "/team/files/small-1.0.whl", "/other/small-2.0.whl", "/team/moved/small-3.0.whl"
            ),
            "/team/files/small-1.0.whl": Reply(b"one"),
            "/other/small-2.0.whl": Reply(b"two"),
            "/team/moved/small-3.0.whl": Reply(status=302, headers=to),
        }
        with serve_replies(replies) as server, mirrored(catalog) as node:
            index = catalog.show_index(f"http://u:p%40@127.0.0.1:{server.port}/team/simple/")
            links = node.links(f"{index}small/")
            assert [node.ask(link)[1] for link in links] == [b"one", b"two", b"three"]
            assert node.ask(links[0], "HEAD") == (200, b"")
        assert server.asked == [
            *(
                "GET /team/simple/small/ u:p@",
                "GET /team/files/small-1.0.whl u:p@",
                "GET /other/small-2.0.whl",
            ),
            *("GET /team/moved/small-3.0.whl u:p@", "HEAD /team/files/small-1.0.whl u:p@"),
        ]
        assert other.asked == ["GET /small-3.0.whl"]


def test_of_a_git_line_its_repository_alone_can_be_read(catalog: Catalog, tmp_path: Path) -> None:
    """With its login; its revision stays, and a submodule of another repository is refused."""
    for name in ("mine", "mine2"):
        make_repository(tmp_path / "org", name)
    with serve_git(tmp_path, password=PASSWORD) as server, mirrored(catalog) as node:
        url = f"http://reader:{PASSWORD}@127.0.0.1:{server.port}/org/mine.git"
        line = catalog.show_line(f"mine @ git+{url}@main#subdirectory=x")
        assert PASSWORD not in line and line.endswith("/org/mine.git@main#subdirectory=x")
        shown = line.partition("git+")[2].partition("@")[0]
        environ = {**os.environ, **node.mirror.environ(node.port, ()), "GIT_TERMINAL_PROMPT": "0"}

        def git(*words: str) -> str:
            done = subprocess.run(["git", *words], env=environ, cwd=tmp_path, capture_output=True, text=True)
            return done.stderr

        assert git("clone", "-q", "--filter=blob:none", shown) == ""
        assert (tmp_path / "mine/mine.py").exists()
        assert "403" in git("ls-remote", shown.replace("mine", "mine2"))
        assert "403" in git("-C", "mine", "push", "--force", "origin", "HEAD:other")
        pushed = f"{shown}/info/refs?service=git-receive-pack"
        assert node.ask(pushed)[0] == 403 and node.ask(f"{shown}/git-receive-pack", "POST", b"0000")[0] == 403
        assert not [one for one in server.asked if "mine2" in one or "receive" in one]
        assert node.ask(f"{shown}/git-upload-pack", "POST", headers={"Content-Length": str(2**31)})[0] == 403
        assert (
            f"{server.port}/org/mine2.git/info/refs: only what the configuration names"
            in node.mirror.translate("")
        )


def test_files_of_a_folder_are_those_that_lie_in_it(catalog: Catalog, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    wheel(folder, "tiny")
    for name in ("secret.txt", "outside.whl"):
        (tmp_path / name).write_text("secret")
    (folder / "a-1.0.whl").symlink_to(tmp_path / "secret.txt")
    (folder / "b-1.0.whl").symlink_to(tmp_path / "outside.whl")
    (folder / "secret.html").write_text("secret")
    (folder / "up").symlink_to(tmp_path)
    with mirrored(catalog) as node:
        shown = catalog.show_links(str(folder))
        links = node.links(shown)
        assert [node.ask(link)[0] for link in links] == [403, 403, 200]
        for path in ("secret.html", "up/", "../secret.txt", "%2e%2e/secret.txt", "tiny-1.0-py3-none-any.whl"):
            assert node.ask(f"{shown}{path}")[0] == 403


def test_an_index_in_a_folder_serves_what_its_pages_name_beside_it(catalog: Catalog, tmp_path: Path) -> None:
    names = ("odd_name-1.whl", "odd_name-1.whl.metadata", "odd_name-2.whl", "deep/odd_name-3.whl")
    for name in (*names, "mirror/files/odd_name-1.whl", "mirror/files/odd_name-1.whl.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    project = tmp_path / "mirror/simple/odd-name/index.html"
    project.parent.mkdir(parents=True)
    links = (
        "../../files/odd_name-1.whl",
        "../../../odd_name-2.whl",
        (tmp_path / "deep/odd_name-3.whl").as_uri(),
    )
    project.write_bytes(page(*links).body)
    with mirrored(catalog) as node:
        index = catalog.show_index((tmp_path / "mirror/simple").as_uri())
        found = node.links(f"{index}odd-name/")
        assert [node.ask(link)[0] for link in found] == [200, 403, 403]
        assert node.ask(f"{found[0]}.metadata") == (200, b"mirror/files/odd_name-1.whl.metadata")
        assert node.ask(f"{index}nothing/")[0] == 404
        assert node.ask(f"{index}../files/odd_name-1.whl")[0] == 403


@pytest.mark.parametrize(
    "unit", [b"<a href='/x-1.0.whl'></a>", b"<a href='" + b"x" * 1000, b"<!--" + b"x" * 1000]
)
def test_a_page_without_an_end_takes_little_memory(catalog: Catalog, unit: bytes) -> None:
    body = unit * (40 * 2**20 // len(unit)) if unit.endswith(b">") else unit + b"x" * 40 * 2**20
    headers = {"content-type": "text/html"}
    with serve_replies({"/simple/x/": Reply(body, headers=headers)}) as server, mirrored(catalog) as node:
        before = resident_mb(os.getpid())
        assert node.ask(catalog.show_index(f"{server.url}/simple") + "/x/")[0] == 504
        assert resident_mb(os.getpid()) - before < 60
        assert "a page of more than" in node.mirror.translate("")


def resident_mb(pid: int) -> float:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_heads_and_connections_have_a_bound(catalog: Catalog, tmp_path: Path) -> None:
    shown = catalog.show_links(str(tmp_path))
    with mirrored(catalog) as node, contextlib.ExitStack() as stack:
        with pytest.raises((http.client.HTTPException, OSError)):
            node.ask(shown, headers={f"X-{number}": "x" * 10_000 for number in range(20)})
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", node.port)))
        with pytest.raises((http.client.HTTPException, OSError)):
            node.ask(shown)
        stack.close()
        wait_until(lambda: _answers(node, shown), "the end of the connections")


def _answers(node: Node, url: str) -> bool:
    try:
        return node.ask(url)[0] == 200
    except (http.client.HTTPException, OSError):
        return False


def test_a_url_that_is_none_is_left_to_who_installs(catalog: Catalog) -> None:
    for place in ("http://[::1/simple", "http://h:999999/simple"):
        assert catalog.show_index(place) == place
    assert not catalog.grants


@pytest.mark.parametrize("internet", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_a_host_that_no_index_names_is_told(
    lab: MakeLab, no_settings: Path, python: str, internet: bool
) -> None:
    """As a package is whose build fetches something; the advice is none that needs what nodes have not."""
    here = lab(1)
    here.hosts[0].script("git", "#!/bin/sh\nexec curl -fsS -m 20 https://elsewhere.example/x\n")
    plan = dataclasses.replace(
        PLAN, lines=("git+http://127.0.0.1:9/x.git",), indexes=Indexes(no_index=True), internet=internet
    )
    with pytest.raises(NodeError) as refused:
        made(here, plan, python)
    assert "needs elsewhere.example:443, where none of its indexes has files" in refused.value.message
    assert ("packages_from" in refused.value.next) is (internet is not False)
    assert refused.value.exit_code == 6


def test_an_sshd_that_forwards_nothing_is_told_with_what_to_type(
    lab: MakeLab, index: Path, python: str
) -> None:
    here = lab(2)
    host = here.hosts[1]
    with (host.root / "sshd_config").open("a") as stream:
        stream.write("AllowTcpForwarding no\n")
    host.stop()
    host.start()
    with pytest.raises(NodeError, match="node1: its sshd forwards no connections") as refused:
        made(here, PLAN, python)
    assert "AllowTcpForwarding" not in refused.value.message and "TcpForwarding" in refused.value.next
    assert refused.value.exit_code == 6


@pytest.mark.prove
def test_a_node_that_is_lost_while_it_installs_is_told_and_the_other_is_done(
    lab: MakeLab, no_settings: Path, python: str
) -> None:
    here, before = lab(2), threads()
    with serve_index(no_settings, hold="tiny-1.0") as server:
        plan = dataclasses.replace(PLAN, indexes=Indexes(index_url=f"{server.url}/simple"))
        making = soon(made, here, plan, python)
        assert server.is_held.wait(60)
        here.hosts[1].stop()
        server.release.set()
        with pytest.raises(NodeError, match="node1: the connection was lost"):
            making.result(120)
    here.hosts[1].start()
    assert list(here.hosts[0].home.glob("awsddp/env/*/ready.json"))
    wait_until(lambda: threads() <= before, "the end of all threads")
    assert made(here, dataclasses.replace(PLAN, indexes=Indexes(find_links=(str(no_settings),))), python)


def test_an_interrupt_ends_what_is_open(lab: MakeLab, no_settings: Path, python: str) -> None:
    here, before = lab(1), threads()
    with serve_index(no_settings, hold="tiny-1.0") as server:
        plan = dataclasses.replace(PLAN, indexes=Indexes(index_url=f"{server.url}/simple"))

        def interrupt() -> None:
            assert server.is_held.wait(60)
            _thread.interrupt_main()

        soon(interrupt)
        with pytest.raises(KeyboardInterrupt):
            made(here, plan, python)
        server.release.set()
    wait_until(lambda: threads() <= before, "the end of all threads")


@pytest.mark.parametrize("packages_from", [pytest.param("client", marks=pytest.mark.prove), None])
def test_a_simple_index_that_is_a_folder_here_is_seen_by_nodes(
    lab: MakeLab,
    no_settings: Path,
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packages_from: Literal["client"] | None,
) -> None:
    """Its pages name files that lie beside it, as the usual mirrors write them."""
    for name in ("small", "tiny"):
        page = tmp_path / "mirror/simple" / name / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(f'<a href="../../files/{name}-1.0-py3-none-any.whl">{name}-1.0-py3-none-any.whl</a>')
    shutil.copytree(no_settings, tmp_path / "mirror/files")
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/mirror/simple")
    found = made(lab(1), dataclasses.replace(PLAN, packages_from=packages_from), python)
    assert imported(found[0].python, "import small, tiny") == ""


def test_the_key_of_links_is_kept_for_one_user(tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    keys = each(lambda _: signing_key(folder), range(8))
    assert len(set(keys)) == 1 and len(keys[0]) == 32
    assert [(one.name, one.stat().st_mode & 0o777) for one in folder.iterdir()] == [("mirror.key", 0o600)]


def test_uv_gets_its_pythons_from_the_mirror(catalog: Catalog, tmp_path: Path) -> None:
    """By the true uv; there is none behind it."""
    with serve_replies({}) as server, mirrored(catalog) as node:
        shown = catalog.show(f"{server.url}/releases/download", "tree")
        own = {
            "UV_PYTHON_INSTALL_MIRROR": shown,
            "UV_PYTHON_INSTALL_DIR": str(tmp_path),
            "UV_HTTP_RETRIES": "0",
        }
        environ = {**os.environ, **node.mirror.environ(node.port, ()), **own}
        words = [find_uv_bin(), "venv", "--no-project", "--python", "3.9.7", tmp_path / "venv"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.returncode and "404 Not Found" in node.mirror.translate(done.stderr)
    assert server.asked and server.asked[0].startswith("GET /releases/download/2021")
