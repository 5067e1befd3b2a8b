"""--save-to while the upload is prevented: by missing rights, a signal, or a reboot of the node."""

import json
import time

import pytest

from tests.support.lab import Lab
from tests.system.test_detached import wait_for_state
from tests.system.test_saving import WITH_ROLE, start_with_bucket

pytestmark = pytest.mark.prove

KEEPS = """
import os, pathlib, signal
run = pathlib.Path(os.environ["AWSDDP_RUN_DIR"])
signal.signal(signal.SIGTERM, lambda *_: (run / "last.pt").write_text("at the last moment"))
print("waits", flush=True)
signal.pause()
"""


@pytest.mark.timeout(600)
def test_results_that_were_not_uploaded_stay_on_a_stopped_node_and_fetch_starts_it(lab: Lab) -> None:
    _, iam = start_with_bucket(lab)
    lab.script("keeps.py", KEEPS)
    args = ("run", "--local", "keeps.py", *WITH_ROLE, "2", "--world-size", "2", "--detach")
    assert lab.run(*args, "--name", "left", "--save-to", "s3://results/runs").returncode == 0
    while lab.run("logs").stdout.count("waits") < 2:
        time.sleep(0.5)
    policy = {"RoleName": "training", "PolicyName": "s3"}
    document = iam.get_role_policy(**policy)["PolicyDocument"]
    iam.delete_role_policy(**policy)
    for node in ("node0", "node1"):
        assert lab.run("local", "fault", "add", node, "poweroff").returncode == 0
    wait_for_state(lab, "stopped", within_s=200)
    # without the policy, uploads are retried for two more minutes
    iam.put_role_policy(**policy, PolicyDocument=json.dumps(document))
    fetched = lab.json("fetch", "--local", "-y")
    assert (fetched["started"], len(fetched["down"]["terminated"])) == (True, 2)
    for node in range(2):
        made = lab.project / f"runs/left/node{node}/run/last.pt"
        assert made.read_text() == "at the last moment"


KILL_UPLOADER = "kill -9 $(ps -eo pid=,ni=,comm= | awk '$2 == 19 && $3 == \"awsddp-job\" {print $1}')"


@pytest.mark.timeout(600)
def test_an_uploader_continues_after_a_kill_and_after_a_reboot(lab: Lab) -> None:
    s3, _ = start_with_bucket(lab)
    lab.script("keeps.py", KEEPS)
    args = ("run", "--local", "keeps.py", *WITH_ROLE, "2", "--world-size", "2", "--detach")
    assert lab.run(*args, "--name", "left", "--save-to", "s3://results/runs").returncode == 0
    while lab.run("logs").stdout.count("waits") < 2:
        time.sleep(0.5)

    def list_names() -> list[str]:
        objects = s3.list_objects_v2(Bucket="results", Prefix="runs/left/")
        return [row["Key"].removeprefix("runs/left/") for row in objects["Contents"]]

    def wait_for_upload(name: str) -> None:
        end = time.monotonic() + 120
        while f"node1/run/{name}" not in list_names():
            assert time.monotonic() < end, list_names()
            time.sleep(1)

    def kill_uploader_and_create(name: str) -> None:
        made = f"~/.awsddp/jobs/left/run/{name}"
        line = f"{KILL_UPLOADER}; echo text > {made}.part && mv {made}.part {made} && sync"
        assert lab.run("exec", "--node", "1", line).returncode == 0

    kill_uploader_and_create("killed.pt")
    wait_for_upload("killed.pt")
    kill_uploader_and_create("rebooted.pt")
    lab.run("exec", "--node", "1", "sudo systemctl reboot -ff")
    wait_for_upload("rebooted.pt")
    assert lab.run("down", "-y").returncode == 0
