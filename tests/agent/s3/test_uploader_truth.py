"""What S3 holds is what was made: files that change while they are saved, other writers, restarts.

The saver runs here step by step, against the local cloud's S3.
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent.job_folder import write_json
from awsddp.agent.s3 import uploader
from awsddp.agent.s3.uploader import Uploader
from awsddp.util.shipped_files import template
from tests.support.fleet import launch_of
from tests.support.local_cloud import fault_add, fault_clear
from tests.support.saving_bucket import MB, Bucket, Node
from tests.support.waiting import until


class Steps:
    """The saver of a node, of which each step is a test's."""

    def __init__(self, bucket: Bucket, node: Node, **pace: float) -> None:
        self.bucket, self.node = bucket, node
        usual = {"look_s": 0.0, "parts_s": 0.0}
        self.saver = Uploader(bucket.order("save", **{**usual, **pace}), node.folder, bucket.store())

    def step(self) -> bool:
        """Go once through the saver's loop; tell whether all is done."""
        return self.saver.step()

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it did not come true in time"
            self.step()

    def end(self) -> None:
        """End the job, and save until all is done."""
        self.node.state("succeeded")
        os.close(self.node.lock)
        end = time.monotonic() + 60
        while not self.step():
            assert time.monotonic() < end, "the saver did not end in time"
        self.saver.close()


@pytest.fixture
def steps(bucket: Bucket) -> Steps:
    [node] = bucket.run(starts=False)
    return Steps(bucket, node)


