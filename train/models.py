"""The networks of the recipes."""

from __future__ import annotations

from torch import nn


def digits_net(classes: int = 10) -> nn.Module:
    """Return a small ConvNet for 1 x 8 x 8 images: 37,866 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
