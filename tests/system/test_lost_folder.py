"""A cluster's folder is a cache: lost, torn, read-only, from the future: `status` and `down` are right."""

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


def made(lab: Lab) -> Path:
    """Make a cluster of two nodes and return its folder."""
    assert lab.run("up", "--local", "--nodes", "2", "-y").returncode == 0
    return lab.home / "clusters" / "default"


def right(lab: Lab, *, state: str = "ready") -> None:
    """`status` sees both nodes and `down` ends them."""
    seen = lab.json("status", "--local")
    assert (seen["state"], len(seen["nodes"])) == (state, 2)
    ended = lab.json("down", "--local", "-y", "-c", "default")
    assert (len(ended["terminated"]), ended["leftovers"]) == (2, [])
    assert lab.json("status", "--local")["state"] == "absent"


@pytest.mark.prove
def test_a_folder_that_is_gone(records: Lab) -> None:
    shutil.rmtree(made(records))
    right(records)


@pytest.mark.prove
def test_a_folder_from_a_newer_awsddp(records: Lab) -> None:
    path = made(records) / "cluster.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99, "nodes": {"new": "shape"}}))
    shown = records.run("train", "--local")
    assert (shown.returncode, "newer awsddp" in shown.stderr) == (3, True)
    right(records)


@pytest.mark.prove
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount of its own")
def test_a_folder_that_is_read_only(records: Lab) -> None:
    folder = made(records)
    line = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    for verb, word in (("status", '"ready"'), ("down", '"terminated"')):
        awsddp = [sys.executable, "-m", "awsddp", verb, "--local", "-y", "--json"]
        shown = subprocess.run(
            ["unshare", "-m", "sh", "-c", line, "sh", str(folder), *awsddp],
            cwd=records.project,
            env=records.environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert shown.returncode == 0, shown.stderr
        assert word in shown.stdout
    assert records.json("status", "--local")["state"] == "absent"
    assert records.json("down", "--local", "-y")["state"] == "absent"
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount of its own")
def test_a_disk_that_is_full_keeps_no_bill_alive(records: Lab, tmp_path: Path) -> None:
    line = (
        'mount -t tmpfs -o size=600k tmpfs "$AWSDDP_HOME" && "$@" up --nodes 2 -y >&2 &&\n'
        '{ cat /dev/zero > "$AWSDDP_HOME/zeros"; "$@" down -y --json; }'
    )
    shown = subprocess.run(
        ["unshare", "-m", "sh", "-c", line, "sh", sys.executable, "-m", "awsddp", "--local", "-c", "full"],
        cwd=records.project,
        env=records.environ | {"AWSDDP_HOME": str(tmp_path), "AWSDDP_LOCAL": str(records.home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    ended = json.loads(shown.stdout)
    assert (len(ended["terminated"]), ended["leftovers"]) == (2, [])


@pytest.mark.prove
def test_a_record_cut_off_at_any_byte(records: Lab) -> None:
    path = made(records) / "cluster.json"
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
        seen = records.json("status", "--local")
        assert (seen["state"], len(seen["nodes"])) == ("ready", 2), size
    path.write_bytes(whole[: len(whole) // 2])
    right(records)


@pytest.mark.prove
def test_a_cluster_of_a_local_cloud_that_is_gone_is_not_waited_for(lab: Lab) -> None:
    for _ in range(2):
        assert lab.run("local", "start", "--no-hosts").returncode == 0
        # What AWS does not list yet is waited for, two minutes.
        assert lab.run("up", "--local", "--nodes", "2", "-y", timeout=60).returncode == 0
        assert lab.run("local", "stop").returncode == 0
    assert lab.json("down", "-y")["state"] == "absent"
