"""What nodes fetch through this machine while they install: from where, by whose leave, and when it ends."""

import _thread
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from awsddp.errors import NodeError
from awsddp.nodes.proxy import Proxy
from awsddp.nodes.transport import Fleet
from awsddp.parallel import soon
from awsddp.plan.indexes import Indexes
from tests.nodes.servers import (
    PASSWORD,
    certificate_only,
    make_certificate,
    serve_folder,
    serve_index,
    serve_proxy,
)
from tests.nodes.ssh_hosts import Lab, wait_until
from tests.nodes.test_environments import PLAN, imported, index, made, no_settings, python

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
        indexes = Indexes(index_url=f"{server.url}/simple", ca=certificate_only(certificate))
        found = made(here, dataclasses.replace(PLAN, indexes=indexes), python)
    assert imported(found[1].python, "import small, tiny") == ""
    assert upstream.asked.count(f"CONNECT localhost:{files.port}") >= 2, "each node's own TLS"
    assert f"GET {server.url}/simple/small/" in upstream.asked
    assert sorted(set(files.asked))[0].startswith("GET /") and len(files.asked) >= 4
    wait_until(lambda: threads() <= before, "the end of all threads")


def test_only_the_packages_hosts_and_only_with_the_password(lab: MakeLab, tmp_path: Path) -> None:
    """Another user of the node has no password; a program that installs gets no other host or file."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/secret.txt").touch()
    (tmp_path / "outside.whl").touch()
    (tmp_path / "wheels/inside.whl").touch()
    (tmp_path / "simple/odd-name").mkdir(parents=True)
    (tmp_path / "simple/odd-name/index.html").write_text("<a href='../../odd_name-1.whl'></a>")
    for name in ("odd_name-1.whl", "odd_name-1.whl.metadata", "odd_name-2.whl"):
        (tmp_path / name).touch()
    with (
        serve_folder(tmp_path) as server,
        Proxy(everything=True, ca="", proxy="") as proxy,
        lab(1).fleet() as fleet,
    ):
        proxy.allow(f"http://127.0.0.1:{server.port}/")
        shown, index = proxy.show(str(tmp_path / "wheels")), proxy.show((tmp_path / "simple").as_uri())
        with fleet.forwarded([0], proxy.serve) as ports:
            environ = proxy.environ(ports[0], ())
            none = {name: value.replace("awsddp:", "awsddp:0") for name, value in environ.items()}
            assert curl(fleet, none, server.url).startswith("407")
            assert curl(fleet, environ, server.url).startswith("200")
            assert curl(fleet, environ, "http://localhost.example/").startswith("403")
            assert curl(fleet, environ, "https://localhost.example/").startswith("000 403")
            assert curl(fleet, environ, f"{shown}inside.whl").startswith("200")
            for path in ("secret.txt", "../outside.whl", "%2e%2e/outside.whl"):
                assert curl(fleet, environ, "--path-as-is", f"{shown}{path}").startswith("404")
            for path, code in (("-1.whl", "200"), ("-1.whl.metadata", "200"), ("-2.whl", "404")):
                assert curl(fleet, environ, f"{index}../odd_name{path}", "--path-as-is").startswith(code)
            elsewhere = server.url.replace(f":{server.port}", ":9")
            assert curl(fleet, environ, elsewhere).startswith("403")
            file = ["--request-target", f"file://localhost{tmp_path}/wheels/secret.txt"]
            assert curl(fleet, environ, *file, server.url).startswith("403")
        assert not server.asked or all("secret" not in one for one in server.asked)
        assert "localhost.example:443: no packages come from there" in proxy.translate("")
        wait_until(lambda: not curl(fleet, environ, server.url).startswith("200"), "the end of the forward")


def test_a_url_that_is_none_is_left_to_who_installs() -> None:
    with Proxy(everything=True, ca="", proxy="") as proxy:
        page = '<a href="http://[::1/small-1.0-py3-none-any.whl"></a> http://h:999999/x'
        assert proxy.page(page, "http://index.example") == page
        assert proxy.places == {"index.example:80"}
        assert proxy.show("http://[::1/simple") == "http://[::1/simple"


def test_a_host_that_no_index_names_is_told(lab: MakeLab, no_settings: Path, python: str) -> None:
    """As a package is whose build fetches something."""
    here = lab(1)
    here.hosts[0].script("git", "#!/bin/sh\nexec curl -fsS -m 20 https://elsewhere.example/x\n")
    plan = dataclasses.replace(PLAN, lines=("git+http://127.0.0.1:9/x.git",), indexes=Indexes(no_index=True))
    with pytest.raises(NodeError) as refused:
        made(here, plan, python)
    assert "needs elsewhere.example:443, where none of its indexes has files" in refused.value.message
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
    (tmp_path / "mirror/files").symlink_to(no_settings)
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/mirror/simple")
    found = made(lab(1), dataclasses.replace(PLAN, packages_from=packages_from), python)
    assert imported(found[0].python, "import small, tiny") == ""
