"""`fetch` while the job runs."""

import time

import pytest

from tests.support.lab import Lab

SCRIPT = """
import os, time
from pathlib import Path
run = Path(os.environ["AWSDDP_RUN_DIR"])
Path("whole.pt").write_bytes(b"w" * 1000)
half = open("half.pt", "wb")
half.write(b"h" * 1000)
half.flush()
metrics = (run / "metrics.jsonl").open("a")
log = open("app.log", "a")
number = 0
while not Path("end").exists():
    number += 1
    print("line", number, flush=True)
    print("line", number, file=log, flush=True)
    print('{"step": %d}' % number, file=metrics, flush=True)
    Path("latest").write_text(str(number))
    if number % 7 == 0:
        Path("app.log").rename("app.log.1")
        log = open("app.log", "a")
    time.sleep(0.02)
half.write(b"e")
half.close()
"""


@pytest.mark.prove
def test_fetch_copies_complete_files_while_the_job_runs_and_all_files_at_its_end(cluster: Lab) -> None:
    cluster.script("grows.py", SCRIPT)
    results_dir = cluster.project / "runs/grows"
    args = ("train", "grows.py", "--name", "grows", "--world-size", "2", "--detach")
    assert cluster.run(*args).returncode == 0
    try:
        deadline = time.monotonic() + 30
        while not (results_dir / "node1/whole.pt").exists():
            result = cluster.run("fetch", "grows")
            assert result.returncode == 0, result.stderr
            assert time.monotonic() < deadline
        result = cluster.run("fetch", "grows")
        assert result.returncode == 0, result.stderr
        assert "still writes" in result.stderr
        assert "half.pt" in result.stderr
        for node in (0, 1):
            assert (results_dir / f"node{node}/whole.pt").read_bytes() == b"w" * 1000
            assert not (results_dir / f"node{node}/half.pt").exists()
            for name in (f"logs/rank{node}.log", f"node{node}/app.log.1"):
                lines = (results_dir / name).read_text().splitlines(keepends=True)
                assert all(line.startswith("line ") for line in lines)
        assert cluster.json("status")["jobs"][-1]["state"] == "running"
    finally:
        touched = cluster.run("exec", "--", "touch ~/awsddp/work/end")
    assert touched.returncode == 0, touched.stderr
    assert cluster.run("logs", "-f", "grows").returncode == 0
    assert cluster.json("fetch", "grows")["job"] == "grows"
    for node in (0, 1):
        assert (results_dir / f"node{node}/half.pt").read_bytes() == b"h" * 1000 + b"e"
        last_number = (results_dir / f"node{node}/latest").read_text()
        assert (results_dir / f"logs/rank{node}.log").read_text().endswith(f"line {last_number}\n")
    assert not (results_dir / ".part").exists()
