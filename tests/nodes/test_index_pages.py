"""The pages of indexes and the folders of this machine, as nodes get them."""

import os
from pathlib import Path

import pytest

from awsddp.nodes.catalog import Catalog
from tests.support.mirrored_node import REPLIES, mirrored
from tests.support.servers import Reply, page, serve_replies
from tests.support.wheels import wheel


def test_a_page_is_served_with_links_of_our_own_to_packages_alone(catalog: Catalog) -> None:
    """Relative links, those of another host, and what is said of a file; header names have no case."""
    with serve_replies(REPLIES) as server, mirrored(catalog) as node:
        shown = catalog.rewrite_index(f"{server.url}/simple")
        links = node.links(f"{shown}/small/")
        hosts = [link.rpartition("/")[0].partition("://")[2].partition("/")[0] for link in links]
        assert hosts == ["files.awsddp.invalid"] * 3
        names = [link.rpartition("/")[2] for link in links]
        assert names == ["small-1.0.tar.gz#sha256=ab", "small-2.0.whl", "small-3.0.whl"]
        assert [node.ask(link.partition("#")[0]) for link in links[:2]] == [(200, b"one"), (200, b"two")]
        assert node.ask(f"{links[1]}.metadata") == (200, b"metadata")
        page = node.ask(f"{shown}/small/")[1].decode()
        assert page.count('data-requires-python="&gt;=3.8"') == 3 and server.url not in page
        assert catalog.rewrite_index(f"{server.url}/simple") == shown, "a node finds a file in its cache"


def test_a_page_of_links_may_name_the_place_of_its_files(catalog: Catalog) -> None:
    with serve_replies({"/deep/f/small-1.0.whl": Reply(b"one")}) as files:
        replies = {"/links.html": page("f/small-1.0.whl", base=f"{files.url}/deep/")}
        with serve_replies(replies) as server, mirrored(catalog) as node:
            catalog.rewrite_links_page(f"{files.url}/deep/")
            links = node.links(catalog.rewrite_links_page(f"{server.url}/links.html"))
            assert node.ask(links[0]) == (200, b"one")


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
        shown = catalog.rewrite_links_page(str(folder))
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
        index = catalog.rewrite_index((tmp_path / "mirror/simple").as_uri())
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
        assert node.ask(catalog.rewrite_index(f"{server.url}/simple") + "/x/")[0] == 504
        assert resident_mb(os.getpid()) - before < 60
        assert "a page of more than" in node.mirror.explain_output("")


def resident_mb(pid: int) -> float:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
