"""--data on real local nodes: copied before the ranks start, and only once."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from awsddp.local import control
from tests.support.lab import Lab

LOOK = """
import os, pathlib, sys
root = pathlib.Path(os.environ["AWSDDP_DATA"])
for name in sys.argv[1:]:
    print("found", (root / name).read_text() if name[0] != "/" else sorted(os.listdir(name)))
"""


def make_client(lab: Lab, service: str) -> Any:
    info = control.find_cloud(lab.home)
    assert info is not None
    return boto3.client(  # type: ignore[call-overload]
        service,
        endpoint_url=info.endpoint,
        region_name=info.region,
        aws_access_key_id=info.access_key_id,
        aws_secret_access_key=info.secret_access_key,
    )


@pytest.fixture
def bucket(cluster: Lab) -> Iterator[str]:
    """A bucket, of which the role of the nodes may read set/."""
    name = f"data-{uuid.uuid4().hex}"
    s3, iam, ec2 = (make_client(cluster, service) for service in ("s3", "iam", "ec2"))
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="set/a/one", Body=b"number one")
    arn = f"arn:aws:s3:::{name}"
    statements = [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{arn}/set/*"},
        {
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": arn,
            "Condition": {"StringLike": {"s3:prefix": ["set/*"]}},
        },
    ]
    iam.create_role(RoleName=name[:60], AssumeRolePolicyDocument="{}")
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_role_policy(RoleName=name[:60], PolicyName="read", PolicyDocument=document)
    iam.create_instance_profile(InstanceProfileName=name[:60])
    iam.add_role_to_instance_profile(InstanceProfileName=name[:60], RoleName=name[:60])
    instance_ids = [node["instance_id"] for node in cluster.json("status")["nodes"]]
    responses = [
        ec2.associate_iam_instance_profile(InstanceId=key, IamInstanceProfile={"Name": name[:60]})
        for key in instance_ids
    ]
    yield name
    for response in responses:
        association = response["IamInstanceProfileAssociation"]["AssociationId"]
        ec2.disassociate_iam_instance_profile(AssociationId=association)


@pytest.mark.timeout(400)
def test_data_is_copied_once_and_before_the_ranks_start(cluster: Lab, bucket: str) -> None:
    cluster.script("look.py", LOOK)
    args = ("train", "look.py", "--nproc-per-node", "1")
    source = ("--data", f"s3://{bucket}/set")
    result = cluster.run(*args, *source, "--", "set/a/one", "{data}")
    assert result.returncode == 0, result.stderr + result.stdout
    for rank in ("rank 0 @ node0", "rank 1 @ node1"):
        assert f"[{rank}] found number one" in result.stdout
        assert f"[{rank}] found ['a']" in result.stdout
    again = cluster.run(args[0], "--json", *args[1:], *source, "--", "set/a/one")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("data: 0 files, 0 bytes copied") == 2
    make_client(cluster, "s3").put_object(Bucket=bucket, Key="set/b", Body=b"b")
    more = ("--data", "mine=./mine")
    cluster.script("mine/x/y", "of mine")
    result = cluster.run(args[0], "--json", *args[1:], *source, *more, "--", "set/b", "mine/x/y")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("data: 1 file, 1 bytes copied") == 2
    assert "found of mine" in cluster.run("logs").stdout
    refused = cluster.run(*args, *source, *more, "--", "{data}")
    assert (refused.returncode, "{data} needs one source" in refused.stderr) == (2, True)


@pytest.mark.timeout(200)
def test_train_reports_a_data_source_that_cannot_be_copied(cluster: Lab) -> None:
    cluster.script("look.py", LOOK)
    s3, name = make_client(cluster, "s3"), f"mine-{uuid.uuid4().hex}"
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="set/one", Body=b"public")
    args = ("train", "look.py", "--nproc-per-node", "1", "--data", f"s3://{name}/set", "--", "set/one")
    result = cluster.run(*args)
    assert result.returncode == 6, result.stderr
    assert f"s3://{name}/set may not be read" in result.stderr
    s3.put_bucket_acl(Bucket=name, ACL="public-read")
    result = cluster.run(*args)
    assert "found public" in result.stdout, result.stderr
    planned = cluster.json("plan", "--data", f"s3://{name}/set")
    assert [(data["name"], data["bytes"], data["files"]) for data in planned["data"]] == [("set", 6, 1)]
    missing = cluster.run("train", "look.py", "--data", "./none")
    assert (missing.returncode, "--data: ./none is not a local folder" in missing.stderr) == (3, True)
