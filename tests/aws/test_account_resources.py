"""What is the user's own and named in the configuration: what is wrong is told by its key, before a cent."""

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

Look = Callable[..., Any]


@pytest.fixture
def look(aws: AwsClient, cloud: Cloud) -> Look:
    """Makes the plan for keys that are asked for, as `plan` and `up` do."""

    def made(**asked: str) -> Any:
        spec, _ = load("demo", environ={}, overrides={key.replace("__", "."): v for key, v in asked.items()})
        return make_plan(spec, gather_facts(aws, spec, cloud.target))

    return made


@pytest.fixture
def own(aws: AwsClient, tmp_path: Path) -> Path:
    """The private half of the key pair `mine`."""
    file = tmp_path / "my keys" / "mine.pem"
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text(aws.call("CreateKeyPair", {"KeyName": "mine", "KeyType": "ed25519"})["KeyMaterial"])
    return file


def refusal(look: Look, **asked: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        look(**asked)
    assert caught.value.exit_code == 3
    assert caught.value.next
    return caught.value


def test_a_key_pair_and_its_private_half_are_used(look: Look, own: Path) -> None:
    plan = look(access__key_file=str(own))
    assert plan.request("RunInstances").parameters["KeyName"] == "mine"
    assert not plan.has_request("ImportKeyPair")


def test_a_private_key_of_another_pair_is_told(look: Look, own: Path, aws: AwsClient) -> None:
    aws.call("CreateKeyPair", {"KeyName": "other", "KeyType": "rsa"})
    own = own.rename(own.with_name("other"))
    told = refusal(look, access__key_file=str(own))
    assert told.message == f"access.key_file: {own} is not the private half of other"
    assert "ssh-ed25519 AAAA" in told.why


@pytest.mark.parametrize("form", [(), ("-m", "PEM", "-t", "rsa")])
def test_a_private_key_with_a_passphrase_is_told(look: Look, own: Path, form: tuple[str, ...]) -> None:
    if form:
        own.unlink()
        subprocess.run(["ssh-keygen", "-q", "-N", "secret", "-f", own, *form], check=True)
    else:
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", own], check=True)
    told = refusal(look, access__key_file=str(own))
    assert told.message == f"access.key_file: {own} cannot be used as the private half of mine"
    assert "passphrase" in told.why
    assert f"ssh-keygen -p -N '' -f '{own}'" in told.next


def test_a_private_key_that_others_can_read_is_told(look: Look, own: Path) -> None:
    own.chmod(0o644)
    told = refusal(look, access__key_file=str(own))
    assert told.message == f"access.key_file: {own} cannot be used as the private half of mine"
    assert "too open" in told.why
    assert f"chmod 600 '{own}'" in told.next


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), ("ssh-ed25519 AAAA mine\n", "Load key"), ("\0", "Load key")],
)
def test_what_is_no_private_key_is_told(look: Look, own: Path, content: str | None, why: str) -> None:
    own.unlink()
    if content is not None:
        own.write_text(content)
    told = refusal(look, access__key_file=str(own))
    assert (f"access.key_file: {own} cannot be used" in told.message, why in told.why) == (True, True)


def test_an_instance_profile_that_is_not_there_is_told(look: Look, aws: AwsClient) -> None:
    made = {"InstanceProfileName": "trainers", "Path": "/teams/"}
    arn = aws.call("CreateInstanceProfile", made, service="iam")["InstanceProfile"]["Arn"]
    for right in ("trainers", arn):
        assert look(access__instance_profile=right).has_request("RunInstances")
    elsewhere = arn.replace("/teams/", "/")
    for wrong in ("trainer", elsewhere):
        told = refusal(look, access__instance_profile=wrong)
        assert f"access.instance_profile: no instance profile {wrong!r}" in told.message
    assert arn in told.why


@pytest.mark.parametrize("operation", ["GetInstanceProfile", "DescribeKey"])
def test_where_it_may_not_be_read_the_launch_goes_on(look: Look, cloud: Cloud, operation: str) -> None:
    cloud.fail(operation, "AccessDeniedException", status=400)
    asked = {"GetInstanceProfile": "access__instance_profile", "DescribeKey": "access__kms_key"}[operation]
    assert look(**{asked: "trainers"}).has_request("RunInstances")


def test_a_kms_key_that_cannot_encrypt_disks_is_told(look: Look, aws: AwsClient) -> None:
    def key(**more: str) -> str:
        return str(aws.call("CreateKey", more, service="kms")["KeyMetadata"]["KeyId"])

    good, off, signing = key(), key(), key(KeySpec="RSA_2048", KeyUsage="SIGN_VERIFY")
    aws.call("CreateAlias", {"AliasName": "alias/disks", "TargetKeyId": good}, service="kms")
    aws.call("DisableKey", {"KeyId": off}, service="kms")
    for right in (good, "alias/disks", f"arn:aws:kms:us-east-1:123456789012:key/{good}"):
        assert look(access__kms_key=right).has_request("RunInstances")
    for wrong, why in ((off, "it is Disabled"), (signing, "SIGN_VERIFY"), ("alias/none", "NotFound")):
        told = refusal(look, access__kms_key=wrong)
        assert told.message == f"access.kms_key: {wrong} cannot encrypt disks in us-east-1"
        assert why in told.why
    aws.call("ScheduleKeyDeletion", {"KeyId": off}, service="kms")
    assert "PendingDeletion" in refusal(look, access__kms_key=off).why


