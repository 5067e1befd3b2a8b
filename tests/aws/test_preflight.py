"""Before a launch: what is checked, what AWS is asked, and that nothing is made."""

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


def every_check(aws: AwsClient, asked: ClusterSpec | None = None) -> tuple[Check, ...]:
    asked = asked or spec()
    return before_launch(
        aws,
        asked,
        values(),
        facts=lambda: gather_facts(aws, asked, caller_address="10.77.0.1", target="local"),
    )


def checks(aws: AwsClient, asked: ClusterSpec | None = None) -> dict[str, Check]:
    return {check.name: check for check in every_check(aws, asked)}


def test_nothing_stands_in_the_way_and_nothing_is_made(aws: AwsClient, cloud: Cloud) -> None:
    found = checks(aws)
    assert {name for name, check in found.items() if check.ok is False} == set()
    assert {"credentials", "clock", "plan"} <= set(found)
    assert "unreadable" in found["plan"].value
    warnings = [check.value for check in every_check(aws) if check.name == "warning"]
    assert any(text.startswith("quota unreadable") for text in warnings)
    assert found["permission RunInstances"].ok is True
    assert find_cluster(aws, "demo", aws.identity().user_id) is None


def test_a_dry_run_asks_for_what_can_be_asked_and_tells_the_rest(aws: AwsClient, cloud: Cloud) -> None:
    plan = plan_for(aws)
    told = {one.name.removeprefix("permission "): one for one in dry_run(aws, plan, values())}
    asked = {"ImportKeyPair", "CreateSecurityGroup", "CreatePlacementGroup", "RunInstances"}
    assert {name for name, one in told.items() if one.value == "allowed"} == asked
    assert told["TerminateInstances"].ok is None
    assert told["TerminateInstances"].value == "not asked: needs an instance"
    assert all(cloud.sent(name)[0]["DryRun"] == "true" for name in asked)
    [run] = cloud.sent("RunInstances")
    assert "KeyName" not in run
    assert not any("SecurityGroup" in key for key in run)


def test_a_dry_run_that_is_throttled_is_asked_again_as_it_launches_nothing(
    aws: AwsClient, cloud: Cloud
) -> None:
    cloud.fail("RunInstances", "RequestLimitExceeded")
    cloud.fail("RunInstances", "InternalError", status=500)
    told = {one.name: one for one in dry_run(aws, plan_for(aws), values())}
    assert told["permission RunInstances"].value == "allowed"
    assert len(cloud.sent("RunInstances")) == 3


def test_a_dry_run_asks_for_what_is_the_users_own_and_never_to_change_it(
    aws: AwsClient, cloud: Cloud
) -> None:
    [vpc] = aws.call("DescribeVpcs", {})["Vpcs"]
    made = {"GroupName": "own", "Description": "own", "VpcId": vpc["VpcId"]}
    group = aws.call("CreateSecurityGroup", made)["GroupId"]
    aws.call("CreateKeyPair", {"KeyName": "mine"})
    asked = {"network.security_group": group, "access.key_file": "mine.pem", "cluster.nodes": "1"}
    own, _ = load("demo", environ={}, overrides=asked)
    plan = make_plan(own, gather_facts(aws, own, caller_address="10.77.0.1", target="local"))
    told = {one.name for one in dry_run(aws, plan, values())}
    changed = {"SecurityGroup", "KeyPair", "PlacementGroup"}
    assert [name for name in told if any(word in name for word in changed)] == []
    [run] = cloud.sent("RunInstances")
    assert (run["KeyName"], run["NetworkInterface.1.SecurityGroupId.1"]) == ("mine", group)


@pytest.mark.parametrize("denied", ["RunInstances", "ImportKeyPair", "CreatePlacementGroup"])
def test_a_permission_that_is_not_there_is_named(aws: AwsClient, cloud: Cloud, denied: str) -> None:
    cloud.fail(denied, "UnauthorizedOperation", message=f"... to perform: ec2:{denied} on resource: all")
    check = checks(aws)[f"permission {denied}"]
    assert check.ok is False
    assert f"ec2:{denied}" in check.value
    assert "--iam-policy" in check.hint


def test_a_launch_that_is_denied_for_the_default_group_alone_is_not_told_to_be_denied(
    aws: AwsClient, cloud: Cloud
) -> None:
    text = (
        "... to perform: ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:security-group/sg-0"
    )
    cloud.fail("RunInstances", "UnauthorizedOperation", message=text)
    check = checks(aws)["permission RunInstances"]
    assert check.ok is None
    assert check.value.startswith("not asked: needs a security group")


def test_a_plan_that_cannot_be_is_a_check_that_failed(aws: AwsClient) -> None:
    check = checks(aws, spec(instance_type="p2.8xlarge"))["plan"]
    assert check.ok is False
    assert "p2.8xlarge" in check.value
    assert "g6.48xlarge" in check.hint


def test_a_check_that_fails_hides_no_other(aws: AwsClient, cloud: Cloud) -> None:
    names = set(checks(aws))
    cloud.fail("GetCallerIdentity", "InvalidClientTokenId")
    unknown = checks(aws)
    assert [name for name, check in unknown.items() if check.ok is False] == ["credentials"]
    assert {name.partition(" ")[0] for name in names} - {"warning"} == set(unknown)
    cloud.quotas["L-DB2E81BA"] = 8.0
    small = checks(aws, spec(instance_type="g6.48xlarge"))
    assert [name for name, check in small.items() if check.ok is False] == ["quota"]
    assert "--nodes 2 --instance-type g4dn.xlarge" in small["quota"].hint
    assert small["permission RunInstances"].ok is True


