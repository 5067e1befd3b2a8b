"""Trees of results (benchmarks/campaigns/trees.py): what comes home from a node and from S3 is equal."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.campaigns import trees
from tests.support.local_cloud import Cloud
from tests.support.seed import SEED

SHORT = {"seconds": 0.6, "many": 300}


def differing(local_records: Cloud, numbers: range, **size: float) -> list[trees.Row]:
    """Return the trees of which something came otherwise."""

    def one(number: int) -> trees.Row:
        return trees.run(local_records, number, random.Random(f"{SEED}/{number}"), **size)  # type: ignore[arg-type]

    with ThreadPoolExecutor(max_workers=2) as pool:
        return [row for row in pool.map(one, numbers) if not row["ok"]]


def test_what_comes_home_from_a_node_and_from_s3_is_equal(local_records: Cloud) -> None:
    assert differing(local_records, range(3, 6), **SHORT) == []


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_what_comes_home_of_thirty_trees_is_equal(
    local_records: Cloud, record_property: Callable[[str, object], None]
) -> None:
    record_property("says", f"30 trees, AWSDDP_SEED={SEED}")
    large = 5  # the first of those with 3,000 small files; the campaign has five of them
    wrong = differing(local_records, range(large), seconds=1.0)
    wrong += differing(local_records, range(large, large + 1))
    assert wrong + differing(local_records, range(large + 1, 30), seconds=1.0, many=300) == [], SEED
