"""The bundled program as the demo runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quiet  # noqa: F401  # isort: skip
import torch
from launching import run_ranks


@pytest.mark.parametrize("ranks", [1, 4])
def test_digits_are_learnt_and_what_was_learnt_is_kept(ranks: int, tmp_path: Path) -> None:
    ended = run_ranks("main.py", ranks=ranks, folder=tmp_path)
    assert [e.code for e in ended] == [0] * ranks, ended
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows if "accuracy" in row][-1] > 0.97
    assert [row["loss"] for row in rows if "loss" in row][-1] < 0.1
    kept = sorted((tmp_path / "checkpoints").iterdir())
    state = torch.load(kept[-1], weights_only=True)
    assert state["step"] == rows[-1]["step"] == 184
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["world_size"] == ranks


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [2, 16])
def test_digits_are_learnt_at_any_world_size(ranks: int, tmp_path: Path) -> None:
    ended = run_ranks("main.py", ranks=ranks, folder=tmp_path)
    assert [e.code for e in ended] == [0] * ranks, ended
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows if "accuracy" in row][-1] > 0.97
