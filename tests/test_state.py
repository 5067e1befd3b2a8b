import json
import multiprocessing
import os
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.model.records import Cause, JobRecord, LaunchIntent, PreparedNode, RankResult, Target
from awsddp.state import ClusterFolder, Record, write_private

RECORD = Record(
    id="0a1b2c3d",
    owner="AIDA",
    target=Target(
        name="local", region="us-east-1", endpoint="http://127.0.0.1:1", secret_access_key="s3cret"
    ),
    created=datetime(2026, 11, 21, tzinfo=UTC),
    expires=datetime(2026, 11, 22, tzinfo=UTC),
    instance_type="g6.48xlarge",
    nodes=2,
    gpus_per_node=8,
    pretended=True,
    ssh_user="ubuntu",
    intent=LaunchIntent(
        cluster_id="x",
        zone="us-east-1a",
        written=datetime(2026, 11, 21, tzinfo=UTC),
        parameters={"MinCount": 2},
    ),
    prepared=(PreparedNode(node=0, instance_id="i-1", home="/h", python="/p", nic="ens5"),),
    jobs=(
        JobRecord(
            job="j",
            state="failed",
            cause=Cause(rank=2, node=1, exit_code=3, tail=("a", "b")),
            ranks=(RankResult(rank=0, local_rank=0, node=0, exit_code=None, seconds=1.5),),
            home="runs/j",
        ),
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    return ClusterFolder(tmp_path, "default")


def test_a_record_is_read_as_it_was_written(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    assert folder.read() == RECORD


def test_a_record_of_an_older_awsddp_is_read_and_written_without_loss(
    folder: ClusterFolder,
) -> None:
    """The record is of November 2026, before modules moved into rooms."""
    written = json.loads((Path(__file__).parent / "old_cluster.json").read_text())
    write_private(folder.path / "cluster.json", json.dumps(written).encode())
    record = folder.read()
    assert record is not None and [node.nic for node in record.prepared] == ["ens5", "ens5"]
    assert [job.state for job in record.jobs] == ["cancelled"]
    folder.write(record)
    assert json.loads((folder.path / "cluster.json").read_text()) == written


def test_a_truncated_record_reads_as_lost_and_raises_nothing(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    file = folder.path / "cluster.json"
    content = file.read_bytes()
    for length in range(len(content) - 1):
        file.write_bytes(content[:length])
        assert folder.read() is None, length


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "7", '"x"', "{}", '{"version": 1, "id": 5}', '{"version": "x"}']
)
def test_an_invalid_record_reads_as_lost(folder: ClusterFolder, text: str) -> None:
    folder.path.mkdir(parents=True)
    (folder.path / "cluster.json").write_text(text)
    assert folder.read() is None


def test_a_record_of_a_newer_awsddp_is_refused(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    file = folder.path / "cluster.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    with pytest.raises(ConfigError, match="newer awsddp"):
        folder.read()


def test_files_of_a_cluster_are_private_to_their_owner(folder: ClusterFolder) -> None:
    previous = os.umask(0)
    try:
        folder.write(RECORD)
        write_private(folder.key, b"secret")
        folder.append_event("launched")
        folder.write_ssh_config("Host {}x\n".format)
        with folder.lock("up"):
            pass
        folder.archive("1")
        write_private(folder.key, b"secret")
    finally:
        os.umask(previous)
    paths = [folder.root, *folder.root.rglob("*")]
    assert {"clusters", "history", "locks", "key", "ledger.jsonl", "ssh_config"} <= {
        path.name for path in paths
    }
    assert {path for path in paths if path.stat().st_mode & 0o077} == set()


def test_an_unwritable_folder_is_an_error_and_leaves_nothing(folder: ClusterFolder, tmp_path: Path) -> None:
    (tmp_path / "clusters").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write"):
        folder.write(RECORD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clusters"]


def _hold_lock(
    root: Path, ready: "multiprocessing.synchronize.Event", release: "multiprocessing.synchronize.Event"
) -> None:
    with ClusterFolder(root, "default").lock("up"):
        ready.set()
        release.wait(30)


def test_the_error_of_a_locked_cluster_names_the_holder_and_the_lock_ends_with_it(
    folder: ClusterFolder, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold_lock, args=(tmp_path, ready, release))
    holder.start()
    assert ready.wait(30)
    with pytest.raises(ConfigError) as raised, folder.lock("down"):
        pass
    assert "`awsddp up`" in raised.value.why
    assert str(holder.pid) in raised.value.why
    holder.kill()
    holder.join(30)
    with folder.lock("down"):
        pass


def test_archive_keeps_the_ledger_and_removes_the_key(folder: ClusterFolder, tmp_path: Path) -> None:
    folder.write(RECORD)
    write_private(folder.key, b"secret")
    folder.append_event("launched", instances=["i-1"])
    folder.archive(RECORD.id)
    assert not folder.path.exists()
    (line,) = (tmp_path / "history" / "default-0a1b2c3d" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "launched"


def test_the_common_ssh_config_has_the_existing_clusters(folder: ClusterFolder, tmp_path: Path) -> None:
    other = ClusterFolder(tmp_path, "other")
    common = tmp_path / "ssh_config"
    for cluster_folder in (folder, other):
        cluster_folder.write(RECORD)
        cluster_folder.write_ssh_config("Host {}node0\n".format)
        assert cluster_folder.ssh_config.read_text() == "Host node0\n"
    assert common.read_text().splitlines()[1:] == ["Host default-node0", "Host other-node0"]
    assert stat.S_IMODE(common.stat().st_mode) == 0o600
    other.write_ssh_config(lambda *_: "")
    folder.write_ssh_config("Host {}node1\n".format)
    assert common.read_text().splitlines()[1:] == ["Host default-node1"]
    folder.archive(RECORD.id)
    (line,) = common.read_text().splitlines()
    assert line.startswith("# ") and f"Include {common}" in line


def test_an_archived_cluster_is_restored_neither_in_its_record_nor_in_ssh_config(
    folder: ClusterFolder, tmp_path: Path
) -> None:
    folder.write(RECORD)
    folder.archive(RECORD.id)
    folder.write_ssh_config("Host {}node0\n".format)
    folder.save_jobs(*RECORD.jobs)
    assert folder.update(lambda record: record) is None
    assert not folder.path.exists()
    assert "Host" not in (tmp_path / "ssh_config").read_text()


def _save_jobs(root: Path, number: int) -> None:
    for index in range(10):
        ClusterFolder(root, "default").save_jobs(replace(RECORD.jobs[0], job=f"{number}-{index}"))


def test_simultaneous_commands_lose_no_change_of_the_record(folder: ClusterFolder, tmp_path: Path) -> None:
    folder.write(RECORD)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_save_jobs, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for _ in range(10):
        folder.update(lambda record: replace(record, nodes=record.nodes + 1))
    for writer in writers:
        writer.join(60)
    result = folder.read()
    assert result is not None
    assert (result.nodes, len(result.jobs)) == (RECORD.nodes + 10, 41)
