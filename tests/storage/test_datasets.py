"""A local folder is uploaded to a bucket: files that are there unchanged are not sent again."""

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from awsddp.agent.s3.store import MOST_BYTES, S3Uri, Store
from awsddp.errors import CloudError, ConfigError, NodeError
from awsddp.model.records import Target
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.settings.values import parse_data_sources
from awsddp.storage import datasets
from awsddp.storage.saved_job import SavedCheckpoint, open_store
from awsddp.storage.saved_lists import MAX_READS
from awsddp.util.parallel import NodesFailed
from tests.support.local_cloud import Cloud, add_fault, clear_fault


class Sender:
    """A folder, and the bucket that it is uploaded to."""

    def __init__(self, cloud: Cloud, home: Path) -> None:
        info = cloud.info
        keys = {"access_key_id": info.access_key_id, "secret_access_key": info.secret_access_key}
        self.target = Target(name="local", region=info.region, endpoint=info.endpoint, **keys)
        self.cloud, self.s3, self.root = cloud, cloud.client("s3"), home
        self.uri = S3Uri(f"data-{uuid.uuid4().hex}", "runs")
        self.s3.create_bucket(Bucket=self.uri.bucket)

    def write(self, folder: str = "set", **files: str) -> None:
        for name, content in files.items():
            path = self.root / folder / name.replace("_", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    def cluster(self, home: Path) -> LocatedCluster:
        return LocatedCluster(session=Session(name="default", home=home), target=self.target)

    def send(self, folder: str = "set") -> list[str]:
        """Upload the folder and return the paths that were sent."""
        sent: list[str] = []
        (source,) = parse_data_sources([str(self.root / folder)])
        put = Store.put

        def record(store: Store, uri: S3Uri, name: str, body: bytes, **options: Any) -> str:
            sent.extend([name] * (uri.prefix.rpartition("/")[2] == source.name))
            return put(store, uri, name, body, **options)

        cluster = self.cluster(self.root / ".awsddp")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "put", record)
            datasets._upload_folder(cluster, source.name, datasets._list_files(source), self.uri)
        return sorted(sent)

    @property
    def objects(self) -> dict[str, bytes]:
        """The contents of the bucket's data objects, by their path in the folder."""
        rows = self.s3.list_objects_v2(Bucket=self.uri.bucket).get("Contents", ())
        paths = {row["Key"]: row["Key"].partition("/set/")[2] for row in rows if "/set/" in row["Key"]}
        get = self.s3.get_object
        return {path: get(Bucket=self.uri.bucket, Key=key)["Body"].read() for key, path in paths.items()}

    def key(self, path: str) -> str:
        rows = self.s3.list_objects_v2(Bucket=self.uri.bucket)["Contents"]
        return next(row["Key"] for row in rows if row["Key"].endswith(path))


@pytest.fixture
def sender(records: Cloud, tmp_path: Path) -> Iterator[Sender]:
    yield Sender(records, tmp_path)
    clear_fault(records.info)


def test_unchanged_files_are_not_sent_again_and_removed_files_are_deleted(sender: Sender) -> None:
    sender.write(a="1", b_c="22")
    assert sender.send() == ["a", "b/c"]
    assert sender.send() == []
    sender.write(d="3")
    (sender.root / "set/a").unlink()
    assert sender.send() == ["d"]
    assert sender.objects == {"b/c": b"22", "d": b"3"}


def test_a_file_removed_or_replaced_in_the_bucket_is_sent_again(sender: Sender) -> None:
    sender.write(a="1", b="2", c="3")
    sender.send()
    sender.s3.delete_object(Bucket=sender.uri.bucket, Key=sender.key("/set/a"))
    sender.s3.put_object(Bucket=sender.uri.bucket, Key=sender.key("/set/b"), Body=b"X")
    assert sender.send() == ["a", "b"]
    assert sender.objects == {"a": b"1", "b": b"2", "c": b"3"}


