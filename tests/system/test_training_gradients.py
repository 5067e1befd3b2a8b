"""DistributedDataParallel on W ranks equals one process with the whole batch: gradients and weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.launching import run_program
from tests.support.seed import draw_cases

PROGRAM = Path(__file__).parents[1] / "support" / "whole_batch.py"
SMALL = ("digits-net", "mnist_convnet", "mnist_mlp", "ladder", "elastic", "ddp_demos")


def compare(folder: Path, *models: str, ranks: int, steps: int = 0) -> list[dict[str, dict[str, float]]]:
    command = [sys.executable, str(PROGRAM), str(steps), *models]
    ended = run_program(command, ranks=ranks, folder=folder)
    assert [e.code for e in ended] == [0] * ranks, ended
    return [json.loads(e.out.splitlines()[-1]) for e in ended]


def test_gradients_of_two_ranks_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    rows = compare(tmp_path, *SMALL, ranks=2)[0]
    assert {name: row["off"] for name, row in rows.items() if row["off"] > 1e-9} == {}


@pytest.mark.prove
@pytest.mark.parametrize("ranks", draw_cases([1, 2, 4, 8], 1, label="ranks"))
def test_gradients_of_each_number_of_ranks_are_those_of_the_whole_batch_in_each_model(
    ranks: int, tmp_path: Path
) -> None:
    rows = compare(tmp_path, ranks=ranks)[0]
    assert len(rows) == 8 and {name: row["off"] for name, row in rows.items() if row["off"] > 1e-9} == {}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("models", "ranks"), draw_cases([(SMALL, 4), (("resnet18 on CIFAR-10",), 2)], 1, label="models")
)
def test_weights_are_equal_on_all_ranks_after_100_steps(
    models: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    for rows in compare(tmp_path, *models, ranks=ranks, steps=100):
        assert all(row["alike"] for row in rows.values()), rows
