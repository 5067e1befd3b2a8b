"""Which results a node lists, and which it skips."""

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
from tests.support.fleet import Answer, make_launch

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


def parse_answer(request: messages.Request[Answer], answer: object) -> Answer:
    """Return an answer of node 2 as its client parses it."""
    return calls.parse_response(
        MAGIC + json.dumps(messages.to_json_value(answer)).encode(), request=request, node=2
    )


def make_manifest(request: messages.Manifest, folder: JobFolder) -> Manifest:
    request.ranks = [(5, 2)]
    return parse_answer(request, on_node.manifest(request, folder))


class Node:
    """Node 2 with a job of one rank, after its launch."""

    def __init__(self, top: Path, outputs: Sequence[str] = ()) -> None:
        self.work = top / "work"
        self.work.mkdir()
        self.top = top
        self.folder = JobFolder("job", top / "job")
        for path in (self.folder.logs, self.folder.run):
            path.mkdir(parents=True)
        self.folder.log(5).write_text("log")
        request = make_launch(2, workdir=str(self.work), layout=[[5, 0, 2]], outputs=list(outputs))
        (self.folder.path / "job.json").write_text(json.dumps(request.to_json()))
        self.take_snapshot()

    def take_snapshot(self) -> None:
        """Record the project folder as it is before the job."""
        self.folder.snapshot.write_text(json.dumps(snapshot(self.work)))

    def write(self, name: str, text: str = "x") -> Path:
        """Write a file, of the project folder unless `name` is absolute."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def link(self, name: str, target: Path | str) -> None:
        (self.work / name).parent.mkdir(parents=True, exist_ok=True)
        (self.work / name).symlink_to(target)

    def query(self, outputs: Sequence[str] = (), exclude: Sequence[str] = (), at_once: int = 0) -> Manifest:
        request = messages.Manifest(job="job", outputs=outputs, exclude=exclude_patterns(exclude))
        request.at_once = at_once
        return make_manifest(request, self.folder)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The project folder and the job are empty."""
    return Node(tmp_path)


def get_files(manifest: Manifest) -> dict[str, str]:
    """Return the path of each file of the project folder, by its results path below node2."""
    return {
        file.home.removeprefix("node2/"): file.path
        for file in manifest.files
        if file.target is None and file.home.startswith("node2/") and not file.home.startswith("node2/run/")
    }


def get_links(manifest: Manifest) -> dict[str, str]:
    """Return the targets of the links of the project folder, by their results paths below node2."""
    return {
        file.home.removeprefix("node2/"): os.path.relpath(file.target, Path(file.home).parent)
        for file in manifest.files
        if file.target is not None
    }


def get_skipped(manifest: Manifest) -> dict[str, str]:
    return {Path(entry.path).name: entry.why for entry in manifest.skipped}


def get_manifest(fleet: "Fleet", node: int = 0) -> Manifest:
    return fleet.send_request(node, messages.Manifest(job="job", ranks=[(0, node)]))


@pytest.mark.parametrize(("output", "is_home"), [("~/x", True), ("./~/x", False), ("a/~/x", False)])
def test_only_a_leading_tilde_is_the_home_folder(node: Node, output: str, is_home: bool) -> None:
    path = Path(os.environ["HOME"], "x")
    path.write_text("of the home folder")
    node.write("~/x")
    node.take_snapshot()
    paths = [file.path for file in node.query(outputs=[output]).files]
    assert (str(path) in paths) == is_home
    assert (str(node.work / "~" / "x") in paths) == (output == "./~/x")


