"""The daemon's life: started, forsaken, killed, met while it starts."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from awsddp.errors import LocalCloudError
from awsddp.local import client as local
from awsddp.local import control
from awsddp.local.machine import Place
from awsddp.model.events import Event
from tests.support.http_answers import BAD_ANSWERS, answering
from tests.support.local_cloud import Cloud, left_over, until


def quiet(_: Event) -> None:
    return None


def started_and_killed(home: Path, *, after_s: float) -> None:
    """A client that is killed while it starts an automatic daemon."""
    code = (
        "import sys; from pathlib import Path; from awsddp.local import control\n"
        "control.PATIENCE_S = 1.0\n"
        "control.start(Path(sys.argv[1]), auto=True, mode='records')"
    )
    client = subprocess.Popen([sys.executable, "-c", code, str(home)])
    until((home / "local/daemon.lock").exists)
    time.sleep(after_s)
    client.kill()
    client.wait()


@pytest.mark.prove
def test_a_daemon_that_nobody_waits_for_ends_itself_and_leaves_nothing(tmp_path: Path) -> None:
    started_and_killed(tmp_path, after_s=0.1)
    until(lambda: not (tmp_path / "local").exists())
    (tmp_path / "local.lock").unlink()
    until(lambda: left_over(tmp_path) == {})


def test_a_start_that_is_ended_says_how_to_end_what_it_began(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "awsddp", "local", "start", "--no-hosts"]
    client = subprocess.Popen(
        words, env={**os.environ, "AWSDDP_HOME": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    )
    try:
        until((tmp_path / "local/daemon.lock").exists)
        client.terminate()
        said = client.communicate(timeout=30)[1]
        assert client.returncode == 128 + signal.SIGTERM
        assert "no record of cluster" not in said
        assert "awsddp local stop" in said
    finally:
        control.stop(tmp_path)


def test_a_cloud_with_hosts_starts_without_torch_which_its_first_host_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWSDDP_CACHE", "/dev/null/cache")
    cloud = Cloud(tmp_path, control.start(tmp_path, mode="loopback"))
    try:
        assert cloud.client("ec2").describe_vpcs()["Vpcs"]
        made = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        (ended,) = cloud.wait("terminated", made)
        assert "torch for the local cloud cannot be kept in its cache" in ended["StateReason"]["Message"]
    finally:
        control.stop(tmp_path)


@pytest.mark.parametrize("mode", ["records", pytest.param("loopback", marks=pytest.mark.prove)])
def test_a_daemon_whose_files_were_removed_ends_itself(tmp_path: Path, mode: str) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode=mode))
    made = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
    cloud.wait("running", made)
    shutil.rmtree(tmp_path / "local")
    until(lambda: "processes" not in left_over(tmp_path))


@pytest.mark.prove
def test_it_stays_while_a_client_is_there_or_an_instance_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.0)
    cloud = Cloud(tmp_path, control.start(tmp_path, auto=True, mode="records"))
    try:
        made = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        with local._presence(tmp_path):
            cloud.client("ec2").terminate_instances(InstanceIds=[made])
            until(lambda: not Place(tmp_path).living.exists())
            time.sleep(7)  # its patience, and that with any EC2 client, is over
            assert control.find(tmp_path) is not None
        until(lambda: not (tmp_path / "local").exists())
    finally:
        control.stop(tmp_path)


def test_what_meets_a_daemon_that_starts_waits_for_it(tmp_path: Path) -> None:
    started_and_killed(tmp_path, after_s=0.1)
    assert "pid" not in control.read_report(Place(tmp_path))
    with local.opened(tmp_path, quiet, start=False) as target:
        assert target is not None
    assert not (tmp_path / "local").exists()


@pytest.mark.prove
def test_one_that_ends_by_itself_keeps_what_is_in_s3(tmp_path: Path) -> None:
    for _ in "it ends", "and again":
        cloud = Cloud(tmp_path, control.start(tmp_path, auto=True, mode="records"))
        with local.opened(tmp_path, quiet):
            s3 = cloud.client("s3")
            if s3.list_buckets()["Buckets"] == []:
                s3.create_bucket(Bucket="results")
                s3.put_object(Bucket="results", Key="kept", Body=b"as it was")
            assert s3.get_object(Bucket="results", Key="kept")["Body"].read() == b"as it was"
        assert not (tmp_path / "local").exists()
    assert control.stop(tmp_path) is False  # nothing ran
    assert not Place(tmp_path).buckets.exists()


def test_stop_ends_a_daemon_that_starts(tmp_path: Path) -> None:
    started_and_killed(tmp_path, after_s=0.1)
    assert "pid" not in control.read_report(Place(tmp_path))
    control.stop(tmp_path)
    (tmp_path / "local.lock").unlink(missing_ok=True)
    assert left_over(tmp_path) == {}


def test_status_revives_a_daemon_that_was_killed(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    try:
        made = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        os.kill(int(Place(tmp_path).daemon_lock.read_text()), signal.SIGKILL)
        until(lambda: not control._daemon_lives(Place(tmp_path)))
        assert control.find(tmp_path).pid is None
        document = local.status(tmp_path)
        assert [one["instance_id"] for one in document["instances"]] == [made]
    finally:
        control.stop(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        *BAD_ANSWERS,
        b"HTTP/1.1 500 Failed\r\n\r\n",
        *(b"HTTP/1.1 400 No\r\n\r\n" + one for one in (b"{", b"{}", b"[]")),
    ],
)
def test_an_answer_that_the_daemon_cut_as_it_ended_counts_as_none(raw: bytes) -> None:
    key = {"access_key_id": "local", "secret_access_key": "local"}
    with answering(raw) as endpoint:
        info = control.LocalInfo(
            endpoint,
            control.REGION,
            **key,
            mode="records",
            why="",
            ssh_port=22,
            caller_address="127.0.0.1",
            auto=True,
            pid=None,
        )
        with pytest.raises(LocalCloudError) as caught:
            control.ask(info)
    assert caught.value.message == f"the local cloud at {endpoint} does not answer"


def test_clients_that_start_it_at_once_get_the_same_daemon(tmp_path: Path) -> None:
    found: list[control.LocalInfo] = []
    clients = [
        threading.Thread(target=lambda: found.append(control.start(tmp_path, mode="records")))
        for _ in range(4)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    control.stop(tmp_path)
    assert len(found) == 4
    assert len({info.pid for info in found}) == 1


@pytest.mark.prove
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(f'"version": {control.VERSION}', '"version": 1'),
        lambda text: text.replace(f'"version": {control.VERSION},', ""),
        lambda text: text.replace(f'"version": {control.VERSION}', '"version": 99'),
        lambda text: text[:20],
    ],
)
def test_a_cloud_of_another_version_says_what_to_type(tmp_path: Path, change: Callable[[str], str]) -> None:
    control.start(tmp_path, mode="records")
    settings = Place(tmp_path).settings
    settings.write_text(change(settings.read_text()))
    with pytest.raises(LocalCloudError) as caught:
        local.start(tmp_path, mode=None, share=())
    assert "was made by another version of awsddp" in caught.value.message
    assert str(settings) in caught.value.why
    assert "awsddp local stop" in caught.value.next
    assert local.stop(tmp_path)
    assert not (tmp_path / "local").exists()
