"""The daemon: started, without clients, killed, and called while it starts."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from awsddp.errors import LocalCloudError
from awsddp.local import control
from awsddp.local.machine import CloudPaths
from tests.support.http_answers import BAD_ANSWERS, serve_bytes
from tests.support.local_cloud import Cloud, find_leftovers, until
from tests.support.local_daemon import kill_starting_client


@pytest.mark.prove
def test_a_daemon_without_clients_ends_itself_and_leaves_nothing(tmp_path: Path) -> None:
    kill_starting_client(tmp_path, after_s=0.1)
    until(lambda: not (tmp_path / "local").exists())
    (tmp_path / "local.lock").unlink()
    until(lambda: find_leftovers(tmp_path) == {})


def test_a_terminated_start_names_the_command_that_stops_the_daemon(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "awsddp", "local", "start", "--no-hosts"]
    client = subprocess.Popen(
        command, env={**os.environ, "AWSDDP_HOME": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    )
    try:
        until((tmp_path / "local/daemon.lock").exists)
        client.terminate()
        stderr = client.communicate(timeout=30)[1]
        assert client.returncode == 128 + signal.SIGTERM
        assert "no record of cluster" not in stderr
        assert "awsddp local stop" in stderr
    finally:
        control.stop(tmp_path)


def test_the_first_host_installs_torch_and_the_start_of_a_cloud_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWSDDP_CACHE", "/dev/null/cache")
    cloud = Cloud(tmp_path, control.start(tmp_path, mode="loopback"))
    try:
        assert cloud.client("ec2").describe_vpcs()["Vpcs"]
        instance_id = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
        (instance,) = cloud.wait("terminated", instance_id)
        assert "torch for the local cloud cannot be kept in its cache" in instance["StateReason"]["Message"]
    finally:
        control.stop(tmp_path)


@pytest.mark.parametrize("mode", ["records", pytest.param("loopback", marks=pytest.mark.prove)])
def test_a_daemon_whose_files_were_removed_ends_itself(tmp_path: Path, mode: str) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode=mode))
    instance_id = cloud.client("ec2").run_instances(**cloud.request())["Instances"][0]["InstanceId"]
    cloud.wait("running", instance_id)
    shutil.rmtree(tmp_path / "local")
    until(lambda: "processes" not in find_leftovers(tmp_path))


def test_stop_ends_a_daemon_that_is_starting(tmp_path: Path) -> None:
    kill_starting_client(tmp_path, after_s=0.1)
    assert "pid" not in control.read_report(CloudPaths(tmp_path))
    control.stop(tmp_path)
    (tmp_path / "local.lock").unlink(missing_ok=True)
    assert find_leftovers(tmp_path) == {}


@pytest.mark.parametrize(
    "raw",
    [
        *BAD_ANSWERS,
        b"HTTP/1.1 500 Failed\r\n\r\n",
        *(b"HTTP/1.1 400 No\r\n\r\n" + body for body in (b"{", b"{}", b"[]")),
    ],
)
def test_an_incomplete_answer_of_the_daemon_is_reported_as_no_answer(raw: bytes) -> None:
    key = {"access_key_id": "local", "secret_access_key": "local"}
    with serve_bytes(raw) as endpoint:
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
            control.send_command(info)
    assert caught.value.message == f"the local cloud at {endpoint} does not answer"


def test_clients_that_start_the_cloud_at_once_get_the_same_daemon(tmp_path: Path) -> None:
    infos: list[control.LocalInfo] = []
    clients = [
        threading.Thread(target=lambda: infos.append(control.start(tmp_path, mode="records")))
        for _ in range(4)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    control.stop(tmp_path)
    assert len(infos) == 4
    assert len({info.pid for info in infos}) == 1
