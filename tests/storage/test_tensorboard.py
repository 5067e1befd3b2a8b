"""The loss in TensorBoard's event files."""

import random

from awsddp.storage.loss_plot import plot_loss
from awsddp.storage.tensorboard import cut_middle, read_loss_rows
from tests.support.event_file import record
from tests.support.seed import SEED


def test_the_loss_is_read_from_an_event_file() -> None:
    data = record(0) + record(1, (b"lr", 0.5), (b"train/Loss", None), (b"val/loss", 4.0))
    data += record(300, (b"other loss", 7.0), (b"val/loss", 0.25), (b"y" * 300, 1.0))
    assert read_loss_rows(data) == [{"step": 1, "loss": 4.0}, {"step": 300, "loss": 0.25}]
    assert read_loss_rows(data + record(301, (b"val/loss", 1.0))[:-20]) == read_loss_rows(data)


def test_damaged_event_files_raise_no_error() -> None:
    rng = random.Random(SEED)
    whole = record(1, (b"loss", 4.0)) + record(2, (b"loss", 3.0))
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        rows = read_loss_rows(bytes(damaged))
        assert len(rows) <= 3
        plot_loss(rows, title="x")
        assert len(read_loss_rows(cut_middle(bytes(damaged), 1))) <= 3
    for data in (b"\xff" * 1000, b"", bytes(1 << 20), rng.randbytes(1 << 20)):
        assert read_loss_rows(data) == read_loss_rows(cut_middle(data)) == []


def test_cut_middle_keeps_the_first_and_the_last_loss() -> None:
    data = b"".join(record(step, (b"loss", 9.0 - step), (b"lr", 0.5)) for step in range(9))
    rows = read_loss_rows(data)
    assert read_loss_rows(cut_middle(data, 2)) == [*rows[:2], *rows[-2:]]
    assert cut_middle(data, 5) == data
    assert read_loss_rows(cut_middle(data[:-3], 2))[-1]["step"] in (7, 8)
