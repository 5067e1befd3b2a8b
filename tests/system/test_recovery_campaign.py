"""A job with --recover that loses machines: a case of benchmarks/campaigns/recoveries.py."""

import os
import random
from collections.abc import Callable

import pytest

from benchmarks.campaigns import recoveries
from tests.support.seed import SEED

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(500),
    pytest.mark.skipif(os.geteuid() != 0, reason="systemd-nspawn and namespaces are root's"),
]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_goes_on_as_if_nothing_had_been_lost(
    record_property: Callable[[str, object], None], is_killed: bool
) -> None:
    dice = random.Random(f"{SEED}/{is_killed}")
    fault = recoveries.FAULTS.index(
        dice.choice([name for name in recoveries.FAULTS if name != "no capacity"])
    )
    with recoveries.laboratory() as lab:
        row = recoveries.run(lab, {}, fault, dice, is_killed=is_killed)
    record_property("says", f"recoveries, AWSDDP_SEED={SEED}: {row}")
    assert row["ok"], (SEED, row)
