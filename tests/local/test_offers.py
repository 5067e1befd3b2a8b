"""Quotas, placement groups, network cards and dependencies, in which moto differs from EC2."""

import pytest
from botocore.exceptions import ClientError

from tests.support.local_cloud import Cloud, add_fault, clear_fault, error_code_of

NO_CAPACITY = "InsufficientInstanceCapacity"
G_AND_VT = "L-DB2E81BA"


def test_a_launch_over_the_quota_is_refused_until_the_quota_is_increased(records: Cloud) -> None:
    quotas, ec2 = records.client("service-quotas"), records.client("ec2", region_name="eu-west-1")
    regional = records.client("service-quotas", region_name="eu-west-1")
    quota = regional.get_service_quota(ServiceCode="ec2", QuotaCode=G_AND_VT)["Quota"]
    assert quota["QuotaName"] == "Running On-Demand G and VT instances"
    count = int(quota["Value"]) // 192 + 1
    images = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
    request = {
        "ImageId": images[0]["ImageId"],
        "InstanceType": "g5.48xlarge",
        "MinCount": count,
        "MaxCount": count,
    }
    assert error_code_of(ec2.run_instances, **request) == "VcpuLimitExceeded"
    increase = {"ServiceCode": "ec2", "QuotaCode": G_AND_VT, "DesiredValue": count * 192.0}
    assert regional.request_service_quota_increase(**increase)["RequestedQuota"]["Status"] == "APPROVED"
    instance_ids = [instance["InstanceId"] for instance in ec2.run_instances(**request)["Instances"]]
    assert (
        error_code_of(ec2.run_instances, **{**request, "MinCount": 1, "MaxCount": 1}) == "VcpuLimitExceeded"
    )
    ec2.terminate_instances(InstanceIds=instance_ids)
    assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode=G_AND_VT)["Quota"]["Value"] == quota["Value"]


def test_an_unknown_quota_is_not_found(records: Cloud) -> None:
    get = records.client("service-quotas").get_service_quota
    assert error_code_of(get, ServiceCode="ec2", QuotaCode="L-00000000") == "NoSuchResourceException"


def test_a_placement_group_in_use_cannot_be_deleted(records: Cloud) -> None:
    ec2 = records.client("ec2")
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "mine", "Value": "1"}]}]
    response = ec2.create_placement_group(GroupName="near", Strategy="cluster", TagSpecifications=tags)
    assert response["PlacementGroup"]["State"] == "available"
    [tag] = ec2.describe_tags(Filters=[{"Name": "resource-type", "Values": ["placement-group"]}])["Tags"]
    assert (tag["ResourceId"], tag["Key"]) == (response["PlacementGroup"]["GroupId"], "mine")
    assert error_code_of(ec2.create_placement_group, GroupName="near") == "InvalidPlacementGroup.Duplicate"
    near = records.request(Placement={"GroupName": "near"})
    (instance,) = ec2.run_instances(**near)["Instances"]
    assert records.instances(instance["InstanceId"])[0]["Placement"]["GroupName"] == "near"
    assert error_code_of(ec2.delete_placement_group, GroupName="near") == "InvalidPlacementGroup.InUse"
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    records.wait("terminated", instance["InstanceId"])
    by_tag = [{"Name": "tag:mine", "Values": ["1"]}]
    assert [
        group["GroupName"] for group in ec2.describe_placement_groups(Filters=by_tag)["PlacementGroups"]
    ] == ["near"]
    ec2.delete_placement_group(GroupName="near")
    assert error_code_of(ec2.delete_placement_group, GroupName="near") == "InvalidPlacementGroup.Unknown"
    assert error_code_of(ec2.run_instances, **near) == "InvalidPlacementGroup.Unknown"


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
            "InterfaceType": "efa-only" if card else "efa",
        }
        for card in range(4)
    ]
    request = records.request(InstanceType="p4d.24xlarge", NetworkInterfaces=nics)
    (instance,) = ec2.run_instances(**request)["Instances"]
    (instance,) = records.instances(instance["InstanceId"])
    attachments = [
        (nic["Attachment"]["NetworkCardIndex"], nic["Attachment"]["DeviceIndex"], nic["InterfaceType"])
        for nic in instance["NetworkInterfaces"]
    ]
    assert attachments == [(0, 0, "efa"), (1, 1, "efa-only"), (2, 1, "efa-only"), (3, 1, "efa-only")]
    assert ["PrivateIpAddress" in nic for nic in instance["NetworkInterfaces"]] == [True, False, False, False]
    assert "PublicIpAddress" not in instance
    nics[0]["AssociatePublicIpAddress"] = True
    assert error_code_of(ec2.run_instances, **request) == "InvalidParameterCombination"
    del nics[0]["AssociatePublicIpAddress"]
    nics[1]["InterfaceType"] = "efa"  # a second device of the node's network
    assert error_code_of(ec2.run_instances, **request) == "UnsupportedOperation"
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    records.wait("terminated", instance["InstanceId"])
    ec2.delete_security_group(GroupId=group)


