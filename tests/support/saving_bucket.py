"""A bucket of the local cloud's S3, and simulated nodes that save a job there."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError

from awsddp.agent.job_folder import JobFolder, initial_document, write_json
from awsddp.agent.s3.store import Store
from awsddp.agent_client import program
from awsddp.local import control
from awsddp.model.node_answers import NameClaimResult, read_answer
from awsddp.plan.policy import role_policy
from awsddp.settings.spec import ClusterSpec, JobSection, JobSpec
from tests.support.fleet import make_launch
from tests.support.local_cloud import Cloud

RIGHTS = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload")


MB = 1 << 20


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    home = tmp_path_factory.mktemp("cloud")
    yield Cloud(home, control.start(home, mode="records"))
    control.stop(home)


class Metadata:
    """The metadata service of a node whose role has `rights` in a bucket; without a cloud it has no role."""

    def __init__(self, cloud: Cloud | None, bucket: str = "", rights: tuple[str, ...] = RIGHTS) -> None:
        role = self._role(cloud, bucket, rights) if cloud else None

        self.slow_s, self.refusals_left = 0.0, 0
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._send("token")

            def do_GET(self) -> None:
                self._send("training" if self.path.endswith("/") else json.dumps(role))

            def _send(self, text: str) -> None:
                time.sleep(metadata.slow_s)
                refused, metadata.refusals_left = (
                    metadata.refusals_left > 0,
                    max(0, metadata.refusals_left - 1),
                )
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
        for row in policy["Statement"]:
            row["Action"] = [action for action in row["Action"] if action in rights or action not in RIGHTS]
        policy["Statement"] = [row for row in policy["Statement"] if row["Action"]]
        document = json.dumps(policy)
        iam.put_role_policy(RoleName=name, PolicyName="rights", PolicyDocument=document)
        credentials = cloud.client("sts").assume_role(RoleArn=arn, RoleSessionName="i-1")["Credentials"]
        keys = {"AccessKeyId": credentials["AccessKeyId"], "SecretAccessKey": credentials["SecretAccessKey"]}
        ends = {"Expiration": "2099-01-01T00:00:00Z", "LastUpdated": "2026-01-01T00:00:00Z"}
        return {"Code": "Success", "Type": "AWS-HMAC", "Token": credentials["SessionToken"], **keys, **ends}


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
        s3 = {"region": "us-east-1", "endpoint": self.cloud.info.endpoint}
        return {**usual, **pace, **s3, **changes}

    def start(
        self,
        do: str,
        home: Path,
        metadata: Metadata | None = None,
        python: str = sys.executable,
        **changes: Any,
    ) -> Any:
        argv, stdin = program.node_program(python, program.UPLOADER_MODULES, self.order(do, **changes))
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

    def claim(self, metadata: Metadata | None = None, **changes: Any) -> NameClaimResult:
        out, err = self.start("claim", self.top, metadata, **changes).communicate(timeout=60)
        assert out, err
        return read_answer(out, NameClaimResult, node=0)

    def names(self) -> list[str]:
        rows = self.s3.list_objects_v2(Bucket=self.name, Prefix="runs/job-1/").get("Contents", ())
        return [row["Key"].removeprefix("runs/job-1/") for row in rows]

    def get(self, key: str) -> bytes:
        body: bytes = self.s3.get_object(Bucket=self.name, Key=f"runs/job-1/{key}")["Body"].read()
        return body

    def json(self, key: str) -> Any:
        try:
            return json.loads(self.get(key))
        except ClientError:
            return {}

    def pages(self, refs: list[Any]) -> dict[str, Any]:
        """Return the rows in the pages of a list; the ETag of each page must be the listed one."""
        files: dict[str, Any] = {}
        for key, size, etag in refs:
            page = {"Bucket": self.name, "Key": f"runs/job-1/{key}", "IfMatch": etag}
            body = self.s3.get_object(**page)["Body"].read()
            assert len(body) == size
            files |= json.loads(body).get("files", {})
        return files

    def read_list(self, node: int = 0) -> dict[str, Any]:
        """Return the rows of a node's list, by home. It is read again if it changes during the read."""
        for _ in range(9):
            with contextlib.suppress(ClientError):
                return self.pages(self.json(f"node{node}.json").get("pages", []))
        raise AssertionError("the list changes faster than it can be read")

    def join(self, row: Any) -> bytes | None:
        """Return the content of a file from its listed parts, or None if a part has changed."""
        bodies = []
        for key, size, etag, digest in row["parts"]:
            part = {"Bucket": self.name, "Key": f"runs/job-1/{key}"}
            try:
                body = self.s3.get_object(**part, **({} if digest else {"IfMatch": etag}))["Body"].read()
            except ClientError:
                return None
            body = body[:size] if digest else body
            assert len(body) == size and digest in ("", hashlib.sha256(body).hexdigest())
            bodies.append(body)
        return b"".join(bodies)

    def read_result(self, home: str, node: int = 0) -> bytes | None:
        """Return the content of a saved result, or None."""
        row = self.read_list(node).get(home)
        return row and self.join(row)

    def uploads(self) -> list[str]:
        """Return the keys of incomplete multipart uploads."""
        return [row["Key"] for row in self.s3.list_multipart_uploads(Bucket=self.name).get("Uploads", ())]

    def store(self) -> Store:
        """Return a store with the credentials of a client."""
        info, session = self.cloud.info, botocore.session.Session()
        session.set_credentials(info.access_key_id, info.secret_access_key)
        return Store(region=info.region, endpoint=info.endpoint, session=session)

    @property
    def checkpoint(self) -> Any:
        """The checkpoint in job.json, with the rows of its files."""
        for _ in range(9):
            checkpoint = self.json("job.json").get("checkpoint") or {"name": None, "pages": []}
            with contextlib.suppress(ClientError):
                return {**checkpoint, "files": self.pages(checkpoint["pages"])}
        raise AssertionError("job.json changes faster than it can be read")

    def run(self, count: int = 1, *, starts: bool = True) -> list["Node"]:
        self.nodes = [Node(self, node, count, starts=starts) for node in range(count)]
        return self.nodes


class Node:
    """A node on which the job runs, and its uploader."""

    def __init__(self, bucket: Bucket, number: int, count: int, *, starts: bool = True) -> None:
        home = bucket.top / f"home{number}"
        self.work, self.jobs = home / "work", home / ".awsddp" / "jobs" / "job-1"
        for path in (self.work, self.jobs / "logs", self.jobs / "run"):
            path.mkdir(parents=True)
        self.run, self.log = self.jobs / "run", self.jobs / "logs" / f"rank{number}.log"
        every = range(count)
        machines = [{"node": node, "private_ip": "127.0.0.1", "instance_id": f"i-{node}"} for node in every]
        layout = [[node, 0, node] for node in every]
        self.request = make_launch(number, job="job-1", nodes=machines, layout=layout, workdir=str(self.work))
        self.folder = JobFolder("job-1", self.jobs)
        write_json(self.jobs / "job.json", self.request)
        write_json(self.folder.snapshot, {})
        self.lock = self.folder.acquire_lock()
        self.state("running")
        write_json(self.folder.saving, {"error": ""})  # as the launcher does
        self.saver: Any = bucket.start("save", home) if starts else None

    def state(self, state: str) -> None:
        document = initial_document(self.request)
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
