"""S3 holds exactly what the job wrote: files that change during their upload, other writers, restarts.

The uploader runs step by step, against the local cloud's S3.
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
from awsddp.agent.shutdown import Shutdown
from awsddp.util.shipped_files import template
from tests.support.fleet import make_launch
from tests.support.local_cloud import add_fault, clear_fault
from tests.support.saving_bucket import MB, Bucket, Node
from tests.support.waiting import until


class Steps:
    """The uploader of a node, which a test runs step by step."""

    def __init__(self, bucket: Bucket, node: Node, **pace: float) -> None:
        self.bucket, self.node = bucket, node
        usual = {"look_s": 0.0, "parts_s": 0.0}
        self.uploader = Uploader(bucket.order("save", **{**usual, **pace}), node.folder, bucket.store())

    def step(self) -> bool:
        """Run the uploader's loop once. Return True if all is done."""
        return self.uploader.step()

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
            assert time.monotonic() < end, "the uploader did not end in time"
        self.uploader.close()


@pytest.fixture
def steps(bucket: Bucket) -> Steps:
    [node] = bucket.run(starts=False)
    return Steps(bucket, node)


def put(path: Path, body: bytes, like: os.stat_result | None = None) -> os.stat_result:
    """Write a file in place, with the modification time of another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    if like is not None:
        os.utime(path, ns=(like.st_mtime_ns, like.st_mtime_ns))
    return path.stat()


def replace(path: Path, body: bytes) -> None:
    """Replace a file atomically."""
    part = path.with_name(f".{path.name}.new")
    part.write_bytes(body)
    part.replace(path)


LONGEST = "x" * 255


@pytest.mark.parametrize(
    ("name", "second"), [("model.pt", "model.pt~2"), (LONGEST, f"{LONGEST[:-2]}~2")], ids=["short", "longest"]
)
def test_two_results_of_the_same_path_are_both_saved(steps: Steps, name: str, second: str) -> None:
    put(steps.node.run / name, b"R" * 1000)
    put(steps.node.work / "run" / name, b"W" * 2000)
    steps.end()
    assert steps.bucket.read_result(f"node0/run/{name}") == b"R" * 1000
    assert steps.bucket.read_result(f"node0/run/{second}") == b"W" * 2000


def test_file_that_is_rewritten_with_the_same_size_and_time_is_saved_again(steps: Steps) -> None:
    same = steps.node.run / "same.bin"
    before = put(same, b"A" * 100)
    os.link(same, steps.node.run / "hard.bin")
    steps.until(lambda: steps.bucket.read_result("node0/run/same.bin") == b"A" * 100)
    put(same, b"B" * 100, like=before)
    assert same.stat().st_mtime_ns == before.st_mtime_ns
    steps.end()
    assert [steps.bucket.read_result(f"node0/run/{name}") for name in ("same.bin", "hard.bin")] == [
        b"B" * 100
    ] * 2


@pytest.mark.parametrize("write", [replace, put], ids=["renamed", "in place"])
def test_rewritten_log_is_never_listed_as_a_mixture(
    steps: Steps, write: Callable[[Path, bytes], object]
) -> None:
    rows, path = steps.node.run / "predictions.jsonl", "node0/run/predictions.jsonl"
    versions = []
    for epoch in range(4):
        versions.append(b'{"epoch": %d}\n' % epoch * (300_000 * (epoch + 1)))  # 4.2 MB, and longer each time
        write(rows, versions[-1])
        for _ in range(6):
            steps.step()
            time.sleep(0.05)
            content = steps.bucket.read_result(path)
            assert content is None or any(version.startswith(content) for version in versions), epoch
        steps.until(lambda: steps.bucket.read_result(path) == versions[-1])
    steps.end()
    assert steps.bucket.read_result(path) == versions[-1]


def test_change_in_the_middle_of_a_log_is_saved_at_the_end(steps: Steps) -> None:
    log = steps.node.run / "deep.log"
    body = os.urandom(20 * MB)
    before = put(log, body)
    steps.until(lambda: steps.bucket.read_result("node0/run/deep.log") == body)
    steps.uploader._files["node0/run/deep.log"].check_at = float("inf")
    with log.open("r+b") as file:
        file.seek(3 * MB)
        file.write(b"changed")
    os.utime(log, ns=(before.st_mtime_ns, before.st_mtime_ns))
    steps.end()
    assert steps.bucket.read_result("node0/run/deep.log") == log.read_bytes() != body


def test_upload_of_a_file_that_changes_is_cancelled_and_the_next_version_saved(steps: Steps) -> None:
    path = steps.node.run / "shrink.bin"
    put(path, b"x" * (40 * MB))
    add_fault(steps.bucket.cloud.info, "UploadPart", "delay", seconds=20, only=steps.bucket.name)
    steps.until(lambda: steps.uploader._sending)
    put(path, b"0123456789")
    began = time.monotonic()
    clear_fault(steps.bucket.cloud.info)
    steps.end()
    assert time.monotonic() - began < 40, "it waited for bytes that never come"
    assert steps.bucket.read_result("node0/run/shrink.bin") == b"0123456789"
    assert steps.bucket.uploads() == []


def test_file_that_changed_during_its_upload_is_not_listed_as_saved(steps: Steps) -> None:
    path = steps.node.run / "model.pt"
    put(path, b"first")
    steps.until(lambda: "node0/run/model.pt" in steps.uploader._sending)
    sending = steps.uploader._sending["node0/run/model.pt"]
    until(sending.upload.done)
    put(path, b"other")
    steps.step()
    listed = steps.bucket.read_list().get("node0/run/model.pt")
    assert listed is None or steps.bucket.join(listed) == b"other"
    steps.end()
    assert steps.bucket.read_result("node0/run/model.pt") == b"other"


def test_file_that_becomes_a_fifo_does_not_delay_others(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = steps.node.run / "becomes-a-fifo"
    put(path, b"file")
    put(steps.node.run / "other", b"other")
    make_manifest = uploader.manifest

    def list_and_replace(*arguments: Any) -> Any:
        results = make_manifest(*arguments)
        if path.is_file():
            path.unlink()
            os.mkfifo(path)
        return results

    monkeypatch.setattr(uploader, "manifest", list_and_replace)
    monkeypatch.setattr(uploader, "sample", lambda *_: "")
    steps.until(lambda: steps.bucket.read_result("node0/run/other") == b"other")


def test_checkpoints_are_sent_first_and_the_queue_without_another_scan(
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
    order = [*steps.uploader._sending]
    assert order[0] == "node0/run/z.pt" and len(steps.uploader._queue) > 300
    steps.until(lambda: len(bucket.read_list()) >= 401)
    assert steps.uploader._scans == 1


def test_key_in_job_json_is_not_reused(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "_OWN_BEATS", 0)
    path = steps.node.run / "model.pt"
    for number in range(4):
        put(path, b"version %d" % number)
        steps.until(lambda now=number: steps.bucket.read_result("node0/run/model.pt") == b"version %d" % now)
    path.unlink()
    steps.until(lambda: not steps.bucket.read_list())
    row = steps.bucket.checkpoint["files"]["node0/run/model.pt"]
    monkeypatch.setattr(steps.uploader, "_publish", lambda **_: None)  # job.json stays as it is
    for number in range(4, 9):
        put(path, b"version %d" % number)
        steps.until(lambda now=number: steps.bucket.read_result("node0/run/model.pt") == b"version %d" % now)
        assert steps.bucket.join(row) == b"version 3"


def test_key_in_the_next_job_json_is_not_reused(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write of job.json may be delayed."""
    monkeypatch.setattr(uploader, "_OWN_BEATS", 0)
    path, name = steps.node.run / "model.pt", "node0/run/model.pt"
    put(path, b"first")
    steps.until(lambda: steps.bucket.checkpoint["name"])
    with monkeypatch.context() as late:
        late.setattr(steps.uploader, "_publish", lambda **_: None)
        put(path, b"second")
        steps.until(lambda: steps.bucket.read_result(name) == b"second")
        for number in range(5):  # none of these is a checkpoint
            put(path, torn := b"PK\x03\x04 no end %d" % number)
            steps.until(lambda now=torn: steps.bucket.read_result(name) == now)  # type: ignore[misc]
    steps.end()
    assert steps.bucket.join(steps.bucket.checkpoint["files"][name]) == b"second"


