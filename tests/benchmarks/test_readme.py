"""The programs behind the figures of benchmarks/README.md still run. Their results are not tested."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.seed import SEED

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SHORTEST = {
    "data": "--nodes 1 --mb 1 --times 1",
    "fan_out": "--nodes 1 --times 1",
    "gang": "--pairs 1 --ranks 2",
    "local_boot": "--nodes 2 --times 1",
    "many_lines": "--nodes 1 --ranks 1 --lines 10 --rounds 1",
    "notify": "ok --pairs 2 --steps 2",
    "own_time": "1",
    "rank_helper": "1",
    "rehearsed_gpu": "",
    "saving": "--pairs 1 --steps 20 --rounds 1 --small 20 --medium 2 --large 20",
    "start": "1 --nodes 2",
    "startup": "1",
    "status": "1",
    "train_ddp": "--only digits --pairs 1 --rounds 1",
    "train_gpu": "",
    "train_input": "--rounds 1",
    "train_processes": "--images 5120 --rounds 1",
    "two_trees": ". --shortest --rounds 1",
    "campaigns/beside": "--runs 1 --parallel 1",
    "campaigns/bucket": "--runs 1 --parallel 1",
    "campaigns/cuts": "--runs 1 --parallel 1",
    "campaigns/deaths": "--runs 1",
    "campaigns/doctor": "--runs 1",
    "campaigns/fetch": "--runs 1",
    "campaigns/forgotten": "--runs 1 --parallel 1",
    "campaigns/hangs": "--runs 1",
    "campaigns/hostile_node": "--runs 1",
    "campaigns/network_breaks": "--runs 1 --longest 1",
    "campaigns/projects": "--runs 1",
    "campaigns/recoveries": "--runs 1",
    "campaigns/saved": "--runs 1",
    "campaigns/saves": "--runs 1",
    "campaigns/stuck": "--runs 1",
    "campaigns/trees": "--runs 1 --parallel 1",
}
"""The arguments with which each program measures least."""
CHEAP = ("start", "startup", "campaigns/hostile_node")
"""Programs that take seconds and need no host."""
OF_TORCH = ("train_ddp", "train_gpu", "train_input", "train_processes")
EACH_OF_TORCH = """
import os, runpy, sys
import torch  # once for all: that takes seconds
for name in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv, sys.path[0] = [f"{name}.py", "--help"], "benchmarks"
        runpy.run_path(f"benchmarks/{name}.py", run_name="__main__")
    if failed := os.waitpid(child, 0)[1]:
        sys.exit(f"{name}: {failed}")
"""


def run_benchmark(name: str, *arguments: str, timeout: float) -> str:
    module = f"benchmarks.{name.replace('/', '.')}"
    program = ["-m", module] if "/" in name else [f"benchmarks/{name}.py"]
    return run_python(*program, *arguments, timeout=timeout)


def run_python(*arguments: str, timeout: float) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "AWSDDP_HOME"))}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{arguments[0]}: {done.stdout}{done.stderr}"
    return done.stdout


def test_every_program_has_a_shortest_form() -> None:
    files = [path.relative_to(BENCHMARKS) for path in BENCHMARKS.rglob("[a-z]*.py")]
    assert {str(path.with_suffix("")) for path in files} == set(SHORTEST)


@pytest.mark.parametrize("name", sorted(set(SHORTEST) - set(CHEAP) - set(OF_TORCH)))
def test_a_program_has_the_options_of_its_shortest_form(name: str) -> None:
    check_usage(name, run_benchmark(name, "--help", timeout=60))


@pytest.mark.prove
def test_programs_that_import_torch_have_the_options_of_their_shortest_form() -> None:
    usages = run_python("-c", EACH_OF_TORCH, *OF_TORCH, timeout=100).split("usage: ")[1:]
    for name, usage in zip(OF_TORCH, usages, strict=True):
        check_usage(name, f"usage: {usage}")


def check_usage(name: str, usage: str) -> None:
    assert usage.startswith(f"usage: {name.rpartition('/')[2]}.py ")
    assert [part for part in SHORTEST[name].split() if part.startswith("-") and part not in usage] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.prove] * (name == "start")) for name in CHEAP]
)
def test_a_program_that_needs_no_host_runs(name: str) -> None:
    assert run_benchmark(name, *SHORTEST[name].split(), timeout=100)


@pytest.mark.prove
def test_a_random_program_runs() -> None:
    name = random.Random(f"benchmark/{SEED}").choice(sorted(set(SHORTEST) - set(CHEAP)))
    run_benchmark(name, *SHORTEST[name].split(), timeout=500)
