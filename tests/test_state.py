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


def test_what_is_written_is_read_back(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    assert folder.read() == RECORD


def test_a_record_that_an_older_awsddp_wrote_is_read_and_written_with_all_that_it_has(
    folder: ClusterFolder,
) -> None:
    """It is of November 2026, of the version before modules moved into rooms."""
    written = json.loads((Path(__file__).parent / "old_cluster.json").read_text())
    write_private(folder.path / "cluster.json", json.dumps(written).encode())
    record = folder.read()
    assert record is not None and [one.nic for one in record.prepared] == ["ens5", "ens5"]
    assert [job.state for job in record.jobs] == ["cancelled"]
    folder.write(record)
    assert json.loads((folder.path / "cluster.json").read_text()) == written


def test_a_record_cut_at_any_byte_reads_as_lost_never_as_an_error(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    file = folder.path / "cluster.json"
    whole = file.read_bytes()
    for length in range(len(whole) - 1):
        file.write_bytes(whole[:length])
        assert folder.read() is None, length


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "7", '"x"', "{}", '{"version": 1, "id": 5}', '{"version": "x"}']
)
def test_a_record_that_is_no_record_reads_as_lost(folder: ClusterFolder, text: str) -> None:
    folder.path.mkdir(parents=True)
    (folder.path / "cluster.json").write_text(text)
    assert folder.read() is None


def test_a_record_of_a_newer_awsddp_is_refused(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    file = folder.path / "cluster.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    with pytest.raises(ConfigError, match="newer awsddp"):
        folder.read()


def test_private_files_are_the_owners_alone(folder: ClusterFolder) -> None:
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
    made = [folder.root, *folder.root.rglob("*")]
    assert {"clusters", "history", "locks", "key", "ledger.jsonl", "ssh_config"} <= {
        path.name for path in made
    }
    assert {path for path in made if path.stat().st_mode & 0o077} == set()


def test_a_folder_that_cannot_be_written_is_a_clear_error_and_leaves_nothing(
    folder: ClusterFolder, tmp_path: Path
) -> None:
    (tmp_path / "clusters").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write"):
        folder.write(RECORD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clusters"]


def _hold(
    root: Path, ready: "multiprocessing.synchronize.Event", release: "multiprocessing.synchronize.Event"
) -> None:
    with ClusterFolder(root, "default").lock("up"):
        ready.set()
        release.wait(30)


def test_a_second_client_is_told_who_holds_the_cluster_and_the_lock_ends_with_its_holder(
    folder: ClusterFolder, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, release))
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


def test_after_down_the_ledger_stays_and_the_key_does_not(folder: ClusterFolder, tmp_path: Path) -> None:
    folder.write(RECORD)
    write_private(folder.key, b"secret")
    folder.append_event("launched", instances=["i-1"])
    folder.archive(RECORD.id)
    assert not folder.path.exists()
    (line,) = (tmp_path / "history" / "default-0a1b2c3d" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "launched"


def test_the_common_ssh_config_holds_the_clusters_that_live(folder: ClusterFolder, tmp_path: Path) -> None:
    other = ClusterFolder(tmp_path, "other")
    common = tmp_path / "ssh_config"
    for one in (folder, other):
        one.write(RECORD)
        one.write_ssh_config("Host {}node0\n".format)
        assert one.ssh_config.read_text() == "Host node0\n"
    assert common.read_text().splitlines()[1:] == ["Host default-node0", "Host other-node0"]
    assert stat.S_IMODE(common.stat().st_mode) == 0o600
    other.write_ssh_config(lambda *_: "")
    folder.write_ssh_config("Host {}node1\n".format)
    assert common.read_text().splitlines()[1:] == ["Host default-node1"]
    folder.archive(RECORD.id)
    (line,) = common.read_text().splitlines()
    assert line.startswith("# ") and f"Include {common}" in line


def test_a_cluster_that_was_retired_meanwhile_comes_back_neither_as_a_record_nor_as_an_entry(
    folder: ClusterFolder, tmp_path: Path
) -> None:
    folder.write(RECORD)
    folder.archive(RECORD.id)
    folder.write_ssh_config("Host {}node0\n".format)
    folder.save_jobs(*RECORD.jobs)
    assert folder.update(lambda record: record) is None
    assert not folder.path.exists()
    assert "Host" not in (tmp_path / "ssh_config").read_text()


def _remember(root: Path, number: int) -> None:
    for one in range(10):
        ClusterFolder(root, "default").save_jobs(replace(RECORD.jobs[0], job=f"{number}-{one}"))


def test_commands_at_once_lose_nothing_that_another_wrote_to_the_record(
    folder: ClusterFolder, tmp_path: Path
) -> None:
    folder.write(RECORD)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_remember, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for _ in range(10):
        folder.update(lambda record: replace(record, nodes=record.nodes + 1))
    for writer in writers:
        writer.join(60)
    found = folder.read()
    assert found is not None
    assert (found.nodes, len(found.jobs)) == (RECORD.nodes + 10, 41)
