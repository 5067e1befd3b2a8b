"""`doctor` and `train` on two real nodes: who is named, and nobody without a fault."""

import pytest

from benchmarks.campaigns import doctor
from tests.support.lab import Lab
from tests.support.local_cloud import needs_root
from tests.support.seed import drawn

pytestmark = [pytest.mark.prove, needs_root]
LOCAL = ["slow-network", "slow-cpu", "full-disk", "oom", "clock", "hostkey"]
"""Faults whose node is found in seconds: the others wait for its login."""


def test_healthy_nodes_form_a_process_group_and_nobody_is_named(cluster: Lab) -> None:
    found = cluster.json("doctor")
    assert doctor.is_named(found, doctor.HEALTHY, 0), found
    shown = cluster.run("doctor")
    assert shown.returncode == 0, shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize("way", drawn([way for way in LOCAL if way in doctor.possible()], 2, what="doctor"))
def test_a_node_with_a_fault_is_named(cluster: Lab, way: str) -> None:
    cluster.run("local", "fault", "add", "node1", way)
    try:
        found = cluster.json("doctor", code=6)
    finally:
        cluster.run("local", "fault", "clear")
    assert doctor.is_named(found, way, 1), [check for check in found["checks"] if check["ok"] is not True]
    hints = {check["hint"] for check in found["checks"] if check["ok"] is False}
    assert all("up -o cluster.replace=i-" in hint for hint in hints)


def test_train_names_a_bad_node_before_the_ranks_start(cluster: Lab) -> None:
    cluster.script("hello.py", "print('up')\n")
    cluster.run("local", "fault", "add", "node1", "oom")
    try:
        shown = cluster.run("train", "hello.py", "--name", "unfit")
        assert shown.returncode == 6
        assert "node1: memory: " in shown.stderr
        assert "[rank" not in shown.stdout
    finally:
        cluster.run("local", "fault", "clear")
    assert cluster.json("train", "hello.py", "--name", "unfit")["state"] == "succeeded"
