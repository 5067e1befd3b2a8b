"""The recipes' networks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn


def digits_net(classes: int = 10) -> nn.Module:
    """Return a small ConvNet for 1 x 8 x 8 images: 38,282 parameters."""
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


def resnet18(classes: int = 10) -> nn.Module:
    """Return torchvision's ResNet-18 (https://arxiv.org/abs/1512.03385). Raises MissingPackage."""
    network: nn.Module = _torchvision_models().resnet18(num_classes=classes)
    return network


class MissingPackage(Exception):
    """A network needs a package that is not installed. The message says how to install the package."""


def _torchvision_models() -> ModuleType:
    try:
        return importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        release = torch.__version__.partition("+")[0]
        raise MissingPackage(
            f"this network needs {error.name}. Install the build for torch {release}: "
            f"{sys.executable} -m pip install torchvision torch=={release}"
        ) from error
    except RuntimeError:  # built for another torch
        importlib.import_module("torchvision_operators")
        return importlib.import_module("torchvision.models")


MODELS: dict[str, Callable[[int], nn.Module]] = {"digits-net": digits_net, "resnet18": resnet18}


def build(name: str, classes: int = 10) -> nn.Module:
    """Return the network `name` in the same memory layout as the batches: channels last."""
    return MODELS[name](classes).to(memory_format=torch.channels_last)
