"""Errors of AWS: what failed, why, and the next step."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from awsddp.aws.api_errors import translate_error
from awsddp.aws.client import AwsClient, Trail
from awsddp.errors import CloudError
from awsddp.model.records import Target, TargetName
from tests.support.moto_cloud import Cloud


def test_an_error_has_a_message_a_reason_and_a_next_step(aws: AwsClient, cloud: Cloud) -> None:
    cases = (
        ("UnauthorizedOperation", "permission denied: DescribeSubnets"),
        ("ExpiredToken", "expired"),
        ("AuthFailure", "rejected the credentials"),
        ("OptInRequired", "refused DescribeSubnets"),
    )
    for code, message in cases:
        cloud.fail("DescribeSubnets", code)
        with pytest.raises(CloudError) as caught:
            aws.call("DescribeSubnets", {})
        assert message in caught.value.message
        assert code in caught.value.why
        assert caught.value.next


@pytest.mark.parametrize(
    ("code", "status", "kind", "advice"),
    [
        ("InsufficientHostCapacity", 400, "capacity", "another --instance-type"),
        ("InsufficientCapacity", 500, "capacity", "another --instance-type"),
        ("InsufficientReservedInstanceCapacity", 400, "capacity", "another --instance-type"),
        ("VolumeLimitExceeded", 400, "quota", "aws service-quotas list-service-quotas"),
        ("SecurityGroupLimitExceeded", 400, "quota", "aws service-quotas list-service-quotas"),
        ("AddressLimitExceeded", 400, "quota", "aws service-quotas list-service-quotas"),
        ("VcpuLimitExceeded", 400, "quota", "awsddp doctor --request-quota"),
        ("RequestLimitExceeded", 503, "throttled", "wait a minute"),
    ],
)
def test_each_capacity_and_limit_code_of_ec2_has_its_kind_and_next_step(
    code: str, status: int, kind: str, advice: str
) -> None:
    reply: Any = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = translate_error(ClientError(reply, "RunInstances"), "RunInstances", location="us-east-1")
    assert error.kind == kind
    assert advice in error.next


DENIED = (
    "You are not authorized to perform this operation. User: arn:aws:iam::1:user/ann is not authorized to"
)


BLOB = "4Ou6SyWJ" * 200


def test_a_denial_has_no_encoded_message_and_the_trail_has_it(
    aws: AwsClient, cloud: Cloud, tmp_path: Path
) -> None:
    text = f"{DENIED} perform: ec2:StopInstances. Encoded authorization failure message: {BLOB}"
    cloud.fail("StopInstances", "UnauthorizedOperation", message=text)
    with pytest.raises(CloudError) as refused:
        AwsClient(cloud.target, on_call=Trail(tmp_path)).call("StopInstances", {"InstanceIds": ["i-1"]})
    assert refused.value.why == f"UnauthorizedOperation: {DENIED} perform: ec2:StopInstances."
    assert json.loads((tmp_path / "calls.jsonl").read_text())["encoded"] == BLOB


@pytest.fixture
def account_endpoint(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send requests of targets without an endpoint to the moto cloud."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


@pytest.mark.usefixtures("account_endpoint")
@pytest.mark.parametrize("code", ["AuthFailure", "InvalidClientTokenId"])
@pytest.mark.parametrize(("region", "is_disabled"), [("af-south-1", True), ("eu-west-1", False)])
def test_a_disabled_region_is_distinguished_from_bad_credentials(
    cloud: Cloud, code: str, region: str, is_disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [af_south] = cloud.backend.describe_regions(["af-south-1"])
    monkeypatch.setattr(af_south, "opt_in_status", "not-opted-in")
    cloud.fail("GetCallerIdentity", code)
    with pytest.raises(CloudError) as refused:
        AwsClient(Target(region=region)).identity()
    assert (f"region {region} is not enabled" in refused.value.message) == is_disabled
    assert (f"aws account enable-region --region-name {region}" in refused.value.next) == is_disabled
    assert ("rejected the credentials" in refused.value.message) != is_disabled


@pytest.mark.usefixtures("account_endpoint")
def test_credentials_that_no_region_accepts_are_an_error(cloud: Cloud) -> None:
    cloud.fail("GetCallerIdentity", "AuthFailure")
    cloud.fail("DescribeRegions", "AuthFailure")
    with pytest.raises(CloudError, match="AWS rejected the credentials"):
        AwsClient(Target(region="af-south-1")).identity()


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "RequestTimeTooSkewed"])
@pytest.mark.parametrize(("minutes", "why"), [(10, "600 s behind AWS's"), (-10, "600 s ahead of AWS's")])
def test_a_refused_signature_names_the_wrong_clock(minutes: int, why: str, code: str) -> None:
    now = datetime(2026, 11, 21, 8, 45, tzinfo=UTC)
    headers = {"date": format_datetime(now + timedelta(minutes=minutes))}
    reply: Any = {
        "Error": {"Code": code, "Message": "Signature expired"},
        "ResponseMetadata": {"HTTPHeaders": headers, "HTTPStatusCode": 403},
    }
    error = translate_error(ClientError(reply, "RunInstances"), "RunInstances", location="us-east-1", now=now)
    assert "clock" in error.message
    assert why in error.why
    assert "timedatectl" in error.next


def test_a_clock_error_of_s3_is_recognized_without_a_date() -> None:
    reply: Any = {"Error": {"Code": "RequestTimeTooSkewed", "Message": "The difference is too large"}}
    error = translate_error(ClientError(reply, "GetObject"), "GetObject", location="s3://runs/j")
    assert ("clock" in error.message, error.kind) == (True, "credentials")


@pytest.mark.parametrize(
    ("code", "kind"),
    [("SlowDown", "throttled"), ("ServiceUnavailable", "unavailable"), ("RequestTimeout", "unavailable")],
)
def test_temporary_errors_of_s3_are_retryable(code: str, kind: str) -> None:
    status = 400 if code == "RequestTimeout" else 503
    reply: Any = {"Error": {"Code": code, "Message": "later"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = translate_error(ClientError(reply, "GetObject"), "GetObject", location="s3://runs/j")
    assert (error.kind, error.retryable) == (kind, True)


@pytest.mark.parametrize(("name", "who"), [("aws", "AWS"), ("local", "the local cloud")])
def test_an_error_names_the_endpoint_that_is_unreachable(cloud: Cloud, name: TargetName, who: str) -> None:
    aws = AwsClient(replace(cloud.target, name=name, endpoint="http://127.0.0.1:9"))
    with pytest.raises(CloudError, match=f"could not reach {who} for"):
        aws.identity()
