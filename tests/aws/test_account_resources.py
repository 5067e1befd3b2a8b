"""The user's own resources that the configuration names: an error names the key, before a launch."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws.account_resources import list_missing_actions
from awsddp.aws.client import AwsClient
from awsddp.errors import ConfigError
from awsddp.plan.launch_plan import make_plan
from awsddp.session.locate import gather_facts
from awsddp.settings.loader import load
from tests.support.moto_cloud import Cloud

Launch = Callable[..., Any]


@pytest.fixture
def launch(aws: AwsClient, cloud: Cloud) -> Launch:
    """Return a function that makes the plan for settings, as `plan` and `up` do."""

    def make(**keys: str) -> Any:
        spec, _ = load("demo", environ={}, overrides={key.replace("__", "."): v for key, v in keys.items()})
        return make_plan(spec, gather_facts(aws, spec, cloud.target))

    return make


@pytest.fixture
def key(aws: AwsClient, tmp_path: Path) -> Path:
    """The private half of the key pair `mine`."""
    file = tmp_path / "my keys" / "mine.pem"
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text(aws.call("CreateKeyPair", {"KeyName": "mine", "KeyType": "ed25519"})["KeyMaterial"])
    return file


def catch_error(launch: Launch, **keys: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        launch(**keys)
    assert caught.value.exit_code == 3
    assert caught.value.next
    return caught.value


def test_a_key_pair_and_its_private_half_are_used(launch: Launch, key: Path) -> None:
    plan = launch(access__key_file=str(key))
    assert plan.request("RunInstances").parameters["KeyName"] == "mine"
    assert not plan.has_request("ImportKeyPair")


def test_a_private_key_of_another_pair_is_refused(launch: Launch, key: Path, aws: AwsClient) -> None:
    aws.call("CreateKeyPair", {"KeyName": "other", "KeyType": "rsa"})
    key = key.rename(key.with_name("other"))
    error = catch_error(launch, access__key_file=str(key))
    assert error.message == f"access.key_file: {key} is not the private half of other"
    assert "ssh-ed25519 AAAA" in error.why


@pytest.mark.parametrize("form", [(), ("-m", "PEM", "-t", "rsa")])
def test_a_key_with_a_passphrase_is_refused(launch: Launch, key: Path, form: tuple[str, ...]) -> None:
    if form:
        key.unlink()
        subprocess.run(["ssh-keygen", "-q", "-N", "secret", "-f", key, *form], check=True)
    else:
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", key], check=True)
    error = catch_error(launch, access__key_file=str(key))
    assert error.message == f"access.key_file: {key} cannot be used as the private half of mine"
    assert "passphrase" in error.why
    assert f"ssh-keygen -p -N '' -f '{key}'" in error.next


def test_a_private_key_that_others_can_read_is_refused(launch: Launch, key: Path) -> None:
    key.chmod(0o644)
    error = catch_error(launch, access__key_file=str(key))
    assert error.message == f"access.key_file: {key} cannot be used as the private half of mine"
    assert "too open" in error.why
    assert f"chmod 600 '{key}'" in error.next


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), ("ssh-ed25519 AAAA mine\n", "Load key"), ("\0", "Load key")],
)
def test_an_invalid_private_key_is_refused(launch: Launch, key: Path, content: str | None, why: str) -> None:
    key.unlink()
    if content is not None:
        key.write_text(content)
    error = catch_error(launch, access__key_file=str(key))
    assert (f"access.key_file: {key} cannot be used" in error.message, why in error.why) == (True, True)


def test_an_unknown_instance_profile_is_refused(launch: Launch, aws: AwsClient) -> None:
    parameters = {"InstanceProfileName": "trainers", "Path": "/teams/"}
    arn = aws.call("CreateInstanceProfile", parameters, service="iam")["InstanceProfile"]["Arn"]
    for valid in ("trainers", arn):
        assert launch(access__instance_profile=valid).has_request("RunInstances")
    other_path = arn.replace("/teams/", "/")
    for invalid in ("trainer", other_path):
        error = catch_error(launch, access__instance_profile=invalid)
        assert f"access.instance_profile: no instance profile {invalid!r}" in error.message
    assert arn in error.why


@pytest.mark.parametrize("operation", ["GetInstanceProfile", "DescribeKey"])
def test_an_unreadable_resource_stops_no_launch(launch: Launch, cloud: Cloud, operation: str) -> None:
    cloud.fail(operation, "AccessDeniedException", status=400)
    key = {"GetInstanceProfile": "access__instance_profile", "DescribeKey": "access__kms_key"}[operation]
    assert launch(**{key: "trainers"}).has_request("RunInstances")


def test_a_kms_key_that_cannot_encrypt_disks_is_refused(launch: Launch, aws: AwsClient) -> None:
    def create(**more: str) -> str:
        return str(aws.call("CreateKey", more, service="kms")["KeyMetadata"]["KeyId"])

    good, disabled, signing = create(), create(), create(KeySpec="RSA_2048", KeyUsage="SIGN_VERIFY")
    aws.call("CreateAlias", {"AliasName": "alias/disks", "TargetKeyId": good}, service="kms")
    aws.call("DisableKey", {"KeyId": disabled}, service="kms")
    for valid in (good, "alias/disks", f"arn:aws:kms:us-east-1:123456789012:key/{good}"):
        assert launch(access__kms_key=valid).has_request("RunInstances")
    for invalid, why in (
        (disabled, "the key is Disabled"),
        (signing, "SIGN_VERIFY"),
        ("alias/none", "NotFound"),
    ):
        error = catch_error(launch, access__kms_key=invalid)
        assert error.message == f"access.kms_key: {invalid} cannot encrypt disks in us-east-1"
        assert why in error.why
    aws.call("ScheduleKeyDeletion", {"KeyId": disabled}, service="kms")
    assert "PendingDeletion" in catch_error(launch, access__kms_key=disabled).why


def create_subnet(aws: AwsClient, *, gateway: bool) -> tuple[str, str]:
    """Create a VPC with a subnet; return their ids."""
    vpc = aws.call("CreateVpc", {"CidrBlock": "10.9.0.0/16"})["Vpc"]["VpcId"]
    parameters = {"VpcId": vpc, "CidrBlock": "10.9.1.0/24", "AvailabilityZone": "us-east-1b"}
    subnet = aws.call("CreateSubnet", parameters)["Subnet"]["SubnetId"]
    if gateway:
        igw = aws.call("CreateInternetGateway", {})["InternetGateway"]["InternetGatewayId"]
        aws.call("AttachInternetGateway", {"InternetGatewayId": igw, "VpcId": vpc})
        [table] = aws.call("DescribeRouteTables", {"Filters": [{"Name": "vpc-id", "Values": [vpc]}]})[
            "RouteTables"
        ]
        out = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": igw, "RouteTableId": table["RouteTableId"]}
        aws.call("CreateRoute", out)
    return vpc, subnet


def test_route_tables_are_read_of_all_vpcs_or_of_that_of_the_configured_subnet(
    launch: Launch, aws: AwsClient, cloud: Cloud
) -> None:
    vpc, subnet = create_subnet(aws, gateway=False)
    cloud.requests.clear()
    assert {item.route for item in launch().subnets} == {"internet"}
    launch(network__subnet=subnet, network__address="private", network__ssh_cidr="10.0.0.0/8")
    vpcs = [form.get("Filter.1.Value.1") for form in cloud.requests_of("DescribeRouteTables")]
    assert vpcs == [None, vpc]


def test_a_group_of_another_vpc_is_refused(launch: Launch, aws: AwsClient) -> None:
    vpc, subnet = create_subnet(aws, gateway=True)
    parameters = {"GroupName": "own", "Description": "own", "VpcId": vpc}
    group = aws.call("CreateSecurityGroup", parameters)["GroupId"]
    error = catch_error(launch, network__security_group=group)
    assert f"network.security_group: {group} is in {vpc}" in error.message
    plan = launch(network__security_group=group, network__subnet=subnet)
    (warning,) = [text for text in plan.warnings if "does not allow traffic between its members" in text]
    assert warning.startswith(f"network.security_group: {group}")


def test_a_subnet_without_a_route_to_the_internet_is_refused(launch: Launch, aws: AwsClient) -> None:
    _, subnet = create_subnet(aws, gateway=False)
    error = catch_error(launch, network__subnet=subnet)
    assert error.message == f"network.subnet: {subnet} has no route to an internet gateway"
    private = {"network__address": "private", "network__ssh_cidr": "10.0.0.0/8"}
    plan = launch(network__subnet=subnet, **private)
    assert f"{subnet} has no default route: the nodes cannot install anything" in plan.warnings


def test_a_default_subnet_without_a_route_is_skipped(launch: Launch, aws: AwsClient) -> None:
    subnets = launch().subnets
    [main] = aws.call("DescribeRouteTables", {})["RouteTables"]
    closed = aws.call("CreateRouteTable", {"VpcId": main["VpcId"]})["RouteTable"]["RouteTableId"]
    aws.call("AssociateRouteTable", {"RouteTableId": closed, "SubnetId": subnets[0].id})
    assert launch().subnets == subnets[1:]

    aws.call("DeleteRoute", {"RouteTableId": main["RouteTableId"], "DestinationCidrBlock": "0.0.0.0/0"})
    error = catch_error(launch)
    assert error.message == f"the default VPC {main['VpcId']} has no route to an internet gateway"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network.subnet", "subnet-0123456789abcdef0"),
        ("network.security_group", "sg-0123456789abcdef0"),
        ("network.ssh_cidr", "sg-0123456789abcdef0"),
        ("access.key_file", "~/.ssh/nobody's.pem"),
    ],
)
def test_a_missing_resource_is_named_by_its_key(launch: Launch, key: str, value: str) -> None:
    error = catch_error(launch, **{key.replace(".", "__"): value})
    assert error.message.startswith(f"{key}: no ")
    assert Path(value).stem in error.message


def test_an_invalid_address_is_refused_with_an_own_security_group(launch: Launch, aws: AwsClient) -> None:
    group = aws.call("CreateSecurityGroup", {"GroupName": "own", "Description": "own"})["GroupId"]
    error = catch_error(launch, network__security_group=group, network__ssh_cidr="10.0.0")
    assert "network.ssh_cidr: invalid address block '10.0.0'" in error.message


def test_permissions_of_a_role_are_simulated_with_arns_of_its_partition(aws: AwsClient, cloud: Cloud) -> None:
    cloud.fail("SimulatePrincipalPolicy", "AccessDenied", "AccessDenied")
    assert list(list_missing_actions(aws, "arn:aws-cn:iam::123456789012:role/gpu", "s3://results/runs")) == []
    arns = [form["ResourceArns.member.1"] for form in cloud.requests_of("SimulatePrincipalPolicy")]
    assert arns == ["arn:aws-cn:s3:::results", "arn:aws-cn:s3:::results/runs/job/job.json"]
