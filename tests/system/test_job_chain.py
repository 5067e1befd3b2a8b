"""--after on real nodes: a chain goes on without a client, wherever one that adds to it is killed."""

import os
import random
import signal
import time

import pytest

from tests.support.lab import Lab
from tests.support.seed import SEED

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]
LATEST_KILL_S = 5.0
"""About when a client has launched its job."""

LINK = """
import os, pathlib, sys, time
run = pathlib.Path(os.environ['AWSDDP_RUN_DIR'])
go = pathlib.Path(os.environ['HOME'], 'go')
while sys.argv[1:] and not go.exists():
    time.sleep(0.1)
run.joinpath('who').write_text(f'{name} {os.getcwd()}')
"""


def test_chain_of_three_goes_on_without_a_client_and_one_that_is_killed_changes_nothing(
    cluster: Lab,
) -> None:
    cluster.script("link.py", LINK.replace("{name}", "first"))
    words = ("train", "link.py", "--world-size", "2", "--detach", "--name")
    assert cluster.json(*words, "first", "--", "waits")["state"] == "running"
    for name, after in (("second", "first"), ("third", "all")):
        cluster.script("link.py", LINK.replace("{name}", name))
        assert cluster.json(*words, name, "--after", after)["state"] == "waiting"
    at = random.Random(f"{SEED} kill").uniform(0, LATEST_KILL_S)
    client = cluster.start("train", "link.py", "--world-size", "2", "--after", "all", "--name", "fourth")
    time.sleep(at)
    os.killpg(client.pid, signal.SIGKILL)
    client.communicate()
    seen = {job["job"]: job["state"] for job in cluster.jobs()}
    assert {name: seen[name] for name in ("first", "second", "third")} == {
        "first": "running",
        "second": "waiting",
        "third": "waiting",
    }, f"killed at {at:.1f} s"
    # The node's watchdog counts what is called so as a job: it is not idle.
    count = cluster.json("exec", "pgrep -cx awsddp-job")["nodes"]
    assert all(int(node["stdout"]) >= 3 for node in count), count
    assert cluster.run("exec", "touch ~/go").returncode == 0
    for name in ("second", "third"):
        followed = cluster.run("logs", "-f", name)
        assert followed.returncode == 0, followed.stderr
        assert cluster.run("fetch", name).returncode == 0
        for node in (0, 1):
            said = (cluster.project / f"runs/{name}/node{node}/run/who").read_text()
            assert said == f"{name} /home/ubuntu/awsddp/work-{name}", f"killed at {at:.1f} s"
    after = cluster.json("train", "link.py", "--world-size", "2", "--after", "all", "--name", "after")
    assert after["state"] == "succeeded", f"killed at {at:.1f} s"
