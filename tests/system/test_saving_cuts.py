"""--save-to, where a saver is kept from it: by its rights, a signal, or the end of its machine."""

import json
import time

import pytest

from tests.support.lab import Lab
from tests.system.test_detached import wait_for_state
from tests.system.test_saving import WITH_ROLE, with_bucket

pytestmark = pytest.mark.prove

KEEPS = """
import os, pathlib, signal
run = pathlib.Path(os.environ["AWSDDP_RUN_DIR"])
signal.signal(signal.SIGTERM, lambda *_: (run / "last.pt").write_text("at the last moment"))
print("waits", flush=True)
signal.pause()
"""


@pytest.mark.timeout(600)
def test_what_could_not_be_saved_stays_on_a_node_that_stops_and_fetch_starts_it(lab: Lab) -> None:
    _, iam = with_bucket(lab)
    lab.script("keeps.py", KEEPS)
    words = ("run", "--local", "keeps.py", *WITH_ROLE, "2", "--world-size", "2", "--detach")
    assert lab.run(*words, "--name", "left", "--save-to", "s3://results/runs").returncode == 0
    while lab.run("logs").stdout.count("waits") < 2:
        time.sleep(0.5)
    policy = {"RoleName": "training", "PolicyName": "s3"}
    document = iam.get_role_policy(**policy)["PolicyDocument"]
    iam.delete_role_policy(**policy)
    for node in ("node0", "node1"):
        assert lab.run("local", "fault", "add", node, "poweroff").returncode == 0
    wait_for_state(lab, "stopped", within_s=200)
    iam.put_role_policy(
        **policy, PolicyDocument=json.dumps(document)
    )  # else it is tried for two minutes more
    fetched = lab.json("fetch", "--local", "-y")
    assert (fetched["started"], len(fetched["down"]["terminated"])) == (True, 2)
    for node in range(2):
        made = lab.project / f"runs/left/node{node}/run/last.pt"
        assert made.read_text() == "at the last moment"


KILL_SAVER = "kill -9 $(ps -eo pid=,ni=,comm= | awk '$2 == 19 && $3 == \"awsddp-job\" {print $1}')"


@pytest.mark.timeout(600)
def test_a_saver_that_is_killed_or_goes_with_a_reboot_goes_on(lab: Lab) -> None:
    s3, _ = with_bucket(lab)
    lab.script("keeps.py", KEEPS)
    words = ("run", "--local", "keeps.py", *WITH_ROLE, "2", "--world-size", "2", "--detach")
    assert lab.run(*words, "--name", "left", "--save-to", "s3://results/runs").returncode == 0
    while lab.run("logs").stdout.count("waits") < 2:
        time.sleep(0.5)

    def names() -> list[str]:
        found = s3.list_objects_v2(Bucket="results", Prefix="runs/left/")
        return [one["Key"].removeprefix("runs/left/") for one in found["Contents"]]

    def saves(name: str) -> None:
        end = time.monotonic() + 120
        while f"node1/run/{name}" not in names():
            assert time.monotonic() < end, names()
            time.sleep(1)

    def kill_saver_and_make(name: str) -> None:
        made = f"~/.awsddp/jobs/left/run/{name}"
        line = f"{KILL_SAVER}; echo text > {made}.part && mv {made}.part {made} && sync"
        assert lab.run("exec", "--node", "1", line).returncode == 0

    kill_saver_and_make("killed.pt")
    saves("killed.pt")
    kill_saver_and_make("rebooted.pt")
    lab.run("exec", "--node", "1", "sudo systemctl reboot -ff")
    saves("rebooted.pt")
    assert lab.run("down", "-y").returncode == 0
