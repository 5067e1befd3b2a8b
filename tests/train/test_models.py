"""The networks."""

from __future__ import annotations

import pytest

import quiet  # noqa: F401  # isort: skip
import models
import torch


def test_resnet18_has_as_many_weights_as_the_published_one() -> None:
    assert sum(p.numel() for p in models.ResNet18(1000).parameters()) == 11_689_512


def test_resnet18_is_torchvisions() -> None:
    theirs = pytest.importorskip("torchvision.models", exc_type=ImportError)
    torch.manual_seed(0)
    ours = models.ResNet18(10)
    torch.manual_seed(0)
    reference = theirs.resnet18(num_classes=10)
    torch.testing.assert_close(dict(ours.state_dict()), dict(reference.state_dict()), rtol=0, atol=0)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), reference(images))


@pytest.mark.parametrize(("name", "shape"), [("digits-net", (1, 8, 8)), ("resnet18", (3, 32, 32))])
def test_models_give_ten_logits(name: str, shape: tuple[int, ...]) -> None:
    assert models.build(name)(torch.randn(2, *shape)).shape == (2, 10)
