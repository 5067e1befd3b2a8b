"""Two short network breaks, drawn from a new seed each time (AWSDDP_SEED=N draws them again)."""

import os
import random
import secrets
from collections.abc import Callable, Iterator

import pytest

from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns import network_breaks
from benchmarks.campaigns._campaign import cluster

SEED = int(os.environ.get("AWSDDP_SEED", secrets.randbelow(10**6)))

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(os.geteuid() != 0, reason="systemd-nspawn and namespaces are root's"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Rehearsal]:
    with cluster(2, network_breaks.SCRIPTS) as made:
        yield made


@pytest.mark.parametrize("number", [0, 1])
def test_job_ends_as_if_the_network_had_not_broken(
    lab: Rehearsal, number: int, record_property: Callable[[str, object], None]
) -> None:
    row = network_breaks.run(lab, number, random.Random(f"{SEED}/{number}"), longest=20)
    record_property("says", f"network breaks, AWSDDP_SEED={SEED}: {row}")
    assert row["ok"], (SEED, row)