def test_every_new_or_changed_file_is_listed(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.write("same.txt", "same")
    fleet.write("grown.txt", "less")
    job = fleet.run(SAVES, world_size=1, outputs=("big1", "~/elsewhere", "not/there"))
    assert job.state == "succeeded", fleet.log(0)
    result = get_manifest(fleet)
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
    assert get_skipped(result) == {"there": "it does not exist", "pipe": "a pipe"}
    assert not any(entry.owed for entry in result.skipped)
    limited = {file.home for file in result.files if file.limited}
    assert limited == {name for name in files if name.startswith("node0/")} - {
        "node0/run/deep/metrics.json",
        "node0/big1",
        f"node0/outside{fleet.homes[0]}/elsewhere/e",
    }


def test_small_results_are_sent_with_the_list_but_logs_are_not(node: Node) -> None:
    node.folder.samples.write_text("said")
    for size in (10, 60, 50):
        node.write(f"f{size}", "x" * size)
    data = {file.home: file.data for file in node.query(at_once=125).files}
    assert data == {
        "logs/rank5.log": None,
        ".awsddp/samples2.json": b"said",
        "node2/f10": b"x" * 10,
        "node2/f50": b"x" * 50,
        "node2/f60": b"x" * 60,
    }
    assert node.query(at_once=64).files[-1].data is None
    node.folder.log(5).write_text("")  # a follower has no file of an empty log, which is not worth an rsync
    assert node.query(at_once=125).files[0].data == b""


def test_sample_depends_on_the_size_and_on_blocks_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for size in (0, 1, 100_000, 3_000_000):
        file.write_bytes(os.urandom(size))
        sample = on_node.sample(file, size)
        with file.open("ab") as stream:
            stream.write(b"more")
        assert on_node.sample(file, size) == sample
        assert on_node.sample(file, size + 4) != sample
    changed = file.read_bytes()
    for at in (0, 2_999_999):
        file.write_bytes(changed[:at] + bytes([changed[at] ^ 1]) + changed[at + 1 :])
        assert on_node.sample(file, 3_000_000) != sample


def test_list_without_data_reads_no_file(node: Node) -> None:
    node.write("x")
    assert {(file.sample, file.data) for file in node.query().files} == {(None, None)}


def test_link_to_a_fetched_file_stays_a_link(node: Node) -> None:
    node.write("ckpt/step100.pt")
    node.link("ckpt/latest.pt", "step100.pt")
    node.link("best", node.work / "ckpt/latest.pt")
    node.link("deep/er/all", "../../ckpt")
    node.link("log", node.folder.log(5))
    result = node.query()
    assert get_links(result) == {
        "ckpt/latest.pt": "step100.pt",
        "best": "ckpt/latest.pt",
        "deep/er/all": "../../ckpt",
        "log": "../logs/rank5.log",
    }
    assert get_files(result) == {"ckpt/step100.pt": f"{node.work}/ckpt/step100.pt"}


def test_link_to_a_file_outside_is_fetched_as_the_file(node: Node) -> None:
    outside = node.write(str(node.top / "store/model.pt"), "weights")
    node.link("best.pt", outside)
    node.link("same.pt", outside)
    result = node.query()
    assert get_files(result) == {"best.pt": f"{node.work}/best.pt", "same.pt": f"{node.work}/same.pt"}
    assert {file.size for file in result.files if file.limited} == {7}
    assert (get_links(result), get_skipped(result)) == ({}, {})


def test_link_of_an_earlier_job_is_fetched_when_its_file_outside_changes(node: Node) -> None:
    outside = node.write(str(node.top / "store/model.pt"), "old")
    node.link("best.pt", outside)
    node.take_snapshot()
    assert get_files(node.query()) == {}
    outside.write_text("newer")
    assert get_files(node.query()) == {"best.pt": f"{node.work}/best.pt"}


def rewrite(path: Path, text: str) -> None:
    """Write other text of the same size in place, and restore the time."""
    info = path.stat()
    path.write_text(text)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_file_that_is_rewritten_with_the_same_size_and_time_is_a_result(node: Node) -> None:
    weights, outside = node.write("weights.bin", "SSSS"), node.write(str(node.top / "store/model.pt"), "old")
    node.link("best.pt", outside)
    node.take_snapshot()
    rewrite(weights, "TTTT")
    rewrite(outside, "new")
    result = node.query()
    assert set(get_files(result)) == {"weights.bin", "best.pt"}
    assert [file.limited for file in result.files if file.home == "node2/weights.bin"] == [True]


def test_touched_file_has_the_digest_of_its_content(node: Node) -> None:
    path = node.write("data.bin", "x" * 300_000)
    node.link("link", "data.bin")
    node.take_snapshot()
    os.chown(path, -1, -1)
    os.chown(node.work / "link", -1, -1, follow_symlinks=False)
    (file,) = [file for file in node.query(at_once=1).files if file.path.startswith(str(node.work))]
    assert (file.home, file.digest) == ("node2/data.bin", sha256(b"x" * 300_000).hexdigest())
    path.write_text("y" * 300_000)
    (file,) = [file for file in node.query(at_once=1).files if file.path == str(path)]
    assert file.digest is None


def test_snapshot_of_an_older_version_is_read(node: Node) -> None:
    outside = node.write(str(node.top / "store/model.pt"), "old")
    node.link("best.pt", outside)
    node.write("same")
    changed = node.write("changed")
    current = json.loads(node.folder.snapshot.read_text()) | snapshot(node.work)
    older = {path: [value for i, value in enumerate(stamp) if i % 4 != 2] for path, stamp in current.items()}
    node.folder.snapshot.write_text(json.dumps(older))
    changed.write_text("other")
    assert get_files(node.query()) == {"changed": str(changed)}


def test_link_to_an_unchanged_file_is_fetched_as_the_file(node: Node) -> None:
    node.write("pretrained.pt")
    node.take_snapshot()
    node.link("start.pt", "pretrained.pt")
    assert get_files(node.query()) == {"start.pt": f"{node.work}/start.pt"}


def test_link_to_a_folder_outside_is_followed_only_as_an_output(node: Node) -> None:
    node.write(str(node.top / "data/sub/a"))
    node.link("data", node.top / "data")
    result = node.query()
    assert get_files(result) == {}
    assert get_skipped(result) == {
        "data": f"a link to the folder {node.top}/data, which is fetched if an --output names the link"
    }
    followed = node.query(outputs=["data"])
    assert get_files(followed) == {"data/sub/a": str(node.top / "data/sub/a")}
    assert (get_links(followed), get_skipped(followed)) == ({}, {})
    assert not any(file.limited for file in followed.files)


def test_output_that_is_a_link_is_fetched_with_its_target(node: Node) -> None:
    node.write(str(node.top / "store/model.pt"))
    node.link("best.pt", node.top / "store/model.pt")
    node.write("steps/1")
    node.link("latest", "steps")
    result = node.query(outputs=["best.pt", "latest", "latest/1"])
    assert get_files(result) == {"best.pt": f"{node.work}/best.pt", "steps/1": f"{node.work}/steps/1"}
    assert get_links(result) == {"latest": "steps"}
    assert not any(file.limited for file in result.files)


def test_broken_links_are_fetched_inside_and_skipped_outside(node: Node) -> None:
    node.link("inside", "not/there")
    node.link("outside", "/not/there")
    node.link("a", "b")
    node.link("b", "a")
    node.link("self", "self")
    result = node.query()
    assert get_links(result) == {"inside": "not/there", "a": "b", "b": "a", "self": "self"}
    assert get_skipped(result) == {"outside": "a link to /not/there, which is not a file"}


def test_loops_of_links_end(node: Node) -> None:
    node.write("a/file")
    node.link("a/up", "..")
    node.link("a/here", ".")
    result = node.query(outputs=["a", "a/up/a"])
    assert list(get_files(result)) == ["a/file"]
    assert set(get_links(result)) == {"a/up", "a/here"}


def test_unreadable_files_are_skipped_with_the_error(node: Node) -> None:
    node.write("closed/inside")
    node.write("secret")
    (node.work / "closed").chmod(0)
    (node.work / "secret").chmod(0)
    try:
        whys = {Path(entry.path).name: entry.why for entry in query_as_user(node).skipped if entry.owed}
    finally:
        (node.work / "closed").chmod(0o700)
    assert whys == {"closed": "Permission denied", "secret": "Permission denied"}


def query_as_user(node: Node) -> Any:
    """Return the manifest that a user gets who is not root and cannot read everything."""
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


def test_excluded_files_are_counted_and_all_others_are_listed(node: Node) -> None:
    for name in ("data/a", "data/deep/b", "keep/data.txt", "x.tmp", "keep.tmp"):
        node.write(name, "12345")
    node.write(".gitignore", "keep/")
    node.link("latest", "x.tmp")
    result = node.query(exclude=["data/", "*.tmp", "!keep.tmp"])
    assert set(get_files(result)) == {"keep/data.txt", "keep.tmp", ".gitignore"}
    assert (result.excluded.files, result.excluded.size) == (3, 15)
    assert get_links(result) == {"latest": "x.tmp"}
    included = node.query(exclude=["data/"], outputs=["data/a"])
    assert "data/a" in get_files(included)


def test_files_beyond_the_maximum_size_of_the_list_are_counted(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_node, "LIST_BYTES", 3000)
    for number in range(100):
        node.write(f"f{number}", "12345")
    result = node.query()
    (row,) = result.skipped
    assert row.owed
    assert (len(get_files(result)) + int(row.why.split()[0]), row.size) == (100, 5 * int(row.why.split()[0]))


def test_large_work_folder_is_listed_quickly(node: Node) -> None:
    for folder in range(20):
        (node.work / str(folder)).mkdir()
        for number in range(100):
            (node.work / str(folder) / str(number)).touch()
    began = time.monotonic()
    assert len(get_files(node.query())) == 2000
    assert time.monotonic() - began < 5, sys.version


def test_results_on_an_instance_store_are_marked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("x")
    assert not any(file.ephemeral for file in node.query().files)
    monkeypatch.setattr(on_node, "is_ephemeral", lambda device: device == node.work.stat().st_dev)
    assert all(file.ephemeral for file in node.query().files)


def test_follower_gets_event_files_whole_once_they_have_grown(node: Node) -> None:
    node.write("old/events.out.tfevents.1", "old")
    node.take_snapshot()
    node.write("runs/a/events.out.tfevents.2", "grown")
    node.write("runs/a/weights.pt")
    node.write("private/events.out.tfevents.3")
    node.link("events.out.tfevents.4", node.work / "runs/a/weights.pt")
    node.write(str(node.folder.run / "events.out.tfevents.5"), "in the run folder")
    node.write("huge/events.out.tfevents.6", "x" * (calls.EVENTS_REQUEST_BYTES + 1))

    def list_grown(sizes: dict[str, int]) -> dict[str, bytes | None]:
        request = messages.Manifest(
            job="job",
            exclude=exclude_patterns(["private"]),
            events=sizes,
            at_once=calls.EVENTS_REQUEST_BYTES,
        )
        listing = make_manifest(request, node.folder)
        assert get_links(listing) == {}
        return {file.home: file.data for file in listing.files}

    work, run = "node2/runs/a/events.out.tfevents.2", "node2/run/events.out.tfevents.5"
    assert list_grown({}) == {work: b"grown", run: b"in the run folder"}
    assert list_grown({work: 4, run: 17}) == {work: b"grown"}


def test_file_that_is_open_for_writing_is_marked(node: Node) -> None:
    node.write("whole")
    node.write("appended")
    with (
        (node.work / "half").open("w") as half,
        (node.work / "appended").open("a") as appended,
        node.folder.log(5).open("w"),
    ):
        for file in (half, appended):
            file.write("x")
            file.flush()
        manifest = node.query()
    assert [Path(file.path).name for file in manifest.files if file.writing] == ["half"]
    assert not any(file.writing for file in node.query().files)


def test_file_that_changed_since_it_was_read_is_sent_without_data(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.write("ckpt.pt", "half")
    open_for_writing = on_node._open_for_writing

    def write_and_open() -> dict[tuple[int, int], bool]:
        path.write_text("whole")
        return open_for_writing()

    assert {file.data for file in node.query(at_once=100).files if file.path == str(path)} == {b"half"}
    monkeypatch.setattr(on_node, "_open_for_writing", write_and_open)
    assert {file.data for file in node.query(at_once=100).files if file.path == str(path)} == {None}
