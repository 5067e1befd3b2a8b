"""One case of each kind of benchmarks/campaigns/cuts.py, drawn from a new seed that is printed."""

import os
import random
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.campaigns import cuts
from tests.support.local_cloud import Cloud, clear_fault

SEED = int(os.environ.get("AWSDDP_SEED", secrets.randbelow(10**6)))


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_slow_s3_that_cuts_connections_leaves_no_partial_file_and_no_open_upload(
    local_records: Cloud, record_property: Callable[[str, object], None]
) -> None:
    def run_case(number: int) -> cuts.Row:
        return cuts.run(local_records, number, random.Random(f"{SEED}/{number}"))

    with ThreadPoolExecutor() as pool:
        rows = list(pool.map(run_case, range(len(cuts.KINDS))))
    clear_fault(local_records.info)  # faults that no request met
    record_property("says", f"cuts, AWSDDP_SEED={SEED}: {rows}")
    assert all(row["ok"] for row in rows), (SEED, rows)
