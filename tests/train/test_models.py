"""The networks."""

from __future__ import annotations

import pytest

import quiet  # noqa: F401  # isort: skip
import models
import torch


def test_our_resnet18_is_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours = models.ResNet18(10)
    assert (
        sum(p.numel() for p in ours.parameters()) == 11_181_642
    )  # 11,689,512 with torchvision's 1000 classes
    if models.find_spec("torchvision"):
        torch.manual_seed(0)
        theirs = models.resnet18(10)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        images = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(("name", "shape"), [("digits-net", (1, 8, 8)), ("resnet18", (3, 32, 32))])
def test_models_give_ten_logits(name: str, shape: tuple[int, ...]) -> None:
    assert models.build(name)(torch.randn(2, *shape)).shape == (2, 10)
