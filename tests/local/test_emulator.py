"""The endpoint as any EC2 client sees it; no host boots here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awsddp.errors import LocalCloudError
from awsddp.local import control
from tests.support.local_cloud import Cloud, error_code_of


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"InstanceType": "p2.8xlarge"}, "Unsupported"),
        ({"InstanceType": "p2.9xlarge"}, "InvalidParameterValue"),
        ({"InstanceType": "g5g.xlarge"}, "InvalidParameterValue"),
        ({"Placement": {"AvailabilityZone": "us-east-1e"}}, "Unsupported"),
        ({"ImageId": "ami-12345678901234567"}, "InvalidAMIID.NotFound"),
        ({"ImageId": "nothing"}, "InvalidAMIID.Malformed"),
        ({"KeyName": "nothing"}, "InvalidKeyPair.NotFound"),
        ({"SecurityGroupIds": ["sg-12345678901234567"]}, "InvalidGroup.NotFound"),
        ({"SubnetId": "subnet-12345678901234567"}, "InvalidSubnetID.NotFound"),
        ({"MinCount": 3, "MaxCount": 2}, "InvalidParameterValue"),
        ({"UserData": "x" * 16385}, "InvalidParameterValue"),
        ({"DryRun": True}, "DryRunOperation"),
    ],
)
def test_a_launch_is_refused_as_ec2_refuses_it(records: Cloud, change: dict[str, Any], code: str) -> None:
    before = len(records.instances())
    assert error_code_of(records.client("ec2").run_instances, **records.request(**change)) == code
    assert len(records.instances()) == before


def test_a_retired_type_is_not_described(records: Cloud) -> None:
    describe = records.client("ec2").describe_instance_types
    assert error_code_of(describe, InstanceTypes=["p2.8xlarge"]) == "InvalidInstanceType"


def test_the_images_are_deep_learning_amis_with_rehearsed_gpus(records: Cloud) -> None:
    ec2 = records.client("ec2")
    name = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) *"
    images = ec2.describe_images(Owners=["898082745236"], Filters=[{"Name": "name", "Values": [name]}])[
        "Images"
    ]
    newest = max(images, key=lambda image: image["CreationDate"])
    assert newest["ImageId"] == records.image
    assert {tag["Key"]: tag["Value"] for tag in newest["Tags"]} == {
        "awsddp:gpus": "rehearsed",
        "awsddp:hosts": "none",
        "awsddp:internet": "none",
    }
    assert newest["RootDeviceName"] == "/dev/sda1"
    assert newest["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 75
    assert newest["EnaSupport"] is True


def test_another_user_is_another_owner(records: Cloud) -> None:
    iam = records.client("iam")
    iam.create_user(UserName="bob")
    key = iam.create_access_key(UserName="bob")["AccessKey"]
    bob = records.client(
        "sts", aws_access_key_id=key["AccessKeyId"], aws_secret_access_key=key["SecretAccessKey"]
    )
    ours = records.client("sts").get_caller_identity()["UserId"]
    assert bob.get_caller_identity()["UserId"] != ours
    assert records.client("sts").get_caller_identity()["UserId"] == ours


def test_the_same_token_launches_once(records: Cloud) -> None:
    ec2 = records.client("ec2")
    request = records.request(MinCount=2, MaxCount=2, ClientToken="once")
    first = [instance["InstanceId"] for instance in ec2.run_instances(**request)["Instances"]]
    again = [instance["InstanceId"] for instance in ec2.run_instances(**request)["Instances"]]
    assert again == first
    assert error_code_of(ec2.run_instances, **{**request, "MaxCount": 3}) == "IdempotentParameterMismatch"
    records.kill()
    assert [instance["InstanceId"] for instance in ec2.run_instances(**request)["Instances"]] == first
    ec2.terminate_instances(InstanceIds=first)
    assert error_code_of(ec2.run_instances, **request) == "IdempotentInstanceTerminated"


def test_a_group_in_use_cannot_be_deleted(records: Cloud) -> None:
    ec2 = records.client("ec2")
    group = ec2.create_security_group(GroupName="used", Description="-")["GroupId"]
    other = ec2.create_security_group(GroupName="other", Description="-")["GroupId"]
    pair = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=pair)
    ec2.authorize_security_group_ingress(GroupId=other, IpPermissions=pair)
    instance_id = ec2.run_instances(**records.request(SecurityGroupIds=[group]))["Instances"][0]["InstanceId"]
    assert error_code_of(ec2.delete_security_group, GroupId=group) == "DependencyViolation"
    [nic] = ec2.describe_network_interfaces(Filters=[{"Name": "group-id", "Values": [group]}])[
        "NetworkInterfaces"
    ]
    code = error_code_of(ec2.delete_network_interface, NetworkInterfaceId=nic["NetworkInterfaceId"])
    assert code == "InvalidNetworkInterface.InUse"
    ec2.terminate_instances(InstanceIds=[instance_id])
    records.wait("terminated", instance_id)
    assert error_code_of(ec2.delete_security_group, GroupId=group) == "DependencyViolation"
    ec2.delete_security_group(GroupId=other)
    ec2.delete_security_group(GroupId=group)


def test_addresses_of_two_regions_differ(records: Cloud) -> None:
    subnets = [
        subnet["CidrBlock"]
        for region in ("us-east-1", "eu-west-1")
        for subnet in records.client("ec2", region_name=region).describe_subnets()["Subnets"]
    ]
    assert len(subnets) > 6
    assert len(set(subnets)) == len(subnets)


def test_a_killed_daemon_keeps_its_resources_and_its_endpoint(records: Cloud) -> None:
    ec2 = records.client("ec2")
    instance_id = ec2.run_instances(**records.request())["Instances"][0]["InstanceId"]
    group = ec2.create_security_group(GroupName="kept", Description="-")["GroupId"]
    owner = records.client("sts").get_caller_identity()["UserId"]
    endpoint = records.info.endpoint
    records.kill()
    assert records.info.endpoint == endpoint
    assert records.wait("running", instance_id)
    assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["GroupName"] == "kept"
    assert records.client("sts").get_caller_identity()["UserId"] == owner
    assert (
        records.client("ec2").run_instances(**records.request())["Instances"][0]["PrivateIpAddress"]
        != (records.instances(instance_id)[0]["PrivateIpAddress"])
    )


def test_status_reports_endpoint_region_mode_and_instances(records: Cloud) -> None:
    instance_id = records.client("ec2").run_instances(**records.request())["Instances"][0]["InstanceId"]
    document = control.send_command(records.info)
    assert {name: document[name] for name in ("endpoint", "region", "mode")} == {
        "endpoint": records.info.endpoint,
        "region": "us-east-1",
        "mode": "records",
    }
    assert instance_id in [instance["instance_id"] for instance in document["instances"]]


def test_two_homes_have_two_clouds(records: Cloud, tmp_path: Path) -> None:
    other = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    try:
        assert other.info.endpoint != records.info.endpoint
        assert (
            error_code_of(other.client("ec2", endpoint_url=records.info.endpoint).describe_vpcs)
            == "AuthFailure"
        )
        assert other.instances() == []
    finally:
        control.stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_second_start_returns_the_same_cloud(records: Cloud) -> None:
    assert control.start(records.home, auto=True) == records.info
    assert control.find_cloud(records.home) == records.info
    with pytest.raises(LocalCloudError, match="records mode"):
        control.start(records.home, mode="loopback")


def test_find_and_stop_do_nothing_without_a_cloud(tmp_path: Path) -> None:
    assert control.find_cloud(tmp_path) is None
    control.stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.prove
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data[: len(data) // 2], id="cut"),
        pytest.param(lambda data: data.replace(b"awsddp.local.offers", b"awsddp.local.moved_"), id="moved"),
    ],
)
def test_start_refuses_an_unreadable_state_file_and_names_local_stop(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    """The file is truncated, or has classes that an older awsddp had elsewhere."""
    info = control.start(tmp_path, mode="records")
    assert info.pid is not None
    Cloud(tmp_path, info).client("ec2").create_placement_group(GroupName="group", Strategy="cluster")
    state = tmp_path / "local/state.pickle"
    data = state.read_bytes()
    control._end_daemon(control.CloudPaths(tmp_path))
    state.write_bytes(change(data))
    with pytest.raises(LocalCloudError, match="state cannot be used") as caught:
        control.start(tmp_path)
    assert str(state) in caught.value.why
    assert "awsddp local stop" in caught.value.next
    state.write_bytes(data)
    assert control.start(tmp_path).endpoint == info.endpoint
    control.stop(tmp_path)


def test_records_mode_launches_into_any_subnet(records: Cloud) -> None:
    ec2 = records.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="192.168.0.0/16")["Vpc"]["VpcId"]
    response = ec2.create_subnet(VpcId=vpc, CidrBlock="192.168.7.0/24", AvailabilityZone="us-east-1a")
    subnet = response["Subnet"]["SubnetId"]
    instance = ec2.run_instances(**records.request(SubnetId=subnet))["Instances"][0]
    assert instance["PrivateIpAddress"].startswith("192.168.7.")
