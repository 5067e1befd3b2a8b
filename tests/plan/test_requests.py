"""The requests of a plan, and their resolved parameters."""

import json
from datetime import UTC, datetime

import pytest

from awsddp.plan.records import plan_to_document, resource_names
from awsddp.plan.requests import RequestValues
from tests.support.plan_facts import plan

IDS = {
    **resource_names("demo", "0a1b2c3d"),
    "security_group": "sg-1",
    "subnet": "subnet-b",
    "client_token": "token",
}
SECRETS = {"user_data": "#cloud-config\n", "public_key": "ssh-ed25519 AAAA awsddp"}
NOW = datetime(2026, 11, 21, 8, 45, tzinfo=UTC)
TAGS = [
    {"Key": "awsddp:cluster", "Value": "demo"},
    {"Key": "awsddp:id", "Value": "0a1b2c3d"},
    {"Key": "awsddp:owner", "Value": "AIDAEXAMPLE"},
    {"Key": "awsddp:created", "Value": "2026-11-21T08:45:00Z"},
    {"Key": "team", "Value": "vision"},
]
NAME = {"Key": "Name", "Value": "awsddp-demo"}
INSIDE = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}


def test_requests_are_resolved_with_ids_secrets_and_times() -> None:
    values = RequestValues(ids=IDS, secrets=SECRETS, now=NOW)
    sent = map(values.resolve, plan(tags={"team": "vision"}).requests)
    assert [(item.operation, item.parameters) for item in sent] == [
        (
            "ImportKeyPair",
            {
                "KeyName": "awsddp-demo-0a1b2c3d",
                "PublicKeyMaterial": "ssh-ed25519 AAAA awsddp",
                "TagSpecifications": [{"ResourceType": "key-pair", "Tags": TAGS}],
            },
        ),
        (
            "CreateSecurityGroup",
            {
                "GroupName": "awsddp-demo-0a1b2c3d",
                "Description": "awsddp cluster demo",
                "VpcId": "vpc-1",
                "TagSpecifications": [{"ResourceType": "security-group", "Tags": TAGS}],
            },
        ),
        (
            "AuthorizeSecurityGroupIngress",
            {
                "GroupId": "sg-1",
                "IpPermissions": [
                    INSIDE,
                    {
                        "IpProtocol": "tcp",
                        "FromPort": 22,
                        "ToPort": 22,
                        "IpRanges": [{"CidrIp": "203.0.113.7/32"}],
                    },
                ],
            },
        ),
        ("AuthorizeSecurityGroupEgress", {"GroupId": "sg-1", "IpPermissions": [INSIDE]}),
        (
            "CreatePlacementGroup",
            {
                "GroupName": "awsddp-demo-0a1b2c3d",
                "Strategy": "cluster",
                "TagSpecifications": [{"ResourceType": "placement-group", "Tags": TAGS}],
            },
        ),
        (
            "RunInstances",
            {
                "ClientToken": "token",
                "ImageId": "ami-0123456789abcdef0",
                "InstanceType": "g6.48xlarge",
                "MinCount": 2,
                "MaxCount": 2,
                "KeyName": "awsddp-demo-0a1b2c3d",
                "UserData": "#cloud-config\n",
                "InstanceInitiatedShutdownBehavior": "terminate",
                "MetadataOptions": {
                    "HttpEndpoint": "enabled",
                    "HttpTokens": "required",
                    "HttpPutResponseHopLimit": 1,
                },
                "BlockDeviceMappings": [
                    {
                        "DeviceName": "/dev/sda1",
                        "Ebs": {
                            "VolumeSize": 200,
                            "VolumeType": "gp3",
                            "Encrypted": True,
                            "DeleteOnTermination": True,
                        },
                    }
                ],
                "NetworkInterfaces": [
                    {
                        "DeviceIndex": 0,
                        "SubnetId": "subnet-b",
                        "Groups": ["sg-1"],
                        "AssociatePublicIpAddress": True,
                        "DeleteOnTermination": True,
                    }
                ],
                "Placement": {"GroupName": "awsddp-demo-0a1b2c3d"},
                "TagSpecifications": [
                    {
                        "ResourceType": "instance",
                        "Tags": [
                            NAME,
                            *TAGS,
                            {"Key": "awsddp:nodes", "Value": "0,1"},
                            {"Key": "awsddp:expires", "Value": "2026-11-22T08:45:00Z"},
                        ],
                    },
                    {"ResourceType": "volume", "Tags": [NAME, *TAGS]},
                    {"ResourceType": "network-interface", "Tags": [NAME, *TAGS]},
                ],
            },
        ),
    ]


def test_the_document_is_json_and_has_no_secret() -> None:
    text = json.dumps(plan_to_document(plan()))
    made = json.loads(text)
    assert made["requests"][-1]["parameters"]["UserData"] == {"$secret": "user_data"}
    assert made["expires"] == {"$now": 86400}
    assert made["zones"] == ["us-east-1b", "us-east-1c"]
    assert set(made) >= {
        "cluster", "target", "region", "instance_type", "nodes", "gpus_per_node", "image", "zones",
        "requests", "choices", "price_usd_per_hour", "price_date", "expires", "warnings",
    }  # fmt: skip


def test_a_request_without_its_id_is_an_error() -> None:
    values = RequestValues(ids=resource_names("demo", "0a1b2c3d"), secrets=SECRETS, now=NOW)
    with pytest.raises(KeyError):
        list(map(values.resolve, plan().requests))
