"""Eight clients on two machines at once; and a node that is lost with its results, before and after `up`."""

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.system.test_reservations import make_client

SLEEPS = "import time; print('up', flush=True); time.sleep(600)\n"
SAVES = """
import os
print("line of", os.environ["RANK"])
open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write(os.environ["RANK"])
"""


def copy_machine(lab: Lab, name: str = "other") -> Lab:
    """Return another machine with a copy of the cluster's folder, and thus its key."""
    other = Lab(lab.root / name)
    shutil.copytree(lab.home / "clusters", other.home / "clusters")
    other.environ["AWSDDP_LOCAL"] = str(lab.home)
    return other


@pytest.mark.prove
def test_one_of_eight_clients_starts_a_job_and_the_others_are_refused(lab: Lab) -> None:
    assert lab.run("up", "--local", "--nodes", "2", "-y").returncode == 0
    machines = [lab, copy_machine(lab)]
    for machine in machines:
        machine.script("sleeps.py", SLEEPS)
    ec2 = make_client(lab)
    for _ in range(3):
        clients = [
            machine.start("train", "sleeps.py", "--nproc-per-node", "1", "--detach", "--json")
            for machine in machines * 4
        ]
        outcomes = [(process.communicate(timeout=170), process.returncode) for process in clients]
        assert sorted(code for _, code in outcomes) == [0] + [3] * 7, [err for (_, err), _ in outcomes]
        documents = [json.loads(out) for (out, _), _ in outcomes]
        [name] = [row["job"] for row in documents if "job" in row]
        refusals = {row["error"]["message"] for row in documents if "error" in row}
        assert refusals == {f"job {name} runs on node0, node1"}
        jobs = lab.jobs()
        assert [job["job"] for job in jobs if job["state"] == "running"] == [name]
        fetched = list_fetched(lab)
        assert not [job for job in jobs if job["state"] == "cancelled" and job["job"] not in fetched]
        tags = ec2.describe_tags(Filters=[{"Name": "key", "Values": ["awsddp:unfetched"]}])["Tags"]
        assert {tag["Value"] for tag in tags} == {name}
        assert lab.json("cancel", name)["state"] == "cancelled"
        assert lab.run("fetch", name).returncode == 0
    assert lab.run("down", "-y").returncode == 0


def list_fetched(lab: Lab) -> set[str]:
    """Return the names of the fetched jobs."""
    return {path.name for path in (lab.project / "runs").glob("*")}


@pytest.mark.prove
@pytest.mark.parametrize("replaced", [False, True], ids=["before up", "after up"])
def test_fetch_copies_the_results_of_the_other_node_and_names_the_lost_part(lab: Lab, replaced: bool) -> None:
    lab.script("saves.py", SAVES)
    before = lab.json("up", "--local", "--nodes", "2", "-y")["nodes"]
    assert lab.run("train", "saves.py", "--world-size", "2", "--name", "j", "--detach").returncode == 0
    while lab.jobs()[0]["state"] == "running":
        time.sleep(0.1)
    terminated = before[1]["instance_id"]
    ec2 = make_client(lab)
    ec2.terminate_instances(InstanceIds=[terminated])
    ec2.get_waiter("instance_terminated").wait(InstanceIds=[terminated], WaiterConfig={"Delay": 1})
    if replaced:
        after = lab.json("up", "-y")["nodes"]
        assert after[0]["instance_id"] == before[0]["instance_id"] != after[1]["instance_id"] != terminated
    lost = f"node1 ({terminated}) is gone; its part of job j is lost"

    listed = lab.run("jobs", "--json")
    assert (listed.returncode, json.loads(listed.stdout)["jobs"][0]["state"]) == (0, "succeeded")
    assert replaced or f"node1 ({terminated}) is gone" in listed.stderr
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
