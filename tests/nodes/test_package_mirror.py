"""What nodes fetch through this machine while they install: from where, by whose leave, and when it ends."""

import _thread
import contextlib
import dataclasses
import http.client
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from uv import find_uv_bin

from awsddp.errors import NodeError
from awsddp.nodes.catalog import Catalog
from awsddp.nodes.fleet import Fleet
from awsddp.nodes.package_mirror import Mirror
from awsddp.plan.indexes import Indexes
from awsddp.util.parallel import run_in_thread
from tests.nodes.test_environments import PLAN, imported, index, made, no_settings, python
from tests.support.mirrored_node import REPLIES, Node, mirrored
from tests.support.servers import (
    PASSWORD,
    certificate_only,
    make_certificate,
    serve_folder,
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


def test_only_a_client_with_the_password_is_served_and_no_connection_is_its_own(
    lab: MakeLab, catalog: Catalog, tmp_path: Path
) -> None:
    wheel(tmp_path / "wheels", "tiny")
    shown = catalog.rewrite_links_page(str(tmp_path / "wheels"))
    with (
        serve_folder(tmp_path) as server,
        Mirror(catalog, ca="", proxy="") as mirror,
        lab(1).fleet() as fleet,
    ):
        with fleet.forward_ports([0], mirror.serve) as ports:
            environ = mirror.environ(ports[0], ())
            other = {name: value.replace("awsddp:", "awsddp:0") for name, value in environ.items()}
            assert curl(fleet, other, shown).startswith("407")
            assert curl(fleet, environ, shown).startswith("200")
            assert curl(fleet, environ, server.url).startswith("403")
            assert curl(fleet, environ, server.url.replace("http:", "https:")).startswith("000 403")
            assert not server.asked
        assert f"127.0.0.1:{server.port}: no packages come from there" in mirror.explain_output("")
        real = (tmp_path / "wheels").as_uri()
        assert mirror.explain_output(f"{shown}x.whl").startswith(f"{real}/x.whl\n")
        wait_until(lambda: not curl(fleet, environ, shown).startswith("200"), "the end of the forward")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_sent_to_an_index(catalog: Catalog, method: str) -> None:
    with serve_replies(REPLIES) as server, mirrored(catalog) as node:
        index = catalog.rewrite_index(f"http://reader:{PASSWORD}@127.0.0.1:{server.port}/simple")
        assert node.ask(f"{index}/small/", method, b"x")[0] in (403, 501) and not server.asked
        assert node.ask(f"{index}/small/", headers={"Content-Length": "5"})[0] == 200
        assert node.ask(node.links(f"{index}/small/")[1], headers={"Content-Length": "5"}) == (200, b"two")
        assert all(one.startswith("GET ") for one in server.asked)


def test_heads_and_connections_have_a_bound(catalog: Catalog, tmp_path: Path) -> None:
    shown = catalog.rewrite_links_page(str(tmp_path))
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
        making = run_in_thread(made, here, plan, python)
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

        run_in_thread(interrupt)
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


def test_uv_gets_its_pythons_from_the_mirror(catalog: Catalog, tmp_path: Path) -> None:
    """By the true uv; there is none behind it."""
    with serve_replies({}) as server, mirrored(catalog) as node:
        shown = catalog.rewrite_location(f"{server.url}/releases/download", "tree")
        own = {
            "UV_PYTHON_INSTALL_MIRROR": shown,
            "UV_PYTHON_INSTALL_DIR": str(tmp_path),
            "UV_HTTP_RETRIES": "0",
        }
        environ = {**os.environ, **node.mirror.environ(node.port, ()), **own}
        words = [find_uv_bin(), "venv", "--no-project", "--python", "3.9.7", tmp_path / "venv"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.returncode and "404 Not Found" in node.mirror.explain_output(done.stderr)
    assert server.asked and server.asked[0].startswith("GET /releases/download/2021")
