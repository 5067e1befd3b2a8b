"""Two commands on one cluster at once: each ends as it does alone, or names the command that holds it up."""

import random
import subprocess
import sys
from typing import Any

import boto3
import pytest

from awsddp.model.records import format_node_numbers
from awsddp.state import ClusterFolder
from benchmarks.campaigns import beside
from tests.support.lab import Lab
from tests.support.seed import SEED, draw_cases


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_two_commands_at_once_end_as_alone_or_name_the_other() -> None:
    with beside.laboratory() as laboratory:
        for number in draw_cases(range(len(beside.PAIRS)), 1, label="beside"):
            row = laboratory.run(number, random.Random(f"{SEED}/{number}"))
            assert row["ok"], row


def make_client(lab: Lab) -> Any:
    """Return an EC2 client of the lab's local cloud."""
    cloud = lab.json("local", "status")
    return boto3.client(
        "ec2",
        endpoint_url=cloud["endpoint"],
        region_name=cloud["region"],
        aws_access_key_id=cloud["access_key_id"],
        aws_secret_access_key=cloud["secret_access_key"],
    )


def launch_another(ec2: Any) -> str:
    """Launch a second node as `up --nodes 2` does, and return its id before it is prepared."""
    filters = [{"Name": "instance-state-name", "Values": ["running"]}]
    first = ec2.describe_instances(Filters=filters)["Reservations"][0]["Instances"][0]
    tags = [tag for tag in first["Tags"] if tag["Key"] != "awsddp:nodes"]
    launched = ec2.run_instances(
        ImageId=first["ImageId"],
        InstanceType=first["InstanceType"],
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[
            {
                "ResourceType": "instance",
                "Tags": [*tags, {"Key": "awsddp:nodes", "Value": format_node_numbers([1])}],
            }
        ],
    )
    return str(launched["Instances"][0]["InstanceId"])


@pytest.mark.prove
def test_a_node_that_is_listed_and_not_prepared_is_being_prepared_for_every_verb(records: Lab) -> None:
    assert records.run("up", "--local", "--nodes", "1", "-y").returncode == 0
    ec2 = make_client(records)
    instance_id = launch_another(ec2)
    records.script("train.py", "")
    verbs = (("exec", "true"), ("train", "train.py", "--on", "0"), ("ssh", "--node", "1"))
    with ClusterFolder(records.home, "default").lock("up"):
        for args in verbs:
            error = records.json(*args, code=6)["error"]
            assert "node1 is being prepared" in error["message"] + error["why"], args
            assert "`awsddp up` on" in error["why"], args
    ec2.stop_instances(InstanceIds=[instance_id])
    error = records.json("train", "train.py", "--on", "0", code=6)["error"]
    assert (error["why"], error["next"]) == ("node1 is stopped", "awsddp up   # finish it")
    assert records.run("down", "-y").returncode == 0


@pytest.mark.prove
@pytest.mark.parametrize("more", [("-o", "cluster.idle=40m"), ()], ids=["changed", "unchanged"])
def test_up_reports_that_another_command_stops_the_node_that_it_waits_for(
    lab: Lab, more: tuple[str, ...]
) -> None:
    assert lab.run("up", "--local", "--nodes", "1", "-o", "local.gpus=off", "-y").returncode == 0
    assert lab.run("local", "fault", "add", "node0", "cut").returncode == 0
    up = subprocess.Popen(
        [sys.executable, "-m", "awsddp", "up", *more, "-y"],
        cwd=lab.project,
        env=lab.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stderr is not None
    assert any("waiting for SSH" in line for line in up.stderr)
    filters = [{"Name": "instance-state-name", "Values": ["running"]}]
    [page] = make_client(lab).describe_instances(Filters=filters)["Reservations"]
    make_client(lab).stop_instances(InstanceIds=[page["Instances"][0]["InstanceId"]])
    _, stderr = up.communicate(timeout=120)
    assert up.returncode == 6
    assert "while it was started" in stderr
    assert "another command, here or elsewhere" in stderr
