"""The bundled program as the demo runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.launching import run_ranks
from tests.support.seed import draw_cases


def train_digits(ranks: int, folder: Path) -> list[dict[str, float]]:
    ended = run_ranks("main.py", ranks=ranks, folder=folder)
    assert [e.code for e in ended] == [0] * ranks, ended
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows if "accuracy" in row][-1] > 0.97
    return rows


@pytest.mark.prove
def test_four_ranks_learn_digits_and_keep_their_checkpoints(tmp_path: Path) -> None:
    rows = train_digits(4, tmp_path)
    assert [row["loss"] for row in rows if "loss" in row][-1] < 0.1
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.pt", "step-00000161.pt", "step-00000184.pt"]
    state = torch.load(tmp_path / "checkpoints" / names[-1], weights_only=True)
    assert state["at"]["step"] == rows[-1]["step"] == 184
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["world_size"] == 4
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")


@pytest.mark.prove
@pytest.mark.parametrize("ranks", draw_cases([1, 2, 16], 1, label="ranks of digits"))
def test_digits_are_learnt_at_each_world_size(ranks: int, tmp_path: Path) -> None:
    train_digits(ranks, tmp_path)
