"""Nodes that no client returns to end by themselves, and keep results that are nowhere else."""

import time

import pytest

from tests.support.lab import Lab
from tests.support.traces import find_traces

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]
IDLE_S = 10
LATE_S = 60.0

SAVES = """
import os
open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write("mine")
"""


def wait_for_state(lab: Lab, state: str, *, within_s: float = LATE_S) -> dict[str, object]:
    """Wait until the cluster has a state by itself, and return its status."""
    end = time.monotonic() + within_s
    while (status := lab.json("status", "--local"))["state"] != state:
        assert time.monotonic() < end, status
        time.sleep(1)
    return status


def test_a_detached_run_stops_its_nodes_and_fetch_starts_them_fetches_and_terminates_them(lab: Lab) -> None:
    before = find_traces(lab.home)
    lab.script("saves.py", SAVES)
    args = ("--local", "--nodes", "2", "--world-size", "2", "-y", "--detach", "--idle", f"{IDLE_S}s")
    result = lab.run("run", "saves.py", *args, "--name", "left")
    assert result.returncode == 0, result.stderr
    assert f"The nodes end {IDLE_S}s after the job, at 20" in result.stdout
    wait_for_state(lab, "stopped")
    fetched = lab.json("fetch", "--local", "-y")
    assert fetched["started"]
    assert len(fetched["down"]["terminated"]) == 2
    for node in range(2):
        assert (lab.project / f"runs/left/node{node}/run/saved.txt").read_text() == "mine"
    lab.close()
    assert find_traces(lab.home) == before


def test_an_idle_cluster_terminates_itself_once_its_results_are_fetched(lab: Lab) -> None:
    lab.script("saves.py", SAVES)
    up = lab.run("up", "--local", "--nodes", "1", "-y", "--idle", "1h")
    assert up.returncode == 0, up.stderr
    assert lab.run("train", "saves.py", "--world-size", "1").returncode == 0
    (first,) = lab.json("status", "--local", "-v")["nodes"]
    (second,) = lab.json("status", "--local", "-v")["nodes"]  # `status` does not reset the idle time
    assert 0 < second["idle_left_s"] <= first["idle_left_s"] <= 3600
    assert "idle left" in lab.run("status", "--local", "-v").stdout
    assert lab.json("up", "--local", "-y", "--idle", f"{IDLE_S}s")["idle"] == f"{IDLE_S}s"
    assert wait_for_state(lab, "ending")["nodes"] == []  # a group and a key remain: they cost nothing
    assert lab.json("down")["removed"] > 0
