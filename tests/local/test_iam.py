"""Who may do what with S3, by the policies of a role."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.local_cloud import Cloud, refusal
from tests.support.s3_role import role


def test_a_role_may_do_what_its_policies_say(records: Cloud, bucket: str) -> None:
    records.client("s3").put_object(Bucket=bucket, Key="in/secret1", Body=b"")
    arn, s3 = role(records, bucket, "s3:GetObject", "s3:PutObject")
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
    named = {"Bucket": bucket, "Key": "in/one"}
    assert refusal(s3.delete_object, **named) == "AccessDenied"
    assert refusal(s3.get_object, Bucket=bucket, Key="in/secret1") == "AccessDenied"
    assert refusal(s3.get_object, Bucket=bucket, Key="in/none") == "AccessDenied"
    assert refusal(s3.list_objects_v2, Bucket=bucket) == "AccessDenied"
    assert refusal(s3.list_multipart_uploads, Bucket=bucket) == "AccessDenied"


def test_who_may_list_by_prefix_alone_is_not_told_what_is_not_there(records: Cloud, bucket: str) -> None:
    _, s3 = role(records, bucket, "s3:GetObject", listed="*")
    assert refusal(s3.get_object, Bucket=bucket, Key="in/none") == "AccessDenied"
    assert refusal(s3.list_objects_v2, Bucket=bucket) == "AccessDenied"
    assert s3.list_objects_v2(Bucket=bucket, Prefix="")["KeyCount"] == 0


def test_the_rights_of_a_role_can_be_asked_for(records: Cloud, bucket: str) -> None:
    arn, _ = role(records, bucket, "s3:GetObject")
    at, iam = f"arn:aws:s3:::{bucket}", records.client("iam")

    def decisions(resource: str, **more: Any) -> list[str]:
        answer = iam.simulate_principal_policy(
            PolicySourceArn=arn,
            ActionNames=["s3:GetObject", "s3:PutObject", "s3:ListBucket"],
            ResourceArns=[resource],
            **more,
        )
        return [one["EvalDecision"] for one in answer["EvaluationResults"]]

    prefix = {"ContextKeyName": "s3:prefix", "ContextKeyValues": ["in/a"], "ContextKeyType": "string"}
    assert decisions(f"{at}/in/x") == ["allowed", "implicitDeny", "implicitDeny"]
    assert decisions(f"{at}/in/secret1")[0] == "explicitDeny"
    assert decisions(at, ContextEntries=[prefix])[2] == "allowed"
    name = arn.rpartition("/")[2]
    assert iam.list_role_policies(RoleName=name)["PolicyNames"] == ["rights"]
    iam.delete_role_policy(RoleName=name, PolicyName="rights")
    iam.delete_role(RoleName=name)
    assert refusal(iam.get_role, RoleName=name) == "NoSuchEntity"
