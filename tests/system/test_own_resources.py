"""Nodes in a user's own subnet, group, key and role: all verbs use them, and `down` leaves them unchanged."""

import ipaddress
import json
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from tests.support.lab import Lab
from tests.support.local_cloud import needs_root

SCRIPT = "import os; open('made.txt', 'w').write(os.environ['RANK']); print('here', flush=True)\n"


def make_clients(lab: Lab) -> dict[str, Any]:
    """Return clients of the lab's local cloud that are independent of awsddp."""
    cloud = json.loads(lab.run("--json", "local", "status").stdout)
    return {
        name: botocore.session.Session().create_client(
            name,
            region_name=cloud["region"],
            endpoint_url=cloud["endpoint"],
            aws_access_key_id=cloud["access_key_id"],
            aws_secret_access_key=cloud["secret_access_key"],
        )
        for name in ("ec2", "iam", "kms")
    }


def create_resources(lab: Lab, aws: dict[str, Any]) -> dict[str, str]:
    """Create a subnet, a group, a key pair, a role and a KMS key; return the settings that name them."""
    ec2 = aws["ec2"]
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
    aws["iam"].create_instance_profile(InstanceProfileName="trainers")
    disks = aws["kms"].create_key()["KeyMetadata"]["KeyId"]
    aws["kms"].create_alias(AliasName="alias/disks", TargetKeyId=disks)
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


def list_resources(aws: dict[str, Any], file: Path) -> list[Any]:
    """Return all resources of the account but instances."""
    ec2 = aws["ec2"]
    return [
        ec2.describe_vpcs()["Vpcs"],
        sorted(ec2.describe_subnets()["Subnets"], key=lambda row: str(row["SubnetId"])),
        sorted(ec2.describe_security_groups()["SecurityGroups"], key=lambda row: str(row["GroupId"])),
        ec2.describe_key_pairs(IncludePublicKey=True)["KeyPairs"],
        ec2.describe_volumes()["Volumes"],
        ec2.describe_placement_groups()["PlacementGroups"],
        ec2.describe_route_tables()["RouteTables"],
        aws["iam"].list_instance_profiles()["InstanceProfiles"],
        aws["kms"].list_aliases()["Aliases"],
        (file.read_text(), file.stat().st_mode, file.stat().st_mtime_ns),
    ]


@needs_root
@pytest.mark.prove
def test_resources_of_the_user_are_used_and_left_unchanged(lab: Lab, tmp_path: Path) -> None:
    assert lab.run("local", "start").returncode == 0
    aws = make_clients(lab)
    settings = create_resources(lab, aws)
    file = Path(settings["access.key_file"])
    before = list_resources(aws, file)
    options = [text for key, value in settings.items() for text in ("-o", f"{key}={value}")]
    up = lab.json("up", "--local", "-y", "--nodes", "2", "--instance-type", "g4dn.xlarge", *options)
    assert up["state"] == "ready"

    ids = [node["instance_id"] for node in up["nodes"]]
    pages = aws["ec2"].describe_instances(InstanceIds=ids)["Reservations"]
    for node in (node for page in pages for node in page["Instances"]):
        tags = {tag["Key"]: tag["Value"] for tag in node["Tags"]}
        assert (tags["team"], tags["cost centre"]) == ("vision", "4711")
        assert (node["KeyName"], node["SubnetId"]) == ("mine", settings["network.subnet"])
        assert [group["GroupId"] for group in node["SecurityGroups"]] == [settings["network.security_group"]]
        assert node["IamInstanceProfile"]["Arn"].endswith(":instance-profile/trainers")
    mine = [{"Name": "tag:awsddp:cluster", "Values": ["default"]}]
    volumes = aws["ec2"].describe_volumes(Filters=mine)["Volumes"]
    assert [(volume["Encrypted"], volume["KmsKeyId"]) for volume in volumes] == [(True, "alias/disks")] * 2
    for resource in (*volumes, *aws["ec2"].describe_network_interfaces(Filters=mine)["NetworkInterfaces"]):
        assert {"team", "cost centre"} <= {tag["Key"] for tag in resource.get("Tags", resource.get("TagSet"))}

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    result = lab.run("exec", "whoami", cwd=elsewhere)
    assert sorted(result.stdout.splitlines()) == ["[node0] ubuntu", "[node1] ubuntu"], result.stderr
    lab.script("train.py", SCRIPT)
    job = lab.json("train", "train.py", "--name", "one")
    assert (job["state"], len(job["ranks"])) == ("succeeded", 2)
    assert lab.run("ssh", "--node", "1", "--", "whoami").stdout == "ubuntu\n"
    grown = lab.json("up", "-y", "--nodes", "3", cwd=elsewhere)
    assert [node["instance_id"] for node in grown["nodes"]][:2] == ids

    ended = lab.json("down", "-y", cwd=elsewhere)
    assert (len(ended["terminated"]), ended["leftovers"]) == (3, [])
    after = list_resources(aws, file)
    for was, now in zip(before, after, strict=True):
        if was and isinstance(was, list) and "SubnetId" in was[0]:
            was, now = (
                [
                    {key: value for key, value in subnet.items() if key != "AvailableIpAddressCount"}
                    for subnet in subnets
                ]
                for subnets in (was, now)
            )
        assert now == was
