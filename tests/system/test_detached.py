"""Machines that nobody comes back to: they end by themselves, and never with the only copy of a result."""

import time

import pytest

from tests.support.lab import Lab
from tests.support.traces import traces

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]
IDLE_S = 10
LATE_S = 60.0

SAVES = """
import os
open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write("mine")
"""


def becomes(lab: Lab, state: str, *, within_s: float = LATE_S) -> dict[str, object]:
    """Wait until the cluster is in a state by itself."""
    end = time.monotonic() + within_s
    while (seen := lab.json("status", "--local"))["state"] != state:
        assert time.monotonic() < end, seen
        time.sleep(1)
    return seen


def test_a_detached_run_stops_with_its_results_and_fetch_starts_fetches_and_ends_it(lab: Lab) -> None:
    before = traces(lab.home)
    lab.script("saves.py", SAVES)
    words = ("--local", "--nodes", "2", "--world-size", "2", "-y", "--detach", "--idle", f"{IDLE_S}s")
    shown = lab.run("run", "saves.py", *words, "--name", "left")
    assert shown.returncode == 0, shown.stderr
    assert f"The nodes end {IDLE_S}s after the job, at 20" in shown.stdout
    becomes(lab, "stopped")
    fetched = lab.json("fetch", "--local", "-y")
    assert fetched["started"]
    assert len(fetched["down"]["terminated"]) == 2
    for node in range(2):
        assert (lab.project / f"runs/left/node{node}/run/saved.txt").read_text() == "mine"
    lab.close()
    assert traces(lab.home) == before


def test_a_cluster_that_nobody_uses_ends_once_its_results_are_home(lab: Lab) -> None:
    lab.script("saves.py", SAVES)
    up = lab.run("up", "--local", "--nodes", "1", "-y", "--idle", "1h")
    assert up.returncode == 0, up.stderr
    assert lab.run("train", "saves.py", "--world-size", "1").returncode == 0
    (first,) = lab.json("status", "--local", "-v")["nodes"]
    (second,) = lab.json("status", "--local", "-v")["nodes"]  # who only asks is no user of the node
    assert 0 < second["idle_left_s"] <= first["idle_left_s"] <= 3600
    assert "idle left" in lab.run("status", "--local", "-v").stdout
    assert lab.json("up", "--local", "-y", "--idle", f"{IDLE_S}s")["idle"] == f"{IDLE_S}s"
    assert becomes(lab, "ending")["nodes"] == []  # what costs nothing is left: a group, a key
    assert lab.json("down")["removed"] > 0