@pytest.mark.parametrize("method", ["in place", "renamed over"])
def test_a_changed_file_with_the_same_size_and_time_is_sent_again(sender: Sender, method: str) -> None:
    sender.write(a="1", b="2")
    sender.send()
    path = sender.root / "set/a"
    info = path.stat()
    new = path if method == "in place" else sender.root / "new"
    new.write_text("X")
    os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
    new.replace(path)
    assert sender.send() == ["a"]
    assert sender.objects == {"a": b"X", "b": b"2"}


def test_a_failed_upload_is_not_recorded_as_sent(sender: Sender) -> None:
    sender.write(a="1", b="2")
    sender.send()
    sender.write(a="X")  # of the same size; the object in the bucket is older
    add_fault(sender.cloud.info, "PutObject", "AccessDenied", only=sender.key("/set/a"))
    with pytest.raises(CloudError):
        sender.send()
    clear_fault(sender.cloud.info)
    assert sender.send() == ["a"]
    assert sender.objects == {"a": b"X", "b": b"2"}


def test_two_folders_of_the_same_name_have_separate_keys(sender: Sender) -> None:
    sender.write("one/set", a="1")
    sender.write("two/set", a="2")
    for _ in range(2):
        sender.send("one/set")
        sender.send("two/set")
    rows = sender.s3.list_objects_v2(Bucket=sender.uri.bucket)["Contents"]
    keys = [row["Key"] for row in rows if row["Key"].endswith("/set/a")]
    bodies = {sender.s3.get_object(Bucket=sender.uri.bucket, Key=key)["Body"].read() for key in keys}
    assert bodies == {b"1", b"2"}
    assert (sender.send("one/set"), sender.send("two/set")) == ([], [])


@pytest.mark.parametrize("part", ["json", ".set/0", "both"])
def test_a_damaged_list_of_sent_files_is_ignored(sender: Sender, part: str) -> None:
    sender.write(a="1", b="2")
    sender.send()
    for name in ("set.json", ".set/0") if part == "both" else (f"set.{part}" if part == "json" else part,):
        body = b'[["a", 9, "e"], 1' if name == "set.json" else b"{" + b"[" * 100_000
        sender.s3.put_object(Bucket=sender.uri.bucket, Key=sender.key(f"/{name}"), Body=body)
    assert sender.send() == ["a", "b"]
    assert sender.send() == []


def test_the_list_of_many_files_has_pages_and_only_changed_ones_are_written(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Mapping[str, datasets._Row] = {
        f"{number:05}{'ü' * 100}": (1, 1 << 60, 1 << 60, 1 << 30, "e" * 32) for number in range(20_000)
    }
    with open_store(sender.target, sender.uri) as store:
        written: list[tuple[str, int]] = []
        put = store.put

        def record(uri: S3Uri, name: str, body: bytes, **options: Any) -> str:
            written.append((name, len(body)))
            return put(uri, name, body, **options)

        monkeypatch.setattr(store, "put", record)
        sent = datasets._SentFiles(store, sender.uri, "set", secret="ours")
        sent.rows = dict(rows)
        sent.write()
        assert len(written) > 5 and max(size for _, size in written) <= MOST_BYTES
        written.clear()
        sent.rows["z"] = (1, 2, 3, 4, "e")
        sent.write()
        assert [name for name, _ in written][1:] == ["set.json"], "its last page, and the list of pages"
        read_back = datasets._SentFiles(store, sender.uri, "set", secret="ours")
        read_back.read(lambda path, row: True)
        assert read_back.rows == sent.rows
        written.clear()
        read_back.write()
        assert written == []


def test_a_file_that_becomes_a_pipe_does_not_block(sender: Sender) -> None:
    sender.write(a="1")
    (source,) = parse_data_sources([str(sender.root / "set")])
    files = datasets._list_files(source)
    (sender.root / "set/a").unlink()
    os.mkfifo(sender.root / "set/a")
    cluster = sender.cluster(sender.root)
    with pytest.raises(OSError, match="is no longer a file"):
        datasets._upload_folder(cluster, "set", files, sender.uri)


# ---- a store


def test_a_missing_document_is_none_even_if_s3_denies_access(sender: Sender) -> None:
    with open_store(sender.target, sender.uri) as store:
        add_fault(sender.cloud.info, "GetObject", "AccessDenied", only=sender.uri.key("none.json"))
        assert store.document(sender.uri, "none.json") is None
        store.write(sender.uri, "there.json", {})
        add_fault(sender.cloud.info, "GetObject", "AccessDenied", only=sender.uri.key("there.json"))
        with pytest.raises(CloudError), open_store(sender.target, sender.uri) as other:
            other.document(sender.uri, "there.json")


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "PreconditionFailed"])
def test_a_conditional_write_that_loses_to_another_returns_none(sender: Sender, code: str) -> None:
    with open_store(sender.target, sender.uri) as store:
        add_fault(sender.cloud.info, "PutObject", code, only=sender.uri.key("job.json"))
        assert store.write(sender.uri, "job.json", {}, instead_of="") is None
        with pytest.raises(ClientError):
            store.write(sender.uri, "job.json", {})


