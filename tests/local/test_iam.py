"""Permissions in S3 by the policies of a role."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.local_cloud import Cloud, error_code_of
from tests.support.s3_role import make_role


def test_a_role_has_the_permissions_of_its_policies(records: Cloud, bucket: str) -> None:
    records.client("s3").put_object(Bucket=bucket, Key="in/secret1", Body=b"")
    arn, s3 = make_role(records, bucket, "s3:GetObject", "s3:PutObject")
    s3.put_object(Bucket=bucket, Key="in/one", Body=b"1")
    assert s3.get_object(Bucket=bucket, Key="in/one")["Body"].read() == b"1"
    assert len(s3.list_objects_v2(Bucket=bucket, Prefix="in/")["Contents"]) == 2
    with pytest.raises(ClientError) as caught:
        s3.put_object(Bucket=bucket, Key="out", Body=b"")
    name = arn.rpartition("/")[2]
    assert caught.value.response["Error"]["Message"] == (
        f"User: arn:aws:sts::123456789012:assumed-role/{name}/i-1 is not authorized to perform: "
        f's3:PutObject on resource: "arn:aws:s3:::{bucket}/out" because no identity-based policy allows '
        "the s3:PutObject action"
    )
    target = {"Bucket": bucket, "Key": "in/one"}
    assert error_code_of(s3.delete_object, **target) == "AccessDenied"
    assert error_code_of(s3.get_object, Bucket=bucket, Key="in/secret1") == "AccessDenied"
    assert error_code_of(s3.get_object, Bucket=bucket, Key="in/none") == "AccessDenied"
    assert error_code_of(s3.list_objects_v2, Bucket=bucket) == "AccessDenied"
    assert error_code_of(s3.list_multipart_uploads, Bucket=bucket) == "AccessDenied"


def test_permission_to_list_a_prefix_does_not_reveal_missing_objects(records: Cloud, bucket: str) -> None:
    _, s3 = make_role(records, bucket, "s3:GetObject", listed="*")
    assert error_code_of(s3.get_object, Bucket=bucket, Key="in/none") == "AccessDenied"
    assert error_code_of(s3.list_objects_v2, Bucket=bucket) == "AccessDenied"
    assert s3.list_objects_v2(Bucket=bucket, Prefix="")["KeyCount"] == 0


def test_simulate_principal_policy_returns_the_permissions_of_a_role(records: Cloud, bucket: str) -> None:
    arn, _ = make_role(records, bucket, "s3:GetObject")
    bucket_arn, iam = f"arn:aws:s3:::{bucket}", records.client("iam")

    def simulate(resource: str, **options: Any) -> list[str]:
        answer = iam.simulate_principal_policy(
            PolicySourceArn=arn,
            ActionNames=["s3:GetObject", "s3:PutObject", "s3:ListBucket"],
            ResourceArns=[resource],
            **options,
        )
        return [result["EvalDecision"] for result in answer["EvaluationResults"]]

    prefix = {"ContextKeyName": "s3:prefix", "ContextKeyValues": ["in/a"], "ContextKeyType": "string"}
    assert simulate(f"{bucket_arn}/in/x") == ["allowed", "implicitDeny", "implicitDeny"]
    assert simulate(f"{bucket_arn}/in/secret1")[0] == "explicitDeny"
    assert simulate(bucket_arn, ContextEntries=[prefix])[2] == "allowed"
    name = arn.rpartition("/")[2]
    assert iam.list_role_policies(RoleName=name)["PolicyNames"] == ["rights"]
    iam.delete_role_policy(RoleName=name, PolicyName="rights")
    iam.delete_role(RoleName=name)
    assert error_code_of(iam.get_role, RoleName=name) == "NoSuchEntity"
