"""A case of each kind of benchmarks/campaigns/cuts.py, drawn with a fresh seed that is printed."""

import os
import random
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.campaigns import cuts
from tests.support.local_cloud import Cloud, fault_clear

SEED = int(os.environ.get("AWSDDP_SEED", secrets.randbelow(10**6)))


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_nothing_half_has_a_name_and_no_upload_is_left_where_s3_cuts_and_is_slow(
    local_records: Cloud, record_property: Callable[[str, object], None]
) -> None:
    def one(number: int) -> cuts.Row:
        return cuts.run(local_records, number, random.Random(f"{SEED}/{number}"))

    with ThreadPoolExecutor() as pool:
        rows = list(pool.map(one, range(len(cuts.KINDS))))
    fault_clear(local_records.info)  # those that struck nobody
    record_property("says", f"cuts, AWSDDP_SEED={SEED}: {rows}")
    assert all(row["ok"] for row in rows), (SEED, rows)
