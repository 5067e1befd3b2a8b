"""A spot node that EC2 reclaims: all ranks have the notice to save, and the cause has the time of the end."""

import json
import time

import pytest

from tests.support.lab import Lab
from tests.support.local_cloud import needs_root

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400), needs_root]

SAVES = """
import os, pathlib, signal, sys, time

def save(*_):
    time.sleep(8)  # longer than job.grace
    pathlib.Path(os.environ["AWSDDP_RUN_DIR"], f"saved{os.environ['RANK']}.pt").write_text("whole")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
SHORT_GRACE = ("-o", "job.grace=1s")


def test_ranks_save_after_a_spot_notice_and_the_cause_has_its_time(lab: Lab) -> None:
    lab.script("saves.py", SAVES)
    lab.json("up", "--local", "--nodes", "2", "--spot", "-y")
    job = lab.json("train", "saves.py", "--world-size", "2", "--name", "noticed", "--detach", *SHORT_GRACE)[
        "job"
    ]
    while lab.run("logs", job).stdout.count("ready") < 2:
        time.sleep(0.2)
    noticed = time.time()
    assert lab.run("local", "fault", "add", "node1", "reclaim", "--notice", "40s").returncode == 0
    result = lab.run("logs", "-f", job)
    assert time.time() - noticed < 40, "the ranks did not end between the notice and the reclaim"
    record = json.loads((lab.project / "runs/noticed/job.json").read_text())
    cause = record["cause"]
    assert (result.returncode, record["state"], cause["kind"]) == (1, "interrupted", "spot_interruption")
    assert (cause["node"], cause["retryable"]) == (1, True)
    expected = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(noticed + 40))
    assert cause["values"]["time"][:15] == expected[:15]
    assert f"AWS reclaims the spot instance at {cause['values']['time']}" in cause["explanation"]
    for rank in (0, 1):
        assert (lab.project / f"runs/noticed/node{rank}/run/saved{rank}.pt").read_text() == "whole"
    while (ended := lab.json("local", "status")["instances"][1])["state"] != "terminated":
        assert time.time() - noticed < 120
        time.sleep(0.5)
    assert "Server.SpotInstanceTermination" in ended["reason"]
