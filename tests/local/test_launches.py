"""Every operation and encoding that launches takes one path: the same checks, an address in the block."""

import base64
import ipaddress
import re
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.local.conftest import Cloud, refusal

BLOCK = ipaddress.IPv4Network("10.77.0.0/16")


def send(cloud: Cloud, method: str, **parameters: str) -> tuple[int, str]:
    """One signed call of EC2, its parameters in the URL (GET) or in the body (POST)."""
    text = urlencode({"Version": "2016-11-15", **parameters})
    url = f"{cloud.info.endpoint}/" + (f"?{text}" if method == "GET" else "")
    body = text.encode() if method == "POST" else None
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if body else {}
    request = AWSRequest(method, url, headers=headers, data=body)
    key = Credentials(cloud.info.access_key_id, cloud.info.secret_access_key)
    SigV4Auth(key, "ec2", cloud.info.region).add_auth(request)
    prepared = request.prepare()
    call = urllib.request.Request(url, data=body, method=method, headers=dict(prepared.headers.items()))
    try:
        with urllib.request.urlopen(call, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def template(cloud: Cloud, name: str, **data: Any) -> dict[str, Any]:
    ec2 = cloud.client("ec2")
    made = ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    return {"LaunchTemplateId": made["LaunchTemplate"]["LaunchTemplateId"]}


def by_get(cloud: Cloud, name: str, **changes: str) -> None:
    wanted = {"ImageId": cloud.image, "InstanceType": "g5.xlarge", "MinCount": "1", "MaxCount": "1"}
    status, text = send(cloud, "GET", Action="RunInstances", **{**wanted, **changes})
    assert status == 200, text


def with_empty_subnet(cloud: Cloud, name: str, **changes: str) -> None:
    wanted = {"ImageId": cloud.image, "InstanceType": "g5.xlarge", "MinCount": "1", "MaxCount": "1"}
    empty = {"SubnetId": "", "KeyName": "", "Placement.GroupName": "", "PrivateIpAddress": ""}
    status, text = send(cloud, "POST", Action="RunInstances", **{**wanted, **empty, **changes})
    assert status == 200, text


def by_spot_request(cloud: Cloud, name: str, **changes: str) -> None:
    specification = {"ImageId": cloud.image, "InstanceType": "g5.xlarge", **changes}
    cloud.client("ec2").request_spot_instances(LaunchSpecification=specification)


def by_fleet(cloud: Cloud, name: str, **changes: str) -> None:
    chosen = template(cloud, name, **{"ImageId": cloud.image, "InstanceType": "g5.xlarge", **changes})
    cloud.client("ec2").create_fleet(
        LaunchTemplateConfigs=[{"LaunchTemplateSpecification": {**chosen, "Version": "$Latest"}}],
        TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        Type="instant",
    )


def by_template(cloud: Cloud, name: str, **changes: str) -> None:
    chosen = template(cloud, name, **{"ImageId": cloud.image, "InstanceType": "g5.xlarge", **changes})
    cloud.client("ec2").run_instances(LaunchTemplate=chosen, MinCount=1, MaxCount=1)


WAYS = [by_get, with_empty_subnet, by_spot_request, by_fleet, by_template]


@pytest.mark.parametrize("launch", WAYS)
def test_every_launch_gets_an_address_in_the_block(records: Cloud, launch: Any) -> None:
    before = {one["InstanceId"] for one in records.instances()}
    launch(records, f"block-{launch.__name__}")
    (made,) = [one for one in records.instances() if one["InstanceId"] not in before]
    assert ipaddress.IPv4Address(made["PrivateIpAddress"]) in BLOCK
    assert made["InstanceType"] == "g5.xlarge"
    assert made["SubnetId"] in {
        one["SubnetId"] for one in records.client("ec2").describe_subnets()["Subnets"]
    }


@pytest.mark.parametrize("launch", WAYS)
def test_every_launch_refuses_a_type_that_is_none(records: Cloud, launch: Any) -> None:
    before = len(records.instances())
    with pytest.raises(Exception, match=r"Invalid value 't99\.micro' for InstanceType"):
        launch(records, f"type-{launch.__name__}", InstanceType="t99.micro")
    assert len(records.instances()) == before


def test_a_template_gives_all_that_it_says(records: Cloud) -> None:
    ec2 = records.client("ec2")
    group = ec2.create_security_group(GroupName="templated", Description="-")["GroupId"]
    chosen = template(
        records,
        "whole",
        ImageId=records.image,
        InstanceType="g5.xlarge",
        SecurityGroupIds=[group],
        InstanceInitiatedShutdownBehavior="terminate",
        UserData=base64.b64encode(b"#!/bin/sh\n").decode(),
        TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "team", "Value": "a"}]}],
    )
    ec2.create_launch_template_version(
        **chosen, SourceVersion="1", LaunchTemplateData={"InstanceType": "g5.2xlarge"}
    )
    second = {**chosen, "Version": "2"}
    (made,) = ec2.run_instances(LaunchTemplate=second, MinCount=1, MaxCount=1)["Instances"]
    assert (made["InstanceType"], made["SecurityGroups"][0]["GroupId"]) == ("g5.2xlarge", group)
    assert made["Tags"] == [{"Key": "team", "Value": "a"}]
    for attribute, value in {
        "instanceInitiatedShutdownBehavior": "terminate",
        "userData": base64.b64encode(b"#!/bin/sh\n").decode(),
    }.items():
        found = ec2.describe_instance_attribute(InstanceId=made["InstanceId"], Attribute=attribute)
        assert found[attribute[0].upper() + attribute[1:]]["Value"] == value
    missing = {"LaunchTemplateName": "none"}
    code = refusal(ec2.run_instances, LaunchTemplate=missing, MinCount=1, MaxCount=1)
    assert code == "InvalidLaunchTemplateName.NotFoundException"


