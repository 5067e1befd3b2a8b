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
from tests.nodes.test_sync import read_tree
from tests.support.project_folder import ODD_NAMES
from tests.support.ssh_hosts import Host, Lab

MakeLab = Callable[[int], Lab]


def make_file(host: Host, name: str, data: bytes, *, home: str | None = None) -> ResultFile:
    """Create a file on a node, and return its description."""
    path = host.work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return describe(
        ResultFile(path=str(path), home=home or f"node{host.node}/{name}", size=0, node=host.node)
    )


def describe(file: ResultFile) -> ResultFile:
    """Return the description of a file of a node as it is now."""
    info = Path(file.path).stat()
    sampled = sample(Path(file.path), info.st_size) if Path(file.path).is_file() else None
    stamp = {"modified": info.st_mtime_ns, "changed": info.st_ctime_ns, "inode": info.st_ino}
    return replace(file, size=info.st_size, sample=sampled, **stamp)


def make_link(home: str, target: str) -> ResultFile:
    return ResultFile(path="/l", home=home, size=0, target=target)


def pull(
    lab: Lab, wanted: dict[int, list[ResultFile]], target: Path, **settings: object
) -> dict[int, NodeFiles]:
    def list_files(nodes: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        files = [file for node in nodes for file in wanted[node] if Path(file.path).exists()]
        return {(file.node, file.path): describe(file) for file in files}

    transfer = download.rsync_transfer(lab.ssh_config)
    return download.pull(  # type: ignore[arg-type]
        wanted, target, transfer=transfer, list_files=list_files, matches_sample=matches, **settings
    )


def matches(path: Path, file: ResultFile) -> bool:
    return sample(path, file.size) == file.sample


def make_job_json(changed: Sequence[ResultFile]) -> dict[str, bytes]:
    return {"job.json": b"{}"}


class Changed(list[ResultFile]):
    """The files that arrived different from their description: a `last_files` that collects them."""

    def __call__(self, changed: Sequence[ResultFile]) -> dict[str, bytes]:
        self += changed
        return {}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The results folder, whose path needs quoting."""
    return tmp_path / "my runs" / "job's"


def test_results_of_all_nodes_arrive_in_one_folder(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(2)
    (first, second), log, log1 = lab.hosts, b"log\n" * 1000, b"gol\n" * 1000
    wanted = {
        0: [make_file(first, "out/x.pth", b"zero"), make_file(first, "l0", log, home="logs/rank0.log")],
        1: [make_file(second, "out/x.pth", b"one"), make_file(second, "l1", log1, home="logs/rank1.log")],
    }
    events: list[Event] = []
    counts = pull(lab, wanted, target, last_files=make_job_json, on_event=events.append)
    assert counts == {0: NodeFiles(node=0, files=2, bytes=4004), 1: NodeFiles(node=1, files=2, bytes=4003)}
    files = {name: data for name, data in read_tree(target).items() if data is not None}
    assert files == {
        "job.json": b"{}",
        "logs/rank0.log": log,
        "logs/rank1.log": log1,
        "node0/out/x.pth": b"zero",
        "node1/out/x.pth": b"one",
    }
    assert list(target.parent.iterdir()) == [target]
    assert events[-1].fraction == 1.0


def test_data_that_came_with_the_list_is_not_fetched(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    file = make_file(lab.hosts[0], "out/x.pth", b"data")
    lab.hosts[0].stop()
    assert pull(lab, {0: [replace(file, data=b"data")]}, target) == {0: NodeFiles(node=0, files=1, bytes=4)}
    assert (target / "node0/out/x.pth").read_bytes() == b"data"
    assert pull(lab, {0: [file]}, target) == {0: NodeFiles(node=0, files=0, bytes=0)}


def test_second_fetch_gets_new_and_changed_files_and_keeps_others(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    first = [make_file(host, "a", b"a"), make_file(host, "b", b"b")]
    pull(lab, {0: first}, target)
    (target / "notes.txt").write_text("mine")
    (target / "node0/a").write_text("spoiled")
    counts = pull(lab, {0: [*first, make_file(host, "c", b"ccc")]}, target)
    assert counts == {0: NodeFiles(node=0, files=2, bytes=4)}
    assert read_tree(target) == {
        "node0": None,
        "node0/a": b"a",
        "node0/b": b"b",
        "node0/c": b"ccc",
        "notes.txt": b"mine",
    }


def test_file_rewritten_with_the_same_size_and_time_is_fetched_again(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    first = make_file(lab.hosts[0], "a", b"a" * 100_000)
    pull(lab, {0: [first]}, target)
    path = Path(first.path)
    path.write_bytes(b"b" * 100_000)
    os.utime(path, ns=(first.modified, first.modified))
    for files in (1, 0):
        assert pull(lab, {0: [describe(first)]}, target)[0].files == files
        assert (target / first.home).read_bytes() == b"b" * 100_000


def test_large_file_rewritten_in_the_middle_with_the_same_size_and_time_is_fetched_again(
    make_lab: MakeLab, target: Path
) -> None:
    lab = make_lab(1)
    first = make_file(lab.hosts[0], "a", b"a" * 1_000_000)
    pull(lab, {0: [first]}, target, last_files=make_job_json)
    with Path(first.path).open("r+b") as file:
        file.seek(20_000)  # between the blocks of a sample
        file.write(b"b")
    os.utime(first.path, ns=(first.modified, first.modified))
    now = describe(first)
    assert (now.size, now.modified, now.sample) == (first.size, first.modified, first.sample)
    for files in (1, 0):
        assert pull(lab, {0: [now]}, target, last_files=make_job_json)[0].files == files
        assert (target / first.home).read_bytes() == Path(first.path).read_bytes()


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_file_rewritten_during_a_fetch_with_the_same_size_and_time_is_discarded(
    make_lab: MakeLab, target: Path, size: int
) -> None:
    lab = make_lab(1)
    first = make_file(lab.hosts[0], "a", b"a" * size)
    transfer = download.rsync_transfer(lab.ssh_config)

    def rewrite_late(*arguments: object) -> None:
        transfer(*arguments)  # type: ignore[arg-type]
        Path(first.path).write_bytes(b"a" * 20_000 + b"b" + b"a" * (size - 20_001))
        os.utime(first.path, ns=(first.modified, first.modified))

    def look_again(_: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        return {(0, first.path): describe(first)}

    changed = Changed()
    wanted = {0: [first]}
    download.pull(
        wanted,
        target,
        transfer=rewrite_late,
        list_files=look_again,
        matches_sample=matches,
        last_files=changed,
    )
    assert changed == [first]
    assert not (target / first.home).exists()


def test_file_rewritten_after_an_interrupted_fetch_arrives_as_it_is_now(
    make_lab: MakeLab, target: Path
) -> None:
    lab = make_lab(1)
    first = make_file(lab.hosts[0], "a", b"a" * 1_000_000)
    transfer = download.rsync_transfer(lab.ssh_config)

    def transfer_and_fail(*arguments: object) -> None:
        transfer(*arguments)  # type: ignore[arg-type]
        raise OSError("cut")

    with pytest.raises(ConfigError):
        download.pull({0: [first]}, target, transfer=transfer_and_fail, matches_sample=matches)
    with Path(first.path).open("r+b") as file:
        file.seek(20_000)  # between the blocks of a sample
        file.write(b"b")
    os.utime(first.path, ns=(first.modified, first.modified))
    pull(lab, {0: [describe(first)]}, target)
    assert (target / first.home).read_bytes() == Path(first.path).read_bytes()


def test_file_with_any_name_is_fetched(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    files = [make_file(host, f"{name}/{name}", name.encode("utf-8", "surrogateescape")) for name in ODD_NAMES]
    pull(lab, {0: files}, target)
    assert read_tree(target / "node0") == read_tree(host.work)
    assert not list(target.parent.rglob("canary"))


def test_fetch_of_no_files_creates_the_folder(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    assert pull(lab, {0: []}, target, last_files=make_job_json) == {0: NodeFiles(node=0, files=0, bytes=0)}
    assert read_tree(target) == {"job.json": b"{}"}


def rewrite_file(host: Host) -> ResultFile:
    file = make_file(host, "x", b"data")
    host.script("rsync", '#!/bin/sh\n/usr/bin/rsync "$@"\nprintf atad > {home}/awsddp/work/x\n')
    return file


def extend_file(host: Host) -> ResultFile:
    file = make_file(host, "x", b"data" * 1000)
    host.script("rsync", '#!/bin/sh\n/usr/bin/rsync "$@"\nprintf data >> {home}/awsddp/work/x\n')
    return file


def remove_file(host: Host) -> ResultFile:
    file = make_file(host, "x", b"data")
    Path(file.path).unlink()
    return file


def make_folder(host: Host) -> ResultFile:
    file = remove_file(host)
    Path(file.path).mkdir()
    return file


def make_pipe(host: Host) -> ResultFile:
    file = remove_file(host)
    os.mkfifo(file.path)
    return file


@pytest.mark.parametrize("change", [rewrite_file, extend_file, remove_file, make_folder, make_pipe])
@pytest.mark.parametrize("exists", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_file_that_differs_from_its_description_stops_no_other_file(
    make_lab: MakeLab, target: Path, change: Callable[[Host], ResultFile], exists: bool
) -> None:
    lab = make_lab(2)
    old_tree = {"node1": None, "node1/x": b"old"} if exists else {}
    if exists:
        (target / "node1").mkdir(parents=True)
        (target / "node1/x").write_text("old")
    intact, different = make_file(lab.hosts[0], "good", b"good"), change(lab.hosts[1])
    changed, wanted = Changed(), {0: [intact], 1: [different, make_file(lab.hosts[1], "y", b"yy")]}
    counts = pull(lab, wanted, target, last_files=changed)
    assert counts == {0: NodeFiles(node=0, files=1, bytes=4), 1: NodeFiles(node=1, files=1, bytes=2)}
    assert changed == [different]
    new_tree = {"node0": None, "node0/good": b"good", "node1": None, "node1/y": b"yy"}
    assert read_tree(target) == old_tree | new_tree


def test_growing_file_arrives_with_at_least_its_described_size(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    names = ("grown", "rotated", "removed", "shrunk", "whole")
    files = [make_file(host, name, name.encode() * 1000) for name in names]
    (host.work / "removed").unlink()
    commands = "cd {home}/awsddp/work; printf more >> grown; printf %9999s >> rotated; printf new > shrunk"
    host.script("rsync", f'#!/bin/sh\n/usr/bin/rsync "$@"\n{commands}\n')
    (host.work / "rotated").write_text("new" * 2000)
    changed = Changed()
    counts = pull(lab, {0: files}, target, accept_grown=True, last_files=changed)
    assert (counts, changed) == ({0: NodeFiles(node=0, files=2, bytes=10_000)}, files[1:4])
    assert read_tree(target / "node0") == {"grown": b"grown" * 1000, "whole": b"whole" * 1000}
    assert [path.name for path in target.iterdir()] == ["node0"]


def test_longer_local_log_is_not_truncated(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    log = make_file(lab.hosts[0], "log", b"one\n", home="logs/rank0.log")
    (target / "logs").mkdir(parents=True)
    (target / "logs/rank0.log").write_bytes(b"one\ntwo\n")
    assert pull(lab, {0: [log]}, target, accept_grown=True) == {0: NodeFiles(node=0, files=0, bytes=0)}
    assert (target / "logs/rank0.log").read_bytes() == b"one\ntwo\n"
    assert pull(lab, {0: [log]}, target) == {0: NodeFiles(node=0, files=1, bytes=4)}


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


def record_rsync(host: Host) -> Path:
    """Cut the output of a node's rsync after 2 MB; return the file that records it."""
    host.script("relay", RELAY)
    host.script("rsync", RSYNC)
    return host.root / "sent"


def test_interrupted_fetch_resumes_where_it_stopped(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    sent = record_rsync(host)
    data = [os.urandom(500_000), os.urandom(5_000_000)]
    files = [make_file(host, f"f{number}", content) for number, content in enumerate(data)]
    cuts = 0
    while not (target / "job.json").exists():
        try:
            pull(lab, {0: files}, target, last_files=make_job_json)
        except NodesFailed:
            assert not (target / "node0/f1").exists()
            cuts += 1
    assert 2 <= cuts <= 4
    versions = {".awsddp": None, VERSIONS: (target / VERSIONS).read_bytes()}
    assert read_tree(target) == {
        **versions,
        "job.json": b"{}",
        "node0": None,
        "node0/f0": data[0],
        "node0/f1": data[1],
    }
    assert sent.stat().st_size < 5_500_000 + cuts * 500_000


def test_fetch_writes_through_no_link_in_the_staging_folder(
    make_lab: MakeLab, target: Path, tmp_path: Path
) -> None:
    lab = make_lab(1)
    file = make_file(lab.hosts[0], "a", b"a")
    private = tmp_path / "mine"
    private.mkdir()
    (private / "a").write_text("mine")
    staged = target / STAGING_FOLDER / "node0" / file.path.lstrip("/")
    staged.parent.parent.mkdir(parents=True)
    staged.parent.symlink_to(private)
    (target / STAGING_FOLDER / "also").symlink_to(private / "a")
    pull(lab, {0: [file]}, target, last_files=make_job_json)
    assert read_tree(private) == {"a": b"mine"}
    assert read_tree(target) == {"job.json": b"{}", "node0": None, "node0/a": b"a"}


def test_sparse_file_stays_sparse_and_its_holes_are_not_transferred(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    sent = record_rsync(host)
    file = make_file(host, "holes", b"")
    with (host.work / "holes").open("wb") as stream:
        stream.truncate(20_000_000)
        stream.seek(10_000_000)
        stream.write(b"data")
    pull(lab, {0: [replace(describe(file), sparse=True)]}, target)
    assert (target / "node0/holes").stat().st_blocks * 512 < 1_000_000
    assert sent.stat().st_size < 200_000


def test_full_disk_is_reported_before_any_transfer(
    make_lab: MakeLab, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=8_400_000))
    large = ResultFile(path="/x", home="x", size=20_000_000)
    with pytest.raises(ConfigError, match=r"need 20\.0 MB, .* has only 8\.4 MB free"):
        pull(make_lab(1), {0: [large]}, target)
    assert not target.parent.exists()


@pytest.mark.parametrize("count", [0, 2])
def test_interrupted_fetch_writes_no_job_json_and_the_next_one_completes(
    make_lab: MakeLab, target: Path, count: int
) -> None:
    lab = make_lab(2)
    wanted = {
        host.node: [make_file(host, str(number), os.urandom(1000)) for number in range(20)]
        for host in lab.hosts
    }
    events: list[Event] = []

    def interrupt(event: Event) -> None:
        events.append(event)
        if len(events) > count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(lab, wanted, target, on_event=interrupt, last_files=make_job_json)
    assert not (target / "job.json").exists()
    pull(lab, wanted, target, last_files=make_job_json)
    assert {path: data for path, data in read_tree(target).items() if data is not None} == {
        "job.json": b"{}",
        **{file.home: Path(file.path).read_bytes() for files in wanted.values() for file in files},
    }


def test_leftovers_of_a_killed_fetch_are_removed(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    (target / STAGING_FOLDER / "node0/whole").mkdir(parents=True)
    (target / STAGING_FOLDER / "node0/whole/rubbish").write_text("rubbish")
    events = make_file(lab.hosts[0], "events", b"e")
    pull(lab, {0: [replace(events, data=b"e")]}, target)
    assert (target / STAGING_FOLDER / "node0/whole/rubbish").exists()
    pull(lab, {0: [make_file(lab.hosts[0], "a", b"a")]}, target, last_files=make_job_json)
    assert read_tree(target) == {"job.json": b"{}", "node0": None, "node0/a": b"a", "node0/events": b"e"}


def test_unreachable_node_is_named_and_results_of_the_others_arrive(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(2)
    wanted = {host.node: [make_file(host, "a", b"a%d" % host.node)] for host in lab.hosts}
    lab.hosts[1].stop()
    with pytest.raises(NodesFailed, match="node1: the transfer was interrupted"):
        pull(lab, wanted, target, last_files=make_job_json)
    assert read_tree(target) == {"node0": None, "node0/a": b"a0"}


def test_equal_files_of_two_nodes_are_transferred_once(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(2)
    sent, weights = [record_rsync(host) for host in lab.hosts], os.urandom(1_500_000)
    wanted = {host.node: [make_file(host, "deep/model.pt", weights)] for host in lab.hosts}
    changed = Changed()
    assert pull(lab, wanted, target, last_files=changed) == {
        0: NodeFiles(node=0, files=1, bytes=1_500_000),
        1: NodeFiles(node=1, files=0, bytes=0),
    }
    assert changed == []
    copies = [target / "node0/deep/model.pt", target / "node1/deep/model.pt"]
    assert [path.read_bytes() for path in copies] == [weights] * 2
    assert len({path.stat().st_ino for path in copies}) == 2
    assert sum(path.stat().st_size for path in sent) < 1_600_000
    copies[0].unlink()
    pull(lab, wanted, target, last_files=changed)
    assert copies[0].read_bytes() == weights
    assert sum(path.stat().st_size for path in sent) < 1_700_000


def test_equal_files_with_several_names_are_transferred_once(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    weights = os.urandom(1_500_000)
    files = [make_file(host, name, weights) for name in ("last.pth", "copy.pth")]
    sent = record_rsync(host)
    (host.work / "best.pth").hardlink_to(host.work / "last.pth")
    files.append(describe(replace(files[0], path=str(host.work / "best.pth"), home="node0/best.pth")))
    pull(lab, {0: files}, target)
    assert {path.read_bytes() for path in (target / "node0").iterdir()} == {weights}
    assert sent.stat().st_size < 1_700_000


def test_file_that_was_only_touched_is_not_transferred_again(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    first = make_file(lab.hosts[0], "a", os.urandom(1_500_000))
    pull(lab, {0: [first]}, target, last_files=make_job_json)
    sent = record_rsync(lab.hosts[0])
    Path(first.path).chmod(0o600)
    pull(lab, {0: [describe(first)]}, target, last_files=make_job_json)
    size = sent.stat().st_size
    pull(lab, {0: [describe(first)]}, target, last_files=make_job_json)
    assert sent.stat().st_size == size < 100_000
    assert (target / first.home).read_bytes() == Path(first.path).read_bytes()


def test_files_with_equal_samples_and_different_content_both_arrive(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    weights = os.urandom(1_500_000)
    other = weights[:100_000] + b"other" + weights[100_005:]
    files = [make_file(host, "a", weights), make_file(host, "b", other)]
    pull(lab, {0: [files[0], replace(files[1], sample=files[0].sample)]}, target)
    assert read_tree(target / "node0") == {"a": weights, "b": other}


def test_link_on_a_node_arrives_as_the_file_that_it_points_to(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    file = make_file(host, "real", b"data")
    for name in ("x", "y"):
        (host.work / name).symlink_to("real")
    links = [replace(file, path=str(host.work / name), home=f"node0/{name}") for name in ("x", "y")]
    pull(lab, {0: [file, *links]}, target)
    assert read_tree(target / "node0") == {"real": b"data", "x": b"data", "y": b"data"}
    assert not (target / "node0/x").is_symlink()


FORGE = """\
import os, sys
old, new = (word.encode().decode("unicode_escape").encode("latin-1") for word in sys.argv[1:])
while data := os.read(0, 65536):
    open('{root}/log.forged', 'a').write('x' * (old in data))
    os.write(1, data.replace(old, new))
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/needle", "/needlz"),
        ("/needle", "/../../"),
        ("/needle", "/../../../.."),
        ("awsddp", "../../"),
        (r"\xa4\x81", r"\xff\xa1"),  # a file's mode, a link's
        (r"\xa4\x81", r"\xa4\x11"),  # a pipe's
    ],
)
def test_node_that_forges_names_and_kinds_in_rsync_changes_nothing_else(
    make_lab: MakeLab, target: Path, old: str, new: str
) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    file = make_file(host, "needle/x", b"data")
    Path(file.path).chmod(0o644)
    host.script("forge", FORGE)
    script = f"""#!/bin/sh\n/usr/bin/rsync "$@" | exec python3 '{{root}}/bin/forge' '{old}' '{new}'\n"""
    host.script("rsync", script)
    before = read_tree(target.parent.parent)
    with suppress(NodesFailed):
        pull(lab, {0: [file]}, target, last_files=make_job_json)
    assert (host.root / "log.forged").read_text()
    after = {path: data for path, data in read_tree(target.parent.parent).items() if data is not None}
    results = target.relative_to(target.parent.parent).as_posix()
    changed_paths = {path for path in after if before.get(path) != after[path]}
    allowed = {
        path
        for path in changed_paths
        if path.startswith((f"{results}/{STAGING_FOLDER}/node0/", f"{lab.folder.name}/", "node0/l"))
    }
    assert changed_paths - allowed <= {f"{results}/job.json"}
    assert not any(path.is_symlink() for path in target.rglob("*"))


@pytest.mark.parametrize("link_target", ["{mine}", "{mine}/x", "/etc/hostname", "nowhere"])
def test_file_that_becomes_a_link_on_its_node_is_not_followed_on_this_machine(
    make_lab: MakeLab, target: Path, tmp_path: Path, link_target: str
) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    file = make_file(host, "x", b"data")
    private = tmp_path / "mine"
    private.mkdir()
    (private / "x").write_bytes(b"mine")
    (host.work / "x").unlink()
    (host.work / "x").symlink_to(link_target.format(mine=private))
    pull(lab, {0: [file]}, target, last_files=make_job_json)
    assert read_tree(private) == {"x": b"mine"}
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_links_are_created_after_files_and_replace_files(make_lab: MakeLab, target: Path) -> None:
    lab = make_lab(1)
    file = make_file(lab.hosts[0], "ckpt/step1.pt", b"1")
    links = [make_link("node0/ckpt/latest.pt", "node0/ckpt/step1.pt"), make_link("node0/a", "node0/b")]
    pull(lab, {0: [file, *links]}, target)
    assert (target / "node0/ckpt/latest.pt").read_bytes() == b"1"
    links[0] = make_link("node0/ckpt/latest.pt", "node0/a")
    (target / "node0/a").unlink()
    (target / "node0/a").write_text("a file at home")
    pull(lab, {0: [file, *links]}, target)
    assert [(target / link.home).readlink() for link in links] == [Path("../a"), Path("b")]


def test_fetch_follows_no_link_in_the_results_folder(make_lab: MakeLab, target: Path, tmp_path: Path) -> None:
    lab = make_lab(1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").write_text("data")
    (target / "node0").mkdir(parents=True)
    (target / "node0/deep").symlink_to(tmp_path / "mine")
    (target / "node0/file").symlink_to(tmp_path / "mine/x")
    files = [make_file(lab.hosts[0], "deep/x", b"data"), make_file(lab.hosts[0], "file", b"more")]
    pull(lab, {0: [*files, make_link("node0/deep/link", "node0/deep/x")]}, target)
    assert read_tree(tmp_path / "mine") == {"x": b"data"}
    assert (target / "node0/deep/x").read_bytes() == b"data"
    assert not (target / "node0/deep").is_symlink()
    assert (target / "node0/file").read_bytes() == b"more"


def test_folder_named_as_the_results_plus_part_is_unchanged(make_lab: MakeLab, target: Path) -> None:
    other = target.with_name(f"{target.name}.part")
    other.mkdir(parents=True)
    (other / "mine").write_text("mine")
    pull(make_lab(1), {0: []}, target)
    assert (other / "mine").read_text() == "mine"
