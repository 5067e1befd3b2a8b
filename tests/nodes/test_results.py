import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from awsddp.cluster import HomeLink
from awsddp.errors import AwsddpError, ConfigError
from awsddp.nodes import sync
from awsddp.nodes.failures import NodesFailed
from awsddp.nodes.sync import Fetched, Wanted
from awsddp.report import Event
from tests.nodes.ssh_hosts import Host, Lab
from tests.nodes.test_listing import HELL
from tests.nodes.test_sync import tree

MakeLab = Callable[[int], Lab]


def made(host: Host, name: str, data: bytes, *, home: str | None = None) -> Wanted:
    """Let a node hold a file, and return what an honest node says of it."""
    path = host.work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return Wanted(
        remote=str(path),
        home=home if home is not None else f"node{host.node}/{name}",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def pull(lab: Lab, wanted: dict[int, list[Wanted]], target: Path, **settings: object) -> dict[int, Fetched]:
    return sync.pull(wanted, target, ssh_config=lab.ssh_config, **settings)  # type: ignore[arg-type]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where results belong, as a path that needs quoting."""
    return tmp_path / "my runs" / "job's"


def test_the_results_of_all_nodes_come_into_one_folder(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    log = b"log\n" * 1000
    wanted = {
        0: [made(two.hosts[0], "out/x.pth", b"zero"), made(two.hosts[0], "l0", log, home="logs/rank0.log")],
        1: [made(two.hosts[1], "out/x.pth", b"one"), made(two.hosts[1], "l1", log, home="logs/rank1.log")],
    }
    said: list[Event] = []
    came = pull(two, wanted, target, also={"job.json": b"{}"}, on_event=said.append)
    assert came == {0: Fetched(files=2, bytes=4004), 1: Fetched(files=2, bytes=4003)}
    files = {name: data for name, data in tree(target).items() if data is not None}
    assert files == {
        "job.json": b"{}",
        "logs/rank0.log": log,
        "logs/rank1.log": log,
        "node0/out/x.pth": b"zero",
        "node1/out/x.pth": b"one",
    }
    assert list(target.parent.iterdir()) == [target]
    assert said[-1].fraction == 1.0


def test_what_came_with_the_list_is_checked_and_not_fetched(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    told = made(one.hosts[0], "out/x.pth", b"data")
    here = replace(told, data=b"data")
    one.hosts[0].stop()
    assert pull(one, {0: [here]}, target) == {0: Fetched(files=1, bytes=4)}
    assert (target / "node0/out/x.pth").read_bytes() == b"data"
    with pytest.raises(NodesFailed, match="does not match what the node described"):
        pull(one, {0: [replace(here, home="y", data=b"atad")]}, target)
    assert not (target / "y").exists()


def test_a_second_time_only_what_is_new_comes_and_what_is_at_home_stays(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    first = [made(host, "a", b"a"), made(host, "b", b"b")]
    pull(one, {0: first}, target)
    (target / "notes.txt").write_text("mine")
    (target / "node0/a").write_text("spoiled")
    came = pull(one, {0: [*first, made(host, "c", b"ccc")]}, target)
    assert came == {0: Fetched(files=2, bytes=4)}
    assert tree(target) == {
        "node0": None,
        "node0/a": b"a",
        "node0/b": b"b",
        "node0/c": b"ccc",
        "notes.txt": b"mine",
    }


def test_any_name_comes_home(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    files = [made(one.hosts[0], f"{name}/{name}", name.encode("utf-8", "surrogateescape")) for name in HELL]
    pull(one, {0: files}, target)
    assert tree(target / "node0") == tree(one.hosts[0].work)
    assert not list(target.parent.rglob("canary"))


def test_nothing_wanted_is_a_folder_all_the_same(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    assert pull(one, {0: []}, target, also={"job.json": b"{}"}) == {0: Fetched(files=0, bytes=0)}
    assert tree(target) == {"job.json": b"{}"}


def wrong_sha(host: Host) -> Wanted:
    return Wanted(**{**vars(made(host, "x", b"data")), "sha256": "0" * 64})


def wrong_size(host: Host) -> Wanted:
    return Wanted(**{**vars(made(host, "x", b"data")), "size": 5})


def missing(host: Host) -> Wanted:
    wanted = made(host, "x", b"data")
    Path(wanted.remote).unlink()
    return wanted


def link(host: Host) -> Wanted:
    wanted = made(host, "x", b"data")
    Path(wanted.remote).rename(host.work / "real")
    Path(wanted.remote).symlink_to("real")
    return wanted


def folder(host: Host) -> Wanted:
    wanted = missing(host)
    Path(wanted.remote).mkdir()
    return wanted


def pipe(host: Host) -> Wanted:
    wanted = missing(host)
    os.mkfifo(wanted.remote)
    return wanted


@pytest.mark.parametrize("spoil", [wrong_sha, wrong_size, missing, link, folder, pipe])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_not_as_the_node_said_leaves_home_as_it_was(
    lab: MakeLab, target: Path, spoil: Callable[[Host], Wanted], there: bool
) -> None:
    two = lab(2)
    if there:
        target.mkdir(parents=True)
        (target / "old").write_text("old")
    before = tree(target.parent)
    with pytest.raises(NodesFailed, match="does not match what the node described") as caught:
        pull(two, {0: [made(two.hosts[0], "good", b"good")], 1: [spoil(two.hosts[1])]}, target)
    assert list(caught.value.failures) == [1]
    assert tree(target.parent) == before


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a/..", ".", "./a", "a//b", "a/", "a\0b", ".."]
)
def test_a_name_that_could_lead_elsewhere_is_refused(lab: MakeLab, target: Path, name: str) -> None:
    one = lab(1)
    with pytest.raises(ConfigError, match="invalid result path"):
        pull(one, {0: [made(one.hosts[0], "x", b"data", home=name)]}, target)
    assert not target.exists()


@pytest.mark.parametrize("remote", ["relative", "/a/../etc/passwd", "/a\0b", ""])
def test_a_remote_path_must_be_one(lab: MakeLab, target: Path, remote: str) -> None:
    wanted = Wanted(remote=remote, home="x", size=0, sha256="")
    with pytest.raises(ConfigError, match="not an absolute path"):
        pull(lab(1), {0: [wanted]}, target)


def test_two_files_for_one_place_are_refused(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    wanted = {host.node: [made(host, "x", b"data", home="same")] for host in two.hosts}
    with pytest.raises(ConfigError, match="two results"):
        pull(two, wanted, target)
    wanted = {0: [made(two.hosts[0], "x", b"x", home="a"), made(two.hosts[0], "y", b"y", home="a/b")]}
    with pytest.raises(AwsddpError):
        pull(two, wanted, target)
    assert not target.exists()


def test_a_disk_without_the_room_is_said_before_anything_comes(
    lab: MakeLab, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=8_400_000))
    large = Wanted(remote="/x", home="x", size=20_000_000, sha256="0")
    with pytest.raises(ConfigError, match=r"need 20\.0 MB, .* has 8\.4 MB free"):
        pull(lab(1), {0: [large]}, target)
    assert not target.parent.exists()


@pytest.mark.parametrize("when", [0, 2])
def test_an_interrupt_shows_nothing_half_made_and_the_next_time_it_is_whole(
    lab: MakeLab, target: Path, when: int
) -> None:
    two = lab(2)
    wanted = {
        host.node: [made(host, str(number), os.urandom(1000)) for number in range(20)] for host in two.hosts
    }
    said: list[Event] = []

    def interrupt(event: Event) -> None:
        said.append(event)
        if len(said) > when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(two, wanted, target, on_event=interrupt)
    assert not target.exists()
    assert pull(two, wanted, target) == {0: Fetched(files=20, bytes=20000), 1: Fetched(files=20, bytes=20000)}


def test_what_a_killed_fetch_left_is_cleared_away(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    (target.parent / f".{target.name}.part/whole").mkdir(parents=True)
    (target.parent / f".{target.name}.part/whole/rubbish").write_text("rubbish")
    pull(one, {0: [made(one.hosts[0], "a", b"a")]}, target)
    assert tree(target.parent) == {
        target.name: None,
        f"{target.name}/node0": None,
        f"{target.name}/node0/a": b"a",
    }


def test_a_node_that_is_gone_is_named_and_home_is_as_it_was(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    wanted = {host.node: [made(host, "a", b"a%d" % host.node)] for host in two.hosts}
    two.hosts[1].stop()
    with pytest.raises(NodesFailed, match="node1: the transfer was interrupted"):
        pull(two, wanted, target)
    assert not target.exists()


def test_the_same_bytes_under_the_same_path_travel_once(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    wanted = {host.node: [made(host, "deep/model.pt", b"weights")] for host in two.hosts}
    wanted[0].append(replace(wanted[0][0], home="node0/link to it.pt"))
    two.hosts[1].stop()
    assert pull(two, wanted, target) == {0: Fetched(files=1, bytes=7), 1: Fetched(files=0, bytes=0)}
    copies = [target / name for name in ("node0/deep/model.pt", "node0/link to it.pt", "node1/deep/model.pt")]
    assert [path.read_bytes() for path in copies] == [b"weights"] * 3
    assert len({path.stat().st_ino for path in copies}) == 3
    copies[2].unlink()
    two.hosts[0].stop()
    pull(two, wanted, target)
    assert copies[2].read_bytes() == b"weights"


def test_the_same_bytes_under_another_path_are_fetched(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    wanted = {host.node: [made(host, f"f{host.node}", b"weights")] for host in two.hosts}
    assert pull(two, wanted, target)[1] == Fetched(files=1, bytes=7)


def test_links_come_home_after_the_files_and_replace_what_has_their_name(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    file = made(one.hosts[0], "ckpt/step1.pt", b"1")
    links = [
        HomeLink(home="node0/ckpt/latest.pt", target="step1.pt"),
        HomeLink(home="node0/a", target="b"),
    ]
    pull(one, {0: [file]}, target, links=links)
    assert (target / "node0/ckpt/latest.pt").read_bytes() == b"1"
    links[0] = HomeLink(home="node0/ckpt/latest.pt", target="../a")
    (target / "node0/a").unlink()
    (target / "node0/a").write_text("a file at home")
    pull(one, {0: [file]}, target, links=links)
    assert [(target / link.home).readlink() for link in links] == [Path("../a"), Path("b")]


@pytest.mark.parametrize(
    "link",
    [
        HomeLink(home="node0/a", target="/etc/passwd"),
        HomeLink(home="node0/a", target="../../x"),
        HomeLink(home="node0/a/b", target="../../../x"),
        HomeLink(home="node0/a", target="b/../../../x"),
        HomeLink(home="node0/a", target="b/.."),
        HomeLink(home="node0/a", target="b\0"),
        HomeLink(home="../a", target="b"),
        HomeLink(home="a/../b", target="b"),
    ],
)
def test_a_link_that_could_lead_elsewhere_is_refused(lab: MakeLab, target: Path, link: HomeLink) -> None:
    with pytest.raises(ConfigError, match=r"link|path"):
        pull(lab(1), {0: []}, target, links=[link])
    assert not target.exists()


def test_nothing_is_written_or_read_through_a_link_at_home(
    lab: MakeLab, target: Path, tmp_path: Path
) -> None:
    one = lab(1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").write_text("data")
    (target / "node0").mkdir(parents=True)
    (target / "node0/deep").symlink_to(tmp_path / "mine")
    (target / "node0/file").symlink_to(tmp_path / "mine/x")
    files = [made(one.hosts[0], "deep/x", b"data"), made(one.hosts[0], "file", b"more")]
    pull(one, {0: files}, target, links=[HomeLink(home="node0/deep/link", target="x")])
    assert tree(tmp_path / "mine") == {"x": b"data"}
    assert (target / "node0/deep/x").read_bytes() == b"data"
    assert not (target / "node0/deep").is_symlink()
    assert (target / "node0/file").read_bytes() == b"more"


def test_a_folder_of_results_that_ends_in_part_is_left_alone(lab: MakeLab, target: Path) -> None:
    other = target.with_name(f"{target.name}.part")
    other.mkdir(parents=True)
    (other / "mine").write_text("mine")
    pull(lab(1), {0: []}, target)
    assert (other / "mine").read_text() == "mine"
