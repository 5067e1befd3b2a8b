"""What a node saves to S3 while a job runs, against the local cloud's S3; the job itself is made up."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import venv
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError

from awsddp.agent.job_folder import JobFolder, initial, write_json
from awsddp.agent.s3 import store as objects
from awsddp.agent.s3 import uploader
from awsddp.agent.s3.store import Place, Store
from awsddp.agent_client import program
from awsddp.local import control
from awsddp.model.node_answers import Tried, read_answer
from awsddp.plan.policy import role_policy
from awsddp.settings.spec import ClusterSpec, JobSection, JobSpec
from awsddp.storage import datasets
from tests.support.fleet import launch_of
from tests.support.local_cloud import Cloud, fault_add, fault_clear

RIGHTS = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload")
MB = 1 << 20


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    home = tmp_path_factory.mktemp("cloud")
    yield Cloud(home, control.start(home, mode="records"))
    control.stop(home)


class Metadata:
    """The metadata service of a node whose role has these rights in a bucket; no role without a cloud."""

    def __init__(self, cloud: Cloud | None, bucket: str = "", rights: tuple[str, ...] = RIGHTS) -> None:
        role = self._role(cloud, bucket, rights) if cloud else None

        self.slow_s, self.refuses = 0.0, 0
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._say("token")

            def do_GET(self) -> None:
                self._say("training" if self.path.endswith("/") else json.dumps(role))

            def _say(self, text: str) -> None:
                time.sleep(metadata.slow_s)
                refused, metadata.refuses = metadata.refuses > 0, max(0, metadata.refuses - 1)
                self.send_response(404 if refused or (role is None and self.command == "GET") else 200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def _role(self, cloud: Cloud, bucket: str, rights: tuple[str, ...]) -> dict[str, str]:
        iam, name = cloud.client("iam"), f"role-{uuid.uuid4().hex}"
        arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        job = JobSpec(job=JobSection(save_to=f"s3://{bucket}/runs"))
        policy = role_policy(ClusterSpec(name="lab"), job)
        for one in policy["Statement"]:
            one["Action"] = [action for action in one["Action"] if action in rights or action not in RIGHTS]
        policy["Statement"] = [one for one in policy["Statement"] if one["Action"]]
        document = json.dumps(policy)
        iam.put_role_policy(RoleName=name, PolicyName="rights", PolicyDocument=document)
        given = cloud.client("sts").assume_role(RoleArn=arn, RoleSessionName="i-1")["Credentials"]
        keys = {"AccessKeyId": given["AccessKeyId"], "SecretAccessKey": given["SecretAccessKey"]}
        ends = {"Expiration": "2099-01-01T00:00:00Z", "LastUpdated": "2026-01-01T00:00:00Z"}
        return {"Code": "Success", "Type": "AWS-HMAC", "Token": given["SessionToken"], **keys, **ends}


class Bucket:
    """A bucket, and nodes that save a job there."""

    def __init__(self, cloud: Cloud, top: Path) -> None:
        self.cloud, self.top = cloud, top
        self.name = f"bucket-{uuid.uuid4().hex}"
        self.s3 = cloud.client("s3")
        self.s3.create_bucket(Bucket=self.name)
        self.metadata = Metadata(cloud, self.name)
        self.nodes: list[Node] = []

    def order(self, do: str, **changes: Any) -> dict[str, Any]:
        usual = {
            "do": do,
            "place": (self.name, "runs"),
            "job": "job-1",
            "by": "i-0",
            "launch": "launch-1",
            "secret": "5ec2e7",
            "exclude": [],
        }
        pace = {"look_s": 0.05, "parts_s": 0.1, "beat_s": 0.2}
        where = {"region": "us-east-1", "endpoint": self.cloud.info.endpoint}
        return {**usual, **pace, **where, **changes}

    def start(
        self,
        do: str,
        home: Path,
        metadata: Metadata | None = None,
        python: str = sys.executable,
        **changes: Any,
    ) -> Any:
        argv, stdin = program.node_program(python, program.UPLOADER, self.order(do, **changes))
        environ = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": (metadata or self.metadata).endpoint,
            "AWS_ACCESS_KEY_ID": "not-the-role",
            "AWS_SECRET_ACCESS_KEY": "not-the-role",
        }
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environ)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        process.stdin = None
        return process

    def claim(self, metadata: Metadata | None = None, **changes: Any) -> Tried:
        out, err = self.start("claim", self.top, metadata, **changes).communicate(timeout=60)
        assert out, err
        return read_answer(out, Tried, node=0)

    def names(self) -> list[str]:
        found = self.s3.list_objects_v2(Bucket=self.name, Prefix="runs/job-1/").get("Contents", ())
        return [one["Key"].removeprefix("runs/job-1/") for one in found]

    def get(self, key: str) -> bytes:
        body: bytes = self.s3.get_object(Bucket=self.name, Key=f"runs/job-1/{key}")["Body"].read()
        return body

    def json(self, key: str) -> Any:
        try:
            return json.loads(self.get(key))
        except ClientError:
            return {}

    def pages(self, named: list[Any]) -> dict[str, Any]:
        """The files that pages list, each with the ETag that the list names."""
        found: dict[str, Any] = {}
        for key, size, etag in named:
            where = {"Bucket": self.name, "Key": f"runs/job-1/{key}", "IfMatch": etag}
            body = self.s3.get_object(**where)["Body"].read()
            assert len(body) == size
            found |= json.loads(body).get("files", {})
        return found

    def listed(self, node: int = 0) -> dict[str, Any]:
        """What a node lists: a row by place. A list that changes meanwhile is read again."""
        for _ in range(9):
            with contextlib.suppress(ClientError):
                return self.pages(self.json(f"node{node}.json").get("pages", []))
        raise AssertionError("the list changes faster than it can be read")

    def join(self, row: Any) -> bytes | None:
        """What a reader gets of a row: its parts, as they are listed; None where one is another by now."""
        bodies = []
        for key, size, etag, digest in row["parts"]:
            where = {"Bucket": self.name, "Key": f"runs/job-1/{key}"}
            try:
                body = self.s3.get_object(**where, **({} if digest else {"IfMatch": etag}))["Body"].read()
            except ClientError:
                return None
            body = body[:size] if digest else body
            assert len(body) == size and digest in ("", hashlib.sha256(body).hexdigest())
            bodies.append(body)
        return b"".join(bodies)

    def saved(self, home: str, node: int = 0) -> bytes | None:
        """What a reader gets of a result; None where it is not saved."""
        found = self.listed(node).get(home)
        return found and self.join(found)

    def uploads(self) -> list[str]:
        """The keys of what was begun and not completed."""
        return [one["Key"] for one in self.s3.list_multipart_uploads(Bucket=self.name).get("Uploads", ())]

    def store(self) -> Store:
        """S3 as a client sees it."""
        info, session = self.cloud.info, botocore.session.Session()
        session.set_credentials(info.access_key_id, info.secret_access_key)
        return Store(region=info.region, endpoint=info.endpoint, session=session)

    @property
    def checkpoint(self) -> Any:
        """What job.json names, with the rows of its files."""
        for _ in range(9):
            found = self.json("job.json").get("checkpoint") or {"name": None, "pages": []}
            with contextlib.suppress(ClientError):
                return {**found, "files": self.pages(found["pages"])}
        raise AssertionError("job.json changes faster than it can be read")

    def run(self, count: int = 1, *, starts: bool = True) -> list["Node"]:
        self.nodes = [Node(self, node, count, starts=starts) for node in range(count)]
        return self.nodes


class Node:
    """A node on which the job runs, and its saver."""

    def __init__(self, bucket: Bucket, number: int, count: int, *, starts: bool = True) -> None:
        home = bucket.top / f"home{number}"
        self.work, self.jobs = home / "work", home / ".awsddp" / "jobs" / "job-1"
        for path in (self.work, self.jobs / "logs", self.jobs / "run"):
            path.mkdir(parents=True)
        self.run, self.log = self.jobs / "run", self.jobs / "logs" / f"rank{number}.log"
        every = range(count)
        machines = [{"node": one, "private_ip": "127.0.0.1", "instance_id": f"i-{one}"} for one in every]
        layout = [[one, 0, one] for one in every]
        self.request = launch_of(number, job="job-1", nodes=machines, layout=layout, workdir=str(self.work))
        self.folder = JobFolder("job-1", self.jobs)
        write_json(self.jobs / "job.json", self.request)
        write_json(self.folder.snapshot, {})
        self.lock = self.folder.lock()
        self.state("running")
        write_json(self.folder.saving, {"error": ""})  # the launcher does so
        self.saver: Any = bucket.start("save", home) if starts else None

    def state(self, state: str) -> None:
        document = initial(self.request)
        document.state = state
        write_json(self.folder.state, document)

    def end(self) -> None:
        """End the job, and wait for the last upload."""
        self.state("succeeded")
        os.close(self.lock)
        out, err = self.saver.communicate(timeout=60)
        assert self.saver.returncode == 0, err.decode() + out.decode()


@pytest.fixture
def bucket(cloud: Cloud, tmp_path: Path) -> Iterator[Bucket]:
    made = Bucket(cloud, tmp_path)
    yield made
    for node in made.nodes:
        if node.saver is not None:
            node.saver.kill()
            node.saver.communicate()
    made.metadata.server.shutdown()


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.1)


@pytest.mark.prove
def test_a_file_is_saved_once_it_is_whole_and_its_next_version_beside_it(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    assert Path(f"/proc/{node.saver.pid}/comm").read_text() == "awsddp-job\n"  # the watchdog looks for it
    with (node.run / "model.pt").open("wb") as file:
        file.write(b"half")
        file.flush()
        (node.work / ".part").write_bytes(b"renamed")
        (node.work / ".part").rename(node.work / "result")
        until(lambda: bucket.saved("node0/result") == b"renamed")
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

    def returns() -> bool:
        (node.run / "model.pt").write_bytes(text := next(texts))
        until(lambda: bucket.join(row()) == text)
        return keys() == ["node0/run/model.pt"]

    until(returns)
    (node.run / "model.pt").write_bytes(b"the next")
    until(lambda: bucket.join(row()) == b"the next")
    (node.run / "model.pt").unlink()
    until(lambda: bucket.saved("node0/run/model.pt") is None)
    assert bucket.join(row()) == b"the next"
    (node.run / "torn.pt").write_bytes(b"PK\x03\x04 no end")
    (node.run / "link").symlink_to(node.work / "result")
    node.end()
    whole = bucket.json("job.json")
    assert (whole["state"], whole["checkpoint"]["name"]) == ("succeeded", "run/model.pt")
    [[key, *_]] = bucket.json("node0.json")["pages"]
    assert bucket.json(key)["links"] == {"node0/run/link": "node0/result"}
    told = json.loads(node.folder.saving.read_text())
    assert (told["ended"], told["error"], told["pending_files"]) == (True, "", 0)


def test_what_grows_is_sent_in_parts_that_join_to_it(bucket: Bucket) -> None:
    [node] = bucket.run()
    said = b""
    with node.log.open("ab", buffering=0) as log:
        for number in range(4):
            more = os.urandom(5 * MB) + b"%d\n" % number
            log.write(more)
            said += more
            until(lambda now=said: bucket.saved("logs/rank0.log") == now)  # type: ignore[misc]
    rows = node.run / "metrics.jsonl"
    rows.write_text('{"step": 1}\n')
    until(lambda: bucket.saved("node0/run/metrics.jsonl") == b'{"step": 1}\n')
    info = rows.stat()
    rows.write_text('{"step": 2}\n')
    os.utime(rows, ns=(info.st_mtime_ns, info.st_mtime_ns))
    node.end()
    assert bucket.saved("logs/rank0.log") == said
    assert bucket.saved("node0/run/metrics.jsonl") == b'{"step": 2}\n'
    parts = bucket.listed()["logs/rank0.log"]["parts"]
    assert [size for _, size, *_ in parts][:2] == [8 * MB, 8 * MB]


@pytest.mark.prove
def test_what_fails_is_told_and_tried_again(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    fault_add(bucket.cloud.info, "PutObject", "AccessDenied", only="runs/job-1/node0/run/late")
    (node.run / "late").write_bytes(b"late")
    (node.run / "other").write_bytes(b"other")
    until(lambda: "AccessDenied" in json.loads(node.folder.saving.read_text())["error"])
    until(lambda: bucket.saved("node0/run/other") == b"other")
    assert bucket.json("node0.json")["pending"] == ["node0/run"]
    fault_clear(bucket.cloud.info)
    until(lambda: bucket.saved("node0/run/late") == b"late")
    node.end()
    assert json.loads(node.folder.saving.read_text())["error"] == ""


@pytest.mark.prove
def test_a_saver_that_is_killed_leaves_nothing_half_under_a_name(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    with (node.run / "large").open("wb") as file:
        file.truncate(400 * MB)
    until(bucket.uploads)
    os.kill(node.saver.pid, signal.SIGKILL)
    node.saver.wait()
    assert "node0/run/large" not in bucket.names()
    bucket.store().abort(Place(bucket.name, "runs/job-1"))
    assert bucket.uploads() == []


def test_a_claim_gives_up_what_jobs_that_have_ended_left_begun(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job, state in (("ended", "failed"), ("going", "running"), ("claimed", "claimed"), ("not-ours", "")):
        document = {"save": 2, "state": state} if state else {"state": "failed"}
        bucket.s3.put_object(Bucket=bucket.name, Key=f"runs/{job}/job.json", Body=json.dumps(document))
        bucket.s3.create_multipart_upload(Bucket=bucket.name, Key=f"runs/{job}/node0/large")
    for key in ("runs/nobody/file", "runs/.data/0f/set/a", "elsewhere/ended/file"):
        bucket.s3.create_multipart_upload(Bucket=bucket.name, Key=key)
    assert bucket.claim().code == ""
    others = ["elsewhere/ended/file", "runs/nobody/file", "runs/not-ours/node0/large"]
    alive = ["runs/claimed/node0/large", "runs/going/node0/large", "runs/.data/0f/set/a"]
    assert bucket.uploads() == sorted(others + alive)
    bucket.store().abort(Place(bucket.name, "runs"), over=("claimed",))
    assert bucket.uploads() == sorted(others + alive[1:])
    monkeypatch.setattr(objects, "_DAY", timedelta(0))
    bucket.store().abort(Place(bucket.name, "runs"), over=())
    assert bucket.uploads() == sorted([*others, "runs/.data/0f/set/a"])  # it may take days over a slow line
    monkeypatch.setattr(objects, "_WEEK", timedelta(0))
    bucket.store().abort(Place(bucket.name, "runs"), over=())
    assert bucket.uploads() == others


@pytest.mark.prove
def test_a_checkpoint_that_the_job_removes_while_it_is_sent_is_saved(bucket: Bucket) -> None:
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
    until(lambda: bucket.saved("node0/run/step-1.pt") is None)
    node.end()
    assert bucket.checkpoint["name"] == "run/step-1.pt"


def test_of_two_claims_at_once_one_wins_and_the_other_learns_the_names(bucket: Bucket) -> None:
    rivals = [bucket.start("claim", bucket.top, by=one, launch=one) for one in ("one", "other")]
    told = [read_answer(one.communicate(timeout=60)[0], Tried, node=0) for one in rivals]
    assert sorted(one.code for one in told) == ["", "taken"]
    assert [one.names for one in told if one.code] == [("job-1",)]


def test_a_node_claims_again_what_it_has_not_launched(bucket: Bucket) -> None:
    assert [bucket.claim().code for _ in range(2)] == ["", ""]
    assert bucket.claim(launch="launch-2").code == ""
    assert bucket.claim(by="i-1", launch="launch-3").code == "taken"
    document = json.dumps({**bucket.json("job.json"), "state": "running"})  # as its saver writes it
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/job.json", Body=document)
    assert bucket.claim().code == "taken"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"[" * 100_000])
def test_a_name_under_which_others_wrote_is_taken(bucket: Bucket, body: bytes) -> None:
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/job.json", Body=body)
    bucket.s3.create_multipart_upload(Bucket=bucket.name, Key="runs/job-1/node0/large")
    told = bucket.claim()
    assert (told.code, told.names) == ("taken", ("job-1",))
    assert bucket.uploads() == ["runs/job-1/node0/large"]


@pytest.mark.prove
def test_a_python_with_an_old_boto3_saves_with_that_of_the_client(bucket: Bucket) -> None:
    venv.create(bucket.top / "old", with_pip=False, symlinks=True)
    [packages] = (bucket.top / "old/lib").glob("python*/site-packages")
    with datasets._packages() as folder:
        shutil.copytree(folder, packages, dirs_exist_ok=True)
        futures = packages / "s3transfer/futures.py"
        futures.write_text(futures.read_text().replace("def provide_object_etag", "def not_yet"))
        python = str(bucket.top / "old/bin/python")
        told = bucket.claim(python=python)
        assert (told.code, told.said) == ("boto3", "its s3transfer is older than 0.11")
        shutil.copytree(folder, bucket.top / "awsddp/boto3")
        assert bucket.claim(python=python).code == ""


@pytest.mark.prove
def test_a_metadata_service_that_is_slow_is_waited_for(bucket: Bucket) -> None:
    bucket.metadata.slow_s = 1.5
    assert bucket.claim().code == ""


@pytest.mark.parametrize(
    "right", [pytest.param(one, marks=pytest.mark.prove if one in RIGHTS[1:3] else ()) for one in RIGHTS]
)
def test_a_right_that_is_missing_is_named(bucket: Bucket, right: str) -> None:
    lacking = Metadata(bucket.cloud, bucket.name, tuple(one for one in RIGHTS if one != right))
    told = bucket.claim(lacking)
    assert (told.code, told.what) == ("right", right)
    assert right in told.said or right == "s3:ListBucket"
    assert not bucket.json("job.json")


def test_a_metadata_service_that_finds_no_role_at_first_is_asked_again(bucket: Bucket) -> None:
    late = Metadata(bucket.cloud, bucket.name)
    late.refuses = 4  # its token, and each attempt of botocore
    assert bucket.claim(late).code == ""


def test_what_else_keeps_a_node_from_saving_is_told(bucket: Bucket) -> None:
    assert bucket.claim(Metadata(None)).code == "role"
    missing = f"missing-{bucket.name[:40]}"
    assert bucket.claim(Metadata(bucket.cloud, missing), place=(missing, "runs")).code == "bucket"
    far = f"far-{bucket.name[:40]}"
    bucket.s3.create_bucket(Bucket=far, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    told = bucket.claim(Metadata(bucket.cloud, far), place=(far, "runs"))
    assert (told.code, told.what) == ("region", "eu-west-1")


def in_place(bucket: Bucket, to: Path, **files: bytes) -> None:
    """Have a folder appear at once, with files that are whole."""
    made = bucket.top / "made"
    made.mkdir()
    for name, body in files.items():
        (made / name).write_bytes(body)
    made.rename(to)


@pytest.mark.prove
def test_a_file_that_cannot_be_sent_holds_up_no_other(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    key = f"runs/job-1/parts/node0/run/late.jsonl/{0:015}"
    fault_add(bucket.cloud.info, "PutObject", "AccessDenied", only=key)
    (node.run / "late.jsonl").write_bytes(b"late")
    until(lambda: "AccessDenied" in json.loads(node.folder.saving.read_text())["error"])
    (node.run / "other").write_bytes(b"other")
    (node.run / "other.jsonl").write_bytes(b"row")
    until(lambda: bucket.saved("node0/run/other") == b"other")
    until(lambda: bucket.saved("node0/run/other.jsonl") == b"row")
    assert bucket.json("node0.json")["pending"] == ["node0/run"]
    fault_clear(bucket.cloud.info)
    node.end()
    assert bucket.saved("node0/run/late.jsonl") == b"late"


@pytest.mark.prove
def test_a_request_that_is_late_does_not_replace_what_was_sent_after_it(bucket: Bucket) -> None:
    [node] = bucket.run()
    until(lambda: bucket.json("job.json"))
    where = "runs/job-1/node0/run/set"
    fault_add(bucket.cloud.info, "PutObject", "AccessDenied", only=f"{where}/a", times=1)
    fault_add(bucket.cloud.info, "PutObject", "delay", only=f"{where}/b", seconds=5, times=1)
    in_place(bucket, node.run / "set", a=b"1", b=b"old")
    until(lambda: "AccessDenied" in json.loads(node.folder.saving.read_text())["error"])
    (node.run / "set/b").write_bytes(b"new")
    time.sleep(5)  # until the request that is late has been carried out
    node.end()
    assert bucket.saved("node0/run/set/b") == b"new"


@pytest.mark.prove
def test_names_that_look_like_versions_are_kept_apart(bucket: Bucket) -> None:
    [node] = bucket.run()
    (node.run / "model.pt~2").write_bytes(b"a backup")
    (node.run / "model.pt").write_bytes(b"first")
    until(lambda: bucket.saved("node0/run/model.pt") == b"first")
    (node.run / "model.pt").write_bytes(b"second")
    until(lambda: bucket.saved("node0/run/model.pt") == b"second")
    assert bucket.saved("node0/run/model.pt~2") == b"a backup"
    node.end()


@pytest.mark.prove
def test_a_file_that_stays_open_for_writing_is_waited_for_no_longer_than_what_fails(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    [node] = bucket.run()
    monkeypatch.setattr(uploader, "_LATE_S", 2.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    node.saver.kill()
    with (node.run / "open").open("wb"):
        node.state("succeeded")
        os.close(node.lock)
        code = uploader.Saver(bucket.order("save"), node.folder, bucket.store()).run()
    told = json.loads(node.folder.saving.read_text())
    assert (code, told["ended"], told["pending_files"]) == (1, True, 1)
    assert told["error"] == "still being written: node0/run/open"
    assert not bucket.json("node0.json")["ended"]
