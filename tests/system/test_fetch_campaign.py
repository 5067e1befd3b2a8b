"""A job whose files grow, and a fetch that is cut: cases drawn from benchmarks/campaigns/fetch.py."""

import os
import random
import secrets
from collections.abc import Callable

import pytest

from benchmarks.campaigns import fetch
from benchmarks.campaigns._campaign import cluster

SEED = int(os.environ.get("AWSDDP_SEED", secrets.randbelow(10**6)))

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="systemd-nspawn and namespaces are root's"),
]


def test_fetch_copies_complete_files_and_resumes_where_it_was_cut(
    record_property: Callable[[str, object], None],
) -> None:
    with cluster(2, fetch.SCRIPTS) as lab:
        rows = [fetch.cut(lab, 0, random.Random(SEED), cuts=3), fetch.grow(lab, SEED)]
    record_property("says", f"fetch, AWSDDP_SEED={SEED}: {rows}")
    assert all(row["ok"] for row in rows), (SEED, rows)
