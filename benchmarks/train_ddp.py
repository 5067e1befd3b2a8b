"""What DistributedDataParallel costs, what train/main.py costs over a bare DDP loop, and which settings help.

    python benchmarks/train_ddp.py                     # about 4 minutes; --only resnet18 | digits | settings

Two processes, one thread each; the cases take turns within one run. A ratio is given of the least times,
which others on the machine disturbed least, of the median times, and of the median CPU times of both.

    resnet18    a step of batch 32 at 224 pixels: DDP against two processes that do not talk
    digits      epochs of the digits recipe: train/main.py's whole train() (logging, SIGTERM's agreement,
                checkpoint, evaluation and all) against a loop that has nothing but DDP, with the same batches
    settings    a step of DDP with a setting changed against one as train/main.py sets it up, which is right
                where this is above 1
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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
Run = Callable[[], None]
SIZES = {"resnet18": (3, 224), "digits-net": (1, 8)}


def in_turns(runs: Mapping[str, Run], rounds: int) -> dict[str, Tensor]:
    """Return [rounds, 2] for each run: seconds of the slower process, CPU seconds of both.

    Both processes begin a run together; every other round goes backwards; one more before all warms up.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in sorted(runs, reverse=number % 2 == 1):
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            runs[name]()
            times[name].append([time.perf_counter() - started, time.process_time() - worked])
    found = {}
    for name, rows in times.items():
        both = torch.tensor(rows[1:])
        wall, work = both[:, 0].contiguous(), both[:, 1].contiguous()
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(work)
        found[name] = torch.stack([wall, work], 1)
    return found


def report(title: str, over: Tensor, under: Tensor) -> None:
    """Print the ratios; rank 0 does."""
    if dist.get_rank() == 0:
        least = over[:, 0].min() / under[:, 0].min()
        wall, work = over.median(0).values / under.median(0).values
        print(f"{title:48}{least:8.3f}{wall:8.3f}{work:8.3f}", flush=True)


def stepper(
    name: str, *, batch: int, ddp: bool = True, channels_last: bool = True, fused: bool = True, **more: bool
) -> Run:
    """Return a training step of the model `name` with the settings of train/main.py, or others."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = models.MODELS[name](10).to(memory_format=layout)
    if ddp:
        model = DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **more})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=fused)
    channels, size = SIZES[name]
    images = torch.randn(batch, channels, size, size).contiguous(memory_format=layout)
    labels = torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def resnet18(rounds: int) -> None:
    """Measure DDP against no DDP."""
    runs = {name: stepper("resnet18", batch=32, ddp=name == "ddp") for name in ("ddp", "alone")}
    found = in_turns(runs, rounds)
    report("resnet18: DDP / independent", found["ddp"], found["alone"])


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


def digits(rounds: int, place: group.Place, *, epochs: int = 40) -> None:
    """Measure train/main.py against the bare loop."""
    args = recipes.arguments(None, ["--epochs", str(epochs), "--evaluate-every", str(epochs)])
    args.place = []

    def ours() -> None:
        folder = os.environ["AWSDDP_RUN_DIR"] = tempfile.mkdtemp()
        with contextlib.redirect_stdout(io.StringIO()):
            program.train(args, place, CPU)
        shutil.rmtree(folder)

    found = in_turns({"ours": ours, "bare": lambda: bare(epochs, place.rank)}, rounds)
    report("digits: main.py / bare DDP", found["ours"], found["bare"])


CHANGED: dict[str, dict[str, bool]] = {
    "without channels_last": {"channels_last": False},
    "without the fused optimiser": {"fused": False},
    "without bucket views": {"gradient_as_bucket_view": False},
    "with static_graph": {"static_graph": True},
}


def settings(rounds: int) -> None:
    """Measure a step with one setting changed against a step as it is."""
    for name, batch, more in (("resnet18", 4, 1), ("digits-net", 32, 20)):
        runs = {"as it is": stepper(name, batch=batch)}
        runs |= {title: stepper(name, batch=batch, **changed) for title, changed in CHANGED.items()}
        repeated = {title: repeat(step, more) for title, step in runs.items()}
        found = in_turns(repeated, rounds)
        for title in CHANGED:
            report(f"{name}: {title} / as it is", found[title], found["as it is"])


def repeat(step: Run, times: int) -> Run:
    """Return a run of so many steps."""

    def run() -> None:
        for _ in itertools.repeat(None, times):
            step()

    return run


def measure(argv: list[str]) -> int:
    """Be one of the two processes."""
    args = arguments(argv)
    place = group.find_place([], env=os.environ)
    torch.set_num_threads(1)
    group.join(place, device=CPU)
    if place.rank == 0:
        title = f"torch {torch.__version__}, 2 processes, {args.rounds} rounds"
        print(f"{title:48}{'least':>8}{'median':>8}{'CPU':>8}")
    if args.only in (None, "resnet18"):
        resnet18(args.rounds)
    if args.only in (None, "digits"):
        digits(min(5, args.rounds), place)
    if args.only in (None, "settings"):
        settings(args.rounds)
    group.leave()
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["resnet18", "digits", "settings"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spawn", default=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments(sys.argv[1:])
    sys.exit(group.spawn(measure, 2, [*sys.argv[1:], "--spawn", "2"]))
