"""What a node uploads to S3 while a job runs, against the local cloud's S3; the job is simulated."""

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent.s3 import uploader
from awsddp.agent.s3.store import S3Uri
from tests.support.local_cloud import add_fault, clear_fault
from tests.support.saving_bucket import MB, Bucket
from tests.support.waiting import until


@pytest.mark.prove
def test_complete_file_is_saved_and_its_next_version_under_another_key(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    assert Path(f"/proc/{node.saver.pid}/comm").read_text() == "awsddp-job\n"  # the watchdog looks for it
    with (node.run / "model.pt").open("wb") as file:
        file.write(b"half")
        file.flush()
        (node.work / ".part").write_bytes(b"renamed")
        (node.work / ".part").rename(node.work / "result")
        until(lambda: bucket.read_result("node0/result") == b"renamed")
        assert "node0/run/model.pt" not in bucket.names()
        assert bucket.json("node0.json")["pending"] == ["node0/run"]
        assert (bucket.json("job.json")["state"], bucket.checkpoint["name"]) == ("running", None)
        file.write(b" and half")
    until(lambda: bucket.checkpoint["name"] == "run/model.pt")
    assert bucket.get("node0/run/model.pt") == b"half and half"

    def row() -> Any:
        return bucket.checkpoint["files"]["node0/run/model.pt"]

    def keys() -> list[str]:
        return [part[0] for part in row()["parts"]]

    (node.run / "model.pt").write_bytes(b"the next")
    until(lambda: keys() == ["node0/run/model.pt~2"])
    texts = (b"version %d" % number for number in itertools.count(3))

    def reuses_first_key() -> bool:
        (node.run / "model.pt").write_bytes(text := next(texts))
        until(lambda: bucket.join(row()) == text)
        return keys() == ["node0/run/model.pt"]

    until(reuses_first_key)
    (node.run / "model.pt").write_bytes(b"the next")
    until(lambda: bucket.join(row()) == b"the next")
    (node.run / "model.pt").unlink()
    until(lambda: bucket.read_result("node0/run/model.pt") is None)
    assert bucket.join(row()) == b"the next"
    (node.run / "torn.pt").write_bytes(b"PK\x03\x04 no end")
    (node.run / "link").symlink_to(node.work / "result")
    node.end()
    document = bucket.json("job.json")
    assert (document["state"], document["checkpoint"]["name"]) == ("succeeded", "run/model.pt")
    [[key, *_]] = bucket.json("node0.json")["pages"]
    assert bucket.json(key)["links"] == {"node0/run/link": "node0/result"}
    saving = json.loads(node.folder.saving.read_text())
    assert (saving["ended"], saving["error"], saving["pending_files"]) == (True, "", 0)


def test_growing_file_is_saved_in_parts(bucket: Bucket) -> None:
    [node] = bucket.run()
    content = b""
    with node.log.open("ab", buffering=0) as log:
        for number in range(4):
            chunk = os.urandom(5 * MB) + b"%d\n" % number
            log.write(chunk)
            content += chunk
            until(lambda now=content: bucket.read_result("logs/rank0.log") == now)  # type: ignore[misc]
    rows = node.run / "metrics.jsonl"
    rows.write_text('{"step": 1}\n')
    until(lambda: bucket.read_result("node0/run/metrics.jsonl") == b'{"step": 1}\n')
    info = rows.stat()
    rows.write_text('{"step": 2}\n')
    os.utime(rows, ns=(info.st_mtime_ns, info.st_mtime_ns))
    node.end()
    assert bucket.read_result("logs/rank0.log") == content
    assert bucket.read_result("node0/run/metrics.jsonl") == b'{"step": 2}\n'
    parts = bucket.read_list()["logs/rank0.log"]["parts"]
    assert [size for _, size, *_ in parts][:2] == [8 * MB, 8 * MB]


@pytest.mark.prove
def test_failed_upload_is_reported_and_retried(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    add_fault(bucket.cloud.info, "PutObject", "AccessDenied", only="runs/job-1/node0/run/late")
    (node.run / "late").write_bytes(b"late")
    (node.run / "other").write_bytes(b"other")
    until(lambda: "AccessDenied" in json.loads(node.folder.saving.read_text())["error"])
    until(lambda: bucket.read_result("node0/run/other") == b"other")
    assert bucket.json("node0.json")["pending"] == ["node0/run"]
    clear_fault(bucket.cloud.info)
    until(lambda: bucket.read_result("node0/run/late") == b"late")
    node.end()
    assert json.loads(node.folder.saving.read_text())["error"] == ""


@pytest.mark.prove
def test_killed_uploader_leaves_no_partial_object(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    with (node.run / "large").open("wb") as file:
        file.truncate(400 * MB)
    until(bucket.uploads)
    os.kill(node.saver.pid, signal.SIGKILL)
    node.saver.wait()
    assert "node0/run/large" not in bucket.names()
    bucket.store().abort(S3Uri(bucket.name, "runs/job-1"))
    assert bucket.uploads() == []


@pytest.mark.prove
def test_checkpoint_that_the_job_removes_during_its_upload_is_saved(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    with (node.run / "written").open("wb") as file:
        file.truncate(200 * MB)
    (node.run / "written").rename(node.run / "step-1.pt")
    until(lambda: bucket.s3.list_multipart_uploads(Bucket=bucket.name).get("Uploads"))
    (node.run / "step-1.pt").unlink()
    until(lambda: bucket.checkpoint["name"] == "run/step-1.pt")
    [row] = bucket.checkpoint["files"].values()
    [[key, length, *_]] = row["parts"]
    head = bucket.s3.head_object(Bucket=bucket.name, Key=f"runs/job-1/{key}")
    assert row["size"] == length == head["ContentLength"] == 200 * MB
    until(lambda: bucket.read_result("node0/run/step-1.pt") is None)
    node.end()
    assert bucket.checkpoint["name"] == "run/step-1.pt"


def create_folder(bucket: Bucket, to: Path, **files: bytes) -> None:
    """Create a folder with complete files in one step."""
    folder = bucket.top / "made"
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    folder.rename(to)


@pytest.mark.prove
def test_file_that_cannot_be_sent_does_not_delay_others(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    key = f"runs/job-1/parts/node0/run/late.jsonl/{0:015}"
    add_fault(bucket.cloud.info, "PutObject", "AccessDenied", only=key)
    (node.run / "late.jsonl").write_bytes(b"late")
    until(lambda: "AccessDenied" in json.loads(node.folder.saving.read_text())["error"])
    (node.run / "other").write_bytes(b"other")
    (node.run / "other.jsonl").write_bytes(b"row")
    until(lambda: bucket.read_result("node0/run/other") == b"other")
    until(lambda: bucket.read_result("node0/run/other.jsonl") == b"row")
    assert bucket.json("node0.json")["pending"] == ["node0/run"]
    clear_fault(bucket.cloud.info)
    node.end()
    assert bucket.read_result("node0/run/late.jsonl") == b"late"


@pytest.mark.prove
def test_late_request_does_not_replace_a_newer_version(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    prefix = "runs/job-1/node0/run/set"
    add_fault(bucket.cloud.info, "PutObject", "AccessDenied", only=f"{prefix}/a", times=1)
    add_fault(bucket.cloud.info, "PutObject", "delay", only=f"{prefix}/b", seconds=5, times=1)
    create_folder(bucket, node.run / "set", a=b"1", b=b"old")
    until(lambda: "AccessDenied" in json.loads(node.folder.saving.read_text())["error"])
    (node.run / "set/b").write_bytes(b"new")
    time.sleep(5)  # until the late request has been executed
    node.end()
    assert bucket.read_result("node0/run/set/b") == b"new"


@pytest.mark.prove
def test_file_whose_name_looks_like_a_version_is_saved_separately(bucket: Bucket) -> None:
    [node] = bucket.run()
    (node.run / "model.pt~2").write_bytes(b"a backup")
    (node.run / "model.pt").write_bytes(b"first")
    until(lambda: bucket.read_result("node0/run/model.pt") == b"first")
    (node.run / "model.pt").write_bytes(b"second")
    until(lambda: bucket.read_result("node0/run/model.pt") == b"second")
    assert bucket.read_result("node0/run/model.pt~2") == b"a backup"
    node.end()


@pytest.mark.prove
def test_file_that_stays_open_for_writing_is_given_up_at_the_deadline(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    [node] = bucket.run()
    monkeypatch.setattr(uploader, "_LATE_S", 2.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    node.saver.kill()
    with (node.run / "open").open("wb"):
        node.state("succeeded")
        os.close(node.lock)
        code = uploader.Uploader(bucket.order("save"), node.folder, bucket.store()).run()
    saving = json.loads(node.folder.saving.read_text())
    assert (code, saving["ended"], saving["pending_files"]) == (1, True, 1)
    assert saving["error"] == "programs still write to: node0/run/open"
    assert not bucket.json("node0.json")["ended"]
