"""The cost of DistributedDataParallel, of train/main.py over a bare DDP loop, and of DDP settings.

    python benchmarks/train_ddp.py                     # about 8 minutes; --only resnet18 | digits | settings

Each measurement runs two processes with one thread each; the cases are interleaved. One pair of processes on
two cores can be 10 % slower than another pair, and stays slower until it ends. Therefore there are several
pairs, and three ratios are printed: of the least times of all pairs (which other programs disturbed least),
of the median times, and of the median CPU times of both processes.

    resnet18    a step of batch 32 at 224 pixels: DDP against two independent processes
    digits      epochs of the digits recipe: train/main.py's whole Trainer (logging, agreement about SIGTERM,
                checkpoint, evaluation) against a loop with only DDP, with the same batches
    settings    a step of DDP with a changed setting against one with the settings of train/main.py, which are
                right if the ratio is above 1
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
import group
import image_files
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


def interleave(runs: Mapping[str, Run], rounds: int) -> dict[str, Tensor]:
    """Return [rounds, 2] for each run: seconds of the slower process, CPU seconds of both.

    Both processes begin a run at the same time. Every other round takes the runs in reverse order. The first
    round is a warm-up and is not counted.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in sorted(runs, reverse=number % 2 == 1):
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            runs[name]()
            times[name].append([time.perf_counter() - started, time.process_time() - worked])
    results = {}
    for name, rows in times.items():
        measured = torch.tensor(rows[1:])
        wall, work = measured[:, 0].contiguous(), measured[:, 1].contiguous()
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(work)
        results[name] = torch.stack([wall, work], 1)
    return results


def report(title: str, over: Tensor, under: Tensor) -> None:
    """Print the ratios of two measurements [rounds, 2]."""
    least = over[:, 0].min() / under[:, 0].min()
    wall, work = over.median(0).values / under.median(0).values
    print(f"{title:48}{least:8.3f}{wall:8.3f}{work:8.3f}", flush=True)


def make_step(
    name: str, *, batch: int, ddp: bool = True, channels_last: bool = True, fused: bool = True, **more: bool
) -> Run:
    """Return a training step of the model `name`. The default settings are those of train/main.py."""
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


def resnet18(world: group.World) -> dict[str, Run]:
    """Return a step with DDP and one without."""
    return {name: make_step("resnet18", batch=32, ddp=name == "ddp") for name in ("ddp", "alone")}


def train_bare(epochs: int, rank: int) -> None:
    """Train the digits recipe in the shortest DDP loop: data normalised once, no output and no checkpoint."""
    recipe = recipes.RECIPES["digits"]
    images = image_files.load("digits", Path(), True)
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


def digits(world: group.World, *, epochs: int = 40) -> dict[str, Run]:
    """Return a run of train/main.py and a run of the bare loop."""
    args = recipes.parse_arguments(None, ["--epochs", str(epochs), "--evaluate-every", str(epochs)])
    args.place = []

    def ours() -> None:
        folder = os.environ["AWSDDP_RUN_DIR"] = tempfile.mkdtemp()
        with contextlib.redirect_stdout(io.StringIO()):
            program.Trainer(args, world, CPU).train()
        shutil.rmtree(folder)

    return {"ours": ours, "bare": lambda: train_bare(epochs, world.rank)}


CHANGED: dict[str, dict[str, bool]] = {
    "without channels_last": {"channels_last": False},
    "without the fused optimiser": {"fused": False},
    "without bucket views": {"gradient_as_bucket_view": False},
    "with static_graph": {"static_graph": True},
}


def settings(world: group.World) -> dict[str, Run]:
    """Return steps of both networks with the settings of train/main.py, and with one setting changed."""
    runs = {}
    for name, batch, times in (("resnet18", 4, 5), ("digits-net", 32, 200)):
        for title, changed in {"as it is": {}, **CHANGED}.items():
            runs[f"{name}: {title}"] = repeated(make_step(name, batch=batch, **changed), times)
    return runs


def repeated(step: Run, times: int) -> Run:
    """Return a run that repeats `step` this many `times`."""

    def run() -> None:
        for _ in itertools.repeat(None, times):
            step()

    return run


KINDS = {"resnet18": resnet18, "digits": digits, "settings": settings}
RATIOS = {
    "resnet18": [("resnet18: DDP / independent", "ddp", "alone")],
    "digits": [("digits: main.py / bare DDP", "ours", "bare")],
    "settings": [
        (f"{name}: {title} / as it is", f"{name}: {title}", f"{name}: as it is")
        for name in ("resnet18", "digits-net")
        for title in CHANGED
    ],
}


def measure(argv: list[str]) -> int:
    """Run as one of two processes, and write their times to a file."""
    args = arguments(argv)
    world = group.find_world()
    torch.set_num_threads(1)
    group.join(world, device=CPU)
    results = interleave(KINDS[args.only](world), args.rounds)
    if world.rank == 0:
        torch.save(results, args.into)
    group.leave()
    return 0


def main(argv: list[str]) -> int:
    """Measure each kind with several pairs of processes and print the ratios."""
    args = arguments(argv)
    title = f"torch {torch.__version__}, {args.pairs} pairs of processes, {args.rounds} rounds"
    print(f"{title:48}{'least':>8}{'median':>8}{'CPU':>8}", flush=True)
    for kind in [args.only] if args.only else KINDS:
        times: list[dict[str, Tensor]] = []
        with tempfile.TemporaryDirectory() as folder:
            into = f"{folder}/times.pt"
            for _ in range(args.pairs):
                words = ["--only", kind, "--rounds", str(args.rounds), "--into", into, "--spawn", "2"]
                if code := group.spawn(measure, 2, words):
                    return code
                times.append(torch.load(into))
        for title, over, under in RATIOS[kind]:
            report(title, *(torch.cat([pair[name] for pair in times]) for name in (over, under)))
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--pairs", type=int, default=5, help="of processes, one after the other")
    parser.add_argument("--rounds", type=int, default=3, help="of each pair")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.add_argument("--spawn", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
