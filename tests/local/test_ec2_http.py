"""Launches by GET and by POST are treated alike, and descriptions match the node."""

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

from tests.support.local_cloud import Cloud, error_code_of

BLOCK = ipaddress.IPv4Network("10.77.0.0/16")


def send(cloud: Cloud, method: str, **parameters: str) -> tuple[int, str]:
    """Send a signed EC2 request with its parameters in the URL (GET) or in the body (POST)."""
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


def launch_by_get(cloud: Cloud, name: str, **changes: str) -> None:
    parameters = {"ImageId": cloud.image, "InstanceType": "g5.xlarge", "MinCount": "1", "MaxCount": "1"}
    status, text = send(cloud, "GET", Action="RunInstances", **{**parameters, **changes})
    assert status == 200, text


def launch_by_post(cloud: Cloud, name: str, **changes: str) -> None:
    parameters = {"ImageId": cloud.image, "InstanceType": "g5.xlarge", "MinCount": "1", "MaxCount": "1"}
    status, text = send(cloud, "POST", Action="RunInstances", **{**parameters, **changes})
    assert status == 200, text


LAUNCHES = [launch_by_get, launch_by_post]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_launch_gets_an_address_in_the_block(records: Cloud, launch: Any) -> None:
    before = {instance["InstanceId"] for instance in records.instances()}
    launch(records, f"block-{launch.__name__}")
    (launched,) = [instance for instance in records.instances() if instance["InstanceId"] not in before]
    assert ipaddress.IPv4Address(launched["PrivateIpAddress"]) in BLOCK
    assert launched["InstanceType"] == "g5.xlarge"
    assert launched["SubnetId"] in {
        subnet["SubnetId"] for subnet in records.client("ec2").describe_subnets()["Subnets"]
    }


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_launch_refuses_an_unknown_type(records: Cloud, launch: Any) -> None:
    before = len(records.instances())
    with pytest.raises(Exception, match=r"Invalid value 't99\.micro' for InstanceType"):
        launch(records, f"type-{launch.__name__}", InstanceType="t99.micro")
    assert len(records.instances()) == before


def test_a_launch_without_disks_is_described_with_the_disk_of_its_image(records: Cloud) -> None:
    ec2 = records.client("ec2")
    (instance,) = ec2.run_instances(**records.request())["Instances"]
    filters = [{"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}]
    (disk,) = ec2.describe_volumes(Filters=filters)["Volumes"]
    assert (disk["Size"], disk["VolumeType"], disk["Encrypted"]) == (75, "gp3", False)
    assert disk["Attachments"][0]["Device"] == "/dev/sda1"
    (mapping,) = records.instances(instance["InstanceId"])[0]["BlockDeviceMappings"]
    assert mapping["Ebs"]["DeleteOnTermination"] is True
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])


@pytest.mark.parametrize(
    ("price", "code"), [("0.001", "SpotMaxPriceTooLow"), ("cheap", "InvalidParameterValue")]
)
def test_a_spot_price_below_the_market_price_launches_nothing(records: Cloud, price: str, code: str) -> None:
    ec2, before = records.client("ec2"), len(records.instances())
    market = {"MarketType": "spot", "SpotOptions": {"MaxPrice": price}}
    assert error_code_of(ec2.run_instances, **records.request(InstanceMarketOptions=market)) == code
    assert len(records.instances()) == before
    market["SpotOptions"] = {"MaxPrice": "50"}
    (instance,) = ec2.run_instances(**records.request(InstanceMarketOptions=market))["Instances"]
    assert records.instances(instance["InstanceId"])[0]["InstanceLifecycle"] == "spot"
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])


def test_an_unknown_action_is_refused(records: Cloud) -> None:
    status, text = send(records, "POST", Action="RunInstance")
    assert (status, "<Code>InvalidAction</Code>" in text) == (400, True)


def test_replies_have_the_names_and_request_ids_of_ec2(records: Cloud) -> None:
    request_ids = set()
    for method, action in (("GET", "DescribeInstances"), ("POST", "DescribeVpcs"), ("GET", "DescribeVpcs")):
        status, text = send(records, method, Action=action)
        assert status == 200
        assert f'<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">' in text
        request_ids.add(re.findall(r"<requestId>([0-9a-f-]{36})</requestId>", text)[0])
    refused = send(records, "GET", Action="DescribeVpcs", **{"VpcId.1": "vpc-12345678"})[1]
    request_ids |= set(re.findall(r"<RequestID>([0-9a-f-]{36})</RequestID>", refused))
    assert len(request_ids) == 4
