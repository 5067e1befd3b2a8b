"""Read data sets from their published files.

The pixels stay in the files' uint8 records, which are mapped into memory, so that a node's ranks share one
copy.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

HERE = Path(__file__).resolve().parent
MADE = "MADE.json"  # the file that marks a folder's data as synthetic and states the size of each half
PUBLISHED_FOLDER = {"stl10": "stl10_binary", "cifar10": "cifar-10-batches-bin", "mnist": "MNIST/raw"}


class DataError(Exception):
    """A data set is missing, is truncated, or is not the one that its name says."""


@dataclass(frozen=True)
class Format:
    """The format of a data set's records.

    `header` bytes are followed by the pixels, ordered by channel, height, width (or width, height).
    """

    shape: tuple[int, int, int]
    header: int = 0
    columns_first: bool = False
    scale: int = 255  # the largest value that a pixel can have
    classes: int = 10

    @property
    def record(self) -> int:
        """The number of bytes in a record."""
        channels, height, width = self.shape
        return self.header + channels * height * width


FORMATS = {
    "stl10": Format((3, 96, 96), columns_first=True),
    "cifar10": Format((3, 32, 32), header=1),
    "mnist": Format((1, 28, 28)),
    "digits": Format((1, 8, 8), scale=16),
}
COUNTS = {"stl10": (5000, 8000), "cifar10": (50000, 10000), "mnist": (60000, 10000), "digits": (1471, 326)}


@dataclass(frozen=True)
class Images(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The training or the held-out part of a data set.

    It has `records` [n, format.record] uint8 for each file, and `labels` [N] int64, which begin at 0.
    """

    name: str
    folder: Path
    train: bool
    made: bool
    format: Format
    records: tuple[Tensor, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, index: Tensor, *, pinned: bool = False) -> Tensor:
        """Return the records [B, format.record] for the samples `index` [B], without a loop over samples."""
        output = torch.empty(len(index), self.format.record, dtype=torch.uint8, pin_memory=pinned)
        if len(self.records) == 1:
            return torch.index_select(self.records[0], 0, index, out=output)
        first = 0
        for part in self.records:
            positions = ((index >= first) & (index < first + len(part))).nonzero().squeeze(1)
            output[positions] = part.index_select(0, index[positions] - first)
            first += len(part)
        return output

    def pixels(self, records: Tensor) -> Tensor:
        """Return the images [B, C, H, W] in `records` [B, format.record], as a view."""
        channels, height, width = self.format.shape
        pixels = records[:, self.format.header :]
        if self.format.columns_first:
            return pixels.unflatten(1, (channels, width, height)).transpose(2, 3)
        return pixels.unflatten(1, (channels, height, width))

    def __getitems__(self, samples: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch's records, labels and sample numbers. A DataLoader's workers call it."""
        index = torch.tensor(samples)
        return self.gather(index), self.labels[index], index

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle only the name: a worker process maps the files itself."""
        return load, (self.name, self.folder, self.train)


def load(name: str, folder: Path, train: bool) -> Images:
    """Return the training or the held-out half of `name` (stl10, cifar10, mnist, digits) in `folder`.

    Raises DataError if a file is missing, is truncated, is another file or has another format.
    """
    if name == "digits":
        return _digits(train)
    roots = (folder / f"{name}_binary", folder / PUBLISHED_FOLDER[name])
    root = next((root for root in roots if root.is_dir()), folder)
    made = _made_counts(root)
    count = (made or COUNTS[name])[0 if train else 1]
    try:
        records, labels = READERS[name](root, train, count)
    except (OSError, RuntimeError) as error:
        hint = f"Type: python {HERE / 'data.py'} get {name} {folder}"
        raise DataError(f"{name} cannot be read in {root}: {error}. {hint}") from error
    unknown = labels[(labels < 0) | (labels >= FORMATS[name].classes)]
    if len(unknown):
        raise DataError(
            f"{root} has the label {int(unknown[0])}, but {name} has not: the files are wrong or swapped."
        )
    return Images(name, folder, train, bool(made), FORMATS[name], records, labels)


def _made_counts(root: Path) -> list[int] | None:
    path = root / MADE
    try:
        return [int(count) for count in json.loads(path.read_text())["counts"]] if path.exists() else None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not state the number of images: make the data set again.") from error


def _map(path: Path, *, records: int, size: int, offset: int = 0) -> Tensor:
    """Map a file, without its first `offset` bytes, as [records, size] uint8.

    Raises DataError if the file's length is wrong.
    """
    expected = offset + records * size
    if not path.exists() and (packed := path.with_name(path.name + ".gz")).exists():
        _unpack(packed, path)
    length = path.stat().st_size
    if length != expected:
        raise DataError(
            f"{path} has {length} bytes, not {expected}: the file is cut short, or is another file."
        )
    content = torch.from_file(str(path), shared=False, size=expected, dtype=torch.uint8)
    return content[offset:].view(records, size)


def _unpack(packed: Path, path: Path) -> None:
    """Unpack a file under a temporary name and then rename it, because several ranks may do so at once."""
    aside = path.with_name(f"{path.name}.{torch.randint(1 << 60, (1,)).item()}")
    try:
        with gzip.open(packed) as source, aside.open("wb") as target:
            shutil.copyfileobj(source, target)
        aside.replace(path)
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{packed} is cut short or not a gzip file: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def _stl10(root: Path, train: bool, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    half = "train" if train else "test"
    labels = _map(root / f"{half}_y.bin", records=count, size=1).view(-1).long() - 1  # its labels begin at 1
    return (_map(root / f"{half}_X.bin", records=count, size=FORMATS["stl10"].record),), labels


def _cifar10(root: Path, train: bool, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    parts = tuple(
        _map(root / name, records=count // len(names), size=FORMATS["cifar10"].record) for name in names
    )
    return parts, torch.cat([part[:, 0] for part in parts]).long()


def _mnist(root: Path, train: bool, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    half = "train" if train else "t10k"
    images, labels = root / f"{half}-images-idx3-ubyte", root / f"{half}-labels-idx1-ubyte"
    records = _map(images, records=count, size=28 * 28, offset=16)
    digits = _map(labels, records=count, size=1, offset=8)
    for path, expected in ((images, (2051, count, 28, 28)), (labels, (2049, count))):
        with path.open("rb") as file:
            header = tuple(int.from_bytes(file.read(4), "big") for _ in expected)
        if header != expected:
            raise DataError(f"{path} begins with {header}, not {expected}: it is not MNIST's.")
    return (records,), digits.view(-1).long()


READERS = {"stl10": _stl10, "cifar10": _cifar10, "mnist": _mnist}


def _digits(train: bool) -> Images:
    """Return the training or the held-out part of the UCI digits.

    Two of every eleven digits are held out, because the digits repeat with a period of ten.
    """
    path = HERE / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
        values = bytearray(map(int, text.replace("\n", ",").rstrip(",").split(",")))
        rows = torch.frombuffer(values, dtype=torch.uint8).view(sum(COUNTS["digits"]), 65)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read as the UCI digits: {error}. Copy it again.") from error
    held_out = torch.arange(len(rows)) % 11 > 8
    half = ~held_out if train else held_out
    pixels, labels = rows[half, :64].contiguous(), rows[half, 64].long()
    return Images("digits", HERE, train, False, FORMATS["digits"], (pixels,), labels)
