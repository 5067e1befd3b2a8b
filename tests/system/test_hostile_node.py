"""Drawn cases of benchmarks/campaigns/hostile_node.py, with a new seed that is printed."""

import os
import random
from pathlib import Path

import pytest

from benchmarks.campaigns import hostile_node

CASES = 60


@pytest.mark.prove
def test_a_hostile_node_changes_only_its_jobs_folder_and_forges_no_output(tmp_path: Path) -> None:
    seed = os.environ.get("AWSDDP_SEED") or str(random.SystemRandom().randrange(10**6))
    home = hostile_node.Home(tmp_path / "home")
    cases = (f"{seed}/{number}" for number in range(CASES))
    harm = {case: wrong for case in cases if (wrong := hostile_node.play_case(home, case))}
    assert not harm, f"again: AWSDDP_SEED={seed}"
