"""The endpoint as any EC2 client sees it; no host boots here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awsddp.errors import LocalCloudError
from awsddp.local import control
from tests.support.local_cloud import Cloud, refusal


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
    assert refusal(records.client("ec2").run_instances, **records.request(**change)) == code
    assert len(records.instances()) == before


def test_a_type_that_is_gone_is_not_described(records: Cloud) -> None:
    describe = records.client("ec2").describe_instance_types
    assert refusal(describe, InstanceTypes=["p2.8xlarge"]) == "InvalidInstanceType"


def test_the_images_are_deep_learning_amis_with_rehearsed_gpus(records: Cloud) -> None:
    ec2 = records.client("ec2")
    name = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) *"
    found = ec2.describe_images(Owners=["898082745236"], Filters=[{"Name": "name", "Values": [name]}])[
        "Images"
    ]
    newest = max(found, key=lambda image: image["CreationDate"])
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
    first = [one["InstanceId"] for one in ec2.run_instances(**request)["Instances"]]
    again = [one["InstanceId"] for one in ec2.run_instances(**request)["Instances"]]
    assert again == first
    assert refusal(ec2.run_instances, **{**request, "MaxCount": 3}) == "IdempotentParameterMismatch"
    records.kill()
    assert [one["InstanceId"] for one in ec2.run_instances(**request)["Instances"]] == first
    ec2.terminate_instances(InstanceIds=first)
    assert refusal(ec2.run_instances, **request) == "IdempotentInstanceTerminated"


def test_a_group_in_use_cannot_be_deleted(records: Cloud) -> None:
    ec2 = records.client("ec2")
    group = ec2.create_security_group(GroupName="used", Description="-")["GroupId"]
    other = ec2.create_security_group(GroupName="other", Description="-")["GroupId"]
    pair = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=pair)
    ec2.authorize_security_group_ingress(GroupId=other, IpPermissions=pair)
    made = ec2.run_instances(**records.request(SecurityGroupIds=[group]))["Instances"][0]["InstanceId"]
    assert refusal(ec2.delete_security_group, GroupId=group) == "DependencyViolation"
    [nic] = ec2.describe_network_interfaces(Filters=[{"Name": "group-id", "Values": [group]}])[
        "NetworkInterfaces"
    ]
    code = refusal(ec2.delete_network_interface, NetworkInterfaceId=nic["NetworkInterfaceId"])
    assert code == "InvalidNetworkInterface.InUse"
    ec2.terminate_instances(InstanceIds=[made])
    records.wait("terminated", made)
    assert refusal(ec2.delete_security_group, GroupId=group) == "DependencyViolation"
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


def test_a_killed_daemon_goes_on_where_it_was(records: Cloud) -> None:
    ec2 = records.client("ec2")
    made = ec2.run_instances(**records.request())["Instances"][0]["InstanceId"]
    group = ec2.create_security_group(GroupName="kept", Description="-")["GroupId"]
    owner = records.client("sts").get_caller_identity()["UserId"]
    endpoint = records.info.endpoint
    records.kill()
    assert records.info.endpoint == endpoint
    assert records.wait("running", made)
    assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["GroupName"] == "kept"
    assert records.client("sts").get_caller_identity()["UserId"] == owner
    assert (
        records.client("ec2").run_instances(**records.request())["Instances"][0]["PrivateIpAddress"]
        != (records.instances(made)[0]["PrivateIpAddress"])
    )


def test_status_is_the_document_of_the_design(records: Cloud) -> None:
    made = records.client("ec2").run_instances(**records.request())["Instances"][0]["InstanceId"]
    document = control.send_command(records.info)
    assert {name: document[name] for name in ("endpoint", "region", "mode")} == {
        "endpoint": records.info.endpoint,
        "region": "us-east-1",
        "mode": "records",
    }
    assert made in [one["instance_id"] for one in document["instances"]]


def test_two_homes_have_two_clouds(records: Cloud, tmp_path: Path) -> None:
    other = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    try:
        assert other.info.endpoint != records.info.endpoint
        assert refusal(other.client("ec2", endpoint_url=records.info.endpoint).describe_vpcs) == "AuthFailure"
        assert other.instances() == []
    finally:
        control.stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_start_again_is_the_same_cloud(records: Cloud) -> None:
    assert control.start(records.home, auto=True) == records.info
    assert control.find_cloud(records.home) == records.info
    with pytest.raises(LocalCloudError, match="records mode"):
        control.start(records.home, mode="loopback")


def test_there_is_none_where_none_was_started(tmp_path: Path) -> None:
    assert control.find_cloud(tmp_path) is None
    control.stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.prove
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda whole: whole[: len(whole) // 2], id="cut"),
        pytest.param(lambda whole: whole.replace(b"awsddp.local.offers", b"awsddp.local.moved_"), id="moved"),
    ],
)
def test_a_state_file_that_cannot_be_read_says_what_to_do(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    """It is cut, or an awsddp wrote it whose classes have moved since."""
    info = control.start(tmp_path, mode="records")
    assert info.pid is not None
    Cloud(tmp_path, info).client("ec2").create_placement_group(GroupName="group", Strategy="cluster")
    state = tmp_path / "local/state.pickle"
    whole = state.read_bytes()
    control._end_daemon(control.CloudPaths(tmp_path))
    state.write_bytes(change(whole))
    with pytest.raises(LocalCloudError, match="state cannot be used") as caught:
        control.start(tmp_path)
    assert str(state) in caught.value.why
    assert "awsddp local stop" in caught.value.next
    state.write_bytes(whole)
    assert control.start(tmp_path).endpoint == info.endpoint
    control.stop(tmp_path)


def test_in_records_mode_any_subnet_will_do(records: Cloud) -> None:
    ec2 = records.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="192.168.0.0/16")["Vpc"]["VpcId"]
    made = ec2.create_subnet(VpcId=vpc, CidrBlock="192.168.7.0/24", AvailabilityZone="us-east-1a")
    subnet = made["Subnet"]["SubnetId"]
    made = ec2.run_instances(**records.request(SubnetId=subnet))["Instances"][0]
    assert made["PrivateIpAddress"].startswith("192.168.7.")
