"""The mirror through which nodes install packages: its sources, its access rules and its end."""

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
from tests.nodes.test_environments import PLAN, build_envs, hidden_index, index, python, run_python
from tests.support.mirrored_node import REPLIES, Node, serve_through_mirror
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
from tests.support.wheels import write_wheel

__all__ = ["hidden_index", "index", "python"]
MakeLab = Callable[[int], Lab]


def list_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def run_curl(fleet: Fleet, environ: dict[str, str], *arguments: str) -> str:
    """Return the status that curl gets on node 0, and its error message."""
    argv = ["env", *(f"{name}={value}" for name, value in environ.items()), "curl", "-sS", "-m", "20"]
    result = fleet.run(
        [*argv, "-o", "/dev/null", "-w", "%{http_code} %{http_connect}", *arguments], timeout_s=30
    )[0]
    return (result.stdout + result.stderr).decode()


def test_files_on_another_host_come_by_tls_through_the_proxy_of_this_machine(
    make_lab: MakeLab, hidden_index: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only env.ca_bundle has their certificate; the proxy resolves the names."""
    certificate = make_certificate(tmp_path)
    lab, threads_before = make_lab(2), list_threads()
    with (
        serve_folder(hidden_index, tls=certificate) as files,
        serve_index(hidden_index, files=f"https://localhost:{files.port}") as server,
        serve_proxy(password=PASSWORD) as upstream,
    ):
        monkeypatch.setenv("no_proxy", "")
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://staff:{PASSWORD}@127.0.0.1:{upstream.port}")
        index_url, find_links = f"{server.url}/simple", (f"https://localhost:{files.port}/",)
        indexes = Indexes(index_url=index_url, find_links=find_links, ca=certificate_only(certificate))
        envs = build_envs(lab, dataclasses.replace(PLAN, indexes=indexes), python)
    assert run_python(envs[1].python, "import small, tiny") == ""
    assert upstream.requests.count(f"CONNECT localhost:{files.port}") >= 4, "two files for each of two nodes"
    assert f"GET {server.url}/simple/small/" in upstream.requests
    assert sorted(set(files.requests))[0].startswith("GET /") and len(files.requests) >= 4
    wait_until(lambda: list_threads() <= threads_before, "the end of all threads")


def test_mirror_serves_only_clients_with_its_password_and_configured_urls(
    make_lab: MakeLab, catalog: Catalog, tmp_path: Path
) -> None:
    write_wheel(tmp_path / "wheels", "tiny")
    url = catalog.rewrite_links_page(str(tmp_path / "wheels"))
    with (
        serve_folder(tmp_path) as server,
        Mirror(catalog, ca="", proxy="") as mirror,
        make_lab(1).fleet() as fleet,
    ):
        with fleet.forward_ports([0], mirror.serve) as ports:
            environ = mirror.environ(ports[0], ())
            wrong_login = {name: value.replace("awsddp:", "awsddp:0") for name, value in environ.items()}
            assert run_curl(fleet, wrong_login, url).startswith("407")
            assert run_curl(fleet, environ, url).startswith("200")
            assert run_curl(fleet, environ, server.url).startswith("403")
            assert run_curl(fleet, environ, server.url.replace("http:", "https:")).startswith("000 403")
            assert not server.requests
        assert f"127.0.0.1:{server.port}: no packages come from there" in mirror.explain_output("")
        real_url = (tmp_path / "wheels").as_uri()
        assert mirror.explain_output(f"{url}x.whl").startswith(f"{real_url}/x.whl\n")
        wait_until(lambda: not run_curl(fleet, environ, url).startswith("200"), "the end of the forward")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_mirror_uploads_nothing_to_an_index(catalog: Catalog, method: str) -> None:
    with serve_replies(REPLIES) as server, serve_through_mirror(catalog) as node:
        index = catalog.rewrite_index(f"http://reader:{PASSWORD}@127.0.0.1:{server.port}/simple")
        assert node.request(f"{index}/small/", method, b"x")[0] in (403, 501) and not server.requests
        assert node.request(f"{index}/small/", headers={"Content-Length": "5"})[0] == 200
        assert node.request(node.links(f"{index}/small/")[1], headers={"Content-Length": "5"}) == (
            200,
            b"two",
        )
        assert all(request.startswith("GET ") for request in server.requests)


def test_mirror_limits_headers_and_connections(catalog: Catalog, tmp_path: Path) -> None:
    url = catalog.rewrite_links_page(str(tmp_path))
    with serve_through_mirror(catalog) as node, contextlib.ExitStack() as stack:
        with pytest.raises((http.client.HTTPException, OSError)):
            node.request(url, headers={f"X-{number}": "x" * 10_000 for number in range(20)})
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", node.port)))
        with pytest.raises((http.client.HTTPException, OSError)):
            node.request(url)
        stack.close()
        wait_until(lambda: _is_answering(node, url), "the end of the connections")


def _is_answering(node: Node, url: str) -> bool:
    try:
        return node.request(url)[0] == 200
    except (http.client.HTTPException, OSError):
        return False


@pytest.mark.parametrize("internet", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_host_that_no_index_names_is_reported(
    make_lab: MakeLab, hidden_index: Path, python: str, internet: bool
) -> None:
    """For example a package whose build downloads a file. The next step is possible on these nodes."""
    lab = make_lab(1)
    lab.hosts[0].script("git", "#!/bin/sh\nexec curl -fsS -m 20 https://elsewhere.example/x\n")
    plan = dataclasses.replace(
        PLAN, lines=("git+http://127.0.0.1:9/x.git",), indexes=Indexes(no_index=True), internet=internet
    )
    with pytest.raises(NodeError) as error:
        build_envs(lab, plan, python)
    assert "needs elsewhere.example:443, where none of its indexes has files" in error.value.message
    assert ("packages_from" in error.value.next) is (internet is not False)
    assert error.value.exit_code == 6


def test_sshd_without_forwarding_is_reported_with_the_next_step(
    make_lab: MakeLab, index: Path, python: str
) -> None:
    lab = make_lab(2)
    host = lab.hosts[1]
    with (host.root / "sshd_config").open("a") as stream:
        stream.write("AllowTcpForwarding no\n")
    host.stop()
    host.start()
    with pytest.raises(NodeError, match="node1: its sshd forwards no connections") as error:
        build_envs(lab, PLAN, python)
    assert "AllowTcpForwarding" not in error.value.message and "TcpForwarding" in error.value.next
    assert error.value.exit_code == 6


@pytest.mark.prove
def test_node_lost_during_installation_is_reported_and_the_other_completes(
    make_lab: MakeLab, hidden_index: Path, python: str
) -> None:
    lab, threads_before = make_lab(2), list_threads()
    with serve_index(hidden_index, hold="tiny-1.0") as server:
        plan = dataclasses.replace(PLAN, indexes=Indexes(index_url=f"{server.url}/simple"))
        build = run_in_thread(build_envs, lab, plan, python)
        assert server.is_held.wait(60)
        lab.hosts[1].stop()
        server.release.set()
        with pytest.raises(NodeError, match="node1: the connection was lost"):
            build.result(120)
    lab.hosts[1].start()
    assert list(lab.hosts[0].home.glob("awsddp/env/*/ready.json"))
    wait_until(lambda: list_threads() <= threads_before, "the end of all threads")
    assert build_envs(
        lab, dataclasses.replace(PLAN, indexes=Indexes(find_links=(str(hidden_index),))), python
    )


def test_interrupt_ends_all_threads_of_the_mirror(make_lab: MakeLab, hidden_index: Path, python: str) -> None:
    lab, threads_before = make_lab(1), list_threads()
    with serve_index(hidden_index, hold="tiny-1.0") as server:
        plan = dataclasses.replace(PLAN, indexes=Indexes(index_url=f"{server.url}/simple"))

        def interrupt() -> None:
            assert server.is_held.wait(60)
            _thread.interrupt_main()

        run_in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_envs(lab, plan, python)
        server.release.set()
    wait_until(lambda: list_threads() <= threads_before, "the end of all threads")


@pytest.mark.parametrize("packages_from", [pytest.param("client", marks=pytest.mark.prove), None])
def test_nodes_install_from_a_simple_index_in_a_local_folder(
    make_lab: MakeLab,
    hidden_index: Path,
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packages_from: Literal["client"] | None,
) -> None:
    """Its pages link to files in a sibling folder, as usual mirror programs write them."""
    for name in ("small", "tiny"):
        page = tmp_path / "mirror/simple" / name / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(f'<a href="../../files/{name}-1.0-py3-none-any.whl">{name}-1.0-py3-none-any.whl</a>')
    shutil.copytree(hidden_index, tmp_path / "mirror/files")
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/mirror/simple")
    envs = build_envs(make_lab(1), dataclasses.replace(PLAN, packages_from=packages_from), python)
    assert run_python(envs[0].python, "import small, tiny") == ""


def test_uv_requests_python_from_the_mirror(catalog: Catalog, tmp_path: Path) -> None:
    """The real uv requests one, and the mirror has none."""
    with serve_replies({}) as server, serve_through_mirror(catalog) as node:
        url = catalog.rewrite_location(f"{server.url}/releases/download", "tree")
        settings = {
            "UV_PYTHON_INSTALL_MIRROR": url,
            "UV_PYTHON_INSTALL_DIR": str(tmp_path),
            "UV_HTTP_RETRIES": "0",
        }
        environ = {**os.environ, **node.mirror.environ(node.port, ()), **settings}
        arguments = [find_uv_bin(), "venv", "--no-project", "--python", "3.9.7", tmp_path / "venv"]
        result = subprocess.run(arguments, env=environ, capture_output=True, text=True)
    assert result.returncode and "404 Not Found" in node.mirror.explain_output(result.stderr)
    assert server.requests and server.requests[0].startswith("GET /releases/download/2021")
