"""A job with --save-to that loses a node or its cluster: a case of benchmarks/campaigns/saved.py."""

import os
import random
from collections.abc import Callable

import pytest

from benchmarks.campaigns import saved
from tests.support.seed import SEED

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="systemd-nspawn and namespaces are root's"),
]


def test_new_nodes_complete_a_saved_run_as_if_nothing_had_been_lost(
    record_property: Callable[[str, object], None],
) -> None:
    dice = random.Random(SEED)
    with saved.laboratory() as (lab, whole):
        row = saved.run(lab, whole, dice.randrange(len(saved.LOST)), dice)
    record_property("says", f"saved runs, AWSDDP_SEED={SEED}: {row}")
    assert row["ok"], (SEED, row)
