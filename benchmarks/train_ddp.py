"""What DistributedDataParallel costs, and what train/main.py costs over a bare DDP loop.

    python benchmarks/train_ddp.py

Two processes, one thread each; the cases take turns within one run. Each figure is the median over the rounds
of a round's own ratio (least and greatest in brackets): of the wall time of the slower process, and, for a
machine that others use too, of the CPU time of both, gloo's threads included.

    resnet18    steps of batch 32 at 224 pixels: DDP against two processes that do not talk
    digits      epochs of the digits recipe: train/main.py's whole train() (logging, SIGTERM's agreement,
                checkpoint, evaluation and all) against a loop that has nothing but DDP, with the same batches
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
import quiet  # noqa: F401

# isort: split
import data
import group
import main as program
import models
import recipes
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

CPU = torch.device("cpu")


def timed(run: Callable[[], None]) -> Tensor:
    """Return [2]: seconds of the slower process, CPU seconds of both. They start together."""
    dist.barrier()
    started, worked = time.perf_counter(), time.process_time()
    run()
    wall, work = torch.tensor([time.perf_counter() - started]), torch.tensor([time.process_time() - worked])
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(work)
    return torch.cat([wall, work])


def steps(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Train `model` on `batches`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def resnet18(rounds: int, count: int, size: int, batch: int) -> list[Tensor]:
    """Return the rounds' ratios of DDP to no DDP."""
    net = models.build("resnet18")
    ddp = DistributedDataParallel(models.build("resnet18"), gradient_as_bucket_view=True)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    work = [(images, torch.randint(0, 10, (batch,)))] * count
    for model in (net, ddp):
        steps(model, work[:1])
    ratios = []
    for number in range(rounds):
        order = (ddp, net) if number % 2 else (net, ddp)
        seconds = {id(model): timed(lambda model=model: steps(model, work)) for model in order}
        ratios.append(seconds[id(ddp)] / seconds[id(net)])
    return ratios


def bare(epochs: int, rank: int) -> None:
    """The digits recipe as the shortest DDP loop does it: data normalised once, nothing said or kept."""
    recipe = recipes.RECIPES["digits"]
    images = data.load("digits", Path(), True)
    pixels = (images.pixels(images.records[0]).float() / 16 - recipe.mean[0]) / recipe.std[0]
    model = DistributedDataParallel(models.digits_net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    sampler = DistributedSampler[object](images, dist.get_world_size(), rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for index in torch.tensor(list(sampler)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels[index]), images.labels[index]).backward()
            optimizer.step()


def digits(rounds: int, epochs: int, place: group.Place) -> list[Tensor]:
    """Return the rounds' ratios of train/main.py to the bare loop."""
    args = recipes.arguments(None, ["--epochs", str(epochs), "--evaluate-every", str(epochs)])
    args.place = []

    def ours() -> None:
        folder = os.environ["AWSDDP_RUN_DIR"] = tempfile.mkdtemp()
        with contextlib.redirect_stdout(io.StringIO()):
            program.train(args, place, CPU)
        shutil.rmtree(folder)

    runs = {"ours": ours, "bare": lambda: bare(epochs, place.rank)}
    for run in runs.values():
        timed(run)
    ratios = []
    for number in range(rounds):
        seconds = {name: timed(runs[name]) for name in sorted(runs, reverse=number % 2 == 1)}
        ratios.append(seconds["ours"] / seconds["bare"])
    return ratios


def measure(argv: list[str]) -> int:
    """Be one of the two processes."""
    args = arguments(argv)
    place = group.find_place([], env=os.environ)
    torch.set_num_threads(1)
    group.join(place, device=CPU)
    found = {}
    if args.only != "digits":
        found["resnet18: DDP / independent"] = resnet18(args.rounds, args.steps, args.size, args.batch)
    if args.only != "resnet18":
        found["digits: main.py / bare DDP"] = digits(args.rounds, args.epochs, place)
    if place.rank == 0:
        print(f"torch {torch.__version__}, 2 processes, {args.rounds} rounds")
        for name, ratios in found.items():
            wall, work = torch.stack(ratios).T
            print(f"{name:30}wall {wall.median():.3f} ({wall.min():.3f} to {wall.max():.3f})", end="")
            print(f"   CPU {work.median():.3f} ({work.min():.3f} to {work.max():.3f})")
    group.leave()
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["resnet18", "digits"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of resnet18 in a round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=40, help="of digits in a round")
    parser.add_argument("--spawn", default=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments(sys.argv[1:])
    sys.exit(group.spawn(measure, 2, [*sys.argv[1:], "--spawn", "2"]))
