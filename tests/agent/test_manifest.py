"""Which files come home, and what is named instead."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from awsddp.agent import manifest as on_node
from awsddp.agent import messages
from awsddp.agent.file_tree import snapshot
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.log_stream import MAGIC
from awsddp.agent_client import calls
from awsddp.model.node_answers import Manifest
from awsddp.storage.excludes import exclude_patterns
from tests.support.fleet import Told, launch_of

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

SAVES = r"""
import os
from pathlib import Path
Path('saved_models').mkdir()
Path('saved_models/x.pth').write_bytes(b'weights %s' % os.environ['RANK'].encode())
Path(os.environ['AWSDDP_RUN_DIR'], 'deep').mkdir()
Path(os.environ['AWSDDP_RUN_DIR'], 'deep', 'metrics.json').write_text('{}')
Path('grown.txt').open('a').write('more')
Path('runs').mkdir(); Path('runs/events').write_text('x')
Path('sub/__pycache__').mkdir(parents=True); Path('sub/__pycache__/no.pyc').write_text('x')
Path('sub/runs').mkdir(); Path('sub/runs/yes').write_text('x')
Path('latest').symlink_to('saved_models/x.pth')
open(b'odd \xff "name"\n-x', 'w').write('odd')
os.mkfifo('pipe')
Path('big1').write_bytes(b'1' * 40); Path('big2').write_bytes(b'2' * 30)
Path(os.environ['HOME'], 'elsewhere').mkdir(); Path(os.environ['HOME'], 'elsewhere/e').write_text('e')
"""

NOBODY = 65534


def answered(request: messages.Request[Told], answer: object) -> Told:
    """Return an answer of node 2 as its client has it."""
    return calls.parse_response(
        MAGIC + json.dumps(messages.to_json_value(answer)).encode(), request=request, node=2
    )


def listed(request: messages.Manifest, folder: JobFolder) -> Manifest:
    request.ranks = [(5, 2)]
    return answered(request, on_node.manifest(request, folder))


class Node:
    """Node 2 and a job of one rank on it, as the launch left them."""

    def __init__(self, top: Path, outputs: Sequence[str] = ()) -> None:
        self.work = top / "work"
        self.work.mkdir()
        self.top = top
        self.folder = JobFolder("job", top / "job")
        for path in (self.folder.logs, self.folder.run):
            path.mkdir(parents=True)
        self.folder.log(5).write_text("log")
        request = launch_of(2, workdir=str(self.work), layout=[[5, 0, 2]], outputs=list(outputs))
        (self.folder.path / "job.json").write_text(json.dumps(request.to_json()))
        self.begin()

    def begin(self) -> None:
        """Take the project folder as it is for what was there before the job."""
        self.folder.snapshot.write_text(json.dumps(snapshot(self.work)))

    def file(self, name: str, text: str = "x") -> Path:
        """Write a file, of the project folder unless `name` is absolute."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def link(self, name: str, target: Path | str) -> None:
        (self.work / name).parent.mkdir(parents=True, exist_ok=True)
        (self.work / name).symlink_to(target)

    def manifest(
        self, outputs: Sequence[str] = (), exclude: Sequence[str] = (), at_once: int = 0
    ) -> Manifest:
        request = messages.Manifest(job="job", outputs=outputs, exclude=exclude_patterns(exclude))
        request.at_once = at_once
        return listed(request, self.folder)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The project folder and the job are empty."""
    return Node(tmp_path)


def files(manifest: Manifest) -> dict[str, str]:
    """Return the path of each file of the project folder's, by its place below node2."""
    return {
        file.home.removeprefix("node2/"): file.path
        for file in manifest.files
        if file.target is None and file.home.startswith("node2/") and not file.home.startswith("node2/run/")
    }


def links(manifest: Manifest) -> dict[str, str]:
    """Return what the links of the project folder's will hold, by their places below node2."""
    return {
        one.home.removeprefix("node2/"): os.path.relpath(one.target, Path(one.home).parent)
        for one in manifest.files
        if one.target is not None
    }


def skipped(manifest: Manifest) -> dict[str, str]:
    return {Path(one.path).name: one.why for one in manifest.skipped}


def found(fleet: "Fleet", node: int = 0) -> Manifest:
    return fleet.ask(node, messages.Manifest(job="job", ranks=[(0, node)]))


@pytest.mark.parametrize(("output", "is_home"), [("~/x", True), ("./~/x", False), ("a/~/x", False)])
def test_a_tilde_at_the_start_alone_is_the_home_folder(node: Node, output: str, is_home: bool) -> None:
    at_home = Path(os.environ["HOME"], "x")
    at_home.write_text("of the home folder")
    node.file("~/x")
    node.begin()
    paths = [one.path for one in node.manifest(outputs=[output]).files]
    assert (str(at_home) in paths) == is_home
    assert (str(node.work / "~" / "x") in paths) == (output == "./~/x")


