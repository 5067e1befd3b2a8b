"""The published formats: read right, and refused when they are not what they say."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import pickle
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import quiet  # noqa: F401  # isort: skip
import image_files
import obtain
import torch

NAMES = ("stl10", "cifar10", "mnist")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    for name in NAMES:
        obtain.make(name, tmp_path, train=50, test=20)
    return tmp_path


def test_digits_are_all_there_and_split_without_overlap() -> None:
    train, test = image_files.load("digits", Path(), True), image_files.load("digits", Path(), False)
    assert (len(train), len(test)) == (1471, 326)
    assert int(train.records[0].max()) == 16
    first = train.pixels(train.gather(torch.tensor([0])))[0, 0]
    assert first[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0] and int(train.labels[0]) == 0
    assert test.labels.bincount().min() > 25


def test_stl10_pixels_are_stored_by_columns(made: Path) -> None:
    images = image_files.load("stl10", made, True)
    raw = (made / "stl10_binary" / "train_X.bin").read_bytes()
    pixels = images.pixels(images.gather(torch.tensor([3, 7])))
    assert pixels.shape == (2, 3, 96, 96)
    channel, row, column = 1, 10, 20
    assert int(pixels[1, channel, row, column]) == raw[7 * 27648 + channel * 9216 + column * 96 + row]
    assert int(images.labels[7]) == (made / "stl10_binary" / "train_y.bin").read_bytes()[7] - 1


def test_cifar10_batches_are_gathered_across_its_five_files(made: Path) -> None:
    images = image_files.load("cifar10", made, True)
    index = torch.tensor([49, 0, 17])
    raw = b"".join((made / "cifar-10-batches-bin" / f"data_batch_{i}.bin").read_bytes() for i in range(1, 6))
    for record, sample in zip(images.gather(index), index.tolist(), strict=True):
        assert bytes(record.tolist()) == raw[sample * 3073 : (sample + 1) * 3073]
        assert int(images.labels[sample]) == raw[sample * 3073]
    assert images.pixels(images.gather(index)).shape == (3, 3, 32, 32)


def test_mnist_is_read_packed_or_not(made: Path) -> None:
    before = image_files.load("mnist", made, False)
    root = made / "MNIST/raw"
    for path in list(root.glob("t10k-*")):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    after = image_files.load("mnist", made, False)
    assert torch.equal(before.records[0], after.records[0]) and torch.equal(before.labels, after.labels)


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_maps_the_files_itself(name: str, made: Path) -> None:
    images = image_files.load(name, made, True)
    pickled = pickle.dumps(images)
    assert len(pickled) < 500
    records, labels, index = pickle.loads(pickled).__getitems__([1, 2])
    assert torch.equal(records, images.gather(torch.tensor([1, 2])))
    assert labels.tolist() == images.labels[1:3].tolist() and index.tolist() == [1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_every_file_cut_short_or_missing_is_named(name: str, made: Path) -> None:
    for path in [
        p for p in sorted((made / image_files.PUBLISHED_FOLDER[name]).iterdir()) if p.name != image_files.MADE
    ]:
        content = path.read_bytes()
        for damaged in (content[:-1], b"", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(image_files.DataError, match=path.name.replace(".", r"\.")):
                for train in (True, False):
                    image_files.load(name, made, train)
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "file", "other_file"),
    [
        ("stl10", "train_X.bin", "test_X.bin"),
        ("stl10", "train_X.bin", "train_y.bin"),
        ("mnist", "train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        ("mnist", "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"),
        ("cifar10", "data_batch_1.bin", "test_batch.bin"),
    ],
)
def test_swapped_files_are_refused(name: str, file: str, other_file: str, made: Path) -> None:
    root = made / image_files.PUBLISHED_FOLDER[name]
    first, second = (root / file).read_bytes(), (root / other_file).read_bytes()
    (root / file).write_bytes(second)
    (root / other_file).write_bytes(first)
    with pytest.raises(image_files.DataError):
        image_files.load(name, made, True)


def test_labels_out_of_range_are_refused(made: Path) -> None:
    (made / "stl10_binary" / "train_y.bin").write_bytes(bytes([11] * 50))
    with pytest.raises(image_files.DataError, match="label"):
        image_files.load("stl10", made, True)


def test_made_data_never_passes_for_the_real_set(made: Path) -> None:
    assert image_files.load("stl10", made, True).made
    (made / "stl10_binary" / image_files.MADE).unlink()
    with pytest.raises(image_files.DataError, match="cut short"):
        image_files.load("stl10", made, True)
    with pytest.raises(image_files.DataError, match="left alone"):
        obtain.make("stl10", made)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with STL-10's archive, made and small, under the published name and with its true MD5."""
    obtain.make("stl10", tmp_path / "origin", train=50, test=20)
    root = tmp_path / "origin" / "stl10_binary"
    (root / image_files.MADE).unlink()
    archive = tmp_path / "www" / "stl10_binary.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root, "stl10_binary")
    published = obtain.Published(
        "http://nowhere.invalid/stl10_binary.tar.gz", hashlib.md5(archive.read_bytes()).hexdigest()
    )
    monkeypatch.setitem(obtain.PUBLISHED, "stl10", (published,))
    monkeypatch.setitem(image_files.COUNTS, "stl10", (50, 20))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(archive.parent))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_get_downloads_checks_unpacks_and_is_done_once(
    mirror: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    obtain.get("stl10", folder, mirror=mirror)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 10 and f"[{'#' * 30}]" in lines[-1]
    assert len(image_files.load("stl10", folder, True)) == 50
    assert sorted(p.name for p in folder.iterdir()) == [".stl10.lock", "stl10_binary"]
    obtain.get("stl10", folder, mirror="http://127.0.0.1:1")  # nobody is asked again


def test_get_refuses_what_was_not_published(mirror: str, tmp_path: Path) -> None:
    archive = tmp_path / "www" / "stl10_binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-10])
    with pytest.raises(image_files.DataError, match="not the published"):
        obtain.get("stl10", tmp_path / "data", mirror=mirror)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".stl10.lock"]


def test_get_says_what_the_network_said(tmp_path: Path) -> None:
    with pytest.raises(image_files.DataError, match="could not be fetched"):
        obtain.get("mnist", tmp_path, mirror="http://127.0.0.1:1")


def test_get_leaves_made_data_alone(made: Path) -> None:
    with pytest.raises(image_files.DataError, match="made data"):
        obtain.get("cifar10", made)