def test_a_fleet_tries_its_options_in_turn_and_ends_with_its_machines(records: Cloud) -> None:
    ec2 = records.client("ec2")
    chosen = {**template(records, "fleet", ImageId=records.image), "Version": "$Default"}
    types = [{"InstanceType": name} for name in ("p2.8xlarge", "g5.xlarge")]
    configs = [{"LaunchTemplateSpecification": chosen, "Overrides": types}]
    wanted = {"TotalTargetCapacity": 3, "OnDemandTargetCapacity": 2, "DefaultTargetCapacityType": "spot"}
    asked = {"LaunchTemplateConfigs": configs, "TargetCapacitySpecification": wanted, "ClientToken": "fleet"}
    made = ec2.create_fleet(**asked, Type="instant")
    assert [error["ErrorCode"] for error in made["Errors"]] == ["Unsupported"] * 2
    counts = {one["Lifecycle"]: len(one["InstanceIds"]) for one in made["Instances"]}
    assert counts == {"on-demand": 2, "spot": 1}
    assert ec2.create_fleet(**asked, Type="instant")["Instances"] == made["Instances"]  # the same token
    ids = {one for item in made["Instances"] for one in item["InstanceIds"]}
    listed = ec2.describe_fleet_instances(FleetId=made["FleetId"])["ActiveInstances"]
    assert {one["InstanceId"] for one in listed} == ids
    ec2.delete_fleets(FleetIds=[made["FleetId"]], TerminateInstances=True)
    records.wait("terminated", *ids)
    assert refusal(ec2.create_fleet, **{**asked, "ClientToken": "other"}) == "UnsupportedOperation"


def test_a_spot_request_names_its_instance(records: Cloud) -> None:
    ec2 = records.client("ec2")
    specification = {"ImageId": records.image, "InstanceType": "g5.xlarge", "Placement": {}}
    requests = ec2.request_spot_instances(InstanceCount=2, LaunchSpecification=specification)
    ids = [one["SpotInstanceRequestId"] for one in requests["SpotInstanceRequests"]]
    found = ec2.describe_spot_instance_requests(SpotInstanceRequestIds=ids)["SpotInstanceRequests"]
    instances = records.instances(*[one["InstanceId"] for one in found])
    assert {one["InstanceLifecycle"] for one in instances} == {"spot"}
    assert [one["SpotInstanceRequestId"] for one in instances] == ids
    ec2.terminate_instances(InstanceIds=[one["InstanceId"] for one in instances])


@pytest.mark.parametrize(
    ("address", "code"),
    [("10.0.0.9", "InvalidParameterValue"), ("no address", "InvalidParameterValue"), ("", None)],
)
def test_a_private_address_is_one_of_the_subnet(records: Cloud, address: str, code: str | None) -> None:
    ec2 = records.client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]
    if code:
        asked = records.request(SubnetId=subnet["SubnetId"], PrivateIpAddress=address)
        assert refusal(ec2.run_instances, **asked) == code
        return
    chosen = str(ipaddress.IPv4Network(subnet["CidrBlock"])[200])
    asked = records.request(InstanceType="g4dn.xlarge", SubnetId=subnet["SubnetId"], PrivateIpAddress=chosen)
    made = ec2.run_instances(**asked)["Instances"][0]
    assert made["PrivateIpAddress"] == chosen
    assert refusal(ec2.run_instances, **asked) == "InvalidIPAddress.InUse"
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])


def test_replies_are_named_and_numbered_as_ec2s(records: Cloud) -> None:
    seen = set()
    for method, action in (("GET", "DescribeInstances"), ("POST", "DescribeVpcs"), ("GET", "DescribeVpcs")):
        status, text = send(records, method, Action=action)
        assert status == 200
        assert f'<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">' in text
        seen.add(re.findall(r"<requestId>([0-9a-f-]{36})</requestId>", text)[0])
    refused = send(records, "GET", Action="DescribeVpcs", **{"VpcId.1": "vpc-12345678"})[1]
    seen |= set(re.findall(r"<RequestID>([0-9a-f-]{36})</RequestID>", refused))
    assert len(seen) == 4