def put(path: Path, body: bytes, like: os.stat_result | None = None) -> os.stat_result:
    """Write a file in place, with the times of another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    if like is not None:
        os.utime(path, ns=(like.st_mtime_ns, like.st_mtime_ns))
    return path.stat()


def replace(path: Path, body: bytes) -> None:
    """Put another file in the place of one, at once."""
    part = path.with_name(f".{path.name}.new")
    part.write_bytes(body)
    part.replace(path)


LONGEST = "x" * 255


@pytest.mark.parametrize(
    ("name", "second"), [("model.pt", "model.pt~2"), (LONGEST, f"{LONGEST[:-2]}~2")], ids=["short", "longest"]
)
def test_two_results_of_one_place_are_both_saved(steps: Steps, name: str, second: str) -> None:
    put(steps.node.run / name, b"R" * 1000)
    put(steps.node.work / "run" / name, b"W" * 2000)
    steps.end()
    assert steps.bucket.saved(f"node0/run/{name}") == b"R" * 1000
    assert steps.bucket.saved(f"node0/run/{second}") == b"W" * 2000


def test_a_file_that_is_rewritten_with_its_size_and_time_is_saved_again(steps: Steps) -> None:
    same = steps.node.run / "same.bin"
    before = put(same, b"A" * 100)
    os.link(same, steps.node.run / "hard.bin")
    steps.until(lambda: steps.bucket.saved("node0/run/same.bin") == b"A" * 100)
    put(same, b"B" * 100, like=before)
    assert same.stat().st_mtime_ns == before.st_mtime_ns
    steps.end()
    assert [steps.bucket.saved(f"node0/run/{name}") for name in ("same.bin", "hard.bin")] == [b"B" * 100] * 2


@pytest.mark.parametrize("write", [replace, put], ids=["renamed", "in place"])
def test_a_log_that_is_written_anew_is_never_listed_as_a_mixture(
    steps: Steps, write: Callable[[Path, bytes], object]
) -> None:
    rows, at = steps.node.run / "predictions.jsonl", "node0/run/predictions.jsonl"
    were = []
    for epoch in range(4):
        were.append(b'{"epoch": %d}\n' % epoch * (300_000 * (epoch + 1)))  # 4.2 MB, and longer each time
        write(rows, were[-1])
        for _ in range(6):
            steps.step()
            time.sleep(0.05)
            found = steps.bucket.saved(at)
            assert found is None or any(one.startswith(found) for one in were), epoch
        steps.until(lambda: steps.bucket.saved(at) == were[-1])
    steps.end()
    assert steps.bucket.saved(at) == were[-1]


def test_the_middle_of_a_log_that_is_changed_is_seen_at_the_end(steps: Steps) -> None:
    log = steps.node.run / "deep.log"
    body = os.urandom(20 * MB)
    before = put(log, body)
    steps.until(lambda: steps.bucket.saved("node0/run/deep.log") == body)
    steps.saver._files["node0/run/deep.log"].check_at = float("inf")
    with log.open("r+b") as file:
        file.seek(3 * MB)
        file.write(b"changed")
    os.utime(log, ns=(before.st_mtime_ns, before.st_mtime_ns))
    steps.end()
    assert steps.bucket.saved("node0/run/deep.log") == log.read_bytes() != body


def test_an_upload_whose_file_is_written_to_is_given_up_and_the_next_version_is_saved(steps: Steps) -> None:
    path = steps.node.run / "shrink.bin"
    put(path, b"x" * (40 * MB))
    fault_add(steps.bucket.cloud.info, "UploadPart", "delay", seconds=20, only=steps.bucket.name)
    steps.until(lambda: steps.saver._sending)
    put(path, b"0123456789")
    began = time.monotonic()
    fault_clear(steps.bucket.cloud.info)
    steps.end()
    assert time.monotonic() - began < 40, "it waited for bytes that never come"
    assert steps.bucket.saved("node0/run/shrink.bin") == b"0123456789"
    assert steps.bucket.uploads() == []


def test_a_file_that_changed_while_it_was_sent_is_not_listed_as_saved(steps: Steps) -> None:
    path = steps.node.run / "model.pt"
    put(path, b"first")
    steps.until(lambda: "node0/run/model.pt" in steps.saver._sending)
    sending = steps.saver._sending["node0/run/model.pt"]
    until(sending.upload.done)
    put(path, b"other")
    steps.step()
    listed = steps.bucket.listed().get("node0/run/model.pt")
    assert listed is None or steps.bucket.join(listed) == b"other"
    steps.end()
    assert steps.bucket.saved("node0/run/model.pt") == b"other"


def test_a_fifo_in_the_place_of_a_file_holds_up_nothing(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = steps.node.run / "becomes-a-fifo"
    put(path, b"file")
    put(steps.node.run / "other", b"other")
    listing = uploader.manifest

    def listed(*asked: Any) -> Any:
        found = listing(*asked)
        if path.is_file():
            path.unlink()
            os.mkfifo(path)
        return found

    monkeypatch.setattr(uploader, "manifest", listed)
    monkeypatch.setattr(uploader, "sample", lambda *_: "")
    steps.until(lambda: steps.bucket.saved("node0/run/other") == b"other")


def test_checkpoints_go_first_and_sends_that_end_are_followed_by_others_without_a_look(
    bucket: Bucket,
) -> None:
    [node] = bucket.run(starts=False)
    steps = Steps(bucket, node, look_s=3600.0)
    for number in range(400):
        put(node.run / "many" / str(number), b"%d" % number)
    os.rename(node.run / "many", node.run / "all")  # noqa: PTH104
    for number in range(400):
        os.rename(node.run / "all" / str(number), node.run / "all" / f"f{number}")  # noqa: PTH104
    put(node.run / "z.new", b"checkpoint")
    (node.run / "z.new").rename(node.run / "z.pt")
    steps.step()
    order = [*steps.saver._sending]
    assert order[0] == "node0/run/z.pt" and len(steps.saver._queue) > 300
    steps.until(lambda: len(bucket.listed()) >= 401)
    assert steps.saver._scans == 1


def test_a_key_that_job_json_names_is_not_used_again(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "_OWN_BEATS", 0)
    path = steps.node.run / "model.pt"
    for number in range(4):
        put(path, b"version %d" % number)
        steps.until(lambda now=number: steps.bucket.saved("node0/run/model.pt") == b"version %d" % now)
    path.unlink()
    steps.until(lambda: not steps.bucket.listed())
    named = steps.bucket.checkpoint["files"]["node0/run/model.pt"]
    monkeypatch.setattr(steps.saver, "_publish", lambda **_: None)  # job.json stays as it is
    for number in range(4, 9):
        put(path, b"version %d" % number)
        steps.until(lambda now=number: steps.bucket.saved("node0/run/model.pt") == b"version %d" % now)
        assert steps.bucket.join(named) == b"version 3"


def test_a_key_that_job_json_will_name_is_not_used_again(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 may take job.json late."""
    monkeypatch.setattr(uploader, "_OWN_BEATS", 0)
    path, home = steps.node.run / "model.pt", "node0/run/model.pt"
    put(path, b"first")
    steps.until(lambda: steps.bucket.checkpoint["name"])
    with monkeypatch.context() as late:
        late.setattr(steps.saver, "_publish", lambda **_: None)
        put(path, b"second")
        steps.until(lambda: steps.bucket.saved(home) == b"second")
        for number in range(5):  # none of these is a checkpoint
            put(path, torn := b"PK\x03\x04 no end %d" % number)
            steps.until(lambda now=torn: steps.bucket.saved(home) == now)  # type: ignore[misc]
    steps.end()
    assert steps.bucket.join(steps.bucket.checkpoint["files"][home]) == b"second"


