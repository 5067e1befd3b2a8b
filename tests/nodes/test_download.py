import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from awsddp.agent.manifest import sample
from awsddp.errors import ConfigError
from awsddp.model.documents import NodeFiles
from awsddp.model.events import Event
from awsddp.model.node_answers import ResultFile
from awsddp.nodes import download
from awsddp.nodes.download import STAGING_FOLDER, VERSIONS
from awsddp.util.parallel import NodesFailed
from tests.nodes.test_sync import tree
from tests.support.project_folder import HELL
from tests.support.ssh_hosts import Host, Lab

MakeLab = Callable[[int], Lab]


def made(host: Host, name: str, data: bytes, *, home: str | None = None) -> ResultFile:
    """Let a node hold a file, and return what an honest node says of it."""
    path = host.work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return described(
        ResultFile(path=str(path), home=home or f"node{host.node}/{name}", size=0, node=host.node)
    )


def described(one: ResultFile) -> ResultFile:
    """Return what an honest node says of a file now."""
    info = Path(one.path).stat()
    told = sample(Path(one.path), info.st_size) if Path(one.path).is_file() else None
    stamp = {"modified": info.st_mtime_ns, "changed": info.st_ctime_ns, "inode": info.st_ino}
    return replace(one, size=info.st_size, sample=told, **stamp)


def link_to(home: str, target: str) -> ResultFile:
    return ResultFile(path="/l", home=home, size=0, target=target)


