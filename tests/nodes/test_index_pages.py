"""Index pages and folders of this machine, as the mirror serves them to nodes."""

import os
from pathlib import Path

import pytest

from awsddp.nodes.catalog import Catalog
from tests.support.mirrored_node import REPLIES, serve_through_mirror
from tests.support.servers import Reply, page, serve_replies
from tests.support.wheels import write_wheel


def test_mirror_serves_a_page_with_its_own_links_to_packages_only(catalog: Catalog) -> None:
    """With relative links, links to another host and attributes; header names are case-insensitive."""
    with serve_replies(REPLIES) as server, serve_through_mirror(catalog) as node:
        index_url = catalog.rewrite_index(f"{server.url}/simple")
        links = node.links(f"{index_url}/small/")
        hosts = [link.rpartition("/")[0].partition("://")[2].partition("/")[0] for link in links]
        assert hosts == ["files.awsddp.invalid"] * 3
        names = [link.rpartition("/")[2] for link in links]
        assert names == ["small-1.0.tar.gz#sha256=ab", "small-2.0.whl", "small-3.0.whl"]
        assert [node.request(link.partition("#")[0]) for link in links[:2]] == [(200, b"one"), (200, b"two")]
        assert node.request(f"{links[1]}.metadata") == (200, b"metadata")
        text = node.request(f"{index_url}/small/")[1].decode()
        assert text.count('data-requires-python="&gt;=3.8"') == 3 and server.url not in text
        assert catalog.rewrite_index(f"{server.url}/simple") == index_url, "a node finds a file in its cache"


def test_mirror_resolves_links_against_the_base_of_a_page(catalog: Catalog) -> None:
    with serve_replies({"/deep/f/small-1.0.whl": Reply(b"one")}) as files:
        replies = {"/links.html": page("f/small-1.0.whl", base=f"{files.url}/deep/")}
        with serve_replies(replies) as server, serve_through_mirror(catalog) as node:
            catalog.rewrite_links_page(f"{files.url}/deep/")
            links = node.links(catalog.rewrite_links_page(f"{server.url}/links.html"))
            assert node.request(links[0]) == (200, b"one")


def test_mirror_serves_only_the_packages_inside_a_folder(catalog: Catalog, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    write_wheel(folder, "tiny")
    for name in ("secret.txt", "outside.whl"):
        (tmp_path / name).write_text("secret")
    (folder / "a-1.0.whl").symlink_to(tmp_path / "secret.txt")
    (folder / "b-1.0.whl").symlink_to(tmp_path / "outside.whl")
    (folder / "secret.html").write_text("secret")
    (folder / "up").symlink_to(tmp_path)
    with serve_through_mirror(catalog) as node:
        url = catalog.rewrite_links_page(str(folder))
        links = node.links(url)
        assert [node.request(link)[0] for link in links] == [403, 403, 200]
        for path in ("secret.html", "up/", "../secret.txt", "%2e%2e/secret.txt", "tiny-1.0-py3-none-any.whl"):
            assert node.request(f"{url}{path}")[0] == 403


def test_local_index_serves_only_the_named_files_of_its_mirror(catalog: Catalog, tmp_path: Path) -> None:
    names = ("odd_name-1.whl", "odd_name-1.whl.metadata", "odd_name-2.whl", "deep/odd_name-3.whl")
    for name in (*names, "mirror/files/odd_name-1.whl", "mirror/files/odd_name-1.whl.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    project = tmp_path / "mirror/simple/odd-name/index.html"
    project.parent.mkdir(parents=True)
    targets = (
        "../../files/odd_name-1.whl",
        "../../../odd_name-2.whl",
        (tmp_path / "deep/odd_name-3.whl").as_uri(),
    )
    project.write_bytes(page(*targets).body)
    with serve_through_mirror(catalog) as node:
        index = catalog.rewrite_index((tmp_path / "mirror/simple").as_uri())
        links = node.links(f"{index}odd-name/")
        assert [node.request(link)[0] for link in links] == [200, 403, 403]
        assert node.request(f"{links[0]}.metadata") == (200, b"mirror/files/odd_name-1.whl.metadata")
        assert node.request(f"{index}nothing/")[0] == 404
        assert node.request(f"{index}../files/odd_name-1.whl")[0] == 403


@pytest.mark.parametrize(
    "unit", [b"<a href='/x-1.0.whl'></a>", b"<a href='" + b"x" * 1000, b"<!--" + b"x" * 1000]
)
def test_oversized_page_is_refused_and_takes_little_memory(catalog: Catalog, unit: bytes) -> None:
    body = unit * (40 * 2**20 // len(unit)) if unit.endswith(b">") else unit + b"x" * 40 * 2**20
    headers = {"content-type": "text/html"}
    with (
        serve_replies({"/simple/x/": Reply(body, headers=headers)}) as server,
        serve_through_mirror(catalog) as node,
    ):
        before_mb = resident_mb(os.getpid())
        assert node.request(catalog.rewrite_index(f"{server.url}/simple") + "/x/")[0] == 504
        assert resident_mb(os.getpid()) - before_mb < 60
        assert "a page of more than" in node.mirror.explain_output("")


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
