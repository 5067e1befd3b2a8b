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


def test_a_run_goes_on_as_if_nothing_had_been_lost(record_property: Callable[[str, object], None]) -> None:
    dice = random.Random(SEED)
    fault = dice.choice([name for name in recoveries.FAULTS if name != "no capacity"])  # that takes 4 min
    is_killed = dice.random() < 0.5
    with recoveries.laboratory() as lab:
        row = recoveries.run(lab, {}, recoveries.FAULTS.index(fault), dice, is_killed=is_killed)
    record_property("says", f"recoveries, AWSDDP_SEED={SEED}, killed {is_killed}: {row}")
    assert row["ok"], (SEED, is_killed, row)