@pytest.mark.parametrize(("node", "rests_s"), [(0, 60), (1, 900)])
def test_key_is_not_reused_while_a_request_for_it_may_arrive(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, node: int, rests_s: int
) -> None:
    """On other nodes than the first, also while their copy of job.json may be outdated."""
    nodes, skew_s, clock = bucket.run(2, starts=False), [0.0], time.monotonic
    monkeypatch.setattr(uploader.time, "monotonic", lambda: clock() + skew_s[0])
    steps, name = [Steps(bucket, job_node, beat_s=10.0) for job_node in nodes], f"node{node}/run/data"
    steps[0].until(lambda: bucket.json("job.json"))

    def save(body: bytes) -> str:
        put(nodes[node].run / "data", body)
        steps[node].until(lambda: bucket.read_result(name, node) == body)
        [[key, *_]] = bucket.read_list(node)[name]["parts"]
        return str(key)

    first, second = save(b"first"), save(b"second")
    skew_s[0] += rests_s - 5
    third = save(b"third")
    assert len({first, second, third}) == 3
    skew_s[0] += 10
    assert save(b"fourth") in (first, second)


def test_objects_that_another_writer_changed_are_saved_again_before_the_end(steps: Steps) -> None:
    bodies = {"a.bin": b"a" * 10, "b.bin": b"b" * 10, "c.jsonl": b"c" * 10}
    for name, body in bodies.items():
        put(steps.node.run / name, body)
    steps.until(lambda: len(steps.bucket.read_list()) == len(bodies))
    keys = [row["parts"][0][0] for _, row in sorted(steps.bucket.read_list().items())]
    s3, prefix = steps.bucket.s3, f"{'runs/job-1'}/"
    s3.put_object(Bucket=steps.bucket.name, Key=prefix + keys[0], Body=b"A" * 10)
    s3.delete_object(Bucket=steps.bucket.name, Key=prefix + keys[1])
    s3.put_object(Bucket=steps.bucket.name, Key=prefix + keys[2], Body=b"C" * 10)
    steps.end()
    for name, body in bodies.items():
        assert steps.bucket.read_result(f"node0/run/{name}") == body


