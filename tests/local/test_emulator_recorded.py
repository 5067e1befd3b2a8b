"""Answers of the local cloud have the names and types of AWS in every field that awsddp reads."""

from collections.abc import Iterator
from typing import Any

import pytest

from awsddp.local import control
from tests.support.local_cloud import Cloud
from tests.support.recordings import PARSERS, Replay, read_fields

ROLE = {"RoleName": "recorded"}
PROFILE = {"InstanceProfileName": "recorded"}
PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
)
NOT_LOCAL = {"GetProducts"}  # a rehearsal is free, and shows the prices of the table


def make_tags(*kinds: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": "awsddp:nodes", "Value": "0,1"}]} for kind in kinds]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Yield a local cloud for this module only, so that its resources need no cleanup."""
    home = tmp_path_factory.mktemp("recorded")
    yield Cloud(home, control.start(home, mode="records"))
    control.stop(home)


@pytest.fixture(scope="module")
def answers(cloud: Cloud) -> dict[str, Any]:
    """Return the answers of the local cloud by operation, with a resource of each kind."""
    ec2, iam, kms = (cloud.client(service) for service in ("ec2", "iam", "kms"))
    policy = '{"Version": "2012-10-17", "Statement": []}'
    role = iam.create_role(**ROLE, AssumeRolePolicyDocument=policy)["Role"]["Arn"]
    iam.create_instance_profile(**PROFILE)
    iam.add_role_to_instance_profile(**ROLE, **PROFILE)
    responses: dict[str, Any] = {
        "DescribeVpcs": (vpcs := ec2.describe_vpcs()),
        "DescribeSubnets": (subnets := ec2.describe_subnets()),
        "DescribeRegions": ec2.describe_regions(),
    }
    vpc, subnet = vpcs["Vpcs"][0]["VpcId"], subnets["Subnets"][0]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet["SubnetId"])
    responses["DescribeRouteTables"] = ec2.describe_route_tables()
    service = f"com.amazonaws.{cloud.info.region}.s3"
    endpoint = ec2.create_vpc_endpoint(VpcId=vpc, ServiceName=service, RouteTableIds=[table])["VpcEndpoint"][
        "VpcEndpointId"
    ]
    group = ec2.create_security_group(
        GroupName="recorded", Description="recorded", VpcId=vpc, TagSpecifications=make_tags("security-group")
    )["GroupId"]
    from_group = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    from_office = {"IpRanges": [{"CidrIp": "203.0.113.0/24"}], "Ipv6Ranges": [{"CidrIpv6": "2001:db8::/32"}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[from_group, {**ssh, **from_office}])
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIzv1Tq0QkZ1mYJ8b3hRzj8n8l0Xo9o3c1kqk5m2m7aN recorded"
    ec2.import_key_pair(
        KeyName="recorded", PublicKeyMaterial=key.encode(), TagSpecifications=make_tags("key-pair")
    )
    ec2.create_placement_group(
        GroupName="recorded", Strategy="cluster", TagSpecifications=make_tags("placement-group")
    )
    reserved = ec2.create_capacity_reservation(
        InstanceType="g6.xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone=subnet["AvailabilityZone"],
        InstanceCount=1,
        EndDateType="limited",
        EndDate="2099-01-01T00:00:00Z",
    )["CapacityReservation"]["CapacityReservationId"]
    responses["RunInstances"] = ec2.run_instances(
        **cloud.request(InstanceType="g4dn.xlarge", MinCount=2, MaxCount=2),
        KeyName="recorded",
        Placement={"GroupName": "recorded"},
        IamInstanceProfile={"Name": "recorded"},
        NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": subnet["SubnetId"], "Groups": [group]}],
        TagSpecifications=make_tags("instance", "volume", "network-interface"),
    )
    ids = [instance["InstanceId"] for instance in responses["RunInstances"]["Instances"]]
    cloud.wait("running", *ids)
    filters = [{"Name": "tag:awsddp:nodes", "Values": ["0,1"]}]
    responses |= {
        "DescribeVpcEndpoints": ec2.describe_vpc_endpoints(VpcEndpointIds=[endpoint]),
        "DescribeInstanceStatus": ec2.describe_instance_status(InstanceIds=ids),
        "DescribeNetworkInterfaces": ec2.describe_network_interfaces(Filters=filters),
        "DescribeVolumes": ec2.describe_volumes(Filters=filters),
        "DescribeSecurityGroups": ec2.describe_security_groups(GroupIds=[group]),
        "DescribeKeyPairs": ec2.describe_key_pairs(KeyNames=["recorded"]),
        "DescribePlacementGroups": ec2.describe_placement_groups(GroupNames=["recorded"]),
        "DescribeCapacityReservations": ec2.describe_capacity_reservations(CapacityReservationIds=[reserved]),
        "DescribeInstanceTypes": ec2.describe_instance_types(
            InstanceTypes=["g6f.xlarge", "g7e.12xlarge", "p6-b300.48xlarge", "p4d.24xlarge"]
        ),
        "DescribeInstanceTypeOfferings": ec2.describe_instance_type_offerings(),
        "DescribeImages": ec2.describe_images(),
        "DescribeSpotPriceHistory": ec2.describe_spot_price_history(InstanceTypes=["g6.xlarge"]),
        "GetParameters": cloud.client("ssm").get_parameters(Names=[PARAMETER]),
        "GetServiceQuota": cloud.client("service-quotas").get_service_quota(
            ServiceCode="ec2", QuotaCode="L-DB2E81BA"
        ),
        "GetCallerIdentity": cloud.client("sts").get_caller_identity(),
        "GetInstanceProfile": iam.get_instance_profile(**PROFILE),
        "SimulatePrincipalPolicy": iam.simulate_principal_policy(
            PolicySourceArn=role, ActionNames=["s3:PutObject"], ResourceArns=["arn:aws:s3:::runs/a"]
        ),
        "DescribeKey": kms.describe_key(KeyId=kms.create_key()["KeyMetadata"]["KeyId"]),
    }
    ec2.stop_instances(InstanceIds=ids)
    cloud.wait("stopped", *ids)
    responses["DescribeInstances"] = ec2.describe_instances(InstanceIds=ids)
    return responses


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay()


def collect_types(answer: Any, path: tuple[str, ...]) -> set[type]:
    """Return the types of the values that an answer has at a path, in any item of its lists."""
    if isinstance(answer, list):
        return {kind for item in answer for kind in collect_types(item, path)}
    if not path:
        return {type(answer)}
    return collect_types(answer[path[0]], path[1:]) if path[0] in answer else set()


@pytest.mark.parametrize("names", PARSERS, ids=lambda names: names[-1])
def test_the_local_cloud_answers_every_field_that_awsddp_reads(
    answers: dict[str, Any], replay: Replay, names: tuple[str, ...]
) -> None:
    fields = read_fields(replay, names)
    assert fields
    for operation in fields.keys() - NOT_LOCAL:
        recorded = replay.parsed_answer(operation)
        for path in fields[operation]:
            local = collect_types(answers[operation], path)
            assert local == collect_types(recorded, path), (operation, path)