def test_upload_files_returns_the_etag_of_each_file(sender: Sender) -> None:
    sender.write(small="1", large="x" * (9 << 20))
    paths = {name: sender.root / "set" / name for name in ("small", "large")}
    with open_store(sender.target, sender.uri) as store:
        etags = store.upload_files(paths, sender.uri)
        listed = {row.key.removeprefix("runs/"): row.etag for row in store.list(sender.uri)}
    assert etags == listed


# ---- a checkpoint that changes while nodes download it


def make_checkpoint(name: str, size: int) -> SavedCheckpoint:
    uri = S3Uri("bucket", "runs/first")
    files = {name: [(f"node0/run/{name}", size, "e", "")]}
    return SavedCheckpoint(
        job="first", parts=(Path(f"s3://bucket/runs/first/run/{name}"),), uri=uri, files=files
    )


class Requests(list[int]):
    """The sizes of the checkpoints that nodes were sent; their objects change `changes` times."""

    def __init__(self, patch: pytest.MonkeyPatch, changes: int, newest: str) -> None:
        self.changes, self.newest = changes, newest
        patch.setattr(datasets, "_download", self.download)
        patch.setattr(datasets, "open_saved_job", self.open_saved_job)

    def download(self, connected: Any, nodes: Any, message: Any, folder: str) -> None:
        ((_, size, *_),) = next(iter(message["files"].values()))
        self.append(size)
        if len(self) <= self.changes:
            failure = NodeFailure(1, "changed", "s3://bucket/runs/first changed while it was copied")
            raise NodesFailed({1: failure}, {}, 2)

    def open_saved_job(self, session: Session, uri: str) -> Any:
        import contextlib

        assert uri == "s3://bucket/runs/first"
        stored = SimpleNamespace(read_checkpoint=lambda: make_checkpoint(self.newest, len(self)))
        return contextlib.nullcontext(stored)


def test_a_checkpoint_that_changes_during_the_copy_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: Any = None
    cluster = LocatedCluster(session=Session(name="default"))
    connected = ConnectedCluster(cluster=cluster, fleet=fleet)
    requests = Requests(monkeypatch, 2, "model.pt")
    datasets.copy_checkpoint_to_nodes(connected, make_checkpoint("model.pt", 0), {0, 1})
    assert requests == [0, 1, 2]
    requests = Requests(monkeypatch, 99, "model.pt")
    with pytest.raises(NodeError, match=r"node1: .* changed while it was copied"):
        datasets.copy_checkpoint_to_nodes(connected, make_checkpoint("model.pt", 0), {0, 1})
    assert len(requests) == 1 + MAX_READS
    requests = Requests(monkeypatch, 1, "step-2.pt")
    with pytest.raises(ConfigError, match=r"step-1\.pt was replaced while it was downloaded") as error:
        datasets.copy_checkpoint_to_nodes(connected, make_checkpoint("step-1.pt", 0), {0, 1})
    assert "run/step-2.pt is the newest checkpoint now" in error.value.why
