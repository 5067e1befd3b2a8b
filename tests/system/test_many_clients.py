"""Eight clients on two machines at once; and a machine that is lost with results, before and after `up`."""

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.system.test_reservations import client

SLEEPS = "import time; print('up', flush=True); time.sleep(600)\n"
SAVES = """
import os
print("line of", os.environ["RANK"])
open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write(os.environ["RANK"])
"""


def second_machine(lab: Lab, name: str = "other") -> Lab:
    """Another machine that holds a copy of the cluster's folder, and so its key."""
    other = Lab(lab.root / name)
    shutil.copytree(lab.home / "clusters", other.home / "clusters")
    other.environ["AWSDDP_LOCAL"] = str(lab.home)
    return other


@pytest.mark.prove
def test_eight_clients_at_once_have_eight_clean_outcomes(lab: Lab) -> None:
    assert lab.run("up", "--local", "--nodes", "2", "-y").returncode == 0
    machines = [lab, second_machine(lab)]
    for machine in machines:
        machine.script("sleeps.py", SLEEPS)
    ec2 = client(lab)
    for _ in range(3):
        clients = [
            machine.start("train", "sleeps.py", "--nproc-per-node", "1", "--detach", "--json")
            for machine in machines * 4
        ]
        ended = [(one.communicate(timeout=170), one.returncode) for one in clients]
        assert sorted(code for _, code in ended) == [0] + [3] * 7, [said for (_, said), _ in ended]
        documents = [json.loads(out) for (out, _), _ in ended]
        [name] = [one["job"] for one in documents if "job" in one]
        refusals = {one["error"]["message"] for one in documents if "error" in one}
        assert refusals == {f"job {name} runs on node0, node1"}
        jobs = lab.jobs()
        assert [job["job"] for job in jobs if job["state"] == "running"] == [name]
        assert not [job for job in jobs if job["state"] == "cancelled" and job["job"] not in known(lab)]
        tags = ec2.describe_tags(Filters=[{"Name": "key", "Values": ["awsddp:unfetched"]}])["Tags"]
        assert {tag["Value"] for tag in tags} == {name}
        assert lab.json("cancel", name)["state"] == "cancelled"
        assert lab.run("fetch", name).returncode == 0
    assert lab.run("down", "-y").returncode == 0


def known(lab: Lab) -> set[str]:
    """The jobs that were brought home."""
    return {path.name for path in (lab.project / "runs").glob("*")}


@pytest.mark.prove
@pytest.mark.parametrize("mended", [False, True], ids=["before up", "after up"])
def test_results_beside_a_lost_machine_come_home_and_the_lost_part_is_named(lab: Lab, mended: bool) -> None:
    lab.script("saves.py", SAVES)
    before = lab.json("up", "--local", "--nodes", "2", "-y")["nodes"]
    assert lab.run("train", "saves.py", "--world-size", "2", "--name", "j", "--detach").returncode == 0
    while lab.jobs()[0]["state"] == "running":
        time.sleep(0.1)
    gone = before[1]["instance_id"]
    ec2 = client(lab)
    ec2.terminate_instances(InstanceIds=[gone])
    ec2.get_waiter("instance_terminated").wait(InstanceIds=[gone], WaiterConfig={"Delay": 1})
    if mended:
        after = lab.json("up", "-y")["nodes"]
        assert after[0]["instance_id"] == before[0]["instance_id"] != after[1]["instance_id"] != gone
    lost = f"node1 ({gone}) is gone; its part of job j is lost"

    listed = lab.run("jobs", "--json")
    assert (listed.returncode, json.loads(listed.stdout)["jobs"][0]["state"]) == (0, "succeeded")
    assert mended or f"node1 ({gone}) is gone" in listed.stderr
    shown = lab.run("logs", "j")
    assert (shown.returncode, shown.stdout) == (0, "[rank 0 @ node0] line of 0\n")
    assert lost in shown.stderr
    fetched = lab.json("fetch", "j", code=6)
    assert (fetched["error"]["why"], [node["node"] for node in fetched["nodes"]]) == (lost, [0])
    assert (lab.project / "runs/j/node0/run/saved.txt").read_text() == "0"
    assert lab.run("logs", "-f", "j").returncode == 6
    ended = lab.run("down", "-y")
    assert (ended.returncode, "nothing is left" in ended.stdout) == (0, True), ended.stderr
    assert lab.run("logs", "j").stdout == "[rank 0 @ node0] line of 0\n"
    assert not Path(lab.home / "clusters" / "default").exists()
