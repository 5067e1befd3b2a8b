"""A bucket in the cloud in records mode."""

import uuid
from collections.abc import Iterator

import pytest

from tests.support.local_cloud import Cloud, clear_fault, cloud


@pytest.fixture
def bucket(records: Cloud) -> Iterator[str]:
    name = f"bucket-{uuid.uuid4().hex}"
    records.client("s3").create_bucket(Bucket=name)
    yield name
    clear_fault(records.info)
