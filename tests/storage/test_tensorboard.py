"""What happened, as figures and text."""

import random
import re
import struct
from xml.etree import ElementTree

import pytest

from awsddp.job.report_page import measures
from awsddp.model.metric_rows import json_lines, last_value, number
from awsddp.model.records import Saving
from awsddp.model.saving_text import saving_text
from awsddp.storage.loss_plot import loss_plot
from awsddp.storage.tensorboard import both_ends, event_rows
from tests.support.seed import SEED


def test_the_loss_of_a_job_is_that_of_its_first_rank_whoever_wrote_last() -> None:
    rows = [
        {"rank": 0, "loss": 3.0},
        {"rank": 1, "loss": 1.0},
        {"rank": 0, "loss": 2.0},
        {"rank": 1, "loss": 0.5},
    ]
    assert measures(rows)["loss"] == {"last": 2.0, "best": 2.0} and last_value(rows, "loss") == 2.0
    others = [{"rank": 3, "loss": 7.0}, {"rank": 2, "loss": 6.0}, {"rank": 0, "step": 1}]
    assert last_value(others, "loss") == 6.0, "rank 0 writes none"
    assert last_value([{"loss": 4.0}, {"rank": 1, "loss": 5.0}], "loss") == 4.0


def test_whatever_a_program_writes_down_as_its_metrics_can_be_shown() -> None:
    rows = json_lines(
        '{"loss": 1, "step": "x"}\n{"loss": NaN}\n{"loss": 1e999, "accuracy": Infinity}\n[1]\nhalf {\n'
        f'{{"loss": 2, "step": {"9" * 400}, "accuracy": 0.5}}\n'
        + "[" * 100_000
        + '\n{"loss": 1e300, "rank": "x"}'
    )
    assert [number(row.get("loss")) for row in rows] == [1, None, None, 2, None]
    assert last_value(rows, "accuracy") == 0.5
    assert measures(rows) == {"loss": {"last": 2, "best": 1}, "accuracy": {"last": 0.5, "best": 0.5}}
    plot = loss_plot(rows, title="<loss>")
    assert plot is not None
    assert "<loss>" not in plot


def test_plot_has_a_line_for_each_of_eight_ranks_and_the_slowest_is_among_them() -> None:
    rows = [{"rank": rank, "step": step, "loss": 1 / step} for rank in range(12) for step in range(1, 2001)]
    drawn = loss_plot(rows, title="loss", outlier=11)
    assert drawn is not None
    assert re.findall(r"rank \d+", drawn) == [f"rank {rank}" for rank in (*range(7), 11)]
    assert drawn.count("<polyline") == 8
    assert len(drawn) < 100_000


def test_plot_spans_its_points() -> None:
    drawn = loss_plot([{"step": 10, "loss": 3.0}, {"step": 20, "loss": 1.0}], title="loss")
    assert drawn is not None
    picture = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    (line,) = picture.iter(f"{space}polyline")
    assert line.get("points") == "60.0,24.0 548.0,238.0"
    said = [(text.text, text.get("x"), text.get("y")) for text in picture.iter(f"{space}text")]
    assert {("1", "54", "242.0"), ("3", "54", "28.0"), ("10", "60", "256"), ("20", "548", "256")} <= set(said)


def test_one_point_is_no_plot() -> None:
    assert loss_plot([{"loss": 1.0}], title="x") is None
    assert loss_plot([{"loss": 1.0}, {"accuracy": 1.0}], title="x") is None


def field(number: int, value: bytes | int | float) -> bytes:
    """Return a field of a protobuf message."""
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def record(step: int, *scalars: tuple[bytes, float | None]) -> bytes:
    """Return a TFRecord of an Event, as TensorBoard's writers make it."""
    values = (field(1, tag) + (b"" if value is None else field(2, value)) for tag, value in scalars)
    event = b"\x09" + struct.pack("<d", 1.5e9) + field(2, step)
    event += b"".join(field(5, field(1, value)) for value in values)
    return struct.pack("<Q", len(event)) + b"crc4" + event + b"crc4"


def test_loss_of_tensorboards_event_file() -> None:
    data = record(0) + record(1, (b"lr", 0.5), (b"train/Loss", None), (b"val/loss", 4.0))
    data += record(300, (b"other loss", 7.0), (b"val/loss", 0.25), (b"y" * 300, 1.0))
    assert event_rows(data) == [{"step": 1, "loss": 4.0}, {"step": 300, "loss": 0.25}]
    assert event_rows(data + record(301, (b"val/loss", 1.0))[:-20]) == event_rows(data)


def test_a_file_that_is_no_event_file_has_no_loss() -> None:
    drawn = random.Random(SEED)
    whole = record(1, (b"loss", 4.0)) + record(2, (b"loss", 3.0))
    for _ in range(2000):
        torn = bytearray(whole)
        for _ in range(drawn.randrange(1, 6)):
            torn[drawn.randrange(len(torn))] = drawn.randrange(256)
        rows = event_rows(bytes(torn))
        assert len(rows) <= 3
        loss_plot(rows, title="x")
        assert len(event_rows(both_ends(bytes(torn), 1))) <= 3
    for data in (b"\xff" * 1000, b"", bytes(1 << 20), drawn.randbytes(1 << 20)):
        assert event_rows(data) == event_rows(both_ends(data)) == []


def test_both_ends_of_an_event_file_hold_its_first_and_its_last_loss() -> None:
    data = b"".join(record(step, (b"loss", 9.0 - step), (b"lr", 0.5)) for step in range(9))
    whole = event_rows(data)
    assert event_rows(both_ends(data, 2)) == [*whole[:2], *whole[-2:]]
    assert both_ends(data, 5) == data
    assert event_rows(both_ends(data[:-3], 2))[-1]["step"] in (7, 8)


@pytest.mark.parametrize(
    ("saving", "text"),
    [
        (Saving(), "0 files, 0 bytes in S3"),
        (Saving(files=5, bytes=2_000_000, ended=True), "5 files, 2.0 MB in S3"),
        (
            Saving(files=1, bytes=7, pending_files=2, pending_bytes=9),
            "1 file, 7 bytes in S3, 2 files, 9 bytes left",
        ),
        (Saving(error="AccessDenied"), "0 files, 0 bytes in S3, not saved: AccessDenied"),
        (Saving(unasked=(1, 3)), "0 files, 0 bytes in S3, node1, node3 cannot be asked"),
        (Saving(silent_s=59.0), "0 files, 0 bytes in S3"),
        (Saving(silent_s=90.0, ended=True), "0 files, 0 bytes in S3"),
        (
            Saving(silent_s=90.0),
            "0 files, 0 bytes in S3, nothing is saved any more (no sign of life for 1 min 30 s)",
        ),
    ],
)
def test_how_far_results_are_in_s3_is_one_line(saving: Saving, text: str) -> None:
    assert saving_text(saving) == text
