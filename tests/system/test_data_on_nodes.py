"""--data on real local nodes: there before the ranks, and copied once."""

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


def client(lab: Lab, service: str) -> Any:
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
    """A bucket that the role of the nodes may read below set/."""
    name = f"data-{uuid.uuid4().hex}"
    s3, iam, ec2 = (client(cluster, one) for one in ("s3", "iam", "ec2"))
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="set/a/one", Body=b"number one")
    at = f"arn:aws:s3:::{name}"
    statements = [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{at}/set/*"},
        {
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": at,
            "Condition": {"StringLike": {"s3:prefix": ["set/*"]}},
        },
    ]
    iam.create_role(RoleName=name[:60], AssumeRolePolicyDocument="{}")
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_role_policy(RoleName=name[:60], PolicyName="read", PolicyDocument=document)
    iam.create_instance_profile(InstanceProfileName=name[:60])
    iam.add_role_to_instance_profile(InstanceProfileName=name[:60], RoleName=name[:60])
    nodes = [one["instance_id"] for one in cluster.json("status")["nodes"]]
    made = [
        ec2.associate_iam_instance_profile(InstanceId=one, IamInstanceProfile={"Name": name[:60]})
        for one in nodes
    ]
    yield name
    for one in made:
        association = one["IamInstanceProfileAssociation"]["AssociationId"]
        ec2.disassociate_iam_instance_profile(AssociationId=association)


@pytest.mark.timeout(400)
def test_data_is_there_before_the_ranks_and_is_copied_once(cluster: Lab, bucket: str) -> None:
    cluster.script("look.py", LOOK)
    words = ("train", "look.py", "--nproc-per-node", "1")
    source = ("--data", f"s3://{bucket}/set")
    shown = cluster.run(*words, *source, "--", "set/a/one", "{data}")
    assert shown.returncode == 0, shown.stderr + shown.stdout
    for rank in ("rank 0 @ node0", "rank 1 @ node1"):
        assert f"[{rank}] found number one" in shown.stdout
        assert f"[{rank}] found ['a']" in shown.stdout
    again = cluster.run(words[0], "--json", *words[1:], *source, "--", "set/a/one")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("data: 0 files, 0 bytes copied") == 2
    client(cluster, "s3").put_object(Bucket=bucket, Key="set/b", Body=b"b")
    more = ("--data", "mine=./mine")
    cluster.script("mine/x/y", "of mine")
    shown = cluster.run(words[0], "--json", *words[1:], *source, *more, "--", "set/b", "mine/x/y")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr.count("data: 1 file, 1 bytes copied") == 2
    assert "found of mine" in cluster.run("logs").stdout
    both = cluster.run(*words, *source, *more, "--", "{data}")
    assert (both.returncode, "{data} needs one source" in both.stderr) == (2, True)


@pytest.mark.timeout(200)
def test_a_source_that_cannot_be_copied_is_named(cluster: Lab) -> None:
    cluster.script("look.py", LOOK)
    s3, name = client(cluster, "s3"), f"mine-{uuid.uuid4().hex}"
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="set/one", Body=b"public")
    words = ("train", "look.py", "--nproc-per-node", "1", "--data", f"s3://{name}/set", "--", "set/one")
    shown = cluster.run(*words)
    assert shown.returncode == 6, shown.stderr
    assert f"s3://{name}/set may not be read" in shown.stderr
    s3.put_bucket_acl(Bucket=name, ACL="public-read")
    shown = cluster.run(*words)
    assert "found public" in shown.stdout, shown.stderr
    planned = cluster.json("plan", "--data", f"s3://{name}/set")
    assert [(one["name"], one["bytes"], one["files"]) for one in planned["data"]] == [("set", 6, 1)]
    missing = cluster.run("train", "look.py", "--data", "./none")
    assert (missing.returncode, "--data: ./none is not a local folder" in missing.stderr) == (3, True)
