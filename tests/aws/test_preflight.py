"""The checks before a launch, the requests to AWS, and that nothing is created."""

import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.plan_facts import gather_facts
from awsddp.aws.preflight import before_launch, dry_run
from awsddp.cluster.doctor import request_quota
from awsddp.errors import ConfigError, Interrupted
from awsddp.model.records import Check
from awsddp.plan.launch_plan import make_plan
from awsddp.session.context import Session
from awsddp.settings.loader import load
from awsddp.settings.spec import ClusterSpec, NetworkSection
from tests.support.moto_cloud import Cloud, find_cluster, plan_for, spec, values


def list_checks(aws: AwsClient, requested: ClusterSpec | None = None) -> tuple[Check, ...]:
    requested = requested or spec()
    return before_launch(
        aws,
        requested,
        values(),
        facts=lambda: gather_facts(aws, requested, caller_address="10.77.0.1", target="local"),
    )


def map_checks(aws: AwsClient, requested: ClusterSpec | None = None) -> dict[str, Check]:
    return {check.name: check for check in list_checks(aws, requested)}


def test_every_check_passes_and_nothing_is_created(aws: AwsClient, cloud: Cloud) -> None:
    by_name = map_checks(aws)
    assert {name for name, check in by_name.items() if check.ok is False} == set()
    assert {"credentials", "clock", "plan"} <= set(by_name)
    assert "unreadable" in by_name["plan"].value
    warnings = [check.value for check in list_checks(aws) if check.name == "warning"]
    assert any(text.startswith("quota unreadable") for text in warnings)
    assert by_name["permission RunInstances"].ok is True
    assert find_cluster(aws, "demo", aws.identity().user_id) is None


def test_a_dry_run_checks_what_it_can_and_names_the_other_permissions(aws: AwsClient, cloud: Cloud) -> None:
    plan = plan_for(aws)
    checks = {check.name.removeprefix("permission "): check for check in dry_run(aws, plan, values())}
    names = {"ImportKeyPair", "CreateSecurityGroup", "CreatePlacementGroup", "RunInstances"}
    assert {name for name, check in checks.items() if check.value == "allowed"} == names
    assert checks["TerminateInstances"].ok is None
    assert checks["TerminateInstances"].value == "not asked: needs an instance"
    assert all(cloud.requests_of(name)[0]["DryRun"] == "true" for name in names)
    [run] = cloud.requests_of("RunInstances")
    assert "KeyName" not in run
    assert not any("SecurityGroup" in key for key in run)


def test_a_throttled_dry_run_is_repeated(aws: AwsClient, cloud: Cloud) -> None:
    cloud.fail("RunInstances", "RequestLimitExceeded")
    cloud.fail("RunInstances", "InternalError", status=500)
    checks = {check.name: check for check in dry_run(aws, plan_for(aws), values())}
    assert checks["permission RunInstances"].value == "allowed"
    assert len(cloud.requests_of("RunInstances")) == 3


def test_a_dry_run_uses_the_users_own_resources_and_never_changes_them(aws: AwsClient, cloud: Cloud) -> None:
    [vpc] = aws.call("DescribeVpcs", {})["Vpcs"]
    parameters = {"GroupName": "own", "Description": "own", "VpcId": vpc["VpcId"]}
    group = aws.call("CreateSecurityGroup", parameters)["GroupId"]
    aws.call("CreateKeyPair", {"KeyName": "mine"})
    settings = {"network.security_group": group, "access.key_file": "mine.pem", "cluster.nodes": "1"}
    requested, _ = load("demo", environ={}, overrides=settings)
    plan = make_plan(requested, gather_facts(aws, requested, caller_address="10.77.0.1", target="local"))
    names = {check.name for check in dry_run(aws, plan, values())}
    kinds = {"SecurityGroup", "KeyPair", "PlacementGroup"}
    assert [name for name in names if any(kind in name for kind in kinds)] == []
    [run] = cloud.requests_of("RunInstances")
    assert (run["KeyName"], run["NetworkInterface.1.SecurityGroupId.1"]) == ("mine", group)


@pytest.mark.parametrize("denied", ["RunInstances", "ImportKeyPair", "CreatePlacementGroup"])
def test_a_missing_permission_is_named(aws: AwsClient, cloud: Cloud, denied: str) -> None:
    cloud.fail(denied, "UnauthorizedOperation", message=f"... to perform: ec2:{denied} on resource: all")
    check = map_checks(aws)[f"permission {denied}"]
    assert check.ok is False
    assert f"ec2:{denied}" in check.value
    assert "--iam-policy" in check.hint


def test_a_launch_that_is_denied_only_for_the_default_group_counts_as_unchecked(
    aws: AwsClient, cloud: Cloud
) -> None:
    text = (
        "... to perform: ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:security-group/sg-0"
    )
    cloud.fail("RunInstances", "UnauthorizedOperation", message=text)
    check = map_checks(aws)["permission RunInstances"]
    assert check.ok is None
    assert check.value.startswith("not asked: needs a security group")


def test_an_impossible_plan_is_a_failed_check(aws: AwsClient) -> None:
    check = map_checks(aws, spec(instance_type="p2.8xlarge"))["plan"]
    assert check.ok is False
    assert "p2.8xlarge" in check.value
    assert "g6.48xlarge" in check.hint


