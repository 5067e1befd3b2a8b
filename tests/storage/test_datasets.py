"""A folder of this machine's goes to a bucket once: what is there as it was sent does not travel again."""

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
from tests.support.local_cloud import Cloud, fault_add, fault_clear


class Sender:
    """A folder, and a bucket that it goes to."""

    def __init__(self, cloud: Cloud, home: Path) -> None:
        info = cloud.info
        keys = {"access_key_id": info.access_key_id, "secret_access_key": info.secret_access_key}
        self.target = Target(name="local", region=info.region, endpoint=info.endpoint, **keys)
        self.cloud, self.s3, self.home = cloud, cloud.client("s3"), home
        self.above = S3Uri(f"data-{uuid.uuid4().hex}", "runs")
        self.s3.create_bucket(Bucket=self.above.bucket)

    def write(self, folder: str = "set", **files: str) -> None:
        for name, text in files.items():
            path = self.home / folder / name.replace("_", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def cluster(self, home: Path) -> LocatedCluster:
        return LocatedCluster(session=Session(name="default", home=home), target=self.target)

    def send(self, folder: str = "set") -> list[str]:
        """Send the folder and return the paths that travelled."""
        sent: list[str] = []
        (source,) = parse_data_sources([str(self.home / folder)])
        put = Store.put

        def noted(store: Store, where: S3Uri, name: str, body: bytes, **more: Any) -> str:
            sent.extend([name] * (where.prefix.rpartition("/")[2] == source.name))
            return put(store, where, name, body, **more)

        cluster = self.cluster(self.home / ".awsddp")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "put", noted)
            datasets._upload_folder(cluster, source.name, datasets._list_files(source), self.above)
        return sorted(sent)

    @property
    def objects(self) -> dict[str, bytes]:
        """What the bucket has of the data, by its path in the folder."""
        found = self.s3.list_objects_v2(Bucket=self.above.bucket).get("Contents", ())
        paths = {one["Key"]: one["Key"].partition("/set/")[2] for one in found if "/set/" in one["Key"]}
        get = self.s3.get_object
        return {path: get(Bucket=self.above.bucket, Key=key)["Body"].read() for key, path in paths.items()}

    def key(self, path: str) -> str:
        found = self.s3.list_objects_v2(Bucket=self.above.bucket)["Contents"]
        return next(one["Key"] for one in found if one["Key"].endswith(path))


@pytest.fixture
def sender(records: Cloud, tmp_path: Path) -> Iterator[Sender]:
    yield Sender(records, tmp_path)
    fault_clear(records.info)


def test_what_is_there_does_not_travel_and_what_the_folder_has_no_more_goes(sender: Sender) -> None:
    sender.write(a="1", b_c="22")
    assert sender.send() == ["a", "b/c"]
    assert sender.send() == []
    sender.write(d="3")
    (sender.home / "set/a").unlink()
    assert sender.send() == ["d"]
    assert sender.objects == {"b/c": b"22", "d": b"3"}


def test_a_file_that_somebody_removed_or_replaced_there_is_sent_again(sender: Sender) -> None:
    sender.write(a="1", b="2", c="3")
    sender.send()
    sender.s3.delete_object(Bucket=sender.above.bucket, Key=sender.key("/set/a"))
    sender.s3.put_object(Bucket=sender.above.bucket, Key=sender.key("/set/b"), Body=b"X")
    assert sender.send() == ["a", "b"]
    assert sender.objects == {"a": b"1", "b": b"2", "c": b"3"}


@pytest.mark.parametrize("how", ["in place", "renamed over"])
def test_a_file_that_is_another_one_with_the_same_size_and_time_is_sent_again(
    sender: Sender, how: str
) -> None:
    sender.write(a="1", b="2")
    sender.send()
    path = sender.home / "set/a"
    info = path.stat()
    new = path if how == "in place" else sender.home / "new"
    new.write_text("X")
    os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
    new.replace(path)
    assert sender.send() == ["a"]
    assert sender.objects == {"a": b"X", "b": b"2"}


def test_what_was_cut_is_not_written_down_as_sent(sender: Sender) -> None:
    sender.write(a="1", b="2")
    sender.send()
    sender.write(a="X")  # of the same size: its object in the bucket is the older one
    fault_add(sender.cloud.info, "PutObject", "AccessDenied", only=sender.key("/set/a"))
    with pytest.raises(CloudError):
        sender.send()
    fault_clear(sender.cloud.info)
    assert sender.send() == ["a"]
    assert sender.objects == {"a": b"X", "b": b"2"}


def test_two_folders_of_one_name_do_not_share_a_place(sender: Sender) -> None:
    sender.write("one/set", a="1")
    sender.write("two/set", a="2")
    for _ in range(2):
        sender.send("one/set")
        sender.send("two/set")
    found = sender.s3.list_objects_v2(Bucket=sender.above.bucket)["Contents"]
    keys = [one["Key"] for one in found if one["Key"].endswith("/set/a")]
    bodies = {sender.s3.get_object(Bucket=sender.above.bucket, Key=key)["Body"].read() for key in keys}
    assert bodies == {b"1", b"2"}
    assert (sender.send("one/set"), sender.send("two/set")) == ([], [])


@pytest.mark.parametrize("spoil", ["json", ".set/0", "both"])
def test_a_list_that_no_awsddp_wrote_tells_nothing(sender: Sender, spoil: str) -> None:
    sender.write(a="1", b="2")
    sender.send()
    for end in ("set.json", ".set/0") if spoil == "both" else (f"set.{spoil}" if spoil == "json" else spoil,):
        body = b'[["a", 9, "e"], 1' if end == "set.json" else b"{" + b"[" * 100_000
        sender.s3.put_object(Bucket=sender.above.bucket, Key=sender.key(f"/{end}"), Body=body)
    assert sender.send() == ["a", "b"]
    assert sender.send() == []


