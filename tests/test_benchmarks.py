"""The programs behind the README's figures still run. What they measure is no test."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seed import SEED

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHORTEST = {
    "startup": ["1"],
    "status": ["1"],
    "own_time": ["1"],
    "local_boot": ["--nodes", "2", "--times", "1"],
}


@pytest.mark.prove
def test_a_benchmark_still_runs() -> None:
    name = random.Random(f"benchmark/{SEED}").choice(sorted(SHORTEST))
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "AWSDDP_HOME"))}
    words = [sys.executable, str(BENCHMARKS / f"{name}.py"), *SHORTEST[name]]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
