"""Unsupported operations are refused by name; supported ones behave as on EC2. No host boots here."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from awsddp.local import offers, operations
from tests.local.test_ec2_http import send
from tests.support.local_cloud import Cloud, error_code_of, until


@pytest.fixture(scope="module")
def instance(records: Cloud) -> str:
    ec2 = records.client("ec2")
    new_id = ec2.run_instances(**records.request(InstanceType="g4dn.xlarge"))["Instances"][0]["InstanceId"]
    records.wait("running", new_id)
    return str(new_id)


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
        ("ec2", "modify_instance_metadata_options", {"InstanceId": "", "HttpEndpoint": "disabled"}),
        ("ec2", "request_spot_fleet", {"SpotFleetRequestConfig": {"IamFleetRole": "a", "TargetCapacity": 1}}),
        ("ec2", "request_spot_instances", {}),
        ("ec2", "describe_spot_instance_requests", {}),
        ("ec2", "create_launch_template", {"LaunchTemplateName": "a", "LaunchTemplateData": {}}),
        ("ec2", "allocate_address", {}),
        ("ec2", "create_volume", {"AvailabilityZone": "us-east-1a", "Size": 1}),
        ("ec2", "create_network_interface", {"SubnetId": "subnet-12345678"}),
        ("ec2", "modify_network_interface_attribute", {"NetworkInterfaceId": "eni-1", "Groups": ["sg-1"]}),
        ("ec2", "modify_security_group_rules", {"GroupId": "sg-1", "SecurityGroupRules": []}),
        (
            "ec2",
            "authorize_security_group_ingress",
            {
                "GroupId": "sg-1",
                "IpPermissions": [{"IpProtocol": "-1", "PrefixListIds": [{"PrefixListId": "pl-1"}]}],
            },
        ),
        ("sts", "get_session_token", {}),
        (
            "iam",
            "attach_role_policy",
            {"RoleName": "a", "PolicyArn": "arn:aws:iam::aws:policy/ReadOnlyAccess"},
        ),
    ],
)
def test_an_operation_without_effect_is_refused_by_name(
    records: Cloud, instance: str, service: str, operation: str, parameters: dict[str, Any]
) -> None:
    volume = records.client("ec2").describe_volumes()["Volumes"][0]["VolumeId"]
    ids: dict[str, Any] = {"InstanceId": instance, "InstanceIds": [instance], "VolumeId": volume}
    filled = {name: ids.get(name, value) for name, value in parameters.items()}
    name = "".join(part.title() for part in operation.split("_"))
    with pytest.raises(ClientError, match=f"The local cloud does not carry out (ssm:|sts:|iam:)?{name}"):
        getattr(records.client(service), operation)(**filled)


def disk(**changes: Any) -> dict[str, Any]:
    return {"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, **changes}}]}


@pytest.mark.parametrize(
    ("changes", "feature"),
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
        ({"Monitoring": {"Enabled": True}}, "Monitoring.Enabled"),
        ({"Placement": {"Tenancy": "dedicated"}}, "Placement.Tenancy"),
        ({"PrivateIpAddress": "10.77.0.9"}, "PrivateIpAddress"),
        ({"LaunchTemplate": {"LaunchTemplateName": "a"}}, "LaunchTemplate.LaunchTemplateName"),
        (disk(VolumeType="gp3", Iops=4000), "BlockDeviceMapping.Ebs.Iops"),
    ],
)
def test_a_launch_with_an_unsupported_feature_is_refused_by_name(
    records: Cloud, changes: dict[str, Any], feature: str
) -> None:
    with pytest.raises(ClientError, match=f"UnsupportedOperation.*{feature}"):
        records.client("ec2").run_instances(**records.request(**changes))


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        (disk(DeleteOnTermination=False), "BlockDeviceMapping.Ebs.DeleteOnTermination"),
        (disk(VolumeType="io2"), "BlockDeviceMapping.Ebs.VolumeType"),
        (
            {
                "InstanceMarketOptions": {
                    "MarketType": "spot",
                    "SpotOptions": {"SpotInstanceType": "persistent"},
                }
            },
            "Spot",
        ),
        (
            {"TagSpecifications": [{"ResourceType": "fleet", "Tags": [{"Key": "a", "Value": ""}]}]},
            "TagSpecif",
        ),
    ],
)
def test_a_launch_with_a_value_without_effect_is_refused_by_name(
    records: Cloud, changes: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(ClientError, match=f"InvalidParameterValue.*{parameter}"):
        records.client("ec2").run_instances(**records.request(**changes))


LISTS = sorted(name for name in operations.OPERATIONS["ec2"] if name.startswith("Describe"))


@pytest.mark.parametrize("operation", LISTS)
def test_an_unsupported_filter_is_refused_by_name(records: Cloud, operation: str) -> None:
    filters = {"Filter.1.Name": "no-such-filter", "Filter.1.Value.1": "x"}
    status, text = send(records, "POST", Action=operation, **filters)
    assert status == 400
    if operations.OPERATIONS["ec2"][operation].filters:
        assert "<Code>InvalidParameterValue</Code><Message>The filter 'no-such-filter' is invalid" in text
    else:
        assert f"does not carry out {operation} with Filter" in text


FILTERS = [
    (name, key) for name in LISTS for key in operations.OPERATIONS["ec2"][name].filters if key != "tag:"
]


@pytest.mark.parametrize(("operation", "name"), [*FILTERS, ("DescribeInstances", "tag:Name")])
def test_every_supported_filter_excludes_resources_that_do_not_match(
    records: Cloud, instance: str, operation: str, name: str
) -> None:
    filters = {"Filter.1.Name": name, "Filter.1.Value.1": "nothing-is-called-so"}
    options = {"LocationType": "availability-zone"} if "Offerings" in operation else {}
    status, text = send(records, "POST", Action=operation, **filters, **options)
    assert (status, "<item>" in text) == (200, False)


def test_a_filter_takes_wildcards_as_on_ec2(records: Cloud, instance: str) -> None:
    ec2 = records.client("ec2")
    ec2.create_key_pair(KeyName="a-key-of-mine")
    instance_id = ec2.run_instances(**records.request(KeyName="a-key-of-mine"))["Instances"][0]["InstanceId"]
    by_key = [{"Name": "key-name", "Values": ["a-key-*"]}]
    assert [pair["KeyName"] for pair in ec2.describe_key_pairs(Filters=by_key)["KeyPairs"]] == [
        "a-key-of-mine"
    ]
    (page,) = ec2.describe_instances(Filters=by_key)["Reservations"]
    assert [row["InstanceId"] for row in page["Instances"]] == [instance_id]
    ec2.terminate_instances(InstanceIds=[instance_id])


BEHAVIOUR = "instanceInitiatedShutdownBehavior"
CHANGES = [name for name in operations.OPERATIONS["ec2"] if not name.startswith(("Describe", "Get"))]


def describe_all(records: Cloud) -> str:
    """Return all that EC2 lists, without the request ids."""
    extra = {"DescribeInstanceTypeOfferings": {"LocationType": "region"}, "DescribeInstanceAttribute": None}
    calls = {name: extra.get(name, {}) for name in LISTS if "Spot" not in name and "InstanceType" not in name}
    texts = [
        send(records, "POST", Action=name, **values)[1]
        for name, values in calls.items()
        if values is not None
    ]
    return re.sub("<requestId>[^<]*", "", "".join(texts))


def test_a_dry_run_of_every_change_changes_nothing(records: Cloud, instance: str) -> None:
    ec2 = records.client("ec2")
    group = ec2.create_security_group(GroupName="dry", Description="-")["GroupId"]
    near = {"InstanceType": "g5.xlarge", "AvailabilityZone": "us-east-1a", "InstancePlatform": "Linux/UNIX"}
    reservation_id = ec2.create_capacity_reservation(**near, InstanceCount=1)["CapacityReservation"][
        "CapacityReservationId"
    ]
    ec2.create_placement_group(GroupName="dry", Strategy="cluster")
    launch = {"ImageId": records.image, "InstanceType": "g5.xlarge", "MinCount": "1", "MaxCount": "1"}
    stopped = ec2.run_instances(**records.request())["Instances"][0]["InstanceId"]
    records.wait("running", stopped)
    ec2.stop_instances(InstanceIds=[stopped])
    of_instance = {"InstanceId": instance, "Attribute": BEHAVIOUR, "Value": "terminate"}
    instance_ids, tag = {"InstanceId.1": instance}, {"ResourceId.1": instance, "Tag.1.Key": "dry"}
    parameters: dict[str, dict[str, str]] = {
        "RunInstances": launch,
        "StartInstances": instance_ids,
        "StopInstances": instance_ids,
        "RebootInstances": instance_ids,
        "TerminateInstances": instance_ids,
        "ModifyInstanceAttribute": of_instance,
        "ModifyInstancePlacement": {"InstanceId": stopped, "GroupName": "dry"},
        "CreateTags": tag,
        "DeleteTags": tag,
        "CreatePlacementGroup": {"GroupName": "dry-2"},
        "DeletePlacementGroup": {"GroupName": "dry"},
        "CreateKeyPair": {"KeyName": "dry"},
        "CreateSecurityGroup": {"GroupName": "dry-2", "GroupDescription": "-"},
        "DeleteSecurityGroup": {"GroupId": group},
        "CreateVpc": {"CidrBlock": "10.99.0.0/16"},
        "CreateCapacityReservation": {**near, "InstanceCount": "1"},
        "CancelCapacityReservation": {"CapacityReservationId": reservation_id},
    }
    settled = {"running", "stopped", "terminated"}
    until(lambda: {row["State"]["Name"] for row in records.instances()} <= settled)
    before = describe_all(records)
    for name in CHANGES:
        status, text = send(records, "POST", Action=name, DryRun="true", **parameters.get(name, {}))
        assert (status, "<Code>DryRunOperation</Code>" in text) == (412, True), f"{name}: {text}"
    assert describe_all(records) == before
    ec2.terminate_instances(InstanceIds=[stopped])
    ec2.cancel_capacity_reservation(CapacityReservationId=reservation_id)


def test_docs_local_lists_the_supported_operations() -> None:
    page = (Path(operations.__file__).parents[2] / "docs/local.md").read_text()
    rows = re.findall(
        r"^\| ([A-Z0-9]+) \| (.*) \|$", page.partition("## Supported operations")[2], re.MULTILINE
    )
    listed = {service: set(names.split(", ")) for service, names in rows}
    assert listed == {service.upper(): set(rows) for service, rows in operations.OPERATIONS.items()}


def test_systems_manager_has_parameters_of_images_of_ec2_only(records: Cloud) -> None:
    ssm = records.client("ssm")
    other = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
    assert error_code_of(ssm.get_parameter, Name=other) == "ParameterNotFound"
    names = [*offers.list_image_parameters(records.info.region)]
    response = ssm.get_parameters(Names=[*names, other])
    assert response["InvalidParameters"] == [other]
    assert [parameter["Name"] for parameter in response["Parameters"]] == names
    ids = [parameter["Value"] for parameter in response["Parameters"]]
    images = records.client("ec2").describe_images(ImageIds=ids)["Images"]
    assert {image["Architecture"] for image in images} == {"x86_64", "arm64"}
    assert len(images) == len(set(ids)) > 0


def test_only_the_shutdown_behavior_of_an_instance_can_be_changed(records: Cloud, instance: str) -> None:
    ec2 = records.client("ec2")
    target = {"InstanceId": instance, "Attribute": BEHAVIOUR}
    for value in ("terminate", "stop"):
        ec2.modify_instance_attribute(**target, Value=value)
        behavior = ec2.describe_instance_attribute(**target)["InstanceInitiatedShutdownBehavior"]
        assert behavior == {"Value": value}
    for wrong in ({"Value": "explode"}, {"Attribute": "instanceType", "Value": "m5.large"}):
        request = {**target, **wrong}
        assert error_code_of(ec2.modify_instance_attribute, **request) == "InvalidParameterValue"


def test_spot_prices_are_a_share_of_the_on_demand_price(records: Cloud) -> None:
    ec2 = records.client("ec2")
    request = {"InstanceTypes": ["g5.12xlarge", "m5.large"], "ProductDescriptions": ["Linux/UNIX"]}
    history = ec2.describe_spot_price_history(**request)["SpotPriceHistory"]
    prices: dict[str, list[float]] = {}
    for row in history:
        prices.setdefault(row["InstanceType"], []).append(float(row["SpotPrice"]))
    assert len(set(prices["g5.12xlarge"])) > 1
    assert all(0.3 * 5.672 < price < 0.6 * 5.672 for price in prices["g5.12xlarge"])
    assert all(0.02 < price < 0.06 for price in prices["m5.large"])


def test_spot_prices_change_each_day_and_are_listed_from_the_one_in_force_at_the_start(
    records: Cloud,
) -> None:
    def history(**options: Any) -> list[dict[str, Any]]:
        request = {"InstanceTypes": ["g5.12xlarge"], **options}
        listed = records.client("ec2").describe_spot_price_history(**request)["SpotPriceHistory"]
        return [row for row in listed if row["AvailabilityZone"] == "us-east-1a"]

    now = datetime.now(UTC)
    week = history(StartTime=now - timedelta(days=7))
    times = [row["Timestamp"] for row in week]
    assert times[-1] <= now - timedelta(days=7) < times[-2]
    assert times == sorted(times, reverse=True)
    assert len(week) == 8
    assert len({row["SpotPrice"] for row in week}) == 7
    assert {float(row["SpotPrice"]) for row in week} == {
        round(offers.price_usd_per_hour("g5.12xlarge", "us-east-1a", time.date()), 6) for time in times
    }
    [current] = history(StartTime=datetime.now(UTC))
    assert current["SpotPrice"] == week[0]["SpotPrice"]
    assert len(history()) == 91


def test_credentials_of_a_role_are_valid_only_with_their_token(records: Cloud) -> None:
    role = records.client("sts").assume_role(
        RoleArn="arn:aws:iam::123456789012:role/training", RoleSessionName="me"
    )["Credentials"]
    key = {"aws_access_key_id": role["AccessKeyId"], "aws_secret_access_key": role["SecretAccessKey"]}
    sts = records.client("sts", **key, aws_session_token=role["SessionToken"])
    assert sts.get_caller_identity()["Arn"].endswith("assumed-role/training/me")
    assert error_code_of(records.client("sts", **key).get_caller_identity) == "InvalidClientTokenId"


def test_an_endpoint_without_a_type_is_a_gateway_and_can_be_deleted(records: Cloud) -> None:
    ec2 = records.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    service = f"com.amazonaws.{records.info.region}.s3"
    request = {"VpcId": vpc, "ServiceName": service, "RouteTableIds": [table]}
    endpoint = ec2.create_vpc_endpoint(**request)["VpcEndpoint"]
    assert endpoint["VpcEndpointType"] == "Gateway"
    ids = [endpoint["VpcEndpointId"]]
    assert ec2.delete_vpc_endpoints(VpcEndpointIds=ids)["Unsuccessful"] == []
    ec2.delete_route_table(RouteTableId=table)
    ec2.delete_vpc(VpcId=vpc)
