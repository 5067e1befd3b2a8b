"""The folder of a cluster is a cache: `status` and `down` work if it is lost, torn, read-only or newer."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.seed import FULL

STEP = 1 if FULL else 61


def launch(lab: Lab) -> Path:
    """Launch a cluster of two nodes and return its folder."""
    assert lab.run("up", "--local", "--nodes", "2", "-y").returncode == 0
    return lab.home / "clusters" / "default"


def check_status_and_down(lab: Lab, *, state: str = "ready") -> None:
    """Check that `status` lists both nodes and `down` terminates them."""
    status = lab.json("status", "--local")
    assert (status["state"], len(status["nodes"])) == (state, 2)
    ended = lab.json("down", "--local", "-y", "-c", "default")
    assert (len(ended["terminated"]), ended["leftovers"]) == (2, [])
    assert lab.json("status", "--local")["state"] == "absent"


@pytest.mark.prove
def test_status_and_down_work_without_the_folder_of_the_cluster(records: Lab) -> None:
    shutil.rmtree(launch(records))
    check_status_and_down(records)


@pytest.mark.prove
def test_status_and_down_work_with_the_folder_of_a_newer_awsddp(records: Lab) -> None:
    path = launch(records) / "cluster.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99, "nodes": {"new": "shape"}}))
    result = records.run("train", "--local")
    assert (result.returncode, "newer awsddp" in result.stderr) == (3, True)
    check_status_and_down(records)


@pytest.mark.prove
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount of its own")
def test_status_and_down_work_with_a_read_only_folder(records: Lab) -> None:
    folder = launch(records)
    line = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    for verb, text in (("status", '"ready"'), ("down", '"terminated"')):
        awsddp = [sys.executable, "-m", "awsddp", verb, "--local", "-y", "--json"]
        result = subprocess.run(
            ["unshare", "-m", "sh", "-c", line, "sh", str(folder), *awsddp],
            cwd=records.project,
            env=records.environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        assert text in result.stdout
    assert records.json("status", "--local")["state"] == "absent"
    assert records.json("down", "--local", "-y")["state"] == "absent"
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount of its own")
def test_down_terminates_the_nodes_if_the_disk_of_the_client_is_full(records: Lab, tmp_path: Path) -> None:
    line = (
        'mount -t tmpfs -o size=600k tmpfs "$AWSDDP_HOME" && "$@" up --nodes 2 -y >&2 &&\n'
        '{ cat /dev/zero > "$AWSDDP_HOME/zeros"; "$@" down -y --json; }'
    )
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", line, "sh", sys.executable, "-m", "awsddp", "--local", "-c", "full"],
        cwd=records.project,
        env=records.environ | {"AWSDDP_HOME": str(tmp_path), "AWSDDP_LOCAL": str(records.home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    ended = json.loads(result.stdout)
    assert (len(ended["terminated"]), ended["leftovers"]) == (2, [])


@pytest.mark.prove
def test_status_and_down_work_with_a_record_cut_at_any_byte(records: Lab) -> None:
    path = launch(records) / "cluster.json"
    whole = path.read_bytes()
    program = (
        "import sys\nfrom pathlib import Path\nfrom awsddp.state import ClusterFolder, awsddp_home\n"
        "path, whole = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes()\n"
        "for size in range(len(whole)):\n"
        "    path.write_bytes(whole[:size])\n"
        "    record = ClusterFolder(awsddp_home(), 'default').read()\n"
        "    assert record is None or size == len(whole) - 1, size\n"
    )
    subprocess.run([sys.executable, "-c", program, path], env=records.environ, check=True)
    for size in range(0, len(whole), max(STEP, len(whole) // 8 if STEP > 1 else 1)):
        path.write_bytes(whole[:size])
        status = records.json("status", "--local")
        assert (status["state"], len(status["nodes"])) == ("ready", 2), size
    path.write_bytes(whole[: len(whole) // 2])
    check_status_and_down(records)


@pytest.mark.prove
def test_up_does_not_wait_for_a_cluster_of_a_local_cloud_that_is_gone(lab: Lab) -> None:
    for _ in range(2):
        assert lab.run("local", "start", "--no-hosts").returncode == 0
        # `up` waits two minutes for nodes that AWS does not list yet.
        assert lab.run("up", "--local", "--nodes", "2", "-y", timeout=60).returncode == 0
        assert lab.run("local", "stop").returncode == 0
    assert lab.json("down", "-y")["state"] == "absent"