def test_everything_new_or_changed_comes_home(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.write("same.txt", "same")
    fleet.write("grown.txt", "less")
    job = fleet.run(SAVES, world_size=1, outputs=("big1", "~/elsewhere", "not/there"))
    assert job.state == "succeeded", fleet.log(0)
    result = found(fleet)
    files = {file.home: file for file in result.files}
    latest = files.pop("node0/latest")
    assert (latest.target, latest.limited) == ("node0/saved_models/x.pth", False)
    assert set(files) == {
        "logs/rank0.log",
        ".awsddp/supervisor0.log",
        "node0/saved_models/x.pth",
        "node0/run/deep/metrics.json",
        "node0/grown.txt",
        "node0/runs/events",
        "node0/sub/runs/yes",
        'node0/odd \udcff "name"\n-x',
        "node0/big1",
        "node0/big2",
        f"node0/outside{fleet.homes[0]}/elsewhere/e",
    }
    weights = files["node0/saved_models/x.pth"]
    assert (weights.size, weights.sample) == (9, on_node.sample(Path(weights.path), 9))
    assert Path(files['node0/odd \udcff "name"\n-x'].path).exists()
    assert skipped(result) == {"there": "it is not there", "pipe": "a pipe"}
    assert not any(one.owed for one in result.skipped)
    limited = {file.home for file in result.files if file.limited}
    assert limited == {home for home in files if home.startswith("node0/")} - {
        "node0/run/deep/metrics.json",
        "node0/big1",
        f"node0/outside{fleet.homes[0]}/elsewhere/e",
    }


def test_small_results_come_with_the_list_and_logs_do_not(node: Node) -> None:
    node.folder.samples.write_text("said")
    for size in (10, 60, 50):
        node.file(f"f{size}", "x" * size)
    came = {file.home: file.data for file in node.manifest(at_once=125).files}
    assert came == {
        "logs/rank5.log": None,
        ".awsddp/samples2.json": b"said",
        "node2/f10": b"x" * 10,
        "node2/f50": b"x" * 50,
        "node2/f60": b"x" * 60,
    }
    assert node.manifest(at_once=64).files[-1].data is None
    node.folder.log(5).write_text("")  # of what said nothing no watcher has a file: it is not worth an rsync
    assert node.manifest(at_once=125).files[0].data == b""


def test_a_sample_tells_files_apart_by_a_part_of_them(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for size in (0, 1, 100_000, 3_000_000):
        file.write_bytes(os.urandom(size))
        told = on_node.sample(file, size)
        with file.open("ab") as more:
            more.write(b"more")
        assert on_node.sample(file, size) == told
        assert on_node.sample(file, size + 4) != told
    changed = file.read_bytes()
    for at in (0, 2_999_999):
        file.write_bytes(changed[:at] + bytes([changed[at] ^ 1]) + changed[at + 1 :])
        assert on_node.sample(file, 3_000_000) != told


def test_a_list_of_what_there_is_reads_no_file(node: Node) -> None:
    node.file("x")
    assert {(one.sample, one.data) for one in node.manifest().files} == {(None, None)}


def test_link_to_what_is_fetched_stays_a_link(node: Node) -> None:
    node.file("ckpt/step100.pt")
    node.link("ckpt/latest.pt", "step100.pt")
    node.link("best", node.work / "ckpt/latest.pt")
    node.link("deep/er/all", "../../ckpt")
    node.link("log", node.folder.log(5))
    result = node.manifest()
    assert links(result) == {
        "ckpt/latest.pt": "step100.pt",
        "best": "ckpt/latest.pt",
        "deep/er/all": "../../ckpt",
        "log": "../logs/rank5.log",
    }
    assert files(result) == {"ckpt/step100.pt": f"{node.work}/ckpt/step100.pt"}


def test_link_to_a_file_outside_comes_home_as_the_file(node: Node) -> None:
    outside = node.file(str(node.top / "store/model.pt"), "weights")
    node.link("best.pt", outside)
    node.link("same.pt", outside)
    result = node.manifest()
    assert files(result) == {"best.pt": f"{node.work}/best.pt", "same.pt": f"{node.work}/same.pt"}
    assert {file.size for file in result.files if file.limited} == {7}
    assert (links(result), skipped(result)) == ({}, {})


def test_link_of_an_earlier_job_comes_home_when_its_file_outside_changes(node: Node) -> None:
    outside = node.file(str(node.top / "store/model.pt"), "old")
    node.link("best.pt", outside)
    node.begin()
    assert files(node.manifest()) == {}
    outside.write_text("newer")
    assert files(node.manifest()) == {"best.pt": f"{node.work}/best.pt"}


def rewrite(path: Path, text: str) -> None:
    """Write other text of the same size in place, and restore the time."""
    info = path.stat()
    path.write_text(text)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_what_is_rewritten_in_place_with_its_size_and_time_is_a_result(node: Node) -> None:
    weights, outside = node.file("weights.bin", "SSSS"), node.file(str(node.top / "store/model.pt"), "old")
    node.link("best.pt", outside)
    node.begin()
    rewrite(weights, "TTTT")
    rewrite(outside, "new")
    result = node.manifest()
    assert set(files(result)) == {"weights.bin", "best.pt"}
    assert [file.limited for file in result.files if file.home == "node2/weights.bin"] == [True]


def test_what_is_only_touched_has_a_digest_that_tells(node: Node) -> None:
    path = node.file("data.bin", "x" * 300_000)
    node.link("link", "data.bin")
    node.begin()
    os.chown(path, -1, -1)
    os.chown(node.work / "link", -1, -1, follow_symlinks=False)
    (told,) = [one for one in node.manifest(at_once=1).files if one.path.startswith(str(node.work))]
    assert (told.home, told.digest) == ("node2/data.bin", sha256(b"x" * 300_000).hexdigest())
    path.write_text("y" * 300_000)
    (told,) = [one for one in node.manifest(at_once=1).files if one.path == str(path)]
    assert told.digest is None


def test_the_snapshot_of_an_older_version_is_understood(node: Node) -> None:
    outside = node.file(str(node.top / "store/model.pt"), "old")
    node.link("best.pt", outside)
    node.file("same")
    changed = node.file("changed")
    ours = json.loads(node.folder.snapshot.read_text()) | snapshot(node.work)
    theirs = {path: [one for at, one in enumerate(stamp) if at % 4 != 2] for path, stamp in ours.items()}
    node.folder.snapshot.write_text(json.dumps(theirs))
    changed.write_text("other")
    assert files(node.manifest()) == {"changed": str(changed)}


def test_link_to_a_file_that_did_not_change_comes_home_as_the_file(node: Node) -> None:
    node.file("pretrained.pt")
    node.begin()
    node.link("start.pt", "pretrained.pt")
    assert files(node.manifest()) == {"start.pt": f"{node.work}/start.pt"}


def test_link_to_a_folder_outside_is_named_and_followed_as_an_output_only(node: Node) -> None:
    node.file(str(node.top / "data/sub/a"))
    node.link("data", node.top / "data")
    result = node.manifest()
    assert files(result) == {}
    assert skipped(result) == {
        "data": f"a link to the folder {node.top}/data; it is fetched if an --output names it"
    }
    followed = node.manifest(outputs=["data"])
    assert files(followed) == {"data/sub/a": str(node.top / "data/sub/a")}
    assert (links(followed), skipped(followed)) == ({}, {})
    assert not any(file.limited for file in followed.files)


def test_output_that_is_a_link_comes_home_with_what_it_points_to(node: Node) -> None:
    node.file(str(node.top / "store/model.pt"))
    node.link("best.pt", node.top / "store/model.pt")
    node.file("steps/1")
    node.link("latest", "steps")
    result = node.manifest(outputs=["best.pt", "latest", "latest/1"])
    assert files(result) == {"best.pt": f"{node.work}/best.pt", "steps/1": f"{node.work}/steps/1"}
    assert links(result) == {"latest": "steps"}
    assert not any(file.limited for file in result.files)


def test_links_that_lead_nowhere_are_kept_inside_and_named_outside(node: Node) -> None:
    node.link("inside", "not/there")
    node.link("outside", "/not/there")
    node.link("a", "b")
    node.link("b", "a")
    node.link("self", "self")
    result = node.manifest()
    assert links(result) == {"inside": "not/there", "a": "b", "b": "a", "self": "self"}
    assert skipped(result) == {"outside": "a link to /not/there, which is not a file"}


def test_loops_of_folders_end(node: Node) -> None:
    node.file("a/file")
    node.link("a/up", "..")
    node.link("a/here", ".")
    result = node.manifest(outputs=["a", "a/up/a"])
    assert list(files(result)) == ["a/file"]
    assert set(links(result)) == {"a/up", "a/here"}


def test_what_cannot_be_read_is_owed(node: Node) -> None:
    node.file("closed/inside")
    node.file("secret")
    (node.work / "closed").chmod(0)
    (node.work / "secret").chmod(0)
    try:
        owed = {Path(one.path).name: one.why for one in as_a_user(node).skipped if one.owed}
    finally:
        (node.work / "closed").chmod(0o700)
    assert owed == {"closed": "Permission denied", "secret": "Permission denied"}


def as_a_user(node: Node) -> Any:
    """Return the manifest as somebody sees it who may not read everything, as root may."""
    request = messages.Manifest(job="job")
    if os.geteuid() != 0:
        return on_node.manifest(request, node.folder)
    request.at_once = 1
    for path in (node.top, *node.top.parents):
        if path == Path(tempfile.gettempdir()):
            break
        path.chmod(0o711)
    for path in (node.top, *node.top.rglob("*")):
        os.chown(path, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        return on_node.manifest(request, node.folder)
    finally:
        os.seteuid(0)


def test_excluded_files_are_counted_and_nothing_else_is_kept_back(node: Node) -> None:
    for name in ("data/a", "data/deep/b", "keep/data.txt", "x.tmp", "keep.tmp"):
        node.file(name, "12345")
    node.file(".gitignore", "keep/")
    node.link("latest", "x.tmp")
    result = node.manifest(exclude=["data/", "*.tmp", "!keep.tmp"])
    assert set(files(result)) == {"keep/data.txt", "keep.tmp", ".gitignore"}
    assert (result.excluded.files, result.excluded.size) == (3, 15)
    assert links(result) == {"latest": "x.tmp"}
    named = node.manifest(exclude=["data/"], outputs=["data/a"])
    assert "data/a" in files(named)


def test_more_files_than_the_list_has_room_for_are_counted_and_owed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_node, "LIST_BYTES", 3000)
    for number in range(100):
        node.file(f"f{number}", "12345")
    result = node.manifest()
    (rest,) = result.skipped
    assert rest.owed
    assert (len(files(result)) + int(rest.why.split()[0]), rest.size) == (100, 5 * int(rest.why.split()[0]))


def test_large_work_folder_is_listed_quickly(node: Node) -> None:
    for folder in range(20):
        (node.work / str(folder)).mkdir()
        for number in range(100):
            (node.work / str(folder) / str(number)).touch()
    began = time.monotonic()
    assert len(files(node.manifest())) == 2000
    assert time.monotonic() - began < 5, sys.version


def test_results_that_a_stop_loses_are_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.file("x")
    assert not any(file.ephemeral for file in node.manifest().files)
    monkeypatch.setattr(on_node, "is_ephemeral", lambda device: device == node.work.stat().st_dev)
    assert all(file.ephemeral for file in node.manifest().files)


def test_while_a_job_is_followed_event_files_come_whole_once_they_have_grown(node: Node) -> None:
    node.file("old/events.out.tfevents.1", "old")
    node.begin()
    node.file("runs/a/events.out.tfevents.2", "grown")
    node.file("runs/a/weights.pt")
    node.file("private/events.out.tfevents.3")
    node.link("events.out.tfevents.4", node.work / "runs/a/weights.pt")
    node.file(str(node.folder.run / "events.out.tfevents.5"), "in the run folder")
    node.file("huge/events.out.tfevents.6", "x" * (calls.EVENTS_REQUEST_BYTES + 1))

    def grown(known: dict[str, int]) -> dict[str, bytes | None]:
        request = messages.Manifest(
            job="job",
            exclude=exclude_patterns(["private"]),
            events=known,
            at_once=calls.EVENTS_REQUEST_BYTES,
        )
        listing = listed(request, node.folder)
        assert links(listing) == {}
        return {file.home: file.data for file in listing.files}

    work, run = "node2/runs/a/events.out.tfevents.2", "node2/run/events.out.tfevents.5"
    assert grown({}) == {work: b"grown", run: b"in the run folder"}
    assert grown({work: 4, run: 17}) == {work: b"grown"}


def test_what_is_being_written_is_marked(node: Node) -> None:
    node.file("whole")
    node.file("appended")
    with (
        (node.work / "half").open("w") as half,
        (node.work / "appended").open("a") as appended,
        node.folder.log(5).open("w"),
    ):
        for file in (half, appended):
            file.write("x")
            file.flush()
        found = node.manifest()
    assert [Path(one.path).name for one in found.files if one.writing] == ["half"]
    assert not any(one.writing for one in node.manifest().files)


def test_what_changed_since_it_was_read_comes_without_data(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = node.file("ckpt.pt", "half")
    opened = on_node._open_for_writing

    def write_then() -> dict[tuple[int, int], bool]:
        file.write_text("whole")
        return opened()

    assert {one.data for one in node.manifest(at_once=100).files if one.path == str(file)} == {b"half"}
    monkeypatch.setattr(on_node, "_open_for_writing", write_then)
    assert {one.data for one in node.manifest(at_once=100).files if one.path == str(file)} == {None}
