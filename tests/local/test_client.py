"""The local cloud as a command uses it: it is started, revived, kept."""

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
from tests.support.local_daemon import quiet, started_and_killed


@pytest.mark.prove
def test_it_stays_while_a_client_is_there_or_an_instance_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.0)
    cloud = Cloud(tmp_path, control.start(tmp_path, auto=True, mode="records"))
    try:
        made = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        with local._hold_presence_lock(tmp_path):
            cloud.client("ec2").terminate_instances(InstanceIds=[made])
            until(lambda: not CloudPaths(tmp_path).live_mark.exists())
            time.sleep(7)  # its patience, and that with any EC2 client, is over
            assert control.find_cloud(tmp_path) is not None
        until(lambda: not (tmp_path / "local").exists())
    finally:
        control.stop(tmp_path)


def test_what_meets_a_daemon_that_starts_waits_for_it(tmp_path: Path) -> None:
    started_and_killed(tmp_path, after_s=0.1)
    assert "pid" not in control.read_report(CloudPaths(tmp_path))
    with local.open_cloud(tmp_path, quiet, start=False) as target:
        assert target is not None
    assert not (tmp_path / "local").exists()


@pytest.mark.prove
def test_one_that_ends_by_itself_keeps_what_is_in_s3(tmp_path: Path) -> None:
    for _ in "it ends", "and again":
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


def test_status_revives_a_daemon_that_was_killed(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    try:
        made = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        os.kill(int(CloudPaths(tmp_path).daemon_lock.read_text()), signal.SIGKILL)
        until(lambda: not control._is_daemon_alive(CloudPaths(tmp_path)))
        assert control.find_cloud(tmp_path).pid is None
        document = local.status(tmp_path)
        assert [one["instance_id"] for one in document["instances"]] == [made]
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
def test_a_cloud_of_another_version_says_what_to_type(tmp_path: Path, change: Callable[[str], str]) -> None:
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
