"""The aws command line as a witness: what `up` creates, and that `down` deletes this and nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from awsddp.cluster.down import down
from awsddp.cluster.inventory import down_orphans
from awsddp.cluster.stop import stop
from awsddp.cluster.up import up
from tests.support.world import REGION, World, agree, tags

AWS = Path(sys.executable).with_name("aws")
pytestmark = [pytest.mark.prove, pytest.mark.skipif(not AWS.exists(), reason="awscli is not installed")]
# The kinds of resources, and the key of their ids.
KINDS = {
    "instances": "InstanceId",
    "security-groups": "GroupId",
    "key-pairs": "KeyName",
    "volumes": "VolumeId",
    "placement-groups": "GroupName",
    "network-interfaces": "NetworkInterfaceId",
}
Resources = dict[str, dict[str, Any]]


def list_resources(world: World) -> Resources:
    """Return all resources of the account by kind and id, without default groups and terminated instances."""
    info = world.cloud.info
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(world.root),
        "AWS_PAGER": "",
        "AWS_ENDPOINT_URL": info.endpoint,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": info.access_key_id,
        "AWS_SECRET_ACCESS_KEY": info.secret_access_key,
    }

    def describe(kind: str) -> dict[str, Any]:
        line = [str(AWS), "ec2", f"describe-{kind}", "--output=json"]
        result = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        [rows] = (value for value in json.loads(result.stdout).values() if isinstance(value, list))
        items = [node for page in rows for node in page["Instances"]] if kind == "instances" else rows
        return {item[KINDS[kind]]: item for item in items if _is_relevant(item)}

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(KINDS, pool.map(describe, KINDS), strict=True))


def _is_relevant(item: dict[str, Any]) -> bool:
    state = item.get("State")
    return item.get("GroupName") != "default" and not (
        isinstance(state, dict) and state["Name"] == "terminated"
    )


def test_aws_lists_what_up_created_and_nothing_after_down(world: World) -> None:
    assert world.run(up, confirm=agree).code == 0
    resources = list_resources(world)
    count = {kind: len(items) for kind, items in resources.items()}
    each, alone = (
        ("instances", "volumes", "network-interfaces"),
        ("security-groups", "key-pairs", "placement-groups"),
    )
    assert count == {**dict.fromkeys(each, 2), **dict.fromkeys(alone, 1)}
    [owned] = {
        tuple(tags(item)[f"awsddp:{name}"] for name in ("cluster", "id", "owner"))
        for items in resources.values()
        for item in items.values()
    }
    assert (owned[0], owned[2]) == ("demo", world.cloud.client("sts").get_caller_identity()["UserId"])
    name = f"awsddp-demo-{owned[1]}"
    [group], [key], [near] = (resources[kind].values() for kind in alone)
    assert {group["GroupName"], key["KeyName"], near["GroupName"]} == {name}
    rules = {rule["IpProtocol"]: rule for rule in group["IpPermissions"]}
    assert [pair["GroupId"] for pair in rules["-1"]["UserIdGroupPairs"]] == [group["GroupId"]]
    assert [block["CidrIp"] for block in rules["tcp"]["IpRanges"]] == ["203.0.113.7/32"]
    assert (rules["tcp"]["FromPort"], rules["tcp"]["ToPort"], len(rules)) == (22, 22, 2)
    assert (key["KeyType"], near["Strategy"]) == ("ed25519", "cluster")
    for node in resources["instances"].values():
        assert (node["State"]["Name"], node["KeyName"]) == ("running", name)
        assert node["Placement"]["GroupName"] == name
        assert [held["GroupId"] for held in node["SecurityGroups"]] == [group["GroupId"]]
        assert {"Name", "awsddp:nodes", "awsddp:expires", "awsddp:created"} <= set(tags(node))
    assert all(disk["Encrypted"] for disk in resources["volumes"].values())
    assert world.run(down, confirm=agree).code == 0
    assert list_resources(world) == {kind: {} for kind in KINDS}


def create_foreign(world: World, name: str, marks: dict[str, str]) -> None:
    """Create an instance, a group, a key and a placement group with this name and these tags."""
    ec2 = world.cloud.ec2

    def make_tags(*kinds: str) -> list[dict[str, Any]]:
        pairs = [{"Key": key, "Value": value} for key, value in marks.items()]
        return [{"ResourceType": kind, "Tags": pairs} for kind in kinds]

    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.create_security_group(
        GroupName=name, Description="theirs", VpcId=vpc, TagSpecifications=make_tags("security-group")
    )["GroupId"]
    ec2.create_key_pair(KeyName=name, TagSpecifications=make_tags("key-pair"))
    ec2.create_placement_group(
        GroupName=name, Strategy="cluster", TagSpecifications=make_tags("placement-group")
    )
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ec2.run_instances(
        ImageId=image,
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
        KeyName=name,
        SecurityGroupIds=[group],
        Placement={"GroupName": name},
        TagSpecifications=make_tags("instance", "volume", "network-interface"),
    )


def test_foreign_resources_stay_with_any_name_and_tags(world: World) -> None:
    assert world.run(up, confirm=agree).code == 0
    ours = list_resources(world)
    mine = tags(world.cloud.live_instances()[0])
    other = {"awsddp:owner": "AIDASOMEBODYELSE"}
    by_hand = {key: text for key, text in mine.items() if key != "awsddp:id"}
    names_and_tags: tuple[tuple[str, dict[str, str]], ...] = (
        ("awsddp-demo-11111111", {**mine, **other, "awsddp:id": "11111111"}),
        (f"awsddp-demo-{mine['awsddp:id']}-copied", {**mine, **other}),
        ("awsddp-demo-2-22222222", {**mine, "awsddp:cluster": "demo-2", "awsddp:id": "22222222"}),
        ("awsddp-demo", by_hand),
        ("awsddp-demo-33333333", {"Name": "awsddp-demo"}),
    )
    for name, marks in names_and_tags:
        create_foreign(world, name, marks)
    theirs = {
        kind: {key: item for key, item in items.items() if key not in ours[kind]}
        for kind, items in list_resources(world).items()
    }
    assert {kind: len(items) for kind, items in theirs.items()} == dict.fromkeys(KINDS, len(names_and_tags))
    elsewhere = world.root / "elsewhere"
    steps: tuple[tuple[Callable[..., dict[str, Any]], dict[str, Any]], ...] = (
        (up, {"nodes": 3}),
        (stop, {}),
        (up, {"nodes": 1}),
        (down_orphans, {}),
        (down, {"home": elsewhere}),
    )
    for verb, choices in steps:
        outcome = world.run(verb, confirm=agree, **choices)
        assert outcome.code == 0, outcome.text
    assert list_resources(world) == theirs
