"""The aws command line as witness: what `up` makes, that nothing of it is left, that others' things stay."""

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
from tests.support.world import REGION, World, tags, yes

AWS = Path(sys.executable).with_name("aws")
pytestmark = [pytest.mark.prove, pytest.mark.skipif(not AWS.exists(), reason="awscli is not installed")]
# What is looked at, and by which of its keys it is told apart.
KINDS = {
    "instances": "InstanceId",
    "security-groups": "GroupId",
    "key-pairs": "KeyName",
    "volumes": "VolumeId",
    "placement-groups": "GroupName",
    "network-interfaces": "NetworkInterfaceId",
}
Seen = dict[str, dict[str, Any]]


def look(world: World) -> Seen:
    """Return all that the account holds, but the default groups and what is terminated, by kind and id."""
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

    def ask(kind: str) -> dict[str, Any]:
        line = [str(AWS), "ec2", f"describe-{kind}", "--output=json"]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        [found] = (value for value in json.loads(done.stdout).values() if isinstance(value, list))
        items = [one for page in found for one in page["Instances"]] if kind == "instances" else found
        return {item[KINDS[kind]]: item for item in items if _counts(item)}

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(KINDS, pool.map(ask, KINDS), strict=True))


def _counts(item: dict[str, Any]) -> bool:
    state = item.get("State")
    return item.get("GroupName") != "default" and not (
        isinstance(state, dict) and state["Name"] == "terminated"
    )


def test_the_witness_sees_what_up_made_and_nothing_after_down(world: World) -> None:
    assert world.run(up, confirm=yes).code == 0
    seen = look(world)
    count = {kind: len(found) for kind, found in seen.items()}
    each, alone = (
        ("instances", "volumes", "network-interfaces"),
        ("security-groups", "key-pairs", "placement-groups"),
    )
    assert count == {**dict.fromkeys(each, 2), **dict.fromkeys(alone, 1)}
    [owned] = {
        tuple(tags(item)[f"awsddp:{name}"] for name in ("cluster", "id", "owner"))
        for found in seen.values()
        for item in found.values()
    }
    assert (owned[0], owned[2]) == ("demo", world.cloud.client("sts").get_caller_identity()["UserId"])
    name = f"awsddp-demo-{owned[1]}"
    [group], [key], [near] = (seen[kind].values() for kind in alone)
    assert {group["GroupName"], key["KeyName"], near["GroupName"]} == {name}
    rules = {rule["IpProtocol"]: rule for rule in group["IpPermissions"]}
    assert [pair["GroupId"] for pair in rules["-1"]["UserIdGroupPairs"]] == [group["GroupId"]]
    assert [one["CidrIp"] for one in rules["tcp"]["IpRanges"]] == ["203.0.113.7/32"]
    assert (rules["tcp"]["FromPort"], rules["tcp"]["ToPort"], len(rules)) == (22, 22, 2)
    assert (key["KeyType"], near["Strategy"]) == ("ed25519", "cluster")
    for one in seen["instances"].values():
        assert (one["State"]["Name"], one["KeyName"]) == ("running", name)
        assert one["Placement"]["GroupName"] == name
        assert [held["GroupId"] for held in one["SecurityGroups"]] == [group["GroupId"]]
        assert {"Name", "awsddp:nodes", "awsddp:expires", "awsddp:created"} <= set(tags(one))
    assert all(disk["Encrypted"] for disk in seen["volumes"].values())
    assert world.run(down, confirm=yes).code == 0
    assert look(world) == {kind: {} for kind in KINDS}


def foreign(world: World, name: str, marks: dict[str, str]) -> None:
    """Make an instance with a group, a key and a placement group of such a name, tagged so."""
    ec2 = world.cloud.ec2

    def tagged(*kinds: str) -> list[dict[str, Any]]:
        pairs = [{"Key": key, "Value": value} for key, value in marks.items()]
        return [{"ResourceType": kind, "Tags": pairs} for kind in kinds]

    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.create_security_group(
        GroupName=name, Description="theirs", VpcId=vpc, TagSpecifications=tagged("security-group")
    )["GroupId"]
    ec2.create_key_pair(KeyName=name, TagSpecifications=tagged("key-pair"))
    ec2.create_placement_group(
        GroupName=name, Strategy="cluster", TagSpecifications=tagged("placement-group")
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
        TagSpecifications=tagged("instance", "volume", "network-interface"),
    )


def test_what_is_not_ours_stays_whatever_its_names_and_tags(world: World) -> None:
    assert world.run(up, confirm=yes).code == 0
    ours = look(world)
    mine = tags(world.cloud.living()[0])
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
        foreign(world, name, marks)
    theirs = {
        kind: {key: item for key, item in found.items() if key not in ours[kind]}
        for kind, found in look(world).items()
    }
    assert {kind: len(found) for kind, found in theirs.items()} == dict.fromkeys(KINDS, len(names_and_tags))
    elsewhere = world.root / "elsewhere"
    steps: tuple[tuple[Callable[..., dict[str, Any]], dict[str, Any]], ...] = (
        (up, {"nodes": 3}),
        (stop, {}),
        (up, {"nodes": 1}),
        (down_orphans, {}),
        (down, {"home": elsewhere}),
    )
    for verb, choices in steps:
        outcome = world.run(verb, confirm=yes, **choices)
        assert outcome.code == 0, outcome.told
    assert look(world) == theirs
