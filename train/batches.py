"""Batches of images: read from files, copied to the device, then augmented, resized and normalised."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import image_files
import torch
import torch.nn.functional as F
from group import LaunchError, World
from image_files import Images
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler


class Batch(NamedTuple):
    """Has `records` [B, bytes] uint8 as in the file, `labels` [B] and `draws` [B, 3] for `crop_and_flip`."""

    records: Tensor
    labels: Tensor
    draws: Tensor | None


class Transform:
    """Crops, mirrors, resizes and normalises records, on their device, so that the network can use them.

    `mean` and `std` have one number per channel, for pixels between 0 and 1. Images are resized (bilinear) to
    `size` pixels per side, or not at all if `size` is None. Before a random crop, each side of an image is
    padded with `crop` zeros.
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

    def to(self, device: torch.device) -> Transform:
        """Move the constants to `device`; return self."""
        self.rows = {side: row.to(device) for side, row in self.rows.items()}
        return self

    def __call__(self, records: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return images [B, C, H, W] float32 in channels_last, cropped and mirrored if there are `draws`."""
        pixels = self.images.pixels(records)
        if draws is not None and self.crop:
            pixels = crop_and_flip(pixels, draws, padding=self.crop)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        if self.size is None:
            return self._normalise(pixels)
        # Images can be normalised before or after the resize. On a CPU it is faster to resize the bytes
        # first; a GPU has no kernel to resize bytes.
        if pixels.is_cuda:
            return F.interpolate(self._normalise(pixels), (self.size, self.size), mode="bilinear")
        return self._normalise(F.interpolate(pixels, (self.size, self.size), mode="bilinear", antialias=True))

    def _normalise(self, pixels: Tensor) -> Tensor:
        """Normalise whole rows of pixels, which is much faster on a CPU than broadcasting over 3 channels."""
        rows = pixels.permute(0, 2, 3, 1).flatten(2)
        factor, shift = self.rows[pixels.shape[3]]
        normalised = torch.addcmul(shift, rows.float(), factor)
        return normalised.unflatten(2, (pixels.shape[3], -1)).permute(0, 3, 1, 2)


def crop_and_flip(pixels: Tensor, draws: Tensor, *, padding: int) -> Tensor:
    """Pad `pixels` with zeros and return crops [B, C, H, W] from them, some mirrored.

    `draws` [B, 3] has each crop's offsets in rows and columns, 0 to 2 * padding, then 1 to mirror the image.
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
    """The batches of one rank, epoch by epoch. A position of the sampler always yields the same batch.

    This process gathers the images without a loop over samples. If a set does not fit into memory, `workers`
    DataLoader processes can gather the images instead. On a GPU, the next batch is pinned and copied while
    the GPU works on the current one.
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
        self.batch_sampler = BatchSampler(sampler, batch_size)
        # Workers are not forked, because a forked worker can deadlock on a lock that another thread held. The
        # loader has its own generator, because numbers that it draws from the global one change the model's
        # dropout.
        self.loader = DataLoader(
            images,
            batch_sampler=self.batch_sampler,
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            multiprocessing_context="forkserver" if workers else None,
            generator=torch.Generator().manual_seed(seed),
        )

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def images_of_step(self, number: int, passes: int) -> int:
        """Return the number of this rank's images in the step (`passes` batches) that contains batch
        `number`."""
        first = (number - 1) // passes * passes * self.batch_sampler.batch_size
        return min(passes * self.batch_sampler.batch_size, len(self.sampler) - first)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield `epoch`'s batches on the device, beginning with batch `start`."""
        self.sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        draws = self._draw(epoch) if self.crop else None
        batches = (
            Batch(records, labels, None if draws is None else draws[index])
            for records, labels, index in self._read(start)
        )
        return prefetch(batches, self.device) if self.device.type == "cuda" else batches

    def _read(self, start: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each batch's records, labels and sample numbers, beginning with batch `start`."""
        self.batch_sampler.start = start
        if self.loader.num_workers:
            yield from self.loader
            return
        size, pinned = self.batch_sampler.batch_size, self.device.type == "cuda"
        for index in torch.tensor(list(self.sampler))[start * size :].split(size):
            if len(index):  # an empty tensor splits into one empty part
                yield self.images.gather(index, pinned=pinned), self.images.labels[index], index

    def _draw(self, epoch: int) -> Tensor:
        """Return all samples' random draws [N, 3], which depend on seed and epoch, not on the rank."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        limits = (2 * self.crop + 1, 2 * self.crop + 1, 2)
        return torch.stack([torch.randint(n, (len(self.images),), generator=random) for n in limits], 1)


class BatchSampler(Sampler[list[int]]):
    """A batch sampler that can begin at batch `start`."""

    def __init__(self, sampler: DistributedSampler[object], batch_size: int) -> None:
        self.sampler, self.batch_size, self.start = sampler, batch_size, 0

    def __len__(self) -> int:
        return (len(self.sampler) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        for first in range(self.start * self.batch_size, len(samples), self.batch_size):
            yield samples[first : first + self.batch_size]


def _unchanged(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return batch  # a lambda cannot be sent to a worker process


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `batches` on the GPU, copying each on a second stream while the previous one is processed."""
    copies = torch.cuda.Stream(device)

    def move(tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)  # only a copy from pinned memory is asynchronous

    def send(batch: Batch) -> Batch:
        with torch.cuda.stream(copies):
            draws = None if batch.draws is None else move(batch.draws)
            return Batch(move(batch.records), move(batch.labels), draws)

    sent: Batch | None = None
    for batch in chain(batches, [None]):
        ready = sent
        if ready is not None:
            torch.cuda.current_stream(device).wait_stream(copies)
            for tensor in filter(torch.is_tensor, ready):  # otherwise its memory may be reused too early
                tensor.record_stream(torch.cuda.current_stream(device))
        sent = send(batch) if batch is not None else None
        if ready is not None:
            yield ready


class Synthetic:
    """Yields the same images `steps` times, ready on the device, to measure training without reading data."""

    def __init__(
        self, shape: tuple[int, int, int], *, classes: int, batch_size: int, device: torch.device, steps: int
    ) -> None:
        self.steps = steps
        images = torch.randn(batch_size, *shape, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, classes, (batch_size,), device=device)
        self.batch = Batch(torch.empty(0, device=device), labels, None)

    def __len__(self) -> int:
        return self.steps

    def images_of_step(self, number: int, passes: int) -> int:
        """Return the number of images in the step (`passes` batches) that contains batch `number`."""
        first = (number - 1) // passes * passes
        return min(passes, self.steps - first) * len(self.images)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batch again and again."""
        return iter([self.batch] * (self.steps - start))

    def transform(self, records: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the images unchanged."""
        return self.images


@dataclass(frozen=True)
class Inputs:
    """Holds a run's batches to train on, images to evaluate on, their transform, and a name for reports."""

    train: Batches | Synthetic
    test_set: Images | None
    transform: Callable[..., Tensor]
    description: str
    batch_size: int  # how many images one process has in one pass
    images_per_step: int  # of all ranks


def build_inputs(args: argparse.Namespace, world: World, device: torch.device) -> Inputs:
    """Return the data that `args` names, for this rank.

    Raises image_files.DataError if the data set is missing or wrong, and LaunchError if a rank would have no
    image.
    """
    parts, global_batch = world.size * args.accumulate, args.global_batch or 0
    size = args.batch_size or global_batch // parts
    sizes = (size, size * parts)
    if size < 1:
        raise LaunchError(f"a global batch of {global_batch} leaves some ranks without an image.")
    if args.data == "synthetic":
        shape = (3, args.image_size, args.image_size)
        source = Synthetic(shape, classes=10, batch_size=size, device=device, steps=args.steps)
        return Inputs(source, None, source.transform, "synthetic", *sizes)
    train_set, test_set = (image_files.load(args.data, args.data_dir, half) for half in (True, False))
    # The sampler repeats a few images so that all ranks have equally many: a rank with one more batch would
    # wait for the others' gradients forever.
    sampler = DistributedSampler[object](train_set, world.size, world.rank, seed=args.seed)
    options = {"crop": args.crop, "seed": args.seed, "workers": args.workers}
    train = Batches(train_set, sampler, batch_size=size, device=device, **options)
    transform = Transform(train_set, mean=args.mean, std=args.std, size=args.image_size, crop=args.crop)
    made = " (made data, not the real set)" if train_set.made else ""
    return Inputs(train, test_set, transform.to(device), args.data + made, *sizes)
