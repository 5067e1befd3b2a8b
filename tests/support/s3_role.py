"""A role with some rights in a bucket, and S3 with its credentials."""

import json
import uuid
from typing import Any

from tests.support.local_cloud import Cloud


def make_role(records: Cloud, bucket: str, *actions: str, listed: str = "in/*") -> Any:
    """Return (ARN, S3 client) of a role that may do `actions` in the bucket's `in/`, and list `listed`."""
    iam, name = records.client("iam"), f"role-{uuid.uuid4().hex}"
    arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    bucket_arn = f"arn:aws:s3:::{bucket}"
    listing = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": bucket_arn}
    statements = [
        {"Effect": "Allow", "Action": list(actions), "Resource": [bucket_arn, f"{bucket_arn}/in/*"]},
        {**listing, "Condition": {"StringLike": {"s3:prefix": [listed]}}},
        {"Effect": "Deny", "Action": "S3:get*", "Resource": f"{bucket_arn}/in/secret?"},
    ]
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_role_policy(RoleName=name, PolicyName="rights", PolicyDocument=document)
    credentials = records.client("sts").assume_role(RoleArn=arn, RoleSessionName="i-1")["Credentials"]
    return arn, records.client(
        "s3",
        aws_access_key_id=credentials["AccessKeyId"],
        aws_secret_access_key=credentials["SecretAccessKey"],
        aws_session_token=credentials["SessionToken"],
    )
