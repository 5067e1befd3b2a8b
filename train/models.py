"""The networks of the recipes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


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


class ResNet18(nn.Module):
    """ResNet-18 (https://arxiv.org/abs/1512.03385): torchvision's, by its names and its initial weights."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] of images [B, 3, H, W]."""
        x = self.maxpool(torch.relu_(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outputs, H / stride, W / stride] of x [B, inputs, H, W]."""
        around = x if self.downsample is None else self.downsample(x)
        y = torch.relu_(self.bn1(self.conv1(x)))
        return torch.relu_(self.bn2(self.conv2(y)) + around)


MODELS: dict[str, Callable[[int], nn.Module]] = {"digits-net": digits_net, "resnet18": ResNet18}


def build(name: str, classes: int = 10) -> nn.Module:
    """Return the network `name`, its convolutions laid out as the batches are (channels last)."""
    return MODELS[name](classes).to(memory_format=torch.channels_last)
