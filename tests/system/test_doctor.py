"""`doctor` and `train` on two real nodes: they report a faulty node and no healthy one."""

import pytest

from benchmarks.campaigns import doctor
from tests.support.lab import Lab
from tests.support.local_cloud import needs_root
from tests.support.seed import draw_cases

pytestmark = [pytest.mark.prove, needs_root]
LOCAL = ["slow-network", "slow-cpu", "full-disk", "oom", "clock", "hostkey"]
"""Faults that are diagnosed in seconds: with the others, the login waits until its timeout."""


def test_doctor_reports_no_fault_of_healthy_nodes(cluster: Lab) -> None:
    document = cluster.json("doctor")
    assert doctor.is_named(document, doctor.HEALTHY, 0), document
    result = cluster.run("doctor")
    assert result.returncode == 0, result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "name", draw_cases([name for name in LOCAL if name in doctor.possible()], 2, label="doctor")
)
def test_doctor_names_a_node_with_a_fault(cluster: Lab, name: str) -> None:
    cluster.run("local", "fault", "add", "node1", name)
    try:
        result = cluster.json("doctor", code=6)
    finally:
        cluster.run("local", "fault", "clear")
    assert doctor.is_named(result, name, 1), [check for check in result["checks"] if check["ok"] is not True]
    hints = {check["hint"] for check in result["checks"] if check["ok"] is False}
    assert all("up -o cluster.replace=i-" in hint for hint in hints)


def test_train_names_a_faulty_node_before_the_ranks_start(cluster: Lab) -> None:
    cluster.script("hello.py", "print('up')\n")
    cluster.run("local", "fault", "add", "node1", "oom")
    try:
        result = cluster.run("train", "hello.py", "--name", "unfit")
        assert result.returncode == 6
        assert "node1: memory: " in result.stderr
        assert "[rank" not in result.stdout
    finally:
        cluster.run("local", "fault", "clear")
    assert cluster.json("train", "hello.py", "--name", "unfit")["state"] == "succeeded"
