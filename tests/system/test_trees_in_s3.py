"""Trees of results (benchmarks/campaigns/trees.py): a fetch from a node and one from S3 are equal."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.campaigns import trees
from tests.support.local_cloud import Cloud
from tests.support.seed import SEED

SHORT = {"seconds": 0.6, "many": 300}


def list_differing(local_records: Cloud, numbers: range, **size: float) -> list[trees.Row]:
    """Return the trees whose two fetches differ."""

    def run_tree(number: int) -> trees.Row:
        return trees.run(local_records, number, random.Random(f"{SEED}/{number}"), **size)  # type: ignore[arg-type]

    with ThreadPoolExecutor(max_workers=2) as pool:
        return [row for row in pool.map(run_tree, numbers) if not row["ok"]]


def test_fetches_from_a_node_and_from_s3_are_equal(local_records: Cloud) -> None:
    assert list_differing(local_records, range(3, 6), **SHORT) == []


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_fetches_of_thirty_trees_are_equal(
    local_records: Cloud, record_property: Callable[[str, object], None]
) -> None:
    record_property("says", f"30 trees, AWSDDP_SEED={SEED}")
    large = 5  # the first of those with 3,000 small files; the campaign has five of them
    differing = list_differing(local_records, range(large), seconds=1.0)
    differing += list_differing(local_records, range(large, large + 1))
    assert differing + list_differing(local_records, range(large + 1, 30), seconds=1.0, many=300) == [], SEED