def test_credentials_that_end_before_the_cluster_are_a_warning(
    aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hours, is_told in ((1, True), (48, False)):
        end = datetime.now(UTC) + timedelta(hours=hours)
        monkeypatch.setattr(aws, "credentials_end", lambda end=end: end)
        found = every_check(aws)
        assert f"until {end:%Y-%m-%d %H:%M} UTC" in found[0].value
        told = [check.value for check in found if check.name == "warning"]
        assert any("credentials end in" in text for text in told) is is_told


def test_a_wrong_clock_is_told_before_anything_fails(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    call = aws.call

    def late(operation: str, parameters: dict[str, Any], **where: Any) -> dict[str, Any]:
        reply = call(operation, parameters, **where)
        if operation == "GetCallerIdentity":
            reply["ResponseMetadata"]["HTTPHeaders"]["date"] = "Sat, 01 Jan 2000 00:00:00 GMT"
        return reply

    monkeypatch.setattr(aws, "call", late)
    assert checks(aws)["clock"].ok is False


def test_a_subnet_of_ones_own_is_read_with_its_way_out(aws: AwsClient, cloud: Cloud) -> None:
    vpc = aws.call("CreateVpc", {"CidrBlock": "10.9.0.0/16"})["Vpc"]["VpcId"]
    zone = "us-east-1b"
    asked = {"VpcId": vpc, "CidrBlock": "10.9.1.0/24", "AvailabilityZone": zone}
    subnet = aws.call("CreateSubnet", asked)["Subnet"]["SubnetId"]
    own = ClusterSpec(name="demo", network=NetworkSection(subnet=subnet))
    assert gather_facts(aws, own, caller_address="10.77.0.1").subnets[0].route == "none"
    gateway = aws.call("CreateInternetGateway", {})["InternetGateway"]["InternetGatewayId"]
    aws.call("AttachInternetGateway", {"InternetGatewayId": gateway, "VpcId": vpc})
    table = aws.call("CreateRouteTable", {"VpcId": vpc})["RouteTable"]["RouteTableId"]
    aws.call(
        "CreateRoute", {"RouteTableId": table, "DestinationCidrBlock": "0.0.0.0/0", "GatewayId": gateway}
    )
    aws.call("AssociateRouteTable", {"RouteTableId": table, "SubnetId": subnet})
    [read] = gather_facts(aws, own, caller_address="10.77.0.1").subnets
    assert (read.zone, read.vpc, read.route) == (zone, vpc, "internet")


@pytest.mark.parametrize(
    ("key", "asked"),
    [("network.subnet", "subnet-0123456789abcdef0"), ("network.security_group", "sg-0123456789abcdef0")],
)
def test_what_does_not_exist_is_named_by_its_key(aws: AwsClient, key: str, asked: str) -> None:
    own, _ = load("demo", environ={}, overrides={key: asked})
    with pytest.raises(ConfigError) as caught:
        gather_facts(aws, own, caller_address="10.77.0.1")
    assert key in caught.value.message
    assert asked in caught.value.message


def test_a_group_of_ones_own_is_told_what_it_lacks(aws: AwsClient, cloud: Cloud) -> None:
    vpc = gather_facts(aws, spec(), caller_address="10.77.0.1").subnets[0].vpc
    name = f"own-{secrets.token_hex(2)}"
    group = aws.call("CreateSecurityGroup", {"GroupName": name, "Description": "own", "VpcId": vpc})[
        "GroupId"
    ]
    own, _ = load("demo", environ={}, overrides={"network.security_group": group, "capacity.efa": True})

    def lacks() -> str:
        read = gather_facts(aws, own, caller_address="10.77.0.1").group
        assert read is not None
        return "; ".join(read.lacks)

    assert all(text in lacks() for text in ("own members", "EFA needs", "10.77.0.1/32"))
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "10.77.0.0/16"}]}
    aws.call("AuthorizeSecurityGroupIngress", {"GroupId": group, "IpPermissions": [inside, ssh]})
    aws.call("AuthorizeSecurityGroupEgress", {"GroupId": group, "IpPermissions": [inside]})
    assert lacks() == ""


def test_a_missing_quota_is_asked_for_on_a_yes_and_only_then(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (("ENDPOINT_URL", cloud.endpoint), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{key}", value)
    asked = {
        "cluster.region": "us-east-1",
        "cluster.instance_type": "g6.48xlarge",
        "network.ssh_cidr": "10.0.0.0/8",
    }
    own, job = load("demo", environ={}, overrides=asked)
    ctx = Session(name="demo", home=tmp_path, settings=(own, job))
    cloud.quotas = {"L-DB2E81BA": 0.0}

    def refuse(what: str) -> None:
        assert "need 384 vCPUs" in what
        raise Interrupted(what)

    with pytest.raises(Interrupted):
        request_quota(ctx, confirm=refuse)
    assert cloud.asked_quotas == {}
    assert request_quota(ctx, confirm=lambda what: None)["request"] == "request-1"
    assert cloud.asked_quotas == {"L-DB2E81BA": 384.0}
    cloud.quotas = {"L-DB2E81BA": 500.0}
    assert request_quota(ctx, confirm=refuse)["request"] is None
