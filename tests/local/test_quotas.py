"""Quotas, placement groups, network cards and what depends on what: where moto is no EC2."""

import pytest

from tests.local.conftest import Cloud, refusal

G_AND_VT = "L-DB2E81BA"


def test_a_launch_over_the_quota_is_refused_until_more_is_asked_for(records: Cloud) -> None:
    quotas, ec2 = records.client("service-quotas"), records.client("ec2", region_name="eu-west-1")
    here = records.client("service-quotas", region_name="eu-west-1")
    quota = here.get_service_quota(ServiceCode="ec2", QuotaCode=G_AND_VT)["Quota"]
    assert quota["QuotaName"] == "Running On-Demand G and VT instances"
    count = int(quota["Value"]) // 192 + 1
    images = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
    request = {
        "ImageId": images[0]["ImageId"],
        "InstanceType": "g5.48xlarge",
        "MinCount": count,
        "MaxCount": count,
    }
    assert refusal(ec2.run_instances, **request) == "VcpuLimitExceeded"
    asked = {"ServiceCode": "ec2", "QuotaCode": G_AND_VT, "DesiredValue": count * 192.0}
    assert here.request_service_quota_increase(**asked)["RequestedQuota"]["Status"] == "APPROVED"
    made = [one["InstanceId"] for one in ec2.run_instances(**request)["Instances"]]
    assert refusal(ec2.run_instances, **{**request, "MinCount": 1, "MaxCount": 1}) == "VcpuLimitExceeded"
    ec2.terminate_instances(InstanceIds=made)
    assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode=G_AND_VT)["Quota"]["Value"] == quota["Value"]


@pytest.mark.parametrize(
    ("instance_type", "spot", "code"),
    [
        ("p5.48xlarge", False, "L-417A185B"),
        ("p6-b200.48xlarge", True, "L-C4BD4855"),
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("gr6.4xlarge", False, "L-DB2E81BA"),
        ("g4dn.xlarge", True, "L-3819A6DF"),
        ("t3.micro", False, "L-1216C47A"),
        ("inf2.xlarge", False, None),
    ],
)
def test_a_type_counts_against_its_own_quota(instance_type: str, spot: bool, code: str | None) -> None:
    from awsddp.local.quotas import bucket_of

    bucket = bucket_of(instance_type, spot=spot)
    assert (bucket.code if bucket else None) == code


def test_an_unknown_quota_is_not_there(records: Cloud) -> None:
    get = records.client("service-quotas").get_service_quota
    assert refusal(get, ServiceCode="ec2", QuotaCode="L-00000000") == "NoSuchResourceException"


def test_a_placement_group_cannot_go_while_it_is_used(records: Cloud) -> None:
    ec2 = records.client("ec2")
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "mine", "Value": "1"}]}]
    made = ec2.create_placement_group(GroupName="near", Strategy="cluster", TagSpecifications=tags)
    assert made["PlacementGroup"]["State"] == "available"
    assert refusal(ec2.create_placement_group, GroupName="near") == "InvalidPlacementGroup.Duplicate"
    near = records.request(Placement={"GroupName": "near"})
    (one,) = ec2.run_instances(**near)["Instances"]
    by_group = [{"Name": "placement-group-name", "Values": ["near"]}]
    (page,) = ec2.describe_instances(Filters=by_group)["Reservations"]
    assert page["Instances"][0]["Placement"]["GroupName"] == "near"
    assert refusal(ec2.delete_placement_group, GroupName="near") == "InvalidPlacementGroup.InUse"
    ec2.terminate_instances(InstanceIds=[one["InstanceId"]])
    records.wait("terminated", one["InstanceId"])
    by_tag = [{"Name": "tag:mine", "Values": ["1"]}]
    assert [
        group["GroupName"] for group in ec2.describe_placement_groups(Filters=by_tag)["PlacementGroups"]
    ] == ["near"]
    ec2.delete_placement_group(GroupName="near")
    assert refusal(ec2.delete_placement_group, GroupName="near") == "InvalidPlacementGroup.Unknown"
    assert refusal(ec2.run_instances, **near) == "InvalidPlacementGroup.Unknown"


def test_instances_are_found_by_the_token_of_their_launch(records: Cloud) -> None:
    ec2 = records.client("ec2")
    made = ec2.run_instances(**records.request(ClientToken="found-by-it"))["Instances"][0]["InstanceId"]
    by_token = [{"Name": "client-token", "Values": ["found-by-it"]}]
    (page,) = ec2.describe_instances(Filters=by_token)["Reservations"]
    assert [one["InstanceId"] for one in page["Instances"]] == [made]


def test_each_network_card_keeps_its_interface(records: Cloud) -> None:
    ec2 = records.client("ec2")
    group = ec2.create_security_group(GroupName="cards", Description="-")["GroupId"]
    subnet = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1a"]}])[
        "Subnets"
    ][0]
    nics = [
        {
            "DeviceIndex": min(card, 1),
            "NetworkCardIndex": card,
            "SubnetId": subnet["SubnetId"],
            "Groups": [group],
            "InterfaceType": "efa",
        }
        for card in range(4)
    ]
    request = records.request(InstanceType="p4d.24xlarge", NetworkInterfaces=nics)
    (made,) = ec2.run_instances(**request)["Instances"]
    shown = [
        (nic["Attachment"]["NetworkCardIndex"], nic["Attachment"]["DeviceIndex"], nic["InterfaceType"])
        for nic in made["NetworkInterfaces"]
    ]
    assert shown == [(0, 0, "efa"), (1, 1, "efa"), (2, 1, "efa"), (3, 1, "efa")]
    assert len({nic["PrivateIpAddress"] for nic in made["NetworkInterfaces"]}) == 4
    assert "PublicIpAddress" not in made
    nics[0]["AssociatePublicIpAddress"] = True
    assert refusal(ec2.run_instances, **request) == "InvalidParameterCombination"
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
    records.wait("terminated", made["InstanceId"])
    ec2.delete_security_group(GroupId=group)


def test_a_network_goes_from_the_inside_out(records: Cloud) -> None:
    ec2 = records.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.200.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.200.1.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="inner", Description="-", VpcId=vpc)["GroupId"]
    nic = ec2.create_network_interface(SubnetId=subnet)["NetworkInterface"]["NetworkInterfaceId"]
    assert refusal(ec2.delete_subnet, SubnetId=subnet) == "DependencyViolation"
    assert refusal(ec2.delete_vpc, VpcId=vpc) == "DependencyViolation"
    ec2.delete_network_interface(NetworkInterfaceId=nic)
    ec2.delete_subnet(SubnetId=subnet)
    assert refusal(ec2.delete_vpc, VpcId=vpc) == "DependencyViolation"
    ec2.delete_security_group(GroupId=group)
    ec2.delete_vpc(VpcId=vpc)


def test_a_name_that_is_no_id_is_told_from_one_that_is_not_there(records: Cloud) -> None:
    describe = records.client("ec2").describe_instances
    assert refusal(describe, InstanceIds=["i-xyz"]) == "InvalidInstanceID.Malformed"
    assert refusal(describe, InstanceIds=["i-12345678901234567"]) == "InvalidInstanceID.NotFound"
