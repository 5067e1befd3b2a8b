"""The networks."""

from __future__ import annotations

import hashlib

import pytest

import quiet  # noqa: F401  # isort: skip
import models
import torch


def test_resnet18_has_as_many_weights_as_the_published_one() -> None:
    assert sum(p.numel() for p in models.resnet18(1000).parameters()) == 11_689_512


def test_resnet18_has_the_names_and_the_initial_weights_that_checkpoints_have() -> None:
    """The output of an earlier version with the same seed: its checkpoints stay readable."""
    expected = [-0.01433832, 0.29281080, -0.70009333, 0.32524848, -0.57597977]
    expected += [0.04907470, -1.33549404, 0.51705331, 0.43888795, 0.29752001]
    torch.manual_seed(0)
    net = models.resnet18(10)
    names = "\n".join(net.state_dict())
    assert hashlib.md5(names.encode()).hexdigest() == "a5017d04d62c70634f406b7dbda9cf53"
    images = torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64)
    torch.testing.assert_close(net(images)[0], torch.tensor(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "shape"), [("digits-net", (1, 8, 8)), ("resnet18", (3, 32, 32))])
def test_models_give_ten_logits(name: str, shape: tuple[int, ...]) -> None:
    assert models.build(name)(torch.randn(2, *shape)).shape == (2, 10)
