"""Download a published data set, or make a small one in its format, for data.py."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import shutil
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import image_files
import torch


@dataclass(frozen=True)
class Published:
    """A file to download. The MD5 is published by the file's authors or by torchvision."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


_STL10 = "http://ai.stanford.edu/~acoates/stl10/"
_CIFAR10 = "https://www.cs.toronto.edu/~kriz/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
PUBLISHED = {
    "stl10": [Published(_STL10 + "stl10_binary.tar.gz", "91f7769df0f17e558f3565bffb0c7dfb")],
    "cifar10": [Published(_CIFAR10 + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")],
    "mnist": [
        Published(_MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Published(_MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        Published(_MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        Published(_MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ],
}


def get(name: str, folder: Path, *, mirror: str | None = None) -> None:
    """Download the data set `name` into `folder`, check its MD5 and unpack it, unless it is already complete.

    `mirror` is a base URL that serves the same files. Processes on one node that call this function at the
    same time take turns. Raises image_files.DataError if the download fails or if the file is not the
    published one.
    """
    target = folder / image_files.PUBLISHED_FOLDER[name]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / image_files.MADE).exists():
            raise image_files.DataError(
                f"{target} holds made data. Remove it first, or choose another folder."
            )
        if not _complete(name, folder):
            for file in PUBLISHED[name]:
                archive = folder / file.name
                _download(file, archive, mirror=mirror)
                _unpack(archive, target)
                archive.unlink()
            for train in (True, False):
                image_files.load(name, folder, train)
    print(f"{name} is in {target}", flush=True)


def _complete(name: str, folder: Path) -> bool:
    try:
        return all(len(image_files.load(name, folder, train)) for train in (True, False))
    except image_files.DataError:
        return False


def _download(file: Published, archive: Path, *, mirror: str | None) -> None:
    """Download `file` to `archive`. The file is written under another name, checked, then renamed."""
    url = f"{mirror.rstrip('/')}/{file.name}" if mirror else file.url
    aside = archive.with_name(archive.name + ".part")
    digest = hashlib.md5(usedforsecurity=False)  # as published; it detects damage, not attacks
    try:
        with urllib.request.urlopen(url, timeout=60) as response, aside.open("wb") as target:
            total, done = int(response.headers.get("Content-Length") or 0), 0
            while block := response.read(1 << 20):
                target.write(block)
                digest.update(block)
                _progress(file.name, done, done := done + len(block), total)
    except OSError as error:  # URLError, a timeout, a full disk
        aside.unlink(missing_ok=True)
        raise image_files.DataError(f"{url} could not be fetched: {error}") from error
    if digest.hexdigest() != file.md5:
        aside.unlink()
        raise image_files.DataError(
            f"{url} has MD5 {digest.hexdigest()}, not the published {file.md5}: it is cut short or changed."
        )
    aside.replace(archive)


def _progress(name: str, before: int, done: int, total: int) -> None:
    """Show a download's progress: as a bar on a terminal, otherwise as one line per tenth."""
    if total and (sys.stderr.isatty() or before * 10 // total < done * 10 // total):
        bar = f"[{'#' * (done * 30 // total):30}] {done / 1e6:.0f} of {total / 1e6:.0f} MB"
        start, end = ("\r", "" if done < total else "\n") if sys.stderr.isatty() else ("", "\n")
        print(f"{start}{name} {bar}", end=end, file=sys.stderr, flush=True)


def _unpack(archive: Path, target: Path) -> None:
    """Unpack the folder in a .tar.gz as `target`, or the file in a .gz into the folder `target`.

    Until it is complete, the unpacked folder or file has another name.
    """
    aside = target.with_name(target.name + ".aside")
    target.parent.mkdir(parents=True, exist_ok=True)
    if archive.name.endswith(".tar.gz"):
        shutil.rmtree(aside, ignore_errors=True)
        with tarfile.open(archive) as tar:
            # Python before 3.10.12 and 3.11.4 has no filters: https://docs.python.org/3/library/tarfile.html
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            files = [file for file in tar if file.isfile() and not {"", ".."} & {*file.name.split("/")}]
            tar.extractall(aside, files)
        shutil.rmtree(target, ignore_errors=True)
        (aside / target.name).replace(target)
        shutil.rmtree(aside)
    else:
        target.mkdir(exist_ok=True)
        with gzip.open(archive) as packed, aside.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        aside.replace(target / archive.stem)


def make(name: str, folder: Path, *, train: int = 500, test: int = 100, seed: int = 0) -> None:
    """Write a small, learnable set in `name`'s format into `folder`, marked as synthetic, for rehearsals.

    For mnist, the images are enlarged UCI digits at random positions; otherwise each class is a random
    pattern with noise. `train` must be a multiple of 5. Raises image_files.DataError if the folder has a real
    set, which is never overwritten.
    """
    target = folder / image_files.PUBLISHED_FOLDER[name]
    if target.is_dir() and any(target.iterdir()) and not (target / image_files.MADE).exists():
        raise image_files.DataError(
            f"{target} contains other files than made data: they are left alone. Choose another folder."
        )
    target.mkdir(parents=True, exist_ok=True)
    mark = json.dumps({"made": f"not {name}", "counts": [train, test]})
    (target / image_files.MADE).write_text(mark + "\n")
    random, size = torch.Generator().manual_seed(seed), image_files.FORMATS[name].record
    patterns = torch.randint(0, 256, (10, size), generator=random)
    for half, count in ((True, train), (False, test)):
        if name == "mnist":
            pixels, labels = _enlarged_digits(count, train=half, random=random)
        else:
            labels = torch.randint(0, 10, (count,), generator=random)
            noise = torch.randint(0, 256, (count, size), generator=random)
            pixels = ((patterns[labels] + noise) // 2).to(torch.uint8)
        _WRITERS[name](target, half, pixels, labels.to(torch.uint8))
    print(f"made {train} + {test} images in the format of {name} in {target}: for rehearsals, not {name}")


def _enlarged_digits(
    count: int, *, train: bool, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` UCI digits, each 20 x 20 pixels somewhere in a flat 28 x 28 image, and their labels."""
    digits = image_files.load("digits", Path(), train)
    index = torch.randint(0, len(digits), (count,), generator=random)
    small = digits.pixels(digits.gather(index)).float() * (255 / 16)
    large = torch.nn.functional.interpolate(small, (20, 20), mode="bilinear")[:, 0]
    rows, columns = torch.randint(0, 9, (2, count, 1), generator=random) + torch.arange(20)
    pixels = torch.zeros(count, 28, 28, dtype=torch.uint8)
    samples = torch.arange(count)[:, None, None]
    pixels[samples, rows[:, :, None], columns[:, None, :]] = large.to(torch.uint8)
    return pixels.flatten(1), digits.labels[index]


def _write(path: Path, values: torch.Tensor, header: tuple[int, ...] = ()) -> None:
    content = bytearray(values.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(values.flatten())
    path.write_bytes(b"".join(number.to_bytes(4, "big") for number in header) + content)


def _write_stl10(root: Path, train: bool, pixels: torch.Tensor, labels: torch.Tensor) -> None:
    half = "train" if train else "test"
    _write(root / f"{half}_X.bin", pixels)
    _write(root / f"{half}_y.bin", labels + 1)


def _write_cifar10(root: Path, train: bool, pixels: torch.Tensor, labels: torch.Tensor) -> None:
    pixels[:, 0] = labels
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    for name, part in zip(names, pixels.chunk(len(names)), strict=True):
        _write(root / name, part)


def _write_mnist(root: Path, train: bool, pixels: torch.Tensor, labels: torch.Tensor) -> None:
    half = "train" if train else "t10k"
    _write(root / f"{half}-images-idx3-ubyte", pixels, header=(2051, len(labels), 28, 28))
    _write(root / f"{half}-labels-idx1-ubyte", labels, header=(2049, len(labels)))


_WRITERS = {"stl10": _write_stl10, "cifar10": _write_cifar10, "mnist": _write_mnist}
