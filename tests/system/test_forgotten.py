"""Forgotten clusters, drawn from the campaign of all ways to forget one: each ends in time, at its price."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.campaigns import forgotten
from tests.support.seed import FULL, SEED


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_a_forgotten_cluster_ends_in_time_at_the_price_that_was_shown() -> None:
    dice = random.Random(SEED)
    ways = list(range(len(forgotten.WAYS)))
    by_expiry, by_idle = ways[: len(forgotten.BY_EXPIRY)], ways[len(forgotten.BY_EXPIRY) :]
    chosen = ways if FULL else [*dice.sample(by_expiry, 2), *dice.sample(by_idle, 3)]
    with forgotten.laboratory() as (lab, ec2), ThreadPoolExecutor(max_workers=5) as pool:
        draws = [random.Random(f"{SEED}/{number}") for number in chosen]
        rows = list(pool.map(lambda number, draw: forgotten.run(lab, ec2, number, draw), chosen, draws))
    assert [row for row in rows if not row["ok"]] == []