@pytest.mark.parametrize(("node", "rests_s"), [(0, 60), (1, 900)])
def test_a_key_rests_as_long_as_what_was_sent_to_it_may_arrive(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, node: int, rests_s: int
) -> None:
    """On other nodes than the first also as long as what they know of job.json may be old."""
    nodes, skew_s, clock = bucket.run(2, starts=False), [0.0], time.monotonic
    monkeypatch.setattr(uploader.time, "monotonic", lambda: clock() + skew_s[0])
    steps, home = [Steps(bucket, one, beat_s=10.0) for one in nodes], f"node{node}/run/data"
    steps[0].until(lambda: bucket.json("job.json"))

    def key_of(body: bytes) -> str:
        put(nodes[node].run / "data", body)
        steps[node].until(lambda: bucket.saved(home, node) == body)
        [[key, *_]] = bucket.listed(node)[home]["parts"]
        return str(key)

    first, second = key_of(b"first"), key_of(b"second")
    skew_s[0] += rests_s - 5
    third = key_of(b"third")
    assert len({first, second, third}) == 3
    skew_s[0] += 10
    assert key_of(b"fourth") in (first, second)


def test_what_another_writer_did_to_the_objects_is_found_before_all_is_called_saved(steps: Steps) -> None:
    bodies = {"a.bin": b"a" * 10, "b.bin": b"b" * 10, "c.jsonl": b"c" * 10}
    for name, body in bodies.items():
        put(steps.node.run / name, body)
    steps.until(lambda: len(steps.bucket.listed()) == len(bodies))
    keys = [row["parts"][0][0] for _, row in sorted(steps.bucket.listed().items())]
    s3, at = steps.bucket.s3, f"{'runs/job-1'}/"
    s3.put_object(Bucket=steps.bucket.name, Key=at + keys[0], Body=b"A" * 10)
    s3.delete_object(Bucket=steps.bucket.name, Key=at + keys[1])
    s3.put_object(Bucket=steps.bucket.name, Key=at + keys[2], Body=b"C" * 10)
    steps.end()
    for name, body in bodies.items():
        assert steps.bucket.saved(f"node0/run/{name}") == body


