"""From images in files to tensors on the device: gathered, moved ahead, then augmented and resized."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import image_files
import torch
import torch.nn.functional as F
from group import Place
from image_files import Images
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler


class Batch(NamedTuple):
    """`records` [B, bytes] uint8 as the file holds them, `labels` [B], `draws` [B, 3] where wanted."""

    records: Tensor
    labels: Tensor
    draws: Tensor | None


class Prepare:
    """Turns records into what the model eats, where they are: cropped, mirrored, resized, normalised.

    `size`: the side that images are resized to (bilinear), None leaves them. `mean` and `std`: one a channel,
    of pixels between 0 and 1. `crop`: random crops from images padded with that many zeros a side.
    """

    def __init__(
        self,
        images: Images,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: int | None,
        crop: int = 0,
    ) -> None:
        self.images, self.size, self.crop = images, size, crop
        width, scale = images.format.shape[2], images.format.scale
        pixel = torch.tensor([[1 / (scale * s), -m / s] for m, s in zip(mean, std, strict=True)])
        self.rows = {side: pixel.repeat(side, 1).T.contiguous() for side in {width, size or width}}

    def to(self, device: torch.device) -> Prepare:
        """Move its constants; return itself."""
        self.rows = {side: row.to(device) for side, row in self.rows.items()}
        return self

    def __call__(self, records: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return [B, C, H, W] float32 in channels_last. With `draws` [B, 3] (down, right, flip) augment."""
        pixels = self.images.pixels(records)
        if draws is not None and self.crop:
            pixels = crop_and_flip(pixels, draws, padding=self.crop)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        if self.size is None:
            return self._normalise(pixels)
        # The order does not matter. On a CPU it is fastest to resize the bytes; a GPU has no kernel for that.
        if pixels.is_cuda:
            return F.interpolate(self._normalise(pixels), (self.size, self.size), mode="bilinear")
        return self._normalise(F.interpolate(pixels, (self.size, self.size), mode="bilinear", antialias=True))

    def _normalise(self, pixels: Tensor) -> Tensor:
        """Normalise whole rows of pixels: on a CPU much faster than to broadcast over 3 channels."""
        rows = pixels.permute(0, 2, 3, 1).flatten(2)
        factor, shift = self.rows[pixels.shape[3]]
        even = torch.addcmul(shift, rows.float(), factor)
        return even.unflatten(2, (pixels.shape[3], -1)).permute(0, 3, 1, 2)


def crop_and_flip(pixels: Tensor, draws: Tensor, *, padding: int) -> Tensor:
    """Return random crops [B, C, H, W] of `pixels` padded with zeros, some mirrored.

    `draws` [B, 3]: rows down and columns right, 0 to 2 * padding, and 1 where the image is mirrored.
    """
    count, _, height, width = pixels.shape
    padded = F.pad(pixels, (padding,) * 4)
    down, right, mirror = draws.unbind(1)
    columns = torch.arange(width, device=pixels.device).expand(count, width)
    columns = torch.where(mirror.bool()[:, None], width - 1 - columns, columns) + right[:, None]
    rows = torch.arange(height, device=pixels.device) + down[:, None]
    samples = torch.arange(count, device=pixels.device)
    chosen = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [B, H, W, C]
    return chosen.permute(0, 3, 1, 2)


