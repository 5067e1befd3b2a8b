"""DistributedDataParallel on W ranks is one process with the whole batch: gradients, weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import TRAIN, run_program

PROGRAM = """
import sys
sys.path.insert(0, {train!r})
import quiet
import json, os, torch, torch.distributed as dist
import group, models
from torch.nn.parallel import DistributedDataParallel

name, batch, size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
place = group.find_place([], env=os.environ)
group.join(place, device=torch.device("cpu"), timeout_s=120)
torch.manual_seed(place.rank)  # DDP must make the weights alike, not the seed
net = models.build(name).double()
ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
alone = models.build(name).double()
alone.load_state_dict(net.state_dict())
if steps == 0:
    ddp.eval(), alone.eval()  # else batch norm couples the images of a batch
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
random = torch.Generator().manual_seed(7)
channels = 1 if name == "digits-net" else 3
worst = 0.0
for step in range(max(1, steps)):
    images = torch.randn(batch, channels, size, size, generator=random, dtype=torch.float64)
    labels = torch.randint(0, 10, (batch,), generator=random)
    share = slice(place.rank * batch // place.world_size, (place.rank + 1) * batch // place.world_size)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(ddp(images[share]), labels[share]).backward()
    if steps == 0:
        torch.nn.functional.cross_entropy(alone(images), labels).backward()
        for ours, whole in zip(net.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((ours.grad - whole.grad).norm() / whole.grad.norm()))
    else:
        optimizer.step()
weights = torch.cat([p.detach().flatten() for p in net.parameters()])
others = [torch.empty_like(weights) for _ in range(place.world_size)]
dist.all_gather(others, weights)
print(json.dumps({{"worst": worst, "alike": all(torch.equal(weights, o) for o in others)}}))
group.leave()
"""


def results(folder: Path, *args: object, ranks: int) -> list[dict[str, float]]:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(train=str(TRAIN)))
    ended = run_program([sys.executable, str(program), *map(str, args)], ranks=ranks, folder=folder)
    assert [e.code for e in ended] == [0] * ranks, ended
    return [json.loads(e.out.splitlines()[-1]) for e in ended]


@pytest.mark.parametrize(("name", "size", "ranks"), [("digits-net", 8, 2)])
def test_gradients_of_w_ranks_are_those_of_the_whole_batch(
    name: str, size: int, ranks: int, tmp_path: Path
) -> None:
    assert all(r["worst"] < 1e-9 for r in results(tmp_path, name, 8, size, 0, ranks=ranks))


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "size"), [("digits-net", 8), ("resnet18", 32)])
def test_gradients_of_any_number_of_ranks_are_those_of_the_whole_batch(
    name: str, size: int, ranks: int, tmp_path: Path
) -> None:
    assert all(r["worst"] < 1e-9 for r in results(tmp_path, name, 8, size, 0, ranks=ranks))


@pytest.mark.prove
@pytest.mark.parametrize(("name", "size", "ranks"), [("digits-net", 8, 4), ("resnet18", 32, 2)])
def test_weights_are_alike_on_all_ranks_after_100_steps(
    name: str, size: int, ranks: int, tmp_path: Path
) -> None:
    assert all(r["alike"] for r in results(tmp_path, name, 8, size, 100, ranks=ranks))