def test_a_saver_that_is_started_again_goes_on_from_its_list(steps: Steps) -> None:
    bucket, node = steps.bucket, steps.node
    put(node.run / "model.pt", b"one")
    put(node.run / "model.pt~2", b"a backup")
    put(node.log, b"line\n")
    steps.until(lambda: len(bucket.listed()) == 3)
    put(node.run / "model.pt", b"two")
    steps.until(lambda: bucket.saved("node0/run/model.pt") == b"two")
    steps.until(lambda: bucket.checkpoint["name"])
    found = bucket.s3.list_objects_v2(Bucket=bucket.name)["Contents"]
    were = {one["Key"]: one["LastModified"] for one in found if "/node0/" in one["Key"]}
    again = Steps(bucket, node)
    put(node.log, b"line\nline\n")
    again.step()
    assert again.saver._index.checkpoint is not None
    again.end()
    assert bucket.saved("logs/rank0.log") == b"line\nline\n"
    assert bucket.saved("node0/run/model.pt~2") == b"a backup"
    found = bucket.s3.list_objects_v2(Bucket=bucket.name)["Contents"]
    assert {one["Key"]: one["LastModified"] for one in found if "/node0/" in one["Key"]} == were


def test_a_forged_list_is_not_gone_on_from(steps: Steps) -> None:
    bucket, node = steps.bucket, steps.node
    put(node.run / "model.pt", b"mine")
    forged = {"generation": 1, "look": 1, "pages": [["lists/x", 2, "e"]], "ended": True}
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/node0.json", Body=json.dumps(forged))
    steps.end()
    assert bucket.saved("node0/run/model.pt") == b"mine"


def test_job_json_says_over_only_when_the_other_nodes_have_saved_and_signed_it(
    bucket: Bucket,
) -> None:
    nodes = bucket.run(2, starts=False)
    first, second = (Steps(bucket, node, beat_s=0.0) for node in nodes)
    put(nodes[1].run / "theirs", b"theirs")
    nodes[0].state("succeeded")
    for _ in range(20):
        assert not first.step()
    assert bucket.json("job.json")["state"] == "running"
    forged = json.dumps({"node": 1, "launch": "launch-1", "look": 9, "pages": [], "ended": True})
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/node1.json", Body=forged)
    for _ in range(20):
        assert not first.step()
    assert bucket.json("job.json")["state"] == "running"
    second.end()
    first.until(first.step)
    assert bucket.json("job.json")["state"] == "succeeded"


def test_a_folder_is_a_checkpoint_once_it_rests_on_all_nodes(bucket: Bucket) -> None:
    nodes = bucket.run(2, starts=False)
    first, second = (Steps(bucket, node, beat_s=0.0) for node in nodes)

    def until_both(condition: Callable[[], object]) -> None:
        first.until(lambda: second.step() or condition())

    def looks() -> tuple[int, int]:
        """Return how often the nodes have looked, as far as the first one knows."""
        return first.saver._scans, bucket.json("node1.json").get("look", 0)

    put(nodes[0].run / "step-1" / "__0_0.distcp", b"first")
    put(nodes[0].run / "step-1" / ".metadata", b"mark")
    (nodes[1].run / "step-1").mkdir()
    with (nodes[1].run / "step-1" / "__1_0.distcp").open("wb") as file:
        file.write(b"second")
        file.flush()
        until_both(lambda: bucket.saved("node0/run/step-1/.metadata") == b"mark")
        were = looks()
        until_both(lambda: all(now > before + 4 for now, before in zip(looks(), were, strict=True)))
        assert bucket.checkpoint["name"] is None
    until_both(lambda: bucket.checkpoint["name"] == "run/step-1")
    assert {home: bucket.join(row) for home, row in bucket.checkpoint["files"].items()} == {
        "node0/run/step-1/.metadata": b"mark",
        "node0/run/step-1/__0_0.distcp": b"first",
        "node1/run/step-1/__1_0.distcp": b"second",
    }
    second.end()
    assert bucket.json("job.json")["state"] == "running"
    first.end()
    assert bucket.json("job.json")["state"] == "succeeded"


def test_a_node_has_not_ended_while_a_file_is_open_for_writing(steps: Steps) -> None:
    with (steps.node.run / "open").open("wb") as file:
        file.write(b"half")
        file.flush()
        steps.node.state("succeeded")
        for _ in range(20):
            assert not steps.step()
        assert not steps.bucket.json("node0.json")["ended"]
        file.write(b" and half")
    steps.end()
    assert steps.bucket.saved("node0/run/open") == b"half and half"


