"""The endpoint: authentication, and unsupported operations."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import Cloud, error_code_of


def test_the_endpoint_accepts_its_own_credentials_only(records: Cloud) -> None:
    wrong = {"aws_secret_access_key": "x" * 40}
    unknown = {"aws_access_key_id": "AKIAUNKNOWN"}
    assert error_code_of(records.client("ec2", **wrong).describe_regions) == "AuthFailure"
    assert error_code_of(records.client("ec2", **unknown).describe_regions) == "AuthFailure"
    assert error_code_of(records.client("sts", **wrong).get_caller_identity) == "SignatureDoesNotMatch"
    assert error_code_of(records.client("sts", **unknown).get_caller_identity) == "InvalidClientTokenId"


@pytest.mark.parametrize(
    ("service", "operation", "parameters", "code"),
    [
        ("pricing", "get_products", {"ServiceCode": "AmazonEC2"}, "UnknownOperationException"),
        ("efs", "describe_file_systems", {}, "UnknownOperationException"),
        ("ssm", "start_session", {"Target": "i-12345678"}, "UnknownOperationException"),
        ("ec2", "describe_network_insights_paths", {}, "UnsupportedOperation"),
    ],
)
def test_an_unsupported_operation_is_refused_in_the_format_of_its_service(
    records: Cloud, service: str, operation: str, parameters: dict[str, Any], code: str
) -> None:
    log = CloudPaths(records.home).log
    before = log.read_text()
    with pytest.raises(ClientError, match="The local cloud") as caught:
        getattr(records.client(service), operation)(**parameters)
    assert caught.value.response["Error"]["Code"] == code
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    assert log.read_text() == before
