"""DistributedDataParallel on W ranks is one process with the whole batch: gradients, weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.launching import run_program
from tests.support.seed import drawn

PROGRAM = Path(__file__).parents[1] / "support" / "whole_batch.py"
SMALL = ("digits-net", "mnist_convnet", "mnist_mlp", "ladder", "elastic", "ddp_demos")


def compared(folder: Path, *models: str, ranks: int, steps: int = 0) -> list[dict[str, dict[str, float]]]:
    command = [sys.executable, str(PROGRAM), str(steps), *models]
    ended = run_program(command, ranks=ranks, folder=folder)
    assert [e.code for e in ended] == [0] * ranks, ended
    return [json.loads(e.out.splitlines()[-1]) for e in ended]


def test_gradients_of_two_ranks_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    found = compared(tmp_path, *SMALL, ranks=2)[0]
    assert {name: one["off"] for name, one in found.items() if one["off"] > 1e-9} == {}


@pytest.mark.prove
@pytest.mark.parametrize("ranks", drawn([1, 2, 4, 8], 1, what="ranks"))
def test_gradients_of_any_number_of_ranks_are_those_of_the_whole_batch_in_each_model(
    ranks: int, tmp_path: Path
) -> None:
    found = compared(tmp_path, ranks=ranks)[0]
    assert len(found) == 8 and {name: one["off"] for name, one in found.items() if one["off"] > 1e-9} == {}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("models", "ranks"), drawn([(SMALL, 4), (("resnet18 on CIFAR-10",), 2)], 1, what="models")
)
def test_weights_are_alike_on_all_ranks_after_100_steps(
    models: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    for found in compared(tmp_path, *models, ranks=ranks, steps=100):
        assert all(one["alike"] for one in found.values()), found