def test_a_saver_gives_up_what_was_begun_and_never_completed_at_its_end(steps: Steps) -> None:
    steps.bucket.s3.create_multipart_upload(Bucket=steps.bucket.name, Key="runs/job-1/node0/run/cut")
    steps.bucket.s3.create_multipart_upload(Bucket=steps.bucket.name, Key="runs/job-2/node0/run/other")
    steps.end()
    assert steps.bucket.uploads() == ["runs/job-2/node0/run/other"]


def test_of_two_savers_of_a_job_one_works(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    second = bucket.start("save", bucket.top / "home0")
    assert second.wait(timeout=60) == 0
    node.end()


def test_deadlines_are_those_of_the_docs_and_of_the_node() -> None:
    assert uploader._LATE_S == 1800, "half an hour: docs/saving.md"
    stops = re.findall(r"TimeoutStopSec=(\d+)", template("user_data.yaml") + template("prepare.py"))
    assert stops and min(map(int, stops)) > uploader._HURRY_S
    assert uploader._OTHER_BEATS * 10 >= 10 * 60, "a request with all its attempts: store.py"


def test_a_saver_that_was_killed_before_its_first_file_goes_on(steps: Steps) -> None:
    steps.until(lambda: steps.bucket.json("node0.json"))
    assert steps.bucket.json("node0.json")["pages"] == []
    again = Steps(steps.bucket, steps.node)
    put(steps.node.run / "model.pt", b"mine")
    again.end()
    assert steps.bucket.saved("node0/run/model.pt") == b"mine"


@pytest.mark.parametrize("body", [None, b"{}"], ids=["deleted", "replaced"])
@pytest.mark.parametrize("restarts", [False, True], ids=["goes on", "started again"])
def test_pages_that_another_writer_deleted_or_replaced_are_written_again(
    steps: Steps, body: bytes | None, restarts: bool
) -> None:
    bucket = steps.bucket
    put(steps.node.run / "model.pt", b"mine")
    steps.until(lambda: bucket.checkpoint["name"])
    for name in bucket.names():
        if name.startswith("lists/") and body is None:
            bucket.s3.delete_object(Bucket=bucket.name, Key=f"runs/job-1/{name}")
        elif name.startswith("lists/"):
            bucket.s3.put_object(Bucket=bucket.name, Key=f"runs/job-1/{name}", Body=body)
    (Steps(bucket, steps.node) if restarts else steps).end()
    assert bucket.saved("node0/run/model.pt") == b"mine"
    assert bucket.checkpoint["files"].keys() == {"node0/run/model.pt"}


@pytest.mark.parametrize("name", ["job.json", "node0.json", "node1.json"])
def test_documents_that_are_too_long_keep_no_node_from_saving(bucket: Bucket, name: str) -> None:
    nodes = bucket.run(2, starts=False)
    several = [Steps(bucket, node, beat_s=0.0) for node in nodes]
    for one in several:
        put(one.node.run / "model.pt", b"one")
        one.until(lambda: one.saver._written)  # noqa: B023
    bucket.s3.put_object(Bucket=bucket.name, Key=f"runs/job-1/{name}", Body=b" " * (2 * MB + 1))
    several = [Steps(bucket, node, beat_s=0.0) for node in nodes]  # started again
    for text in (b"two", b"three"):
        for number, one in enumerate(several):
            put(one.node.run / "model.pt", text)
            home = f"node{number}/run/model.pt"
            one.until(lambda: one.saver._files.get(home) and bucket.saved(home, number) == text)  # noqa: B023
    several[1].end()
    several[0].end()
    assert bucket.json("job.json")["state"] == "succeeded"


def test_the_other_nodes_save_while_pages_of_the_checkpoint_are_gone(bucket: Bucket) -> None:
    nodes = bucket.run(2, starts=False)
    first, second = (Steps(bucket, node, beat_s=0.0) for node in nodes)
    for one in (first, second):
        put(one.node.run / "model.pt", b"one")
    first.until(lambda: second.step() or bucket.checkpoint["name"])
    for name in bucket.names():
        if name.startswith("lists/checkpoint"):
            bucket.s3.delete_object(Bucket=bucket.name, Key=f"runs/job-1/{name}")
    for text in (b"two", b"three", b"four"):
        put(second.node.run / "model.pt", text)
        second.until(lambda now=text: bucket.saved("node1/run/model.pt", 1) == now)  # type: ignore[misc]
    second.end()
    first.end()


@pytest.mark.parametrize("lost", ["nothing was saved", "a page was replaced"])
def test_a_saver_that_cannot_go_on_from_its_list_begins_anew(steps: Steps, lost: str) -> None:
    bucket, node = steps.bucket, steps.node
    node.log.unlink(missing_ok=True)
    if lost == "a page was replaced":
        put(node.run / "model.pt", b"mine")
        steps.until(lambda: bucket.checkpoint["name"])
        for key in [one for one in bucket.names() if one.startswith("lists/")]:
            bucket.s3.put_object(Bucket=bucket.name, Key=f"runs/job-1/{key}", Body=b"{}")
    else:
        steps.until(lambda: bucket.json("job.json"))
    put(node.run / "model.pt", b"later")
    Steps(bucket, node).end()
    assert bucket.saved("node0/run/model.pt") == b"later"


def test_an_upload_that_failed_and_may_arrive_late_leaves_its_key(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = steps.node.run / "model.pt", "runs/job-1/node0/run/model.pt"
    monkeypatch.setattr(steps.saver._store, "put", late := Late(steps.saver._store.put))
    put(path, b"old")
    with pytest.raises(OSError, match="no reply"):
        steps.until(lambda: False)
    monkeypatch.undo()
    put(path, b"newer")
    steps.until(lambda: steps.bucket.saved("node0/run/model.pt") == b"newer")
    late.arrive()
    assert steps.bucket.s3.get_object(Bucket=steps.bucket.name, Key=key)["Body"].read() == b"old"
    assert steps.bucket.saved("node0/run/model.pt") == b"newer"


def test_what_the_next_job_writes_is_not_saved_as_this_ones(steps: Steps) -> None:
    bucket, node = steps.bucket, steps.node
    put(node.work / "model.pt", b"mine")
    steps.until(lambda: bucket.saved("node0/model.pt") == b"mine")
    node.state("succeeded")
    os.close(node.lock)
    time.sleep(0.05)  # as long as a file's time may be late
    (node.jobs.parent / "job-2").mkdir()
    machines = [{"node": 0, "private_ip": "127.0.0.1", "instance_id": "i-0"}]
    request = launch_of(0, job="job-2", nodes=machines, layout=[[0, 0, 0]], workdir=str(node.work))
    write_json(node.jobs.parent / "job-2" / "job.json", request)
    time.sleep(0.05)
    put(node.work / "model.pt", b"theirs")
    put(node.work / "theirs.pt", b"theirs")
    steps.until(steps.step)
    assert bucket.saved("node0/model.pt") == b"mine"
    assert "node0/theirs.pt" not in bucket.listed()
    assert bucket.json("node0.json")["error"] == ""


def test_times_beyond_what_64_bits_hold_are_the_nearest_ones(steps: Steps) -> None:
    for name, seconds in (("old", -1), ("far", 5_000_000_000)):
        put(steps.node.run / name, name.encode())
        os.utime(steps.node.run / name, (seconds, seconds))
    steps.end()
    assert bytes(steps.bucket.saved("node0/run/old") or b"") == b"old"
    assert steps.bucket.listed()["node0/run/far"]["modified"] < 1 << 63


class Late:
    """A put whose request is still on its way when it has failed."""

    def __init__(self, put: Callable[..., Any]) -> None:
        self._put, self._asked = put, ()

    def __call__(self, *asked: Any, **more: Any) -> Any:
        if not asked[1].startswith("node0/run/"):
            return self._put(*asked, **more)
        self._asked = asked
        raise OSError("no reply came")

    def arrive(self) -> None:
        self._put(*self._asked)