def pull(
    lab: Lab, wanted: dict[int, list[ResultFile]], target: Path, **settings: object
) -> dict[int, NodeFiles]:
    def look(nodes: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        files = [one for node in nodes for one in wanted[node] if Path(one.path).exists()]
        return {(one.node, one.path): described(one) for one in files}

    transfer = download.rsync_transfer(lab.ssh_config)
    return download.pull(  # type: ignore[arg-type]
        wanted, target, transfer=transfer, list_files=look, matches_sample=begins, **settings
    )


def begins(path: Path, one: ResultFile) -> bool:
    return sample(path, one.size) == one.sample


def job_json(changed: Sequence[ResultFile]) -> dict[str, bytes]:
    return {"job.json": b"{}"}


class Changed(list[ResultFile]):
    """What came otherwise than described, once a fetch is over."""

    def __call__(self, changed: Sequence[ResultFile]) -> dict[str, bytes]:
        self += changed
        return {}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where results belong, as a path that needs quoting."""
    return tmp_path / "my runs" / "job's"


def test_the_results_of_all_nodes_come_into_one_folder(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    log, other = b"log\n" * 1000, b"gol\n" * 1000
    wanted = {
        0: [made(two.hosts[0], "out/x.pth", b"zero"), made(two.hosts[0], "l0", log, home="logs/rank0.log")],
        1: [made(two.hosts[1], "out/x.pth", b"one"), made(two.hosts[1], "l1", other, home="logs/rank1.log")],
    }
    said: list[Event] = []
    came = pull(two, wanted, target, last_files=job_json, on_event=said.append)
    assert came == {0: NodeFiles(node=0, files=2, bytes=4004), 1: NodeFiles(node=1, files=2, bytes=4003)}
    files = {name: data for name, data in tree(target).items() if data is not None}
    assert files == {
        "job.json": b"{}",
        "logs/rank0.log": log,
        "logs/rank1.log": other,
        "node0/out/x.pth": b"zero",
        "node1/out/x.pth": b"one",
    }
    assert list(target.parent.iterdir()) == [target]
    assert said[-1].fraction == 1.0


def test_what_came_with_the_list_is_not_fetched(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    told = made(one.hosts[0], "out/x.pth", b"data")
    one.hosts[0].stop()
    assert pull(one, {0: [replace(told, data=b"data")]}, target) == {0: NodeFiles(node=0, files=1, bytes=4)}
    assert (target / "node0/out/x.pth").read_bytes() == b"data"
    assert pull(one, {0: [told]}, target) == {0: NodeFiles(node=0, files=0, bytes=0)}


def test_a_second_time_only_what_is_new_comes_and_what_is_at_home_stays(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    first = [made(host, "a", b"a"), made(host, "b", b"b")]
    pull(one, {0: first}, target)
    (target / "notes.txt").write_text("mine")
    (target / "node0/a").write_text("spoiled")
    came = pull(one, {0: [*first, made(host, "c", b"ccc")]}, target)
    assert came == {0: NodeFiles(node=0, files=2, bytes=4)}
    assert tree(target) == {
        "node0": None,
        "node0/a": b"a",
        "node0/b": b"b",
        "node0/c": b"ccc",
        "notes.txt": b"mine",
    }


def test_what_was_rewritten_in_place_with_its_size_and_time_comes_again(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    first = made(one.hosts[0], "a", b"a" * 100_000)
    pull(one, {0: [first]}, target)
    path = Path(first.path)
    path.write_bytes(b"b" * 100_000)
    os.utime(path, ns=(first.modified, first.modified))
    for files in (1, 0):
        assert pull(one, {0: [described(first)]}, target)[0].files == files
        assert (target / first.home).read_bytes() == b"b" * 100_000


def test_the_middle_of_a_large_file_that_was_rewritten_with_its_size_and_time_comes_again(
    lab: MakeLab, target: Path
) -> None:
    one = lab(1)
    first = made(one.hosts[0], "a", b"a" * 1_000_000)
    pull(one, {0: [first]}, target, last_files=job_json)
    with Path(first.path).open("r+b") as file:
        file.seek(20_000)  # between the blocks of a sample
        file.write(b"b")
    os.utime(first.path, ns=(first.modified, first.modified))
    now = described(first)
    assert (now.size, now.modified, now.sample) == (first.size, first.modified, first.sample)
    for files in (1, 0):
        assert pull(one, {0: [now]}, target, last_files=job_json)[0].files == files
        assert (target / first.home).read_bytes() == Path(first.path).read_bytes()


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_what_is_rewritten_with_its_size_and_time_while_it_comes_is_not_taken(
    lab: MakeLab, target: Path, size: int
) -> None:
    one = lab(1)
    first = made(one.hosts[0], "a", b"a" * size)
    come = download.rsync_transfer(one.ssh_config)

    def then_rewritten(*words: object) -> None:
        come(*words)  # type: ignore[arg-type]
        Path(first.path).write_bytes(b"a" * 20_000 + b"b" + b"a" * (size - 20_001))
        os.utime(first.path, ns=(first.modified, first.modified))

    def look(_: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        return {(0, first.path): described(first)}

    changed = Changed()
    wanted = {0: [first]}
    download.pull(
        wanted, target, transfer=then_rewritten, list_files=look, matches_sample=begins, last_files=changed
    )
    assert changed == [first]
    assert not (target / first.home).exists()


def test_what_was_rewritten_since_a_fetch_was_cut_comes_as_it_is_now(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    first = made(one.hosts[0], "a", b"a" * 1_000_000)
    come = download.rsync_transfer(one.ssh_config)

    def cut(*words: object) -> None:
        come(*words)  # type: ignore[arg-type]
        raise OSError("cut")

    with pytest.raises(ConfigError):
        download.pull({0: [first]}, target, transfer=cut, matches_sample=begins)
    with Path(first.path).open("r+b") as file:
        file.seek(20_000)  # between the blocks of a sample
        file.write(b"b")
    os.utime(first.path, ns=(first.modified, first.modified))
    pull(one, {0: [described(first)]}, target)
    assert (target / first.home).read_bytes() == Path(first.path).read_bytes()


def test_any_name_comes_home(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    files = [made(one.hosts[0], f"{name}/{name}", name.encode("utf-8", "surrogateescape")) for name in HELL]
    pull(one, {0: files}, target)
    assert tree(target / "node0") == tree(one.hosts[0].work)
    assert not list(target.parent.rglob("canary"))


def test_nothing_wanted_is_a_folder_all_the_same(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    assert pull(one, {0: []}, target, last_files=job_json) == {0: NodeFiles(node=0, files=0, bytes=0)}
    assert tree(target) == {"job.json": b"{}"}


def rewritten(host: Host) -> ResultFile:
    wanted = made(host, "x", b"data")
    host.script("rsync", '#!/bin/sh\n/usr/bin/rsync "$@"\nprintf atad > {home}/awsddp/work/x\n')
    return wanted


def torn(host: Host) -> ResultFile:
    wanted = made(host, "x", b"data" * 1000)
    host.script("rsync", '#!/bin/sh\n/usr/bin/rsync "$@"\nprintf data >> {home}/awsddp/work/x\n')
    return wanted


def missing(host: Host) -> ResultFile:
    wanted = made(host, "x", b"data")
    Path(wanted.path).unlink()
    return wanted


def folder(host: Host) -> ResultFile:
    wanted = missing(host)
    Path(wanted.path).mkdir()
    return wanted


def pipe(host: Host) -> ResultFile:
    wanted = missing(host)
    os.mkfifo(wanted.path)
    return wanted


@pytest.mark.parametrize("spoil", [rewritten, torn, missing, folder, pipe])
@pytest.mark.parametrize("there", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_what_is_not_as_the_node_said_costs_no_other_file(
    lab: MakeLab, target: Path, spoil: Callable[[Host], ResultFile], there: bool
) -> None:
    two = lab(2)
    old = {"node1": None, "node1/x": b"old"} if there else {}
    if there:
        (target / "node1").mkdir(parents=True)
        (target / "node1/x").write_text("old")
    good, spoiled = made(two.hosts[0], "good", b"good"), spoil(two.hosts[1])
    changed, wanted = Changed(), {0: [good], 1: [spoiled, made(two.hosts[1], "y", b"yy")]}
    came = pull(two, wanted, target, last_files=changed)
    assert came == {0: NodeFiles(node=0, files=1, bytes=4), 1: NodeFiles(node=1, files=1, bytes=2)}
    assert changed == [spoiled]
    new = {"node0": None, "node0/good": b"good", "node1": None, "node1/y": b"yy"}
    assert tree(target) == old | new


def test_of_what_grows_comes_at_least_what_was_described(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    names = ("grown", "rotated", "removed", "shrunk", "whole")
    files = [made(host, name, name.encode() * 1000) for name in names]
    (host.work / "removed").unlink()
    words = "cd {home}/awsddp/work; printf more >> grown; printf %9999s >> rotated; printf new > shrunk"
    host.script("rsync", f'#!/bin/sh\n/usr/bin/rsync "$@"\n{words}\n')
    (host.work / "rotated").write_text("new" * 2000)
    changed = Changed()
    came = pull(one, {0: files}, target, accept_grown=True, last_files=changed)
    assert (came, changed) == ({0: NodeFiles(node=0, files=2, bytes=10_000)}, files[1:4])
    assert tree(target / "node0") == {"grown": b"grown" * 1000, "whole": b"whole" * 1000}
    assert [path.name for path in target.iterdir()] == ["node0"]


def test_a_log_that_is_here_and_longer_is_not_cut(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    log = made(one.hosts[0], "log", b"one\n", home="logs/rank0.log")
    (target / "logs").mkdir(parents=True)
    (target / "logs/rank0.log").write_bytes(b"one\ntwo\n")
    assert pull(one, {0: [log]}, target, accept_grown=True) == {0: NodeFiles(node=0, files=0, bytes=0)}
    assert (target / "logs/rank0.log").read_bytes() == b"one\ntwo\n"
    assert pull(one, {0: [log]}, target) == {0: NodeFiles(node=0, files=1, bytes=4)}


RSYNC = """\
#!/bin/sh
exec /usr/bin/rsync "$@" | exec python3 '{root}/bin/relay'
"""
RELAY = """\
import os
count = 0
while count < 2_000_000 and (data := os.read(0, 65536)):
    os.write(1, data)
    count += len(data)
    open('{root}/sent', 'ab').write(data)
"""


def counted(host: Host) -> Path:
    """Cut what rsync sends from a node after 2 MB; return the file that gets all of it."""
    host.script("relay", RELAY)
    host.script("rsync", RSYNC)
    return host.root / "sent"


def test_a_fetch_that_is_cut_goes_on_where_it_was(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    sent = counted(host)
    data = [os.urandom(500_000), os.urandom(5_000_000)]
    files = [made(host, f"f{number}", some) for number, some in enumerate(data)]
    cuts = 0
    while not (target / "job.json").exists():
        try:
            pull(one, {0: files}, target, last_files=job_json)
        except NodesFailed:
            assert not (target / "node0/f1").exists()
            cuts += 1
    assert 2 <= cuts <= 4
    ours = {".awsddp": None, VERSIONS: (target / VERSIONS).read_bytes()}
    assert tree(target) == {
        **ours,
        "job.json": b"{}",
        "node0": None,
        "node0/f0": data[0],
        "node0/f1": data[1],
    }
    assert sent.stat().st_size < 5_500_000 + cuts * 500_000


def test_nothing_is_written_through_what_an_earlier_fetch_left(
    lab: MakeLab, target: Path, tmp_path: Path
) -> None:
    one = lab(1)
    file = made(one.hosts[0], "a", b"a")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a").write_text("mine")
    staged = target / STAGING_FOLDER / "node0" / file.path.lstrip("/")
    staged.parent.parent.mkdir(parents=True)
    staged.parent.symlink_to(mine)
    (target / STAGING_FOLDER / "also").symlink_to(mine / "a")
    pull(one, {0: [file]}, target, last_files=job_json)
    assert tree(mine) == {"a": b"mine"}
    assert tree(target) == {"job.json": b"{}", "node0": None, "node0/a": b"a"}


def test_holes_stay_holes_and_do_not_travel(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    sent = counted(host)
    file = made(host, "holes", b"")
    with (host.work / "holes").open("wb") as stream:
        stream.truncate(20_000_000)
        stream.seek(10_000_000)
        stream.write(b"data")
    pull(one, {0: [replace(described(file), sparse=True)]}, target)
    assert (target / "node0/holes").stat().st_blocks * 512 < 1_000_000
    assert sent.stat().st_size < 200_000


def test_a_disk_without_the_room_is_said_before_anything_comes(
    lab: MakeLab, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=8_400_000))
    large = ResultFile(path="/x", home="x", size=20_000_000)
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
        pull(two, wanted, target, on_event=interrupt, last_files=job_json)
    assert not (target / "job.json").exists()
    pull(two, wanted, target, last_files=job_json)
    assert {path: data for path, data in tree(target).items() if data is not None} == {
        "job.json": b"{}",
        **{one.home: Path(one.path).read_bytes() for files in wanted.values() for one in files},
    }


def test_what_a_killed_fetch_left_is_cleared_away(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    (target / STAGING_FOLDER / "node0/whole").mkdir(parents=True)
    (target / STAGING_FOLDER / "node0/whole/rubbish").write_text("rubbish")
    events = made(one.hosts[0], "events", b"e")
    pull(one, {0: [replace(events, data=b"e")]}, target)
    assert (target / STAGING_FOLDER / "node0/whole/rubbish").exists()
    pull(one, {0: [made(one.hosts[0], "a", b"a")]}, target, last_files=job_json)
    assert tree(target) == {"job.json": b"{}", "node0": None, "node0/a": b"a", "node0/events": b"e"}


def test_a_node_that_is_gone_is_named_and_home_is_as_it_was(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    wanted = {host.node: [made(host, "a", b"a%d" % host.node)] for host in two.hosts}
    two.hosts[1].stop()
    with pytest.raises(NodesFailed, match="node1: the transfer was interrupted"):
        pull(two, wanted, target, last_files=job_json)
    assert tree(target) == {"node0": None, "node0/a": b"a0"}


def test_the_same_bytes_under_the_same_path_travel_once(lab: MakeLab, target: Path) -> None:
    two = lab(2)
    sent, weights = [counted(host) for host in two.hosts], os.urandom(1_500_000)
    wanted = {host.node: [made(host, "deep/model.pt", weights)] for host in two.hosts}
    changed = Changed()
    assert pull(two, wanted, target, last_files=changed) == {
        0: NodeFiles(node=0, files=1, bytes=1_500_000),
        1: NodeFiles(node=1, files=0, bytes=0),
    }
    assert changed == []
    copies = [target / "node0/deep/model.pt", target / "node1/deep/model.pt"]
    assert [path.read_bytes() for path in copies] == [weights] * 2
    assert len({path.stat().st_ino for path in copies}) == 2
    assert sum(path.stat().st_size for path in sent) < 1_600_000
    copies[0].unlink()
    pull(two, wanted, target, last_files=changed)
    assert copies[0].read_bytes() == weights
    assert sum(path.stat().st_size for path in sent) < 1_700_000


def test_the_same_bytes_under_several_names_travel_once(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    weights = os.urandom(1_500_000)
    files = [made(host, name, weights) for name in ("last.pth", "copy.pth")]
    sent = counted(host)
    (host.work / "best.pth").hardlink_to(host.work / "last.pth")
    files.append(described(replace(files[0], path=str(host.work / "best.pth"), home="node0/best.pth")))
    pull(one, {0: files}, target)
    assert {path.read_bytes() for path in (target / "node0").iterdir()} == {weights}
    assert sent.stat().st_size < 1_700_000


def test_of_what_was_only_touched_on_its_node_no_bytes_travel(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    first = made(one.hosts[0], "a", os.urandom(1_500_000))
    pull(one, {0: [first]}, target, last_files=job_json)
    sent = counted(one.hosts[0])
    Path(first.path).chmod(0o600)
    pull(one, {0: [described(first)]}, target, last_files=job_json)
    size = sent.stat().st_size
    pull(one, {0: [described(first)]}, target, last_files=job_json)
    assert sent.stat().st_size == size < 100_000
    assert (target / first.home).read_bytes() == Path(first.path).read_bytes()


def test_what_only_seemed_the_same_comes_as_it_is(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    weights = os.urandom(1_500_000)
    other = weights[:100_000] + b"other" + weights[100_005:]
    files = [made(host, "a", weights), made(host, "b", other)]
    pull(one, {0: [files[0], replace(files[1], sample=files[0].sample)]}, target)
    assert tree(target / "node0") == {"a": weights, "b": other}


def test_a_link_comes_home_as_the_file_that_it_leads_to(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    host = one.hosts[0]
    file = made(host, "real", b"data")
    for name in ("x", "y"):
        (host.work / name).symlink_to("real")
    links = [replace(file, path=str(host.work / name), home=f"node0/{name}") for name in ("x", "y")]
    pull(one, {0: [file, *links]}, target)
    assert tree(target / "node0") == {"real": b"data", "x": b"data", "y": b"data"}
    assert not (target / "node0/x").is_symlink()


LIES = """\
import os, sys
old, new = (word.encode().decode("unicode_escape").encode("latin-1") for word in sys.argv[1:])
while data := os.read(0, 65536):
    open('{root}/lied', 'a').write('x' * (old in data))
    os.write(1, data.replace(old, new))
"""


@pytest.mark.parametrize(
    ("true", "lie"),
    [
        ("/needle", "/needlz"),
        ("/needle", "/../../"),
        ("/needle", "/../../../.."),
        ("awsddp", "../../"),
        (r"\xa4\x81", r"\xff\xa1"),  # a file's mode, a link's
        (r"\xa4\x81", r"\xa4\x11"),  # a pipe's
    ],
)
def test_a_node_whose_rsync_lies_about_names_and_kinds_changes_nothing_else(
    lab: MakeLab, target: Path, true: str, lie: str
) -> None:
    one = lab(1)
    host = one.hosts[0]
    wanted = made(host, "needle/x", b"data")
    Path(wanted.path).chmod(0o644)
    host.script("lies", LIES)
    script = f"""#!/bin/sh\n/usr/bin/rsync "$@" | exec python3 '{{root}}/bin/lies' '{true}' '{lie}'\n"""
    host.script("rsync", script)
    before = tree(target.parent.parent)
    with suppress(NodesFailed):
        pull(one, {0: [wanted]}, target, last_files=job_json)
    assert (host.root / "lied").read_text()
    after = {path: data for path, data in tree(target.parent.parent).items() if data is not None}
    home = target.relative_to(target.parent.parent).as_posix()
    new = {path for path in after if before.get(path) != after[path]}
    ours = {
        path
        for path in new
        if path.startswith((f"{home}/{STAGING_FOLDER}/node0/", f"{one.folder.name}/", "node0/l"))
    }
    assert new - ours <= {f"{home}/job.json"}
    assert not any(path.is_symlink() for path in target.rglob("*"))


@pytest.mark.parametrize("leads", ["{mine}", "{mine}/x", "/etc/hostname", "nowhere"])
def test_a_file_that_becomes_a_link_is_read_and_written_through_no_link_here(
    lab: MakeLab, target: Path, tmp_path: Path, leads: str
) -> None:
    one = lab(1)
    host = one.hosts[0]
    wanted = made(host, "x", b"data")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "x").write_bytes(b"mine")
    (host.work / "x").unlink()
    (host.work / "x").symlink_to(leads.format(mine=mine))
    pull(one, {0: [wanted]}, target, last_files=job_json)
    assert tree(mine) == {"x": b"mine"}
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_links_come_home_after_the_files_and_replace_what_has_their_name(lab: MakeLab, target: Path) -> None:
    one = lab(1)
    file = made(one.hosts[0], "ckpt/step1.pt", b"1")
    links = [link_to("node0/ckpt/latest.pt", "node0/ckpt/step1.pt"), link_to("node0/a", "node0/b")]
    pull(one, {0: [file, *links]}, target)
    assert (target / "node0/ckpt/latest.pt").read_bytes() == b"1"
    links[0] = link_to("node0/ckpt/latest.pt", "node0/a")
    (target / "node0/a").unlink()
    (target / "node0/a").write_text("a file at home")
    pull(one, {0: [file, *links]}, target)
    assert [(target / link.home).readlink() for link in links] == [Path("../a"), Path("b")]


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
    pull(one, {0: [*files, link_to("node0/deep/link", "node0/deep/x")]}, target)
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
