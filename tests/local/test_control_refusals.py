"""Invalid input and a full or occupied machine: clear errors, and no partial state."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.handlers import base64_encode_user_data

from awsddp.errors import LocalCloudError
from awsddp.local import control, network
from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import Cloud, error_code_of, find_leftovers, needs_root


def make_raw_client(cloud: Cloud) -> Any:
    """Return an EC2 client that does not encode user data."""
    ec2 = cloud.client("ec2")
    ec2.meta.events.unregister("before-parameter-build.ec2.RunInstances", base64_encode_user_data)
    return ec2


def test_user_data_that_is_not_base64_is_refused(records: Cloud) -> None:
    launch = make_raw_client(records).run_instances
    assert error_code_of(launch, **records.request(UserData="#!")) == "InvalidParameterValue"


def test_start_refuses_to_share_a_missing_folder(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "awsddp",
        "local",
        "start",
        "--no-hosts",
        "--share",
        str(tmp_path / "none"),
    ]
    environ = {**os.environ, "AWSDDP_HOME": str(tmp_path)}
    process = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (process.returncode, f"{tmp_path / 'none'}' does not exist" in process.stderr) == (2, True)
    assert control.find_cloud(tmp_path) is None


def test_start_reports_a_port_in_use_and_keeps_the_cloud(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    try:
        instance_id = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        control._end_daemon(CloudPaths(tmp_path))
        port = int(cloud.info.endpoint.rpartition(":")[2])
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(LocalCloudError, match=f"{port} is taken"),
        ):
            control.start(tmp_path)
        cloud.info = control.start(tmp_path)
        assert cloud.instances(instance_id)
    finally:
        control.stop(tmp_path)


def test_a_loopback_block_has_one_owner() -> None:
    block, holder = network.take_block(network.LOOPBACK_BLOCKS)
    with holder:
        other, second = network.take_block(network.LOOPBACK_BLOCKS)
        second.close()
        assert not block.overlaps(other)
        with pytest.raises(LocalCloudError, match="no address block is free"):
            network.take_block([block])
    network.take_block([block])[1].close()


@needs_root
@pytest.mark.prove
def test_two_clouds_with_hosts_run_at_the_same_time(cloud: Cloud, tmp_path: Path) -> None:
    other = Cloud(tmp_path, control.start(tmp_path))
    try:
        blocks = [item.client("ec2").describe_vpcs()["Vpcs"][0]["CidrBlock"] for item in (cloud, other)]
        assert len(set(blocks)) == 2
        nodes = [
            item.client("ec2").run_instances(**item.request())["Instances"][0] for item in (cloud, other)
        ]
        for item, instance in zip((cloud, other), nodes, strict=True):
            item.wait("running", instance["InstanceId"])
        control.stop(tmp_path)
        assert find_leftovers(tmp_path) == {}
        assert cloud.wait("running", nodes[0]["InstanceId"])
        cloud.client("ec2").terminate_instances(InstanceIds=[nodes[0]["InstanceId"]])
    finally:
        control.stop(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@needs_root
def test_a_launch_on_a_full_disk_is_refused_and_leaves_no_instance(small_disk: Path) -> None:
    cloud = Cloud(small_disk, control.start(small_disk, mode="records"))
    try:
        request = cloud.request()
        space = os.statvfs(small_disk)
        filler = small_disk / "filler"
        filler.write_bytes(b"x" * (space.f_bavail * space.f_bsize))
        with pytest.raises(ClientError, match="No space left"):
            cloud.client("ec2").run_instances(**request)
        assert cloud.instances() == []
        filler.unlink()
        assert cloud.client("ec2").run_instances(**request)["Instances"]
        assert len(cloud.instances()) == 1
    finally:
        control.stop(small_disk)


@needs_root
def test_start_reports_a_full_disk(small_disk: Path) -> None:
    space = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (space.f_bavail * space.f_bsize))
    with pytest.raises(LocalCloudError) as caught:
        control.start(small_disk, mode="records")
    assert "No space left" in caught.value.why


@pytest.mark.parametrize(
    "mapping",
    [{"Ebs": {"VolumeSize": 8}}, {"Ebs": {"VolumeSize": 8, "VolumeType": "gp3"}}],
)
def test_a_root_volume_smaller_than_its_image_is_refused(records: Cloud, mapping: dict[str, Any]) -> None:
    disks = [{"DeviceName": "/dev/sda1", **mapping}]
    launch = records.client("ec2").run_instances
    assert error_code_of(launch, **records.request(BlockDeviceMappings=disks)) == "InvalidBlockDeviceMapping"
