"""Failures around the start of a job: refused before it, or reported with the job that runs."""

import os
import subprocess
import sys

import pytest

from tests.support.lab import Lab

# The folder of a cluster on its own disk, which is full.
FULL = """
cp -a "$1" "$1.kept" && mount -t tmpfs -o size=2m tmpfs "$1" && cp -a "$1.kept/." "$1" && rm -r "$1.kept"
cat /dev/zero > "$1/zeros"
shift
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount of its own")
def test_an_error_right_after_the_start_says_that_the_job_runs(cluster: Lab) -> None:
    cluster.script("short.py", "print('ran', flush=True)\n")
    args = [sys.executable, "-m", "awsddp", "train", "short.py", "--name", "unseen", "--detach"]
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", FULL, "sh", str(cluster.home / "clusters/default"), *args],
        cwd=cluster.project,
        env=cluster.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 3, result.stderr
    assert "job unseen was started, but cannot write" in result.stderr
    assert "awsddp logs -f unseen" in result.stderr
    followed = cluster.run("logs", "-f", "unseen")
    assert (followed.returncode, "ran" in followed.stdout) == (0, True)


def test_a_project_folder_whose_path_is_not_utf8_is_refused_before_the_start(records: Lab) -> None:
    folder = records.root / os.fsdecode(b"bad\xff")
    folder.mkdir()
    (folder / "train.py").touch()
    result = records.run("--local", "train", "train.py", cwd=folder)
    assert result.returncode == 3, result.stderr
    assert "is not UTF-8" in result.stderr
