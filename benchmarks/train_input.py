"""Images a second of the input pipeline on one core, STL-10 at 224 pixels, batch 32.

    pip install torchvision pillow numpy                    # for the pipelines of others
    python benchmarks/train_input.py                        # 500 made images, about a minute
    python benchmarks/train_input.py --data-dir data        # where data.py put STL-10

The pipelines are interleaved in one process that is bound to one core. Each pipeline has two figures in
images per second: that of the best round, which other programs disturbed least, and that of the median round.

    published   the loop of 2018: PIL resize, ToTensor, Normalize, a sample at a time, through a DataLoader
    v2          torchvision.transforms.v2 on whole batches of tensors, both memory layouts: the faster counts
    ours        train/batches.py up to the float batch that the model gets
    handed      train/batches.py up to the uint8 batch handed to the device, where a GPU does the rest
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
import quiet  # noqa: F401

# isort: split
import batches
import image_files
import obtain
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 32


class Published(Dataset[tuple[Any, int]]):
    """Returns the same samples as torchvision.datasets.STL10, but does not check the files' checksums."""

    def __init__(self, images: image_files.Images, transform: Callable[[Any], Any]) -> None:
        self.pixels = images.pixels(images.gather(torch.arange(len(images)))).numpy()
        self.labels, self.transform = images.labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        import numpy
        from PIL import Image

        picture = Image.fromarray(numpy.transpose(self.pixels[sample], (1, 2, 0)))
        return self.transform(picture), int(self.labels[sample])


def pipelines(images: image_files.Images) -> dict[str, Callable[[], int]]:
    """Return each pipeline as a function that runs through the set once and counts its images."""
    old_style, v2 = transforms()
    half = (0.5, 0.5, 0.5)
    old = old_style.Compose([old_style.Resize(224), old_style.ToTensor(), old_style.Normalize(half, half)])
    published = DataLoader(Published(images, old), batch_size=BATCH, shuffle=True)
    new = v2.Compose(
        [v2.Resize(224, antialias=True), v2.ToDtype(torch.float32, scale=True), v2.Normalize(half, half)]
    )
    planes = images.pixels(images.gather(torch.arange(len(images)))).contiguous()
    sampler = DistributedSampler[object](images, 1, 0)
    ours = batches.Batches(images, sampler, batch_size=BATCH, device=torch.device("cpu"))
    transform = batches.Transform(images, mean=half, std=half, size=224)

    def with_v2(pixels: torch.Tensor) -> int:
        return sum(len(new(pixels[index])) for index in torch.randperm(len(images)).split(BATCH))

    layouts = {"v2 planes": planes, "v2 channels last": planes.contiguous(memory_format=torch.channels_last)}
    return {
        "published": lambda: sum(len(pixels) for pixels, _ in published),
        **{name: (lambda pixels=pixels: with_v2(pixels)) for name, pixels in layouts.items()},
        "ours": lambda: sum(len(transform(batch.records)) for batch in ours.epoch(1)),
        "handed": lambda: sum(len(batch.records) for batch in ours.epoch(1)),
    }


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # its operators exist as long as this object


def transforms() -> tuple[Any, Any]:
    """Return torchvision.transforms and its v2, even if a CUDA wheel is installed with a CPU build of
    torch."""
    try:
        import torchvision
    except RuntimeError:  # a CUDA wheel's library does not load, so its operators are undefined
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError as error:
        print(f"left out: {error}. Type: pip install torchvision pillow numpy")
        raise SystemExit from error
    import torchvision.transforms.v2

    return torchvision.transforms, torchvision.transforms.v2


def measure(images: image_files.Images, rounds: int) -> dict[str, list[float]]:
    """Return the images a second of each pipeline in each round."""
    runs = pipelines(images)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            count = run()
            if number:  # the first round warms up
                rates[name].append(count / (time.perf_counter() - started))
    return rates


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="default: a set is made")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        if args.data_dir is None:
            obtain.make("stl10", Path(made), train=500)
        images = image_files.load("stl10", args.data_dir or Path(made), True)
        rates = measure(images, args.rounds)
    print(f"torch {torch.__version__}, {args.rounds} rounds, {len(images)} images{' (made)' * images.made}")
    print(f"{'images/s':20}{'best':>10}{'median':>10}")
    for name, values in rates.items():
        print(f"{name:20}{max(values):10.0f}{statistics.median(values):10.0f}")
    v2 = max((rates["v2 planes"], rates["v2 channels last"]), key=max)
    for title, over, under in (
        ("ours / published", rates["ours"], rates["published"]),
        ("handed / published", rates["handed"], rates["published"]),
        ("ours / best v2", rates["ours"], v2),
    ):
        between = statistics.median(a / b for a, b in zip(over, under, strict=True))
        print(f"{title:20}{max(over) / max(under):10.2f}{between:10.2f}")


if __name__ == "__main__":
    main()
