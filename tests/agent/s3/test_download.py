"""The program that downloads data on a node, against the S3 of a local cloud."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import uuid
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent.s3 import download
from awsddp.agent.s3.download import CopyError, ObjectChanged, S3Object, S3Uri, Stamp
from awsddp.agent_client import program
from awsddp.errors import ConfigError
from awsddp.local import machine
from awsddp.settings.values import parse_data_sources
from awsddp.storage import datasets
from tests.support.local_cloud import Cloud, add_fault, clear_fault

MB = 1 << 20


class Node:
    """A home folder, and a bucket."""

    def __init__(self, records: Cloud, home: Path) -> None:
        self.cloud, self.s3, self.home = records, records.client("s3"), home
        self.bucket = f"data-{uuid.uuid4().hex}"
        self.s3.create_bucket(Bucket=self.bucket)
        self.top = home / "awsddp/data/set"

    def put(self, **files: bytes) -> None:
        for name, body in files.items():
            self.s3.put_object(Bucket=self.bucket, Key=f"set/{name.replace('_', '/')}", Body=body)

    def message(self, *sources: str, **changes: Any) -> dict[str, Any]:
        parsed = parse_data_sources(sources or [f"s3://{self.bucket}/set"])
        return {
            "sources": [source._asdict() for source in parsed],
            "bytes": 0,
            "region": "us-east-1",
            "endpoint": self.cloud.info.endpoint,
            "payer": False,
            "environ": {},
            "folder": str(self.home / "awsddp/data"),
            "packages": str(self.home / "awsddp/boto3"),
            **changes,
        }

    def copy(
        self, *sources: str, python: str = sys.executable, signed: bool = True, **changes: Any
    ) -> dict[str, Any]:
        with self.begin(*sources, python=python, signed=signed, **changes) as process:
            output, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        return answer

    def begin(
        self, *sources: str, python: str = sys.executable, signed: bool = True, **changes: Any
    ) -> subprocess.Popen[bytes]:
        argv, stdin = program.node_program(python, datasets._MODULES, self.message(*sources, **changes))
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.home), "AWS_EC2_METADATA_DISABLED": "true"}
        if signed:
            info = self.cloud.info
            environ |= {
                "AWS_ACCESS_KEY_ID": info.access_key_id,
                "AWS_SECRET_ACCESS_KEY": info.secret_access_key,
            }
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environ)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.flush()
        return process

    @property
    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.top)): path.read_bytes()
            for path in self.top.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def node(records: Cloud, tmp_path: Path) -> Iterator[Node]:
    yield Node(records, tmp_path / "home")
    clear_fault(records.info)


def test_copy_downloads_only_changes_and_keeps_files_of_the_user(node: Node) -> None:
    node.put(a=b"1", b_c=b"22", b_d=b"333", e_f=b"4444")
    node.s3.put_object(Bucket=node.bucket, Key="set/b/", Body=b"")
    assert node.copy() == {"copied": 4, "bytes": 10}
    assert node.files == {"a": b"1", "b/c": b"22", "b/d": b"333", "e/f": b"4444"}
    assert node.copy() == {"copied": 0, "bytes": 0}
    (node.top / "b/mine").write_bytes(b"mine")
    (node.top / "b/d").write_bytes(b"cut")
    (node.top / "a").unlink()
    node.put(b_c=b"23", g=b"55555")
    for key in ("set/b/d", "set/e/f"):
        node.s3.delete_object(Bucket=node.bucket, Key=key)
    assert node.copy() == {"copied": 3, "bytes": 8}
    assert node.files == {"a": b"1", "b/c": b"23", "b/mine": b"mine", "g": b"55555"}
    assert not (node.top / "e").exists()


def test_another_source_of_the_same_name_replaces_the_first(node: Node) -> None:
    node.put(a=b"1", b=b"2")
    node.copy()
    node.s3.put_object(Bucket=node.bucket, Key="other/a", Body=b"1")
    assert node.copy(f"set=s3://{node.bucket}/other") == {"copied": 0, "bytes": 0}
    assert node.files == {"a": b"1"}
    for _ in range(2):
        node.copy("set=./set")
        assert not list(node.top.rglob("*"))
    node.top.mkdir()
    (node.top / "sent").write_bytes(b"by the client")
    node.copy("set=./set")
    assert node.files == {"sent": b"by the client"}
    node.copy()
    assert node.files == {"a": b"1", "b": b"2"}


HOSTILE = [
    ("../out", "'..'"),
    ("a/../../out", "'..'"),
    ("/etc/passwd", "empty"),
    ("a//b", "empty"),
    ("./a", "'.'"),
    ("a\x1b[2Jb", "control characters"),
    ("a\nb", "control characters"),
    ("a\x00b", "control characters"),
    ("a\x9bb", "control characters"),
    ("x" * 256, "too long"),
    ("ä" * 128, "too long"),
    ("x/" * 2000 + "x", "too long"),
    ("x" * MB, "too long"),
    (".awsddp-parts/0", "in use"),
]


@pytest.mark.parametrize(("key", "why"), HOSTILE, ids=[ascii(key)[:20] for key, _ in HOSTILE])
def test_key_that_is_no_valid_path_is_refused(key: str, why: str) -> None:
    with pytest.raises(CopyError) as caught:
        download.map_paths(S3Uri("b", "set"), [S3Object("set/good", 1, "e"), S3Object(f"set/{key}", 1, "e")])
    text = f"{caught.value}"
    assert why in caught.value.document["why"]
    assert text.isprintable() and text.isascii() and len(text) < 2000


def test_key_that_is_a_file_and_a_folder_is_refused() -> None:
    objects = [S3Object(key, 1, "e") for key in ("a", "a-b", "a/b/c")]
    with pytest.raises(CopyError, match="the key 'a' cannot be a file"):
        download.map_paths(S3Uri("b", ""), objects)


def test_nothing_is_written_outside_the_data_folder(node: Node) -> None:
    node.put(a=b"1")
    node.s3.put_object(Bucket=node.bucket, Key="set/../../../out", Body=b"evil")
    answer = node.copy()
    assert "set/../../../out" in answer["failed"]
    assert not list(node.home.rglob("out")) and not node.top.exists()
    node.s3.delete_object(Bucket=node.bucket, Key="set/../../../out")
    node.put(b_c=b"2")
    assert node.copy()["copied"] == 2
    elsewhere = node.home / "elsewhere"
    elsewhere.mkdir()
    (node.top / "b/c").unlink()
    (node.top / "b").rmdir()
    (node.top / "b").symlink_to(elsewhere)
    assert "leads out" in node.copy()["failed"]
    assert not list(elsewhere.iterdir())
    (node.top / "b").unlink()
    (node.top / "a").unlink()
    (node.top / "a").symlink_to(elsewhere / "file")
    assert node.copy()["copied"] == 2
    assert (node.top / "a").read_bytes() == b"1" and not (node.top / "a").is_symlink()
    assert not list(elsewhere.iterdir())


def test_file_of_the_user_at_the_path_of_a_folder_is_reported(node: Node) -> None:
    node.put(a_b=b"1")
    node.top.mkdir(parents=True)
    (node.top / "a").write_bytes(b"mine")
    assert "a" in node.copy()["why"]
    assert node.files["a"] == b"mine"


def test_python_without_boto3_uses_that_of_the_client(node: Node, tmp_path: Path) -> None:
    node.put(a=b"1")
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare/bin/python")
    answer = node.copy(python=python)
    assert answer["lacks"] and "No module named" in answer["why"]
    with datasets._packages() as folder:
        assert sum(path.stat().st_size for path in folder.rglob("*")) < 20 * MB
        assert node.copy(python=python, packages=str(folder)) == {"copied": 1, "bytes": 1}


def test_interrupted_downloads_are_continued(node: Node) -> None:
    body = os.urandom(9 * MB)
    node.put(a=body, b=b"1", c=b"2")
    add_fault(node.cloud.info, "GetObject", "cut", times=3)
    assert node.copy() == {"copied": 3, "bytes": 9 * MB + 2}
    assert node.files["a"] == body
    node.put(d=b"3", e=b"4")
    add_fault(node.cloud.info, "GetObject", "AccessDenied", only="set/e")
    answer = node.copy()
    assert "may not be read" in answer["failed"] and "data.md" in answer["next"]
    clear_fault(node.cloud.info)
    assert node.copy()["copied"] in (1, 2)
    assert node.files.keys() == {"a", "b", "c", "d", "e"}


def test_bucket_that_changes_is_listed_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.put(a=b"1", b=b"1")
    store = download.Store(
        region="us-east-1", endpoint=node.cloud.info.endpoint, session=make_session(node.cloud)
    )
    listings: list[int] = []

    def open_store(**_: object) -> download.Store:
        listings.append(1)
        return download.Store(
            region="us-east-1", endpoint=node.cloud.info.endpoint, session=make_session(node.cloud)
        )

    uri = S3Uri(node.bucket, "set")
    objects = list(store.list(uri))
    node.put(a=b"new")
    node.s3.delete_object(Bucket=node.bucket, Key="set/b")
    node.top.parent.mkdir(parents=True)
    progress = download._Progress()
    download._update_folder(uri, (store, objects), node.top, progress, open_store)
    assert (node.files, len(listings)) == ({"a": b"new"}, 1)

    def changing(*_: object) -> None:
        raise ObjectChanged("set/a")

    monkeypatch.setattr(download, "_download_missing", changing)
    with pytest.raises(CopyError, match="changes while"):
        download._update_folder(uri, (open_store(), objects), node.top, progress, open_store)
    progress.end()


def make_session(cloud: Cloud) -> Any:
    import botocore.session

    session = botocore.session.Session()
    session.set_credentials(cloud.info.access_key_id, cloud.info.secret_access_key)
    return session


def test_only_a_public_bucket_is_read_without_credentials(node: Node) -> None:
    node.put(a=b"1")
    answer = node.copy(signed=False)
    assert "may not be read" in answer["failed"] and "Unable to locate credentials" in answer["why"]
    node.s3.put_bucket_acl(Bucket=node.bucket, ACL="public-read")
    assert node.copy(signed=False)["copied"] == 1
    assert "holds no objects" in node.copy(f"s3://{node.bucket}/none")["failed"]
    assert "aws s3 ls " in node.copy("s3://no-such-bucket")["next"]


def test_a_bucket_of_another_region_is_read(node: Node) -> None:
    far = f"far-{node.bucket[:40]}"
    node.s3.create_bucket(Bucket=far, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    node.cloud.client("s3", region_name="eu-west-1").put_object(Bucket=far, Key="set/a", Body=b"1")
    assert node.copy(f"s3://{far}/set") == {"copied": 1, "bytes": 1}


def test_requester_pays_bucket_is_read_only_with_payer(node: Node) -> None:
    node.put(a=b"1")
    file = machine.CloudPaths(node.cloud.home).buckets / node.bucket / "bucket.json"
    settings = {"owner": "999999999999", "public": True, "requester_pays": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    assert "may not be read" in node.copy()["failed"]
    assert node.copy(payer=True)["copied"] == 1


def test_copy_ends_with_its_client_and_the_next_copy_continues_it(node: Node) -> None:
    node.put(**{f"x{number}": b"1" for number in range(40)})
    add_fault(node.cloud.info, "GetObject", "delay", seconds=1.5, times=20)
    process = node.begin()
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 1
    copied = node.copy()["copied"]
    assert len(node.files) == 40 and copied <= 40
    assert node.copy() == {"copied": 0, "bytes": 0}


def test_file_that_the_user_changed_stays_when_its_object_is_deleted(node: Node) -> None:
    node.put(a=b"1", b=b"2", c=b"3")
    node.copy()
    (node.top / "b").write_bytes(b"mine, and longer")
    for key in ("set/b", "set/c"):
        node.s3.delete_object(Bucket=node.bucket, Key=key)
    assert node.copy() == {"copied": 0, "bytes": 0}
    assert node.files == {"a": b"1", "b": b"mine, and longer"}


def test_a_second_client_waits_until_the_first_has_copied(node: Node) -> None:
    node.put(a=b"1")
    node.top.parent.mkdir(parents=True)
    with (node.top.parent.parent / "data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = node.begin()
        assert process.stdout is not None
        for _ in range(2):  # a second each
            assert json.loads(process.stdout.readline()) == {"at": "looking at the data"}
        assert not node.top.exists()
    assert json.loads(process.communicate()[0].splitlines()[-1]) == {"copied": 1, "bytes": 1}
    assert node.files == {"a": b"1"}


class Checkpoint:
    """A checkpoint of two files: an object, and a list of parts of which the last has grown since."""

    def __init__(self, node: Node) -> None:
        self.node, self.large = node, os.urandom(9 * MB)
        parts = {"node0/run/model.pt": self.large, "parts/1": b"1234", "parts/2": b"5678 and more"}
        self.etags = {key: self.write(key, body) for key, body in parts.items()}
        digests = [hashlib.sha256(text).hexdigest() for text in (b"1234", b"5678")]
        self.files = {
            "model.pt": [["node0/run/model.pt", 9 * MB, self.etags["node0/run/model.pt"], ""]],
            "sub/log": [
                [f"parts/{at}", 4, "of then", digest] for at, digest in zip((1, 2), digests, strict=True)
            ],
        }

    def write(self, key: str, body: bytes) -> str:
        reply = self.node.s3.put_object(Bucket=self.node.bucket, Key=f"runs/first/{key}", Body=body)
        return str(reply["ETag"]).strip('"')

    def copy(self) -> dict[str, Any]:
        return self.node.copy(place=[self.node.bucket, "runs/first"], files=self.files)


def test_checkpoint_is_downloaded_as_listed_and_replaces_earlier_files(node: Node) -> None:
    checkpoint, folder = Checkpoint(node), node.home / "awsddp/data"
    folder.mkdir(parents=True)
    (folder / "older").write_bytes(b"x")
    assert checkpoint.copy() == {"copied": 2, "bytes": 9 * MB + 8}
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert files == {"model.pt": checkpoint.large, "sub/log": b"12345678"}


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("node0/run/model.pt", b"x" * 9 * MB),
        ("node0/run/model.pt", b"x" * 10 * MB),
        ("node0/run/model.pt", b"short"),
        ("node0/run/model.pt", None),
        ("parts/2", b"5679 and more"),
        ("parts/2", b"567"),
    ],
)
def test_checkpoint_with_a_replaced_object_is_refused(node: Node, key: str, body: bytes | None) -> None:
    checkpoint = Checkpoint(node)
    if body is None:
        node.s3.delete_object(Bucket=node.bucket, Key=f"runs/first/{key}")
    else:
        checkpoint.write(key, body)
    answer = checkpoint.copy()
    assert answer["changed"] and f"runs/first/{key} was replaced or deleted" in answer["why"]


def test_download_without_space_does_not_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.top.parent.mkdir(parents=True)
    store: Any = None
    with pytest.raises(CopyError, match="does not fit"):
        download._download_missing(node.top, S3Uri("b", ""), store, {"a": S3Object("a", 1 << 60, "e")}, store)
    assert not node.top.exists()


def test_data_folder_is_on_an_instance_store_with_enough_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = tmp_path / "nvme", tmp_path / "home/awsddp"
    store.mkdir()
    folder.mkdir(parents=True)
    monkeypatch.setattr(download, "_instance_stores", lambda: [store])
    download._make_data_folder(folder / "data", 1 << 60)
    assert not (folder / "data").is_symlink()
    (folder / "data").rmdir()
    download._make_data_folder(folder / "data", 1)
    assert (folder / "data").resolve() == store / "awsddp-data"
    (store / "awsddp-data").rmdir()  # the node was stopped, and started
    download._make_data_folder(folder / "data", 1)
    assert (folder / "data").is_dir()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/nvme1n1 {store} ext4 rw 0 0\nproc /proc proc rw 0 0\nx /gone x x\n")
    monkeypatch.undo()
    monkeypatch.setattr(download, "is_ephemeral", lambda device: device == store.stat().st_dev)
    assert store in download._instance_stores(mounts)


FAKE_HF = """#!/bin/sh
[ "$HF_TOKEN" = secret ] || { echo "401 gated"; exit 1; }
echo "$@" >> "$HOME/asked"
mkdir -p "$8"
echo "$6" > "$8/$6.txt"
"""


def test_each_revision_is_downloaded_from_hugging_face_once(node: Node, tmp_path: Path) -> None:
    folder = node.home / "awsddp/hf/bin"
    folder.mkdir(parents=True)
    (folder / "hf").write_text(FAKE_HF)
    (folder / "hf").chmod(0o755)
    source, python = "set=hf://datasets/org/mine@v1", str(Path(sys.base_prefix, "bin/python3"))
    answer = node.copy(source, python=python)
    assert "401 gated" in answer["why"] and "HF_TOKEN" in answer["next"]
    for _ in range(2):
        assert "failed" not in node.copy(source, python=python, environ={"HF_TOKEN": "secret"})
    assert node.files == {"v1.txt": b"v1\n"}
    node.copy("set=hf://datasets/org/mine", python=python, environ={"HF_TOKEN": "secret"})
    assert node.files == {"main.txt": b"main\n"}
    top = "--local-dir " + str(node.top)
    commands = [f"download org/mine --repo-type dataset --revision {tag} {top}" for tag in ("v1", "main")]
    assert (node.home / "asked").read_text().splitlines() == commands
    node.put(a=b"1")
    assert node.copy()["copied"] == 1
    assert node.files == {"a": b"1"}


def test_malformed_stamp_lists_no_files(tmp_path: Path) -> None:
    (tmp_path / ".set.json").write_text("[1]")
    assert Stamp(tmp_path / "set").files == {}


def test_sizes_of_sources_are_listed_for_a_plan(node: Node, tmp_path: Path) -> None:
    from awsddp.model.records import Target
    from awsddp.settings.spec import DataSection, JobSpec

    node.put(a=b"1", b=b"22")
    info = node.cloud.info
    target = Target(
        name="local",
        region="us-east-1",
        endpoint=info.endpoint,
        access_key_id=info.access_key_id,
        secret_access_key=info.secret_access_key,
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/x").write_bytes(b"333")
    sources = (f"s3://{node.bucket}/set", str(tmp_path / "folder"), "hf://datasets/a")
    listed = datasets.list_data(JobSpec(data=DataSection(sources=sources)), target, internet=True)
    assert [(row.name, row.bytes, row.files) for row in listed] == [
        ("set", 3, 2),
        ("folder", 3, 1),
        ("a", None, None),
    ]
    with pytest.raises(ConfigError, match="cannot reach hf://datasets/a"):
        datasets.list_data(JobSpec(data=DataSection(sources=sources)), target, internet=False)
    assert listed[0].region == "us-east-1"
    for uri, text in (
        ("s3://none-such", "NoSuchBucket"),
        (f"s3://{node.bucket}/none", "holds no objects"),
    ):
        with pytest.raises(ConfigError) as caught:
            datasets.list_data(JobSpec(data=DataSection(sources=(uri,))), target, internet=True)
        assert text in str(caught.value) and caught.value.next
