"""Trees of results on real nodes, drawn from benchmarks/campaigns/trees.py."""

import os
from collections.abc import Callable

import pytest

from benchmarks.campaigns import trees
from tests.support.seed import SEED

TREES = 2

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="systemd-nspawn and namespaces are root's"),
]


def test_fetch_from_nodes_fetch_from_s3_and_down_copy_the_same_tree(
    record_property: Callable[[str, object], None],
) -> None:
    with trees.laboratory() as lab:
        rows = [trees.run_on_nodes(lab, number, f"{SEED}/{number}", many=20) for number in range(TREES)]
    record_property("says", f"trees on nodes, AWSDDP_SEED={SEED}: {rows}")
    assert all(row["ok"] for row in rows), (SEED, rows)
