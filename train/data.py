"""The data sets of the training programs: uint8 images and their labels, as the published files hold them."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

HERE = Path(__file__).resolve().parent


class DataError(Exception):
    """A data set is missing, cut short, or not what its name says."""


@dataclass(frozen=True)
class Images(Dataset[tuple[Tensor, Tensor]]):
    """`pixels` [N, C, H, W] uint8 of 0..`scale`; `labels` [N] int64 of 0..`classes` - 1."""

    pixels: Tensor
    labels: Tensor
    classes: int
    scale: int = 255

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels [B, C, H, W] and labels [B] of the samples `index` [B], with one copy and no loop."""
        return self.pixels.index_select(0, index), self.labels.index_select(0, index)


def digits(*, train: bool) -> Images:
    """Return the UCI digits that ship beside this file (1 x 8 x 8, 0..16): each fifth image is held out.

    Raises DataError when the file is not the one that was shipped.
    """
    path = HERE / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
        table = torch.tensor(bytearray(map(int, text.replace("\n", ",").rstrip(",").split(","))))
        rows = table.view(1797, 65)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read as the UCI digits: {error}. Copy it anew.") from error
    chosen = (torch.arange(len(rows)) % 5 != 4) if train else (torch.arange(len(rows)) % 5 == 4)
    return Images(rows[chosen, :64].view(-1, 1, 8, 8), rows[chosen, 64].long(), classes=10, scale=16)