class Batches:
    """The batches of one rank, epoch by epoch; the same sampler position yields the same batch.

    Gathered here without a loop over samples, or by `workers` processes of a DataLoader where a set does not
    fit into memory. On a GPU the next batch is pinned and moved while this one is worked on.
    """

    def __init__(
        self,
        images: Images,
        sampler: DistributedSampler[object],
        *,
        batch_size: int,
        device: torch.device,
        crop: int = 0,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        self.images, self.sampler, self.device, self.crop, self.seed = images, sampler, device, crop, seed
        self.chunks = Chunks(sampler, batch_size)
        self.loader = DataLoader(
            images,
            batch_sampler=self.chunks,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            multiprocessing_context="forkserver" if workers else None,  # fork can deadlock with threads about
            generator=torch.Generator().manual_seed(seed),  # not the global one: that belongs to the model
        )

    def __len__(self) -> int:
        return len(self.chunks)

    def images_of_step(self, number: int, passes: int) -> int:
        """Return how many images this rank gives to the step of batch `number`, of `passes` batches."""
        first = (number - 1) // passes * passes * self.chunks.batch_size
        return min(passes * self.chunks.batch_size, len(self.sampler) - first)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of `epoch` on the device, from number `start` on."""
        self.sampler.set_epoch(epoch)
        draws = self._draws(epoch) if self.crop else None
        batches = (
            Batch(records, labels, None if draws is None else draws[index])
            for records, labels, index in self._gathered(start)
        )
        return ahead(batches, self.device) if self.device.type == "cuda" else batches

    def _gathered(self, start: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield records, labels and sample numbers of the batches from `start` on."""
        self.chunks.start = start
        if self.loader.num_workers:
            yield from self.loader
            return
        size, pinned = self.chunks.batch_size, self.device.type == "cuda"
        for index in torch.tensor(list(self.sampler))[start * size :].split(size):
            if len(index):  # an empty tensor splits into one empty part
                yield self.images.gather(index, pinned=pinned), self.images.labels[index], index

    def _draws(self, epoch: int) -> Tensor:
        """Return [N, 3] for augmentation: a function of seed, epoch and sample, whoever gets the sample."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        limits = (2 * self.crop + 1, 2 * self.crop + 1, 2)
        return torch.stack([torch.randint(n, (len(self.images),), generator=random) for n in limits], 1)


class Chunks(Sampler[list[int]]):
    """A batch sampler that can begin at batch number `start`."""

    def __init__(self, sampler: DistributedSampler[object], batch_size: int) -> None:
        self.sampler, self.batch_size, self.start = sampler, batch_size, 0

    def __len__(self) -> int:
        return (len(self.sampler) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        for first in range(self.start * self.batch_size, len(samples), self.batch_size):
            yield samples[first : first + self.batch_size]


def _as_it_is(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return batch


def ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `batches` on the GPU, each copied on a stream of its own while the one before it is worked on."""
    copies = torch.cuda.Stream(device)

    def move(tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)

    def send(batch: Batch) -> Batch:
        with torch.cuda.stream(copies):
            draws = None if batch.draws is None else move(batch.draws)
            return Batch(move(batch.records), move(batch.labels), draws)

    waiting: Batch | None = None
    for batch in chain(batches, [None]):
        ready = waiting
        if ready is not None:
            torch.cuda.current_stream(device).wait_stream(copies)
            for tensor in filter(torch.is_tensor, ready):
                tensor.record_stream(torch.cuda.current_stream(device))
        waiting = send(batch) if batch is not None else None
        if ready is not None:
            yield ready


class Synthetic:
    """`steps` times the same images, on the device and ready: training without input, to measure against."""

    def __init__(
        self, shape: tuple[int, int, int], *, classes: int, batch_size: int, device: torch.device, steps: int
    ) -> None:
        self.steps = steps
        self.inputs = torch.randn(batch_size, *shape, device=device).contiguous(
            memory_format=torch.channels_last
        )
        labels = torch.randint(0, classes, (batch_size,), device=device)
        self.batch = Batch(torch.empty(0, device=device), labels, None)

    def __len__(self) -> int:
        return self.steps

    def images_of_step(self, number: int, passes: int) -> int:
        """Return how many images the step of batch `number` (from 1) takes in, in `passes` batches."""
        first = (number - 1) // passes * passes
        return min(passes, self.steps - first) * len(self.inputs)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batch again and again."""
        return iter([self.batch] * (self.steps - start))

    def prepare(self, records: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the images: nothing is left to prepare."""
        return self.inputs


class Source(Protocol):
    """Where the training loop takes its batches from."""

    def __len__(self) -> int: ...
    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]: ...
    def images_of_step(self, number: int, passes: int) -> int: ...


@dataclass(frozen=True)
class Feed:
    """All that a run eats: batches, how they are prepared, what it is tested on, and its name for reports."""

    train: Source
    test_set: Images | None
    prepare: Callable[..., Tensor]
    description: str


def feed(args: argparse.Namespace, place: Place, *, device: torch.device, batch_size: int) -> Feed:
    """Return what `args` asks for, for this rank. Raises image_files.DataError without the data set."""
    if args.data == "synthetic":
        shape = (3, args.image_size, args.image_size)
        source = Synthetic(shape, classes=10, batch_size=batch_size, device=device, steps=args.steps)
        return Feed(source, None, source.prepare, "synthetic")
    train_set, test_set = (image_files.load(args.data, args.data_dir, half) for half in (True, False))
    sampler = DistributedSampler[object](train_set, place.world_size, place.rank, seed=args.seed)
    train = Batches(
        train_set,
        sampler,
        batch_size=batch_size,
        device=device,
        crop=args.crop,
        seed=args.seed,
        workers=args.workers,
    )
    prepare = Prepare(train_set, mean=args.mean, std=args.std, size=args.image_size, crop=args.crop).to(
        device
    )
    made = " (made data, not the real set)" if train_set.made else ""
    return Feed(train, test_set, prepare, args.data + made)
