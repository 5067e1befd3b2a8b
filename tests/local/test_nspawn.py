"""Hosts in systemd-nspawn."""

import subprocess
from pathlib import Path

import pytest

from awsddp.local import nspawn
from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import needs_root


@pytest.mark.parametrize(("error", "is_named"), [("Too many open files", True), ("No such file", False)])
def test_a_lack_of_inotify_instances_is_reported_with_the_limit_to_raise(
    tmp_path: Path, error: str, is_named: bool
) -> None:
    hosts = nspawn.NspawnHosts(CloudPaths(tmp_path))
    hosts.folder("i-1").mkdir(parents=True)
    last = f"Failed to create control group inotify object: {error}\nExiting PID 1...\n"
    (hosts.folder("i-1") / "console.log").write_text(last)
    assert ("sysctl -w fs.inotify.max_user_instances" in hosts.failure_reason("i-1")) == is_named


@needs_root
def test_a_host_whose_disk_cannot_be_mounted_has_failed(tmp_path: Path) -> None:
    """Without loop devices, such a host was once reported as a node that had shut itself down."""
    argv = ["sh", "-c", nspawn.WRAPPER, "sh", "", str(tmp_path), "true"]
    process = subprocess.run(argv, capture_output=True, text=True)
    assert (process.returncode, "mount" in process.stderr) == (0, True)
    assert (tmp_path / "exit").read_text().strip() != "0"
    assert not (tmp_path / "pid").exists()