def subnet_of(aws: AwsClient, *, gateway: bool) -> tuple[str, str]:
    """Make a VPC of the user's own, and return it and a subnet of it."""
    vpc = aws.call("CreateVpc", {"CidrBlock": "10.9.0.0/16"})["Vpc"]["VpcId"]
    asked = {"VpcId": vpc, "CidrBlock": "10.9.1.0/24", "AvailabilityZone": "us-east-1b"}
    subnet = aws.call("CreateSubnet", asked)["Subnet"]["SubnetId"]
    if gateway:
        way = aws.call("CreateInternetGateway", {})["InternetGateway"]["InternetGatewayId"]
        aws.call("AttachInternetGateway", {"InternetGatewayId": way, "VpcId": vpc})
        [table] = aws.call("DescribeRouteTables", {"Filters": [{"Name": "vpc-id", "Values": [vpc]}]})[
            "RouteTables"
        ]
        out = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": way, "RouteTableId": table["RouteTableId"]}
        aws.call("CreateRoute", out)
    return vpc, subnet


def test_the_route_tables_are_those_of_all_vpcs_or_of_that_of_a_named_subnet(
    look: Look, aws: AwsClient, cloud: Cloud
) -> None:
    vpc, subnet = subnet_of(aws, gateway=False)
    cloud.requests.clear()
    assert {one.route for one in look().subnets} == {"internet"}
    look(network__subnet=subnet, network__address="private", network__ssh_cidr="10.0.0.0/8")
    asked = [form.get("Filter.1.Value.1") for form in cloud.sent("DescribeRouteTables")]
    assert asked == [None, vpc]


def test_a_group_of_another_vpc_is_told(look: Look, aws: AwsClient) -> None:
    vpc, subnet = subnet_of(aws, gateway=True)
    made = {"GroupName": "own", "Description": "own", "VpcId": vpc}
    group = aws.call("CreateSecurityGroup", made)["GroupId"]
    told = refusal(look, network__security_group=group)
    assert f"network.security_group: {group} is in {vpc}" in told.message
    plan = look(network__security_group=group, network__subnet=subnet)
    (lack,) = [text for text in plan.warnings if "does not let its own members in" in text]
    assert lack.startswith(f"network.security_group: {group}")


def test_a_subnet_without_a_way_out_is_told(look: Look, aws: AwsClient) -> None:
    _, subnet = subnet_of(aws, gateway=False)
    told = refusal(look, network__subnet=subnet)
    assert told.message == f"network.subnet: {subnet} has no route to an internet gateway"
    private = {"network__address": "private", "network__ssh_cidr": "10.0.0.0/8"}
    plan = look(network__subnet=subnet, **private)
    assert f"{subnet} has no route out: the nodes can install nothing" in plan.warnings


def test_a_default_subnet_that_leads_nowhere_is_passed_over(look: Look, aws: AwsClient) -> None:
    zones = look().subnets
    [main] = aws.call("DescribeRouteTables", {})["RouteTables"]
    shut = aws.call("CreateRouteTable", {"VpcId": main["VpcId"]})["RouteTable"]["RouteTableId"]
    aws.call("AssociateRouteTable", {"RouteTableId": shut, "SubnetId": zones[0].id})
    assert look().subnets == zones[1:]

    aws.call("DeleteRoute", {"RouteTableId": main["RouteTableId"], "DestinationCidrBlock": "0.0.0.0/0"})
    told = refusal(look)
    assert told.message == f"the default VPC {main['VpcId']} has no route to an internet gateway"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network.subnet", "subnet-0123456789abcdef0"),
        ("network.security_group", "sg-0123456789abcdef0"),
        ("network.ssh_cidr", "sg-0123456789abcdef0"),
        ("access.key_file", "~/.ssh/nobody's.pem"),
    ],
)
def test_what_does_not_exist_is_told_by_its_key(look: Look, key: str, value: str) -> None:
    told = refusal(look, **{key.replace(".", "__"): value})
    assert told.message.startswith(f"{key}: no ")
    assert Path(value).stem in told.message


def test_an_address_that_is_none_is_told_beside_a_group_of_ones_own(look: Look, aws: AwsClient) -> None:
    group = aws.call("CreateSecurityGroup", {"GroupName": "own", "Description": "own"})["GroupId"]
    told = refusal(look, network__security_group=group, network__ssh_cidr="10.0.0")
    assert "network.ssh_cidr: invalid address block '10.0.0'" in told.message


def test_whether_a_role_may_save_is_asked_with_arns_of_its_partition(aws: AwsClient, cloud: Cloud) -> None:
    cloud.fail("SimulatePrincipalPolicy", "AccessDenied", "AccessDenied")
    assert list(list_missing_actions(aws, "arn:aws-cn:iam::123456789012:role/gpu", "s3://results/runs")) == []
    asked = [form["ResourceArns.member.1"] for form in cloud.sent("SimulatePrincipalPolicy")]
    assert asked == ["arn:aws-cn:s3:::results", "arn:aws-cn:s3:::results/runs/job/job.json"]
