"""Read the published MNIST files, for mnist_convnet.py and mnist_mlp.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def read_mnist(folder: Path, half: str) -> tuple[Tensor, Tensor, str]:
    """Return pixels [N, 28, 28] uint8, labels [N], and a name for reports. `half` is train or t10k.

    The pixels are mapped into memory, so that the processes on a machine share one copy.
    """
    roots = (root for root in (folder / "MNIST/raw", folder) if (root / f"{half}-images-idx3-ubyte").exists())
    root = next(roots, None)
    if root is None:
        raise SystemExit(f"no MNIST in {folder}. Type: python train/data.py get mnist {folder}")
    images, labels = root / f"{half}-images-idx3-ubyte", root / f"{half}-labels-idx1-ubyte"
    count = labels.stat().st_size - 8
    if images.stat().st_size != 16 + count * 784:
        raise SystemExit(f"{images} does not hold {count} images, one per label: is it cut short?")
    pixels = torch.from_file(str(images), size=16 + count * 784, dtype=torch.uint8)[16:].view(count, 28, 28)
    digits = torch.from_file(str(labels), size=8 + count, dtype=torch.uint8)[8:].long()
    return pixels, digits, "made data, not MNIST" if (root / "MADE.json").exists() else "MNIST"
