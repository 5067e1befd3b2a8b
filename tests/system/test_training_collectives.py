"""Collective decisions of ranks: whose checkpoint is loaded, whose statistics evaluate a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import TRAIN, start, wait_all

pytestmark = pytest.mark.prove

TWO_RANKS = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
import checkpoint, group, main, meters
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
own = Path(f"rank{rank}")
own.mkdir()
if rank == 1:
    checkpoint.save_step({"from": "rank 1"}, own, step=7)
    checkpoint.save_step({"from": "rank 1, later"}, own, step=9)
found = {"loaded": checkpoint.load([own])}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("favourite", torch.full((1,), rank))
    def forward(self, records):  # right on rank 0 alone
        return records.roll(int(self.favourite), dims=1)

labels = torch.arange(8) % 6
records = torch.nn.functional.one_hot(labels, 6).float()
test_set = type("Set", (), {"labels": labels, "gather": lambda self, index: records[index],
                            "__len__": lambda self: len(labels)})()
inputs = SimpleNamespace(test_set=test_set, transform=lambda records: records)
world, cpu = SimpleNamespace(rank=rank, size=2), torch.device("cpu")
found["accuracy"] = main.evaluate(Net(), inputs, world, cpu, print_every=0)["accuracy"]
meter = meters.Meters(cpu, accuracy=False)
meter.add(torch.tensor(1.0 + rank), None, labels[: 2 * (rank + 1)])
found["loss"] = meter.means()["loss"]
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The output of each of two ranks on separate disks."""
    folder: Path = tmp_path_factory.mktemp("two")
    ended = wait_all(start([sys.executable, "-c", TWO_RANKS, str(TRAIN)], ranks=2, folder=folder))
    assert [rank.code for rank in ended] == [0, 0], ended
    return [json.loads(rank.out) for rank in ended]


def test_a_checkpoint_on_the_disk_of_rank_1_alone_is_loaded_by_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["loaded"] for rank in ranks] == [{"from": "rank 1, later"}] * 2


def test_a_model_is_evaluated_with_the_statistics_of_rank_0_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["accuracy"] for rank in ranks] == [1.0, 1.0]


def test_a_row_of_metrics_is_the_mean_over_the_images_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["loss"] for rank in ranks] == [pytest.approx((1.0 * 2 + 2.0 * 4) / 6)] * 2