def test_a_failed_check_does_not_hide_the_others(aws: AwsClient, cloud: Cloud) -> None:
    names = set(map_checks(aws))
    cloud.fail("GetCallerIdentity", "InvalidClientTokenId")
    unknown = map_checks(aws)
    assert [name for name, check in unknown.items() if check.ok is False] == ["credentials"]
    assert {name.partition(" ")[0] for name in names} - {"warning"} == set(unknown)
    cloud.quotas["L-DB2E81BA"] = 8.0
    small = map_checks(aws, spec(instance_type="g6.48xlarge"))
    assert [name for name, check in small.items() if check.ok is False] == ["quota"]
    assert "--nodes 2 --instance-type g4dn.xlarge" in small["quota"].hint
    assert small["permission RunInstances"].ok is True


def test_credentials_that_end_before_the_cluster_are_a_warning(
    aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hours, is_warned in ((1, True), (48, False)):
        end = datetime.now(UTC) + timedelta(hours=hours)
        monkeypatch.setattr(aws, "credentials_end", lambda end=end: end)
        found_checks = list_checks(aws)
        assert f"until {end:%Y-%m-%d %H:%M} UTC" in found_checks[0].value
        warnings = [check.value for check in found_checks if check.name == "warning"]
        assert any("credentials end in" in text for text in warnings) is is_warned


def test_a_wrong_clock_is_a_failed_check(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    call = aws.call

    def late(operation: str, parameters: dict[str, Any], **options: Any) -> dict[str, Any]:
        reply = call(operation, parameters, **options)
        if operation == "GetCallerIdentity":
            reply["ResponseMetadata"]["HTTPHeaders"]["date"] = "Sat, 01 Jan 2000 00:00:00 GMT"
        return reply

    monkeypatch.setattr(aws, "call", late)
    assert map_checks(aws)["clock"].ok is False


def test_an_own_subnet_is_read_with_its_route(aws: AwsClient, cloud: Cloud) -> None:
    vpc = aws.call("CreateVpc", {"CidrBlock": "10.9.0.0/16"})["Vpc"]["VpcId"]
    zone = "us-east-1b"
    parameters = {"VpcId": vpc, "CidrBlock": "10.9.1.0/24", "AvailabilityZone": zone}
    subnet = aws.call("CreateSubnet", parameters)["Subnet"]["SubnetId"]
    requested = ClusterSpec(name="demo", network=NetworkSection(subnet=subnet))
    assert gather_facts(aws, requested, caller_address="10.77.0.1").subnets[0].route == "none"
    gateway = aws.call("CreateInternetGateway", {})["InternetGateway"]["InternetGatewayId"]
    aws.call("AttachInternetGateway", {"InternetGatewayId": gateway, "VpcId": vpc})
    table = aws.call("CreateRouteTable", {"VpcId": vpc})["RouteTable"]["RouteTableId"]
    aws.call(
        "CreateRoute", {"RouteTableId": table, "DestinationCidrBlock": "0.0.0.0/0", "GatewayId": gateway}
    )
    aws.call("AssociateRouteTable", {"RouteTableId": table, "SubnetId": subnet})
    [facts] = gather_facts(aws, requested, caller_address="10.77.0.1").subnets
    assert (facts.zone, facts.vpc, facts.route) == (zone, vpc, "internet")


@pytest.mark.parametrize(
    ("key", "value"),
    [("network.subnet", "subnet-0123456789abcdef0"), ("network.security_group", "sg-0123456789abcdef0")],
)
def test_a_missing_resource_is_named_by_its_key(aws: AwsClient, key: str, value: str) -> None:
    requested, _ = load("demo", environ={}, overrides={key: value})
    with pytest.raises(ConfigError) as caught:
        gather_facts(aws, requested, caller_address="10.77.0.1")
    assert key in caught.value.message
    assert value in caught.value.message


def test_the_missing_rules_of_an_own_group_are_listed(aws: AwsClient, cloud: Cloud) -> None:
    vpc = gather_facts(aws, spec(), caller_address="10.77.0.1").subnets[0].vpc
    name = f"own-{secrets.token_hex(2)}"
    group = aws.call("CreateSecurityGroup", {"GroupName": name, "Description": "own", "VpcId": vpc})[
        "GroupId"
    ]
    requested, _ = load("demo", environ={}, overrides={"network.security_group": group, "capacity.efa": True})

    def list_lacks() -> str:
        own_group = gather_facts(aws, requested, caller_address="10.77.0.1").group
        assert own_group is not None
        return "; ".join(own_group.lacks)

    assert all(text in list_lacks() for text in ("between its members", "EFA needs", "10.77.0.1/32"))
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "10.77.0.0/16"}]}
    aws.call("AuthorizeSecurityGroupIngress", {"GroupId": group, "IpPermissions": [inside, ssh]})
    aws.call("AuthorizeSecurityGroupEgress", {"GroupId": group, "IpPermissions": [inside]})
    assert list_lacks() == ""


def test_a_quota_is_requested_only_after_confirmation(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (("ENDPOINT_URL", cloud.endpoint), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{key}", value)
    settings = {
        "cluster.region": "us-east-1",
        "cluster.instance_type": "g6.48xlarge",
        "network.ssh_cidr": "10.0.0.0/8",
    }
    requested, job = load("demo", environ={}, overrides=settings)
    ctx = Session(name="demo", home=tmp_path, settings=(requested, job))
    cloud.quotas = {"L-DB2E81BA": 0.0}

    def refuse(question: str) -> None:
        assert "need 384 vCPUs" in question
        raise Interrupted(question)

    with pytest.raises(Interrupted):
        request_quota(ctx, confirm=refuse)
    assert cloud.requested_quotas == {}
    assert request_quota(ctx, confirm=lambda question: None)["request"] == "request-1"
    assert cloud.requested_quotas == {"L-DB2E81BA": 384.0}
    cloud.quotas = {"L-DB2E81BA": 500.0}
    assert request_quota(ctx, confirm=refuse)["request"] is None
