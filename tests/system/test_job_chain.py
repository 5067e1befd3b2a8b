"""--after on real nodes: a chain of jobs runs without a client, even if one that adds to it is killed."""

import os
import random
import signal
import time

import pytest

from tests.support.lab import Lab
from tests.support.seed import SEED

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]
LATEST_KILL_S = 5.0
"""About the seconds until a client has launched its job."""

LINK = """
import os, pathlib, sys, time
run = pathlib.Path(os.environ['AWSDDP_RUN_DIR'])
go = pathlib.Path(os.environ['HOME'], 'go')
while sys.argv[1:] and not go.exists():
    time.sleep(0.1)
run.joinpath('who').write_text(f'{name} {os.getcwd()}')
"""


def test_chain_of_three_jobs_runs_without_a_client_and_a_killed_client_changes_nothing(
    cluster: Lab,
) -> None:
    cluster.script("link.py", LINK.replace("{name}", "first"))
    args = ("train", "link.py", "--world-size", "2", "--detach", "--name")
    assert cluster.json(*args, "first", "--", "waits")["state"] == "running"
    for name, after in (("second", "first"), ("third", "all")):
        cluster.script("link.py", LINK.replace("{name}", name))
        assert cluster.json(*args, name, "--after", after)["state"] == "waiting"
    at = random.Random(f"{SEED} kill").uniform(0, LATEST_KILL_S)
    client = cluster.start("train", "link.py", "--world-size", "2", "--after", "all", "--name", "fourth")
    time.sleep(at)
    os.killpg(client.pid, signal.SIGKILL)
    client.communicate()
    states = {job["job"]: job["state"] for job in cluster.jobs()}
    assert {name: states[name] for name in ("first", "second", "third")} == {
        "first": "running",
        "second": "waiting",
        "third": "waiting",
    }, f"killed at {at:.1f} s"
    # The node's watchdog counts processes of this name as jobs: the node is not idle.
    counts = cluster.json("exec", "pgrep -cx awsddp-job")["nodes"]
    assert all(int(node["stdout"]) >= 3 for node in counts), counts
    assert cluster.run("exec", "touch ~/go").returncode == 0
    for name in ("second", "third"):
        followed = cluster.run("logs", "-f", name)
        assert followed.returncode == 0, followed.stderr
        assert cluster.run("fetch", name).returncode == 0
        for node in (0, 1):
            text = (cluster.project / f"runs/{name}/node{node}/run/who").read_text()
            assert text == f"{name} /home/ubuntu/awsddp/work-{name}", f"killed at {at:.1f} s"
    after = cluster.json("train", "link.py", "--world-size", "2", "--after", "all", "--name", "after")
    assert after["state"] == "succeeded", f"killed at {at:.1f} s"
