"""The name of a job in S3 is claimed before it starts, and each right is checked."""

import json
import shutil
import venv

import pytest

from awsddp.model.node_answers import NameClaimResult, read_answer
from awsddp.storage import datasets
from tests.support.saving_bucket import RIGHTS, Bucket, Metadata


def test_one_of_two_concurrent_claims_wins_and_the_other_gets_the_taken_names(bucket: Bucket) -> None:
    claims = [bucket.start("claim", bucket.top, by=owner, launch=owner) for owner in ("one", "other")]
    results = [read_answer(claim.communicate(timeout=60)[0], NameClaimResult, node=0) for claim in claims]
    assert sorted(result.code for result in results) == ["", "taken"]
    assert [result.names for result in results if result.code] == [("job-1",)]


def test_node_can_claim_again_a_name_that_it_has_not_launched(bucket: Bucket) -> None:
    assert [bucket.claim().code for _ in range(2)] == ["", ""]
    assert bucket.claim(launch="launch-2").code == ""
    assert bucket.claim(by="i-1", launch="launch-3").code == "taken"
    document = json.dumps({**bucket.json("job.json"), "state": "running"})  # as its uploader writes it
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/job.json", Body=document)
    assert bucket.claim().code == "taken"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"[" * 100_000])
def test_name_with_objects_of_others_is_taken(bucket: Bucket, body: bytes) -> None:
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/job.json", Body=body)
    bucket.s3.create_multipart_upload(Bucket=bucket.name, Key="runs/job-1/node0/large")
    result = bucket.claim()
    assert (result.code, result.names) == ("taken", ("job-1",))
    assert bucket.uploads() == ["runs/job-1/node0/large"]


@pytest.mark.prove
def test_python_with_an_old_boto3_uses_that_of_the_client(bucket: Bucket) -> None:
    venv.create(bucket.top / "old", with_pip=False, symlinks=True)
    [packages] = (bucket.top / "old/lib").glob("python*/site-packages")
    with datasets._packages() as folder:
        shutil.copytree(folder, packages, dirs_exist_ok=True)
        futures = packages / "s3transfer/futures.py"
        futures.write_text(futures.read_text().replace("def provide_object_etag", "def not_yet"))
        python = str(bucket.top / "old/bin/python")
        result = bucket.claim(python=python)
        assert (result.code, result.said) == ("boto3", "its s3transfer is older than 0.11")
        shutil.copytree(folder, bucket.top / "awsddp/boto3")
        assert bucket.claim(python=python).code == ""


@pytest.mark.prove
def test_slow_metadata_service_is_waited_for(bucket: Bucket) -> None:
    bucket.metadata.slow_s = 1.5
    assert bucket.claim().code == ""


@pytest.mark.parametrize(
    "right", [pytest.param(name, marks=pytest.mark.prove if name in RIGHTS[1:3] else ()) for name in RIGHTS]
)
def test_missing_right_is_named(bucket: Bucket, right: str) -> None:
    lacking = Metadata(bucket.cloud, bucket.name, tuple(name for name in RIGHTS if name != right))
    result = bucket.claim(lacking)
    assert (result.code, result.what) == ("right", right)
    assert right in result.said or right == "s3:ListBucket"
    assert not bucket.json("job.json")


def test_metadata_service_without_a_role_at_first_is_retried(bucket: Bucket) -> None:
    late = Metadata(bucket.cloud, bucket.name)
    late.refusals_left = 4  # the token, and each attempt of botocore
    assert bucket.claim(late).code == ""


def test_missing_role_missing_bucket_and_another_region_are_reported(bucket: Bucket) -> None:
    assert bucket.claim(Metadata(None)).code == "role"
    missing = f"missing-{bucket.name[:40]}"
    assert bucket.claim(Metadata(bucket.cloud, missing), place=(missing, "runs")).code == "bucket"
    far = f"far-{bucket.name[:40]}"
    bucket.s3.create_bucket(Bucket=far, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    result = bucket.claim(Metadata(bucket.cloud, far), place=(far, "runs"))
    assert (result.code, result.what) == ("region", "eu-west-1")
