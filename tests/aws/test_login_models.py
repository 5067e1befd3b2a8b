"""The data files of botocore, read by QuickReader."""

from pathlib import Path

import botocore
import pytest
from botocore.loaders import JSONFileLoader

from awsddp.aws.login import QuickReader

DATA = Path(botocore.__file__).parent / "data"


@pytest.mark.parametrize(
    "name", ["endpoints", "_retry", "ec2/2016-11-15/service-2", "sts/2011-06-15/service-2"]
)
def test_a_description_is_read_as_botocore_reads_it(name: str) -> None:
    ours = QuickReader().load_file(str(DATA / name))
    assert ours == JSONFileLoader().load_file(str(DATA / name))
    assert list(ours) == list(JSONFileLoader().load_file(str(DATA / name)))


def test_a_missing_description_is_none() -> None:
    assert QuickReader().load_file(str(DATA / "ec2/2016-11-15/service-3")) is None
