"""The local cloud as a command uses it: started, restarted, kept alive."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from awsddp.errors import LocalCloudError
from awsddp.local import client as local
from awsddp.local import control
from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import Cloud, until
from tests.support.local_daemon import kill_starting_client, quiet


@pytest.mark.prove
def test_the_daemon_runs_while_a_client_or_an_instance_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.0)
    cloud = Cloud(tmp_path, control.start(tmp_path, auto=True, mode="records"))
    try:
        instance_id = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        with local._hold_presence_lock(tmp_path):
            cloud.client("ec2").terminate_instances(InstanceIds=[instance_id])
            until(lambda: not CloudPaths(tmp_path).live_mark.exists())
            time.sleep(7)  # longer than both timeouts, without and with an EC2 client
            assert control.find_cloud(tmp_path) is not None
        until(lambda: not (tmp_path / "local").exists())
    finally:
        control.stop(tmp_path)


def test_open_cloud_waits_for_a_daemon_that_is_starting(tmp_path: Path) -> None:
    kill_starting_client(tmp_path, after_s=0.1)
    assert "pid" not in control.read_report(CloudPaths(tmp_path))
    with local.open_cloud(tmp_path, quiet, start=False) as target:
        assert target is not None
    assert not (tmp_path / "local").exists()


@pytest.mark.prove
def test_s3_objects_outlive_a_daemon_that_ends_by_itself(tmp_path: Path) -> None:
    for _ in range(2):
        cloud = Cloud(tmp_path, control.start(tmp_path, auto=True, mode="records"))
        with local.open_cloud(tmp_path, quiet):
            s3 = cloud.client("s3")
            if s3.list_buckets()["Buckets"] == []:
                s3.create_bucket(Bucket="results")
                s3.put_object(Bucket="results", Key="kept", Body=b"as it was")
            assert s3.get_object(Bucket="results", Key="kept")["Body"].read() == b"as it was"
        assert not (tmp_path / "local").exists()
    assert control.stop(tmp_path) is False  # nothing ran
    assert not CloudPaths(tmp_path).buckets.exists()


def test_status_restarts_a_daemon_that_was_killed(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    try:
        instance_id = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        os.kill(int(CloudPaths(tmp_path).daemon_lock.read_text()), signal.SIGKILL)
        until(lambda: not control._is_daemon_alive(CloudPaths(tmp_path)))
        assert control.find_cloud(tmp_path).pid is None
        document = local.status(tmp_path)
        assert [instance["instance_id"] for instance in document["instances"]] == [instance_id]
    finally:
        control.stop(tmp_path)


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
def test_start_refuses_a_cloud_of_another_version(tmp_path: Path, change: Callable[[str], str]) -> None:
    control.start(tmp_path, mode="records")
    settings = CloudPaths(tmp_path).settings
    settings.write_text(change(settings.read_text()))
    with pytest.raises(LocalCloudError) as caught:
        local.start(tmp_path, mode=None, share=())
    assert "was made by another version of awsddp" in caught.value.message
    assert str(settings) in caught.value.why
    assert "awsddp local stop" in caught.value.next
    assert local.stop(tmp_path)
    assert not (tmp_path / "local").exists()
