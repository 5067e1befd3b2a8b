"""EC2's documented limits on tags, names, tokens and rules: the local cloud refuses what EC2 refuses."""

from typing import Any

import pytest

from awsddp.settings.ec2_limits import MAX_TAGS
from tests.support.local_cloud import Cloud, error_code_of


def make_tags(**pairs: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in pairs.items()]


@pytest.fixture(scope="module")
def instance(records: Cloud) -> str:
    return str(records.client("ec2").run_instances(**records.request())["Instances"][0]["InstanceId"])


@pytest.mark.parametrize(
    ("pairs", "code"),
    [
        ({"k" * 129: ""}, "InvalidParameterValue"),
        ({"k": "v" * 257}, "InvalidParameterValue"),
        ({"aws:k": ""}, "InvalidParameterValue"),
        ({"AWS:k": ""}, "InvalidParameterValue"),
        ({"k": "a\tb"}, "InvalidParameterValue"),
        ({"": "v"}, "InvalidTagKey.Malformed"),
        ({f"k{number}": "" for number in range(51)}, "TagLimitExceeded"),
    ],
    ids=["key", "value", "reserved", "capitals", "control", "empty", "count"],
)
def test_a_tag_that_ec2_refuses_is_refused_by_create_tags_and_by_launches(
    records: Cloud, instance: str, pairs: dict[str, str], code: str
) -> None:
    ec2, before = records.client("ec2"), len(records.instances())
    assert error_code_of(ec2.create_tags, Resources=[instance], Tags=make_tags(**pairs)) == code
    specifications = [{"ResourceType": "instance", "Tags": make_tags(**pairs)}]
    assert error_code_of(ec2.run_instances, **records.request(TagSpecifications=specifications)) == code
    assert len(records.instances()) == before
    assert not records.instances(instance)[0].get("Tags")


def test_50_tags_of_maximum_length_fit_and_the_51st_does_not(records: Cloud, instance: str) -> None:
    ec2 = records.client("ec2")
    longest = {f"{number:02}{'ü' * 126}": "ü" * 256 for number in range(MAX_TAGS)}
    ec2.create_tags(Resources=[instance], Tags=make_tags(**longest))
    try:
        assert (
            error_code_of(ec2.create_tags, Resources=[instance], Tags=make_tags(more=""))
            == "TagLimitExceeded"
        )
        first = next(iter(longest))
        ec2.create_tags(Resources=[instance], Tags=make_tags(**{first: "changed"}))
    finally:
        ec2.delete_tags(Resources=[instance], Tags=[{"Key": key} for key in longest])


@pytest.mark.parametrize(
    ("operation", "parameters"),
    [
        ("create_key_pair", {"KeyName": "k" * 256}),
        ("create_key_pair", {"KeyName": "schlüssel"}),
        ("create_security_group", {"GroupName": "g" * 256, "Description": "d"}),
        ("create_security_group", {"GroupName": "sg-mine", "Description": "d"}),
        ("create_security_group", {"GroupName": "g", "Description": "d" * 256}),
        ("create_security_group", {"GroupName": "g", "Description": "don't"}),
        ("create_security_group", {"GroupName": "g", "Description": "größer"}),
        ("create_placement_group", {"GroupName": "p" * 256, "Strategy": "cluster"}),
    ],
)
def test_name_that_ec2_refuses_is_refused(records: Cloud, operation: str, parameters: dict[str, Any]) -> None:
    assert error_code_of(getattr(records.client("ec2"), operation), **parameters) == "InvalidParameterValue"


def test_a_client_token_of_more_than_64_characters_is_refused(records: Cloud) -> None:
    launch = records.client("ec2").run_instances
    assert error_code_of(launch, **records.request(ClientToken="t" * 65)) == "InvalidParameterValue"


def test_a_group_takes_60_rules_of_each_kind_and_refuses_a_request_with_more(records: Cloud) -> None:
    ec2 = records.client("ec2")
    group = ec2.create_security_group(GroupName="full", Description="d")["GroupId"]

    def make_request(kind: str, key: str, sources: list[str]) -> dict[str, Any]:
        rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, kind: [{key: peer} for peer in sources]}
        return {"GroupId": group, "IpPermissions": [rule]}

    blocks = [f"10.0.{number}.0/24" for number in range(61)]
    ec2.authorize_security_group_ingress(**make_request("IpRanges", "CidrIp", blocks[:58]))
    ec2.authorize_security_group_ingress(**make_request("UserIdGroupPairs", "GroupId", [group]))
    code = error_code_of(
        ec2.authorize_security_group_ingress, **make_request("IpRanges", "CidrIp", blocks[58:60])
    )
    assert code == "RulesPerSecurityGroupLimitExceeded"
    ec2.authorize_security_group_ingress(**make_request("IpRanges", "CidrIp", blocks[58:59]))
    ec2.authorize_security_group_egress(**make_request("IpRanges", "CidrIp", blocks[:59]))
    code = error_code_of(
        ec2.authorize_security_group_egress, **make_request("IpRanges", "CidrIp", blocks[59:60])
    )
    assert code == "RulesPerSecurityGroupLimitExceeded"


def test_a_filter_takes_200_values(records: Cloud, instance: str) -> None:
    describe = records.client("ec2").describe_instances
    ids = [f"i-{number:017x}" for number in range(200)]
    assert describe(Filters=[{"Name": "instance-id", "Values": ids}])["Reservations"] == []
    filters = [{"Name": "instance-id", "Values": [*ids, instance]}]
    assert error_code_of(describe, Filters=filters) == "FilterLimitExceeded"
