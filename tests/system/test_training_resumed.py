"""A training run that is interrupted and resumed ends with bit for bit the state of an uninterrupted one."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.launching import TRAIN, run_ranks, start, wait_all
from tests.support.seed import FULL, SEED, draw_cases

SETTINGS: dict[str, list[str]] = {
    "digits": ["--epochs", "6", "--accumulate", "2", "--clip-norm", "5"],
    "cifar10-resnet18": ["--epochs", "4", "--batch-size", "16", "--evaluate-every", "1", "--lr", "0.01"],
    "stl10-resnet18": ["--epochs", "3", "--batch-size", "16", "--image-size", "32", "--precision", "bf16"],
}


def load_last_state(folder: Path) -> dict[str, object]:
    return dict(torch.load(max((folder / "checkpoints").glob("step-*.pt")), weights_only=True))


def are_equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(are_equal(first[k], second[k]) for k in first)
        )
    if isinstance(first, list):
        return isinstance(second, list) and all(map(are_equal, first, second))
    return first == second


def interrupt(args: list[str], *, ranks: int, folder: Path, step: int) -> list[int]:
    """Start ranks, terminate the last one once `step` steps are logged, and return all exit codes."""
    ranks_running = start([sys.executable, str(TRAIN / "main.py"), *args], ranks=ranks, folder=folder)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and ranks_running[0].poll() is None:
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        if rows and json.loads(rows[-1])["step"] >= step:
            break
        time.sleep(0.005)
    ranks_running[-1].send_signal(signal.SIGTERM)
    return [ended.code for ended in wait_all(ranks_running)]


def check_resume(recipe: str, data: Path, folder: Path, *, ranks: int, steps: list[int]) -> None:
    args = ["--recipe", recipe, "--data-dir", str(data), "--log-every", "1", *SETTINGS[recipe]]
    whole = run_ranks("main.py", *args, ranks=ranks, folder=folder / "whole")
    assert [e.code for e in whole] == [0] * ranks, whole
    reference = load_last_state(folder / "whole")
    for step in steps:
        broken = folder / f"broken{step}"
        assert interrupt(args, ranks=ranks, folder=broken, step=step) == [75] * ranks
        assert load_last_state(broken)["at"] != reference["at"]
        again = run_ranks(
            "main.py", *args, "--resume", str(broken), ranks=ranks, folder=folder / f"again{step}"
        )
        assert [e.code for e in again] == [0] * ranks, again
        assert are_equal(load_last_state(folder / f"again{step}"), reference)


@pytest.mark.prove
def test_an_interrupted_run_saves_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    check_resume("digits", tmp_path, tmp_path, ranks=2, steps=[31])


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", draw_cases(sorted(SETTINGS), 1, label="recipes"))
def test_a_run_interrupted_at_random_steps_resumes_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    import obtain

    for name in ("stl10", "cifar10"):
        obtain.make(name, tmp_path / "data", train=250, test=20)
    last_step = {"digits": 100, "cifar10-resnet18": 25, "stl10-resnet18": 18}[recipe]
    steps = random.Random(f"{SEED} {recipe}").sample(range(1, last_step), 3 if FULL else 1)
    check_resume(recipe, tmp_path / "data", tmp_path, ranks=2, steps=steps)