def test_the_list_of_many_files_is_split_and_only_what_changed_of_it_is_written(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Mapping[str, datasets._Row] = {
        f"{number:05}{'ü' * 100}": (1, 1 << 60, 1 << 60, 1 << 30, "e" * 32) for number in range(20_000)
    }
    with open_store(sender.target, sender.above) as store:
        written: list[tuple[str, int]] = []
        put = store.put

        def noted(where: S3Uri, name: str, body: bytes, **more: Any) -> str:
            written.append((name, len(body)))
            return put(where, name, body, **more)

        monkeypatch.setattr(store, "put", noted)
        sent = datasets._SentFiles(store, sender.above, "set", secret="ours")
        sent.rows = dict(rows)
        sent.write()
        assert len(written) > 5 and max(size for _, size in written) <= MOST_BYTES
        written.clear()
        sent.rows["z"] = (1, 2, 3, 4, "e")
        sent.write()
        assert [name for name, _ in written][1:] == ["set.json"], "its last page, and the list of pages"
        again = datasets._SentFiles(store, sender.above, "set", secret="ours")
        again.read(lambda path, row: True)
        assert again.rows == sent.rows
        written.clear()
        again.write()
        assert written == []


def test_a_file_that_becomes_a_pipe_blocks_nothing(sender: Sender) -> None:
    sender.write(a="1")
    (source,) = parse_data_sources([str(sender.home / "set")])
    files = datasets._list_files(source)
    (sender.home / "set/a").unlink()
    os.mkfifo(sender.home / "set/a")
    cluster = sender.cluster(sender.home)
    with pytest.raises(OSError, match="is no longer a file"):
        datasets._upload_folder(cluster, "set", files, sender.above)


# ---- a store


def test_who_may_list_a_prefix_only_reads_nothing_where_nothing_is(sender: Sender) -> None:
    with open_store(sender.target, sender.above) as store:
        fault_add(sender.cloud.info, "GetObject", "AccessDenied", only=sender.above.key("none.json"))
        assert store.document(sender.above, "none.json") is None
        store.write(sender.above, "there.json", {})
        fault_add(sender.cloud.info, "GetObject", "AccessDenied", only=sender.above.key("there.json"))
        with pytest.raises(CloudError), open_store(sender.target, sender.above) as other:
            other.document(sender.above, "there.json")


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "PreconditionFailed"])
def test_of_two_who_write_at_once_one_is_told_that_it_did_not(sender: Sender, code: str) -> None:
    with open_store(sender.target, sender.above) as store:
        fault_add(sender.cloud.info, "PutObject", code, only=sender.above.key("job.json"))
        assert store.write(sender.above, "job.json", {}, instead_of="") is None
        with pytest.raises(ClientError):
            store.write(sender.above, "job.json", {})


def test_each_upload_is_answered_with_its_etag(sender: Sender) -> None:
    sender.write(small="1", large="x" * (9 << 20))
    paths = {name: sender.home / "set" / name for name in ("small", "large")}
    with open_store(sender.target, sender.above) as store:
        etags = store.upload_files(paths, sender.above)
        listed = {one.key.removeprefix("runs/"): one.etag for one in store.list(sender.above)}
    assert etags == listed


# ---- a checkpoint that changes while nodes bring it


def checkpoint(name: str, size: int) -> SavedCheckpoint:
    place = S3Uri("bucket", "runs/first")
    files = {name: [(f"node0/run/{name}", size, "e", "")]}
    return SavedCheckpoint(
        job="first", parts=(Path(f"s3://bucket/runs/first/run/{name}"),), uri=place, files=files
    )


class Asked(list[int]):
    """The sizes of the checkpoints that nodes were asked for; their objects change `times`."""

    def __init__(self, patch: pytest.MonkeyPatch, times: int, newest: str) -> None:
        self.times, self.newest = times, newest
        patch.setattr(datasets, "_download", self.ask)
        patch.setattr(datasets, "open_saved_job", self.opened)

    def ask(self, connected: Any, nodes: Any, message: Any, folder: str) -> None:
        ((_, size, *_),) = next(iter(message["files"].values()))
        self.append(size)
        if len(self) <= self.times:
            failure = NodeFailure(1, "changed", "s3://bucket/runs/first changed while it was copied")
            raise NodesFailed({1: failure}, {}, 2)

    def opened(self, session: Session, uri: str) -> Any:
        import contextlib

        assert uri == "s3://bucket/runs/first"
        found = SimpleNamespace(read_checkpoint=lambda: checkpoint(self.newest, len(self)))
        return contextlib.nullcontext(found)


def test_a_checkpoint_that_was_replaced_meanwhile_is_named_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: Any = None
    cluster = LocatedCluster(session=Session(name="default"))
    connected = ConnectedCluster(cluster=cluster, fleet=fleet)
    asked = Asked(monkeypatch, 2, "model.pt")
    datasets.copy_checkpoint_to_nodes(connected, checkpoint("model.pt", 0), {0, 1})
    assert asked == [0, 1, 2]
    asked = Asked(monkeypatch, 99, "model.pt")
    with pytest.raises(NodeError, match=r"node1: .* changed while it was copied"):
        datasets.copy_checkpoint_to_nodes(connected, checkpoint("model.pt", 0), {0, 1})
    assert len(asked) == 1 + MAX_READS
    asked = Asked(monkeypatch, 1, "step-2.pt")
    with pytest.raises(ConfigError, match=r"step-1\.pt was replaced while it was downloaded") as caught:
        datasets.copy_checkpoint_to_nodes(connected, checkpoint("step-1.pt", 0), {0, 1})
    assert "run/step-2.pt is the newest one now" in caught.value.why
