"""What nodes may request from the mirror."""

import os
import subprocess
from pathlib import Path

import pytest

from awsddp.nodes.catalog import Catalog, signing_key
from awsddp.util.parallel import run_each
from tests.support.mirrored_node import REPLIES, serve_through_mirror
from tests.support.servers import PASSWORD, Reply, make_repository, page, serve_git, serve_replies


def test_forged_link_is_refused(catalog: Catalog) -> None:
    with serve_replies(REPLIES) as server, serve_through_mirror(catalog) as node:
        link = node.links(catalog.rewrite_index(f"{server.url}/simple") + "/small/")[1]
        host, signature, encoded, name = link.removeprefix("http://").split("/")
        other = Catalog(everything=True, key=b"other").sign_link(f"{server.url}/files/x.whl", is_named=True)
        for forged in (
            f"http://{host}/{'0' * 32}/{encoded}/{name}",
            f"http://{host}/{signature}/{encoded[:-4]}/x",
            other,
        ):
            assert node.request(forged)[0] == 403
        with serve_through_mirror(Catalog(everything=True, key=b"key")) as other_node:
            assert other_node.request(link)[0] == 403, "no configuration names that host any longer"


@pytest.mark.parametrize(
    "path",
    [
        *("/private", "/simple/small/../../private", "/simple/%2e%2e/private", "/simple/%252e%252e/private"),
        *("/simple/..%5cprivate", "/simple/small/private/deep", "/simplest/small/", "/pypi/small/json"),
        "/files/small-2.0.whl",
    ],
)
def test_other_paths_on_the_host_of_an_index_are_refused(catalog: Catalog, path: str) -> None:
    with serve_replies(REPLIES) as server, serve_through_mirror(catalog) as node:
        host = catalog.rewrite_index(f"{server.url}/simple").removesuffix("/simple")
        assert node.request(f"{host}{path}")[0] == 403 and not server.requests
        assert "only what the configuration names" in node.mirror.explain_output("")


def test_login_is_sent_only_to_the_path_that_it_belongs_to(catalog: Catalog) -> None:
    """By GET and HEAD, and not after a redirect to another host."""
    with serve_replies({"/small-3.0.whl": Reply(b"three")}) as other:
        catalog.rewrite_links_page(f"{other.url}/")
        headers = {"location": f"{other.url}/small-3.0.whl"}
        replies = {
            "/team/simple/small/": page(
                "/team/files/small-1.0.whl", "/other/small-2.0.whl", "/team/moved/small-3.0.whl"
            ),
            "/team/files/small-1.0.whl": Reply(b"one"),
            "/other/small-2.0.whl": Reply(b"two"),
            "/team/moved/small-3.0.whl": Reply(status=302, headers=headers),
        }
        with serve_replies(replies) as server, serve_through_mirror(catalog) as node:
            index = catalog.rewrite_index(f"http://u:p%40@127.0.0.1:{server.port}/team/simple/")
            links = node.links(f"{index}small/")
            assert [node.request(link)[1] for link in links] == [b"one", b"two", b"three"]
            assert node.request(links[0], "HEAD") == (200, b"")
        assert server.requests == [
            *(
                "GET /team/simple/small/ u:p@",
                "GET /team/files/small-1.0.whl u:p@",
                "GET /other/small-2.0.whl",
            ),
            *("GET /team/moved/small-3.0.whl u:p@", "HEAD /team/files/small-1.0.whl u:p@"),
        ]
        assert other.requests == ["GET /small-3.0.whl"]


def test_git_requirement_allows_reading_only_its_repository(catalog: Catalog, tmp_path: Path) -> None:
    """With its login and its revision; another repository of the host is refused."""
    for name in ("mine", "mine2"):
        make_repository(tmp_path / "org", name)
    with serve_git(tmp_path, password=PASSWORD) as server, serve_through_mirror(catalog) as node:
        url = f"http://reader:{PASSWORD}@127.0.0.1:{server.port}/org/mine.git"
        line = catalog.rewrite_requirement(f"mine @ git+{url}@main#subdirectory=x")
        assert PASSWORD not in line and line.endswith("/org/mine.git@main#subdirectory=x")
        remote = line.partition("git+")[2].partition("@")[0]
        environ = {**os.environ, **node.mirror.environ(node.port, ()), "GIT_TERMINAL_PROMPT": "0"}

        def git(*argv: str) -> str:
            result = subprocess.run(["git", *argv], env=environ, cwd=tmp_path, capture_output=True, text=True)
            return result.stderr

        assert git("clone", "-q", "--filter=blob:none", remote) == ""
        assert (tmp_path / "mine/mine.py").exists()
        assert "403" in git("ls-remote", remote.replace("mine", "mine2"))
        assert "403" in git("-C", "mine", "push", "--force", "origin", "HEAD:other")
        push = f"{remote}/info/refs?service=git-receive-pack"
        assert (
            node.request(push)[0] == 403
            and node.request(f"{remote}/git-receive-pack", "POST", b"0000")[0] == 403
        )
        assert not [request for request in server.requests if "mine2" in request or "receive" in request]
        assert (
            node.request(f"{remote}/git-upload-pack", "POST", headers={"Content-Length": str(2**31)})[0]
            == 403
        )
        assert (
            f"{server.port}/org/mine2.git/info/refs: only what the configuration names"
            in node.mirror.explain_output("")
        )


def test_invalid_url_is_left_to_the_installer(catalog: Catalog) -> None:
    for url in ("http://[::1/simple", "http://h:999999/simple"):
        assert catalog.rewrite_index(url) == url
    assert not catalog.grants


def test_signing_key_is_created_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    keys = run_each(lambda _: signing_key(folder), range(8))
    assert len(set(keys)) == 1 and len(keys[0]) == 32
    assert [(path.name, path.stat().st_mode & 0o777) for path in folder.iterdir()] == [("mirror.key", 0o600)]
