"""Objects in S3, against the local cloud."""

import json
from datetime import timedelta

import pytest

from awsddp.agent.s3 import store as objects
from awsddp.agent.s3.store import S3Uri
from tests.support.saving_bucket import Bucket


def test_claim_aborts_incomplete_uploads_only_of_ended_jobs(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job, state in (("ended", "failed"), ("going", "running"), ("claimed", "claimed"), ("not-ours", "")):
        document = {"save": 2, "state": state} if state else {"state": "failed"}
        bucket.s3.put_object(Bucket=bucket.name, Key=f"runs/{job}/job.json", Body=json.dumps(document))
        bucket.s3.create_multipart_upload(Bucket=bucket.name, Key=f"runs/{job}/node0/large")
    for key in ("runs/nobody/file", "runs/.data/0f/set/a", "elsewhere/ended/file"):
        bucket.s3.create_multipart_upload(Bucket=bucket.name, Key=key)
    assert bucket.claim().code == ""
    others = ["elsewhere/ended/file", "runs/nobody/file", "runs/not-ours/node0/large"]
    alive = ["runs/claimed/node0/large", "runs/going/node0/large", "runs/.data/0f/set/a"]
    assert bucket.uploads() == sorted(others + alive)
    bucket.store().abort(S3Uri(bucket.name, "runs"), ended_jobs=("claimed",))
    assert bucket.uploads() == sorted(others + alive[1:])
    monkeypatch.setattr(objects, "_DAY", timedelta(0))
    bucket.store().abort(S3Uri(bucket.name, "runs"), ended_jobs=())
    assert bucket.uploads() == sorted([*others, "runs/.data/0f/set/a"])  # it may take days over a slow line
    monkeypatch.setattr(objects, "_WEEK", timedelta(0))
    bucket.store().abort(S3Uri(bucket.name, "runs"), ended_jobs=())
    assert bucket.uploads() == others