def test_a_vpc_can_be_deleted_only_after_its_contents(records: Cloud) -> None:
    ec2 = records.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.200.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.200.1.0/24", AvailabilityZone="us-east-1a")["Subnet"][
        "SubnetId"
    ]
    group = ec2.create_security_group(GroupName="inner", Description="-", VpcId=vpc)["GroupId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    associated = ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)["AssociationId"]
    by_vpc = [{"Name": "vpc-id", "Values": [vpc]}]
    tables = {row["RouteTableId"]: row for row in ec2.describe_route_tables(Filters=by_vpc)["RouteTables"]}
    assert tables[table]["Associations"][0]["SubnetId"] == subnet
    assert tables[table]["Routes"][1]["GatewayId"] == gateway
    instance = ec2.run_instances(**records.request(SubnetId=subnet, SecurityGroupIds=[group]))["Instances"][0]
    assert error_code_of(ec2.delete_subnet, SubnetId=subnet) == "DependencyViolation"
    assert error_code_of(ec2.delete_vpc, VpcId=vpc) == "DependencyViolation"
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    records.wait("terminated", instance["InstanceId"])
    ec2.disassociate_route_table(AssociationId=associated)
    ec2.delete_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0")
    ec2.delete_route_table(RouteTableId=table)
    ec2.delete_subnet(SubnetId=subnet)
    ec2.detach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    ec2.delete_internet_gateway(InternetGatewayId=gateway)
    assert error_code_of(ec2.delete_vpc, VpcId=vpc) == "DependencyViolation"
    ec2.delete_security_group(GroupId=group)
    ec2.delete_vpc(VpcId=vpc)


def test_an_unknown_instance_is_not_found(records: Cloud) -> None:
    ec2 = records.client("ec2")
    for call in (ec2.describe_instances, ec2.start_instances, ec2.terminate_instances):
        assert error_code_of(call, InstanceIds=["i-12345678901234567"]) == "InvalidInstanceID.NotFound"


def test_a_fault_makes_a_placement_group_full_but_not_its_zone(records: Cloud) -> None:
    ec2 = records.client("ec2")
    ec2.create_placement_group(GroupName="full", Strategy="cluster")
    alone = records.request(InstanceType="g6.xlarge", Placement={"AvailabilityZone": "us-east-1a"})
    grouped = {**alone, "Placement": {**alone["Placement"], "GroupName": "full"}}
    (instance,) = ec2.run_instances(**grouped)["Instances"]
    key = instance["InstanceId"]
    records.wait("running", key)
    ec2.stop_instances(InstanceIds=[key])
    assert (
        error_code_of(ec2.modify_instance_placement, InstanceId=key, GroupName="") == "IncorrectInstanceState"
    )
    records.wait("stopped", key)
    for operation in ("RunInstances", "StartInstances"):
        add_fault(records.info, operation, NO_CAPACITY, only="placement-group")
    try:
        with pytest.raises(ClientError, match=r"sufficient g6\.xlarge capacity .* \(us-east-1a\)") as caught:
            ec2.start_instances(InstanceIds=[key])
        assert caught.value.response["Error"]["Code"] == NO_CAPACITY
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
        assert error_code_of(ec2.run_instances, **grouped) == NO_CAPACITY
        (other,) = ec2.run_instances(**alone)["Instances"]
        ec2.modify_instance_placement(InstanceId=key, GroupName="")
        ec2.start_instances(InstanceIds=[key])
    finally:
        clear_fault(records.info)
    assert records.instances(key)[0]["Placement"].get("GroupName", "") == ""
    ec2.terminate_instances(InstanceIds=[key, other["InstanceId"]])
    ec2.delete_placement_group(GroupName="full")
