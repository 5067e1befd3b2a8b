"""One case of each kind of benchmarks/campaigns/bucket.py, drawn from the seed."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.campaigns import bucket
from tests.support.local_cloud import Cloud
from tests.support.seed import SEED


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_another_writer_below_the_prefix_causes_no_lost_result_and_no_foreign_one(
    local_records: Cloud, record_property: Callable[[str, object], None]
) -> None:
    def run_case(number: int) -> bucket.Row:
        return bucket.run(local_records, number, random.Random(f"{SEED}/{number}"))

    with ThreadPoolExecutor(max_workers=4) as pool:
        rows = list(pool.map(run_case, range(len(bucket.KINDS))))
    record_property("says", f"bucket, AWSDDP_SEED={SEED}:\n{bucket.table(rows)}")
    assert all(row["ok"] for row in rows), (SEED, [row for row in rows if not row["ok"]])
