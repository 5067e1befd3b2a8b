"""The name of a job in S3 is claimed before it starts, and each right is tried."""

import json
import shutil
import venv

import pytest

from awsddp.model.node_answers import NameClaimResult, read_answer
from awsddp.storage import datasets
from tests.support.saving_bucket import RIGHTS, Bucket, Metadata


def test_of_two_claims_at_once_one_wins_and_the_other_learns_the_names(bucket: Bucket) -> None:
    rivals = [bucket.start("claim", bucket.top, by=one, launch=one) for one in ("one", "other")]
    told = [read_answer(one.communicate(timeout=60)[0], NameClaimResult, node=0) for one in rivals]
    assert sorted(one.code for one in told) == ["", "taken"]
    assert [one.names for one in told if one.code] == [("job-1",)]


def test_a_node_claims_again_what_it_has_not_launched(bucket: Bucket) -> None:
    assert [bucket.claim().code for _ in range(2)] == ["", ""]
    assert bucket.claim(launch="launch-2").code == ""
    assert bucket.claim(by="i-1", launch="launch-3").code == "taken"
    document = json.dumps({**bucket.json("job.json"), "state": "running"})  # as its saver writes it
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/job.json", Body=document)
    assert bucket.claim().code == "taken"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"[" * 100_000])
def test_a_name_under_which_others_wrote_is_taken(bucket: Bucket, body: bytes) -> None:
    bucket.s3.put_object(Bucket=bucket.name, Key="runs/job-1/job.json", Body=body)
    bucket.s3.create_multipart_upload(Bucket=bucket.name, Key="runs/job-1/node0/large")
    told = bucket.claim()
    assert (told.code, told.names) == ("taken", ("job-1",))
    assert bucket.uploads() == ["runs/job-1/node0/large"]


@pytest.mark.prove
def test_a_python_with_an_old_boto3_saves_with_that_of_the_client(bucket: Bucket) -> None:
    venv.create(bucket.top / "old", with_pip=False, symlinks=True)
    [packages] = (bucket.top / "old/lib").glob("python*/site-packages")
    with datasets._packages() as folder:
        shutil.copytree(folder, packages, dirs_exist_ok=True)
        futures = packages / "s3transfer/futures.py"
        futures.write_text(futures.read_text().replace("def provide_object_etag", "def not_yet"))
        python = str(bucket.top / "old/bin/python")
        told = bucket.claim(python=python)
        assert (told.code, told.said) == ("boto3", "its s3transfer is older than 0.11")
        shutil.copytree(folder, bucket.top / "awsddp/boto3")
        assert bucket.claim(python=python).code == ""


@pytest.mark.prove
def test_a_metadata_service_that_is_slow_is_waited_for(bucket: Bucket) -> None:
    bucket.metadata.slow_s = 1.5
    assert bucket.claim().code == ""


@pytest.mark.parametrize(
    "right", [pytest.param(one, marks=pytest.mark.prove if one in RIGHTS[1:3] else ()) for one in RIGHTS]
)
def test_a_right_that_is_missing_is_named(bucket: Bucket, right: str) -> None:
    lacking = Metadata(bucket.cloud, bucket.name, tuple(one for one in RIGHTS if one != right))
    told = bucket.claim(lacking)
    assert (told.code, told.what) == ("right", right)
    assert right in told.said or right == "s3:ListBucket"
    assert not bucket.json("job.json")


def test_a_metadata_service_that_finds_no_role_at_first_is_asked_again(bucket: Bucket) -> None:
    late = Metadata(bucket.cloud, bucket.name)
    late.refuses = 4  # its token, and each attempt of botocore
    assert bucket.claim(late).code == ""


def test_what_else_keeps_a_node_from_saving_is_told(bucket: Bucket) -> None:
    assert bucket.claim(Metadata(None)).code == "role"
    missing = f"missing-{bucket.name[:40]}"
    assert bucket.claim(Metadata(bucket.cloud, missing), place=(missing, "runs")).code == "bucket"
    far = f"far-{bucket.name[:40]}"
    bucket.s3.create_bucket(Bucket=far, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    told = bucket.claim(Metadata(bucket.cloud, far), place=(far, "runs"))
    assert (told.code, told.what) == ("region", "eu-west-1")