def test_restarted_uploader_continues_from_its_list(steps: Steps) -> None:
    bucket, node = steps.bucket, steps.node
    put(node.run / "model.pt", b"one")
    put(node.run / "model.pt~2", b"a backup")
    put(node.log, b"line\n")
    steps.until(lambda: len(bucket.read_list()) == 3)
    put(node.run / "model.pt", b"two")
    steps.until(lambda: bucket.read_result("node0/run/model.pt") == b"two")
    steps.until(lambda: bucket.checkpoint["name"])
    rows = bucket.s3.list_objects_v2(Bucket=bucket.name)["Contents"]
    times = {row["Key"]: row["LastModified"] for row in rows if "/node0/" in row["Key"]}
    restarted = Steps(bucket, node)
    put(node.log, b"line\nline\n")
    restarted.step()
    assert restarted.uploader._index.checkpoint is not None
    restarted.end()
    assert bucket.read_result("logs/rank0.log") == b"line\nline\n"
    assert bucket.read_result("node0/run/model.pt~2") == b"a backup"
    rows = bucket.s3.list_objects_v2(Bucket=bucket.name)["Contents"]
    assert {row["Key"]: row["LastModified"] for row in rows if "/node0/" in row["Key"]} == times


def test_forged_list_is_not_continued(steps: Steps) -> None:
    bucket, node = steps.bucket, steps.node
    put(node.run / "model.pt", b"mine")
    forged = {"generation": 1, "look": 1, "pages": [["lists/x", 2, "e"]], "ended": True}
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/node0.json", Body=json.dumps(forged))
    steps.end()
    assert bucket.read_result("node0/run/model.pt") == b"mine"


