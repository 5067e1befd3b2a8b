"""What is not carried out is refused by name; what is carried out does what EC2 does. No host boots here."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from awsddp.cli.plan_page import _node_line
from awsddp.local import market
from tests.local.conftest import Cloud, refusal


@pytest.fixture(scope="module")
def instance(records: Cloud) -> str:
    ec2 = records.client("ec2")
    made = ec2.run_instances(**records.request(InstanceType="g4dn.xlarge"))["Instances"][0]["InstanceId"]
    records.wait("running", made)
    return str(made)


@pytest.mark.parametrize(
    ("service", "operation", "parameters"),
    [
        ("ssm", "send_command", {"InstanceIds": [], "DocumentName": "AWS-RunShellScript"}),
        ("ec2", "create_image", {"InstanceId": "", "Name": "copy"}),
        ("ec2", "attach_volume", {"InstanceId": "", "VolumeId": "", "Device": "/dev/sdf"}),
        ("ec2", "modify_volume", {"VolumeId": "", "Size": 500}),
        ("ec2", "create_snapshot", {"VolumeId": ""}),
        ("ec2", "create_nat_gateway", {"SubnetId": "subnet-12345678"}),
        ("ec2", "modify_instance_attribute", {"InstanceId": "", "SourceDestCheck": {"Value": False}}),
        ("ec2", "request_spot_fleet", {"SpotFleetRequestConfig": {"IamFleetRole": "a", "TargetCapacity": 1}}),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(
    records: Cloud, instance: str, service: str, operation: str, parameters: dict[str, Any]
) -> None:
    volume = records.client("ec2").describe_volumes()["Volumes"][0]["VolumeId"]
    ids: dict[str, Any] = {"InstanceId": instance, "InstanceIds": [instance], "VolumeId": volume}
    filled = {name: ids.get(name, value) for name, value in parameters.items()}
    name = "".join(word.title() for word in operation.split("_"))
    with pytest.raises(ClientError, match=f"The local cloud does not carry out (ssm:)?{name}"):
        getattr(records.client(service), operation)(**filled)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {
                "BlockDeviceMappings": [
                    {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100}},
                    {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 10}},
                ]
            },
            "more than one EBS volume",
        ),
        ({"HibernationOptions": {"Configured": True}}, "HibernationOptions.Configured"),
        ({"CpuOptions": {"CoreCount": 1, "ThreadsPerCore": 1}}, "CpuOptions.CoreCount"),
    ],
)
def test_a_launch_with_what_no_node_has_is_refused_by_name(
    records: Cloud, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ClientError, match=f"UnsupportedOperation.*{named}"):
        records.client("ec2").run_instances(**records.request(**changes))


def shown(records: Cloud, instance: str, attribute: str) -> Any:
    ec2 = records.client("ec2")
    found = ec2.describe_instance_attribute(InstanceId=instance, Attribute=attribute)
    return found.get(attribute[0].upper() + attribute[1:], found.get("Groups"))


def test_both_forms_of_an_attribute_change_it_and_nothing_else(records: Cloud, instance: str) -> None:
    ec2 = records.client("ec2")
    groups = shown(records, instance, "groupSet")
    name = "instanceInitiatedShutdownBehavior"
    ec2.modify_instance_attribute(InstanceId=instance, Attribute=name, Value="terminate")
    assert shown(records, instance, name) == {"Value": "terminate"}
    ec2.modify_instance_attribute(InstanceId=instance, InstanceInitiatedShutdownBehavior={"Value": "stop"})
    assert shown(records, instance, name) == {"Value": "stop"}
    assert groups and shown(records, instance, "groupSet") == groups
    wrong = {"InstanceInitiatedShutdownBehavior": {"Value": "explode"}}
    assert refusal(ec2.modify_instance_attribute, InstanceId=instance, **wrong) == "InvalidParameterValue"


def test_groups_of_an_instance_are_those_of_its_interface(records: Cloud, instance: str) -> None:
    ec2 = records.client("ec2")
    group = ec2.create_security_group(GroupName="instead", Description="-")["GroupId"]
    ec2.modify_instance_attribute(InstanceId=instance, Groups=[group])
    (found,) = records.instances(instance)
    assert [one["GroupId"] for one in found["NetworkInterfaces"][0]["Groups"]] == [group]
    assert [one["GroupId"] for one in found["SecurityGroups"]] == [group]
    unknown = {"InstanceId": instance, "Groups": ["sg-12345678901234567"]}
    assert refusal(ec2.modify_instance_attribute, **unknown) == "InvalidGroup.NotFound"


def test_a_type_changes_when_the_instance_is_stopped(records: Cloud) -> None:
    ec2 = records.client("ec2")
    made = ec2.run_instances(**records.request(InstanceType="g4dn.xlarge"))["Instances"][0]["InstanceId"]
    change = {"InstanceId": made, "InstanceType": {"Value": "g5.xlarge"}}
    assert refusal(ec2.modify_instance_attribute, **change) == "IncorrectInstanceState"
    records.wait("running", made)
    ec2.stop_instances(InstanceIds=[made])
    records.wait("stopped", made)
    none = {**change, "InstanceType": {"Value": "t99.micro"}}
    assert refusal(ec2.modify_instance_attribute, **none) == "InvalidParameterValue"
    ec2.modify_instance_attribute(**change)
    assert records.instances(made)[0]["InstanceType"] == "g5.xlarge"
    ec2.terminate_instances(InstanceIds=[made])


@pytest.mark.parametrize("domain", ["standard", "vpc", None])
def test_an_elastic_address_is_in_the_block_whatever_its_domain(
    records: Cloud, instance: str, domain: str | None
) -> None:
    ec2 = records.client("ec2")
    made = ec2.allocate_address(**({"Domain": domain} if domain else {}))
    assert made["PublicIp"].startswith("10.77.255.")
    assert made["Domain"] == "vpc"
    ec2.associate_address(InstanceId=instance, AllocationId=made["AllocationId"])
    assert records.instances(instance)[0]["PublicIpAddress"] == made["PublicIp"]
    ec2.disassociate_address(
        AssociationId=ec2.describe_addresses(AllocationIds=[made["AllocationId"]])["Addresses"][0][
            "AssociationId"
        ]
    )
    ec2.release_address(AllocationId=made["AllocationId"])


def test_an_elastic_address_moves_with_its_association(records: Cloud, instance: str) -> None:
    ec2 = records.client("ec2")
    other = ec2.run_instances(**records.request(InstanceType="g4dn.xlarge"))["Instances"][0]["InstanceId"]
    records.wait("running", other)
    made = ec2.allocate_address()
    for one in (other, instance):
        ec2.associate_address(InstanceId=one, AllocationId=made["AllocationId"])
    assert records.instances(instance)[0]["PublicIpAddress"] == made["PublicIp"]
    assert records.instances(other)[0].get("PublicIpAddress") != made["PublicIp"]
    second = {"AllocationId": made["AllocationId"], "InstanceId": other, "AllowReassociation": False}
    assert refusal(ec2.associate_address, **second) == "Resource.AlreadyAssociated"
    ec2.associate_address(InstanceId=other, AllocationId=made["AllocationId"])
    ec2.terminate_instances(InstanceIds=[other])
    records.wait("terminated", other)
    (found,) = ec2.describe_addresses(AllocationIds=[made["AllocationId"]])["Addresses"]
    assert "AssociationId" not in found
    ec2.release_address(AllocationId=made["AllocationId"])


def test_spot_prices_are_a_share_of_the_on_demand_price(records: Cloud) -> None:
    ec2 = records.client("ec2")
    asked = {"InstanceTypes": ["g5.12xlarge", "m5.large"], "ProductDescriptions": ["Linux/UNIX"]}
    history = ec2.describe_spot_price_history(**asked)["SpotPriceHistory"]
    prices: dict[str, list[float]] = {}
    for one in history:
        prices.setdefault(one["InstanceType"], []).append(float(one["SpotPrice"]))
    assert len(set(prices["g5.12xlarge"])) > 1
    assert all(0.3 * 5.672 < price < 0.6 * 5.672 for price in prices["g5.12xlarge"])
    assert all(0.02 < price < 0.06 for price in prices["m5.large"])
    zone = ec2.describe_spot_price_history(**asked, AvailabilityZone="us-east-1a")["SpotPriceHistory"]
    assert {one["AvailabilityZone"] for one in zone} == {"us-east-1a"}


def test_spot_prices_change_each_day_and_are_listed_from_the_one_in_force_at_the_start(
    records: Cloud,
) -> None:
    ec2 = records.client("ec2")
    asked = {"InstanceTypes": ["g5.12xlarge"], "AvailabilityZone": "us-east-1a"}
    now = datetime.now(UTC)
    week = ec2.describe_spot_price_history(**asked, StartTime=now - timedelta(days=7))["SpotPriceHistory"]
    times = [one["Timestamp"] for one in week]
    assert times[-1] <= now - timedelta(days=7) < times[-2]
    assert times == sorted(times, reverse=True)
    assert len(week) == 8
    assert len({one["SpotPrice"] for one in week}) == 7
    assert {float(one["SpotPrice"]) for one in week} == {
        round(market.price_usd_per_hour("g5.12xlarge", "us-east-1a", time.date()), 6) for time in times
    }
    [current] = ec2.describe_spot_price_history(**asked, StartTime=datetime.now(UTC))["SpotPriceHistory"]
    assert current["SpotPrice"] == week[0]["SpotPrice"]
    days = {"StartTime": now - timedelta(days=5), "EndTime": now - timedelta(days=3)}
    assert ec2.describe_spot_price_history(**asked, **days)["SpotPriceHistory"] == week[3:6]
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        **asked, StartTime=now - timedelta(days=7), MaxResults=3
    )
    assert [len(page["SpotPriceHistory"]) for page in pages] == [3, 3, 2]
    stamp = {"Name": "timestamp", "Values": [times[2].strftime("%Y-%m-%dT00:00:00.000Z")]}
    assert ec2.describe_spot_price_history(**asked, Filters=[stamp])["SpotPriceHistory"] == [week[2]]
    assert len(ec2.describe_spot_price_history(**asked)["SpotPriceHistory"]) == 91
    assert refusal(ec2.describe_spot_price_history, NextToken="x") == "InvalidParameterValue"


def test_a_roles_credentials_are_valid_with_their_token_alone(records: Cloud) -> None:
    role = records.client("sts").assume_role(
        RoleArn="arn:aws:iam::123456789012:role/training", RoleSessionName="me"
    )["Credentials"]
    key = {"aws_access_key_id": role["AccessKeyId"], "aws_secret_access_key": role["SecretAccessKey"]}
    sts = records.client("sts", **key, aws_session_token=role["SessionToken"])
    assert sts.get_caller_identity()["Arn"].endswith("assumed-role/training/me")
    assert refusal(records.client("sts", **key).get_caller_identity) == "InvalidClientTokenId"


def test_a_plan_of_a_type_without_gpus_says_so() -> None:
    facts = {"gpus_per_node": 0, "gpu": "", "gpu_memory_gb": 0, "pretended": True, "rehearsed": False}
    machine = {"vcpus": 2, "memory_gb": 8, "network_gbit": "<=10", "disk_gb": 200}
    assert _node_line({**facts, **machine}) == "no GPU, 2 vCPUs, 8 GiB, <=10 Gbit/s, 200 GB disk"
