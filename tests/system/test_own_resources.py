"""Nodes of which nearly everything is the user's own: used by every verb, and afterwards as it was before."""

import ipaddress
import json
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from tests.support.lab import Lab
from tests.support.local_cloud import needs_root

SCRIPT = "import os; open('made.txt', 'w').write(os.environ['RANK']); print('here', flush=True)\n"


def clients(lab: Lab) -> dict[str, Any]:
    """Clients of the lab's local cloud, with nothing of ours."""
    told = json.loads(lab.run("--json", "local", "status").stdout)
    return {
        name: botocore.session.Session().create_client(
            name,
            region_name=told["region"],
            endpoint_url=told["endpoint"],
            aws_access_key_id=told["access_key_id"],
            aws_secret_access_key=told["secret_access_key"],
        )
        for name in ("ec2", "iam", "kms")
    }


def make_own(lab: Lab, made: dict[str, Any]) -> dict[str, str]:
    """Make a subnet, a group, a key pair, a role and a KMS key; return the settings that name them."""
    ec2 = made["ec2"]
    [default] = ec2.describe_vpcs()["Vpcs"]
    block = list(ipaddress.ip_network(default["CidrBlock"]).subnets(new_prefix=24))[-2]
    vpc = ec2.create_vpc(CidrBlock=str(block))["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=str(block), AvailabilityZone="us-east-1c")["Subnet"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    [table] = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
    ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    group = ec2.create_security_group(GroupName="own", Description="own", VpcId=vpc)["GroupId"]
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": default["CidrBlock"]}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[inside, ssh])
    key = lab.root / "my own" / "mine.pem"
    key.parent.mkdir()
    key.touch(mode=0o600)
    key.write_text(ec2.create_key_pair(KeyName="mine", KeyType="rsa")["KeyMaterial"])
    made["iam"].create_instance_profile(InstanceProfileName="trainers")
    disks = made["kms"].create_key()["KeyMetadata"]["KeyId"]
    made["kms"].create_alias(AliasName="alias/disks", TargetKeyId=disks)
    return {
        "network.subnet": subnet["SubnetId"],
        "network.security_group": group,
        "access.key_file": str(key),
        "access.user": "ubuntu",
        "access.instance_profile": "trainers",
        "access.kms_key": "alias/disks",
        "tags.team": "vision",
        "tags.cost centre": "4711",
    }


def everything(made: dict[str, Any], file: Path) -> list[Any]:
    """All that is in the account beside instances, as its owner sees it."""
    ec2 = made["ec2"]
    return [
        ec2.describe_vpcs()["Vpcs"],
        sorted(ec2.describe_subnets()["Subnets"], key=lambda one: str(one["SubnetId"])),
        sorted(ec2.describe_security_groups()["SecurityGroups"], key=lambda one: str(one["GroupId"])),
        ec2.describe_key_pairs(IncludePublicKey=True)["KeyPairs"],
        ec2.describe_volumes()["Volumes"],
        ec2.describe_placement_groups()["PlacementGroups"],
        ec2.describe_route_tables()["RouteTables"],
        made["iam"].list_instance_profiles()["InstanceProfiles"],
        made["kms"].list_aliases()["Aliases"],
        (file.read_text(), file.stat().st_mode, file.stat().st_mtime_ns),
    ]


@needs_root
@pytest.mark.prove
def test_what_is_the_users_own_is_used_and_left_as_it_was(lab: Lab, tmp_path: Path) -> None:
    assert lab.run("local", "start").returncode == 0
    made = clients(lab)
    settings = make_own(lab, made)
    file = Path(settings["access.key_file"])
    before = everything(made, file)
    asked = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    up = lab.json("up", "--local", "-y", "--nodes", "2", "--instance-type", "g4dn.xlarge", *asked)
    assert up["state"] == "ready"

    ids = [node["instance_id"] for node in up["nodes"]]
    pages = made["ec2"].describe_instances(InstanceIds=ids)["Reservations"]
    for one in (one for page in pages for one in page["Instances"]):
        tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
        assert (tags["team"], tags["cost centre"]) == ("vision", "4711")
        assert (one["KeyName"], one["SubnetId"]) == ("mine", settings["network.subnet"])
        assert [group["GroupId"] for group in one["SecurityGroups"]] == [settings["network.security_group"]]
        assert one["IamInstanceProfile"]["Arn"].endswith(":instance-profile/trainers")
    mine = [{"Name": "tag:awsddp:cluster", "Values": ["default"]}]
    volumes = made["ec2"].describe_volumes(Filters=mine)["Volumes"]
    assert [(volume["Encrypted"], volume["KmsKeyId"]) for volume in volumes] == [(True, "alias/disks")] * 2
    for found in (*volumes, *made["ec2"].describe_network_interfaces(Filters=mine)["NetworkInterfaces"]):
        assert {"team", "cost centre"} <= {tag["Key"] for tag in found.get("Tags", found.get("TagSet"))}

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    said = lab.run("exec", "whoami", cwd=elsewhere)
    assert sorted(said.stdout.splitlines()) == ["[node0] ubuntu", "[node1] ubuntu"], said.stderr
    lab.script("train.py", SCRIPT)
    job = lab.json("train", "train.py", "--name", "one")
    assert (job["state"], len(job["ranks"])) == ("succeeded", 2)
    assert lab.run("ssh", "--node", "1", "--", "whoami").stdout == "ubuntu\n"
    grown = lab.json("up", "-y", "--nodes", "3", cwd=elsewhere)
    assert [node["instance_id"] for node in grown["nodes"]][:2] == ids

    ended = lab.json("down", "-y", cwd=elsewhere)
    assert (len(ended["terminated"]), ended["leftovers"]) == (3, [])
    after = everything(made, file)
    for was, now in zip(before, after, strict=True):
        if was and isinstance(was, list) and "SubnetId" in was[0]:
            was, now = (
                [
                    {key: value for key, value in one.items() if key != "AvailableIpAddressCount"}
                    for one in some
                ]
                for some in (was, now)
            )
        assert now == was