def test_job_json_has_the_final_state_once_all_nodes_have_signed_that_they_ended(
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


def test_folder_is_a_checkpoint_once_it_is_unchanged_on_all_nodes(bucket: Bucket) -> None:
    nodes = bucket.run(2, starts=False)
    first, second = (Steps(bucket, node, beat_s=0.0) for node in nodes)

    def until_both(condition: Callable[[], object]) -> None:
        first.until(lambda: second.step() or condition())

    def count_scans() -> tuple[int, int]:
        """Return the numbers of scans of the nodes, as the first one knows them."""
        return first.uploader._scans, bucket.json("node1.json").get("look", 0)

    put(nodes[0].run / "step-1" / "__0_0.distcp", b"first")
    put(nodes[0].run / "step-1" / ".metadata", b"mark")
    (nodes[1].run / "step-1").mkdir()
    with (nodes[1].run / "step-1" / "__1_0.distcp").open("wb") as file:
        file.write(b"second")
        file.flush()
        until_both(lambda: bucket.read_result("node0/run/step-1/.metadata") == b"mark")
        scans = count_scans()
        until_both(lambda: all(now > before + 4 for now, before in zip(count_scans(), scans, strict=True)))
        assert bucket.checkpoint["name"] is None
    until_both(lambda: bucket.checkpoint["name"] == "run/step-1")
    assert {name: bucket.join(row) for name, row in bucket.checkpoint["files"].items()} == {
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
    assert steps.bucket.read_result("node0/run/open") == b"half and half"


def test_uploader_aborts_incomplete_uploads_at_its_end(steps: Steps) -> None:
    steps.bucket.s3.create_multipart_upload(Bucket=steps.bucket.name, Key="runs/job-1/node0/run/cut")
    steps.bucket.s3.create_multipart_upload(Bucket=steps.bucket.name, Key="runs/job-2/node0/run/other")
    steps.end()
    assert steps.bucket.uploads() == ["runs/job-2/node0/run/other"]


def test_second_uploader_of_a_job_ends_at_once(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    second = bucket.start("save", bucket.top / "home0")
    assert second.wait(timeout=60) == 0
    node.end()


def test_deadlines_agree_with_the_docs_and_the_node() -> None:
    assert uploader._LATE_S == 1800, "half an hour: docs/saving.md"
    stops = re.findall(r"TimeoutStopSec=(\d+)", template("user_data.yaml") + template("prepare.py"))
    assert stops and min(map(int, stops)) > uploader._HURRY_S
    assert uploader._OTHER_BEATS * 10 >= 10 * 60, "a request with all its attempts: store.py"


@pytest.mark.parametrize(("left_s", "expected_s"), [(115.0, 115.0), (None, 90.0)])
def test_after_a_spot_notice_uploads_are_retried_until_the_reclaim(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, left_s: float | None, expected_s: float
) -> None:
    monkeypatch.setattr(uploader.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(Shutdown, "seconds_left", lambda _: left_s)
    steps.uploader._on_term()
    assert steps.uploader._end_by == 1000.0 + expected_s


def test_uploader_that_was_killed_before_its_first_file_continues(steps: Steps) -> None:
    steps.until(lambda: steps.bucket.json("node0.json"))
    assert steps.bucket.json("node0.json")["pages"] == []
    restarted = Steps(steps.bucket, steps.node)
    put(steps.node.run / "model.pt", b"mine")
    restarted.end()
    assert steps.bucket.read_result("node0/run/model.pt") == b"mine"


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
    assert bucket.read_result("node0/run/model.pt") == b"mine"
    assert bucket.checkpoint["files"].keys() == {"node0/run/model.pt"}


@pytest.mark.parametrize("name", ["job.json", "node0.json", "node1.json"])
def test_oversized_documents_do_not_keep_a_node_from_saving(bucket: Bucket, name: str) -> None:
    nodes = bucket.run(2, starts=False)
    several = [Steps(bucket, node, beat_s=0.0) for node in nodes]
    for steps in several:
        put(steps.node.run / "model.pt", b"one")
        steps.until(lambda: steps.uploader._written)  # noqa: B023
    bucket.s3.put_object(Bucket=bucket.name, Key=f"runs/job-1/{name}", Body=b" " * (2 * MB + 1))
    several = [Steps(bucket, node, beat_s=0.0) for node in nodes]  # started again
    for text in (b"two", b"three"):
        for number, steps in enumerate(several):
            put(steps.node.run / "model.pt", text)
            path = f"node{number}/run/model.pt"
            steps.until(lambda: steps.uploader._files.get(path) and bucket.read_result(path, number) == text)  # noqa: B023
    several[1].end()
    several[0].end()
    assert bucket.json("job.json")["state"] == "succeeded"


def test_other_nodes_save_while_pages_of_the_checkpoint_are_missing(bucket: Bucket) -> None:
    nodes = bucket.run(2, starts=False)
    first, second = (Steps(bucket, node, beat_s=0.0) for node in nodes)
    for steps in (first, second):
        put(steps.node.run / "model.pt", b"one")
    first.until(lambda: second.step() or bucket.checkpoint["name"])
    for name in bucket.names():
        if name.startswith("lists/checkpoint"):
            bucket.s3.delete_object(Bucket=bucket.name, Key=f"runs/job-1/{name}")
    for text in (b"two", b"three", b"four"):
        put(second.node.run / "model.pt", text)
        second.until(lambda now=text: bucket.read_result("node1/run/model.pt", 1) == now)  # type: ignore[misc]
    second.end()
    first.end()


@pytest.mark.parametrize("lost", ["nothing was saved", "a page was replaced"])
def test_uploader_that_cannot_read_its_list_starts_from_scratch(steps: Steps, lost: str) -> None:
    bucket, node = steps.bucket, steps.node
    node.log.unlink(missing_ok=True)
    if lost == "a page was replaced":
        put(node.run / "model.pt", b"mine")
        steps.until(lambda: bucket.checkpoint["name"])
        for key in [name for name in bucket.names() if name.startswith("lists/")]:
            bucket.s3.put_object(Bucket=bucket.name, Key=f"runs/job-1/{key}", Body=b"{}")
    else:
        steps.until(lambda: bucket.json("job.json"))
    put(node.run / "model.pt", b"later")
    Steps(bucket, node).end()
    assert bucket.read_result("node0/run/model.pt") == b"later"


def test_key_of_a_failed_upload_that_may_arrive_late_is_not_reused(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = steps.node.run / "model.pt", "runs/job-1/node0/run/model.pt"
    monkeypatch.setattr(steps.uploader._store, "put", late := Late(steps.uploader._store.put))
    put(path, b"old")
    with pytest.raises(OSError, match="no reply"):
        steps.until(lambda: False)
    monkeypatch.undo()
    put(path, b"newer")
    steps.until(lambda: steps.bucket.read_result("node0/run/model.pt") == b"newer")
    late.arrive()
    assert steps.bucket.s3.get_object(Bucket=steps.bucket.name, Key=key)["Body"].read() == b"old"
    assert steps.bucket.read_result("node0/run/model.pt") == b"newer"


def test_files_of_the_next_job_are_not_saved_with_this_job(steps: Steps) -> None:
    bucket, node = steps.bucket, steps.node
    put(node.work / "model.pt", b"mine")
    steps.until(lambda: bucket.read_result("node0/model.pt") == b"mine")
    node.state("succeeded")
    os.close(node.lock)
    time.sleep(0.05)  # as long as a file's time may be late
    (node.jobs.parent / "job-2").mkdir()
    machines = [{"node": 0, "private_ip": "127.0.0.1", "instance_id": "i-0"}]
    request = make_launch(0, job="job-2", nodes=machines, layout=[[0, 0, 0]], workdir=str(node.work))
    write_json(node.jobs.parent / "job-2" / "job.json", request)
    time.sleep(0.05)
    put(node.work / "model.pt", b"theirs")
    put(node.work / "theirs.pt", b"theirs")
    steps.until(steps.step)
    assert bucket.read_result("node0/model.pt") == b"mine"
    assert "node0/theirs.pt" not in bucket.read_list()
    assert bucket.json("node0.json")["error"] == ""


def test_times_beyond_64_bits_are_clamped(steps: Steps) -> None:
    for name, seconds in (("old", -1), ("far", 5_000_000_000)):
        put(steps.node.run / name, name.encode())
        os.utime(steps.node.run / name, (seconds, seconds))
    steps.end()
    assert bytes(steps.bucket.read_result("node0/run/old") or b"") == b"old"
    assert steps.bucket.read_list()["node0/run/far"]["modified"] < 1 << 63


class Late:
    """A put that fails while its request is still in transit."""

    def __init__(self, put: Callable[..., Any]) -> None:
        self._put, self._arguments = put, ()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not arguments[1].startswith("node0/run/"):
            return self._put(*arguments, **options)
        self._arguments = arguments
        raise OSError("no reply came")

    def arrive(self) -> None:
        self._put(*self._arguments)
