"""From files to tensors: every image once, the same for whoever gets it, right side up."""

from __future__ import annotations

from pathlib import Path

import pytest

import quiet  # noqa: F401  # isort: skip
import batches
import image_files
import obtain
import torch
from torch.utils.data import DistributedSampler

CPU = torch.device("cpu")


def shares(images: image_files.Images, ranks: int, *, size: int, **more: int) -> list[batches.Batches]:
    return [
        batches.Batches(images, DistributedSampler(images, ranks, rank), batch_size=size, device=CPU, **more)
        for rank in range(ranks)
    ]


@pytest.fixture
def cifar(tmp_path: Path) -> image_files.Images:
    obtain.make("cifar10", tmp_path, train=50, test=20)
    return image_files.load("cifar10", tmp_path, True)


def test_an_epoch_gives_every_image_once_over_all_ranks(cifar: image_files.Images) -> None:
    records = [batch.records for rank in shares(cifar, 2, size=8) for batch in rank.epoch(1)]
    assert sorted(bytes(r.tolist()) for r in torch.cat(records)) == sorted(
        bytes(r.tolist()) for r in torch.cat(cifar.records)
    )


def test_epochs_differ_and_come_again(cifar: image_files.Images) -> None:
    rank = shares(cifar, 2, size=8)[0]
    first, second, repeated = (torch.cat([b.records for b in rank.epoch(e)]) for e in (1, 2, 1))
    assert not torch.equal(first, second) and torch.equal(first, repeated)


def test_an_epoch_can_begin_in_the_middle(cifar: image_files.Images) -> None:
    rank = shares(cifar, 2, size=8, crop=4)[1]
    whole = list(rank.epoch(3))
    remaining = list(rank.epoch(3, start=2))
    assert all(
        torch.equal(a, b)
        for x, y in zip(whole[2:], remaining, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_workers_give_what_the_process_itself_gives(cifar: image_files.Images) -> None:
    direct = list(shares(cifar, 1, size=8, crop=4)[0].epoch(2, start=1))
    from_workers = list(shares(cifar, 1, size=8, crop=4, workers=1)[0].epoch(2, start=1))
    assert all(
        torch.equal(a, b)
        for x, y in zip(direct, from_workers, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_augmentation_belongs_to_the_image_whatever_the_world_size(cifar: image_files.Images) -> None:
    def drawn(ranks: int) -> dict[bytes, list[int]]:
        all_batches = [batch for rank in shares(cifar, ranks, size=4, crop=4) for batch in rank.epoch(1)]
        return {
            bytes(r.tolist()): d.tolist()
            for b in all_batches
            for r, d in zip(b.records, b.draws, strict=True)
        }

    assert drawn(1) == drawn(2)


def test_crops_and_mirrors_are_those_that_were_drawn() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4).expand(3, 2, 4, 4)
    draws = torch.tensor([[1, 1, 0], [0, 2, 0], [1, 1, 1]])
    same, moved, mirrored = batches.crop_and_flip(image, draws, padding=1)
    assert torch.equal(same, image[0])
    assert moved[0].tolist() == [[0, 0, 0, 0], [2, 3, 4, 0], [6, 7, 8, 0], [10, 11, 12, 0]]
    assert torch.equal(mirrored, image[0].flip(2))


def test_images_are_normalised_and_resized_as_a_plain_loop_does(tmp_path: Path) -> None:
    obtain.make("stl10", tmp_path, train=50, test=20)
    images = image_files.load("stl10", tmp_path, False)
    records = images.gather(torch.arange(6))
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    prepared = batches.Transform(images, mean=mean, std=std, size=224)(records)
    plain = torch.nn.functional.interpolate(images.pixels(records).float(), (224, 224), mode="bilinear") / 255
    plain = (plain - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert prepared.shape == (6, 3, 224, 224)
    assert (prepared - plain).abs().max() < 1.01 / 255 / min(std)  # bytes are rounded after resizing


def test_passes_of_a_step_are_weighed_by_their_images(cifar: image_files.Images) -> None:
    rank = shares(cifar, 1, size=8)[0]  # 50 images: 8 8 8 | 8 8 8 | 2
    assert [rank.images_of_step(number, 3) for number in range(1, 8)] == [24] * 6 + [2]
