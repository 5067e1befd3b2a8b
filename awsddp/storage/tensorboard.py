"""Read the loss from TensorBoard event files."""

import contextlib
import struct


def read_loss_rows(data: bytes) -> list[dict[str, float]]:
    """Return the steps and losses in a TensorBoard event file, from the first tag that names a loss.

    The file has TFRecord records, and each record is an Event (tensorboard/compat/proto in
    github.com/tensorflow/tensorboard). In an Event, field 2 is the step and field 5 is the summary. A value
    in the summary has the tag in field 1 and simple_value in field 2. An incomplete last record is ignored.
    """
    rows: list[dict[str, float]] = []
    chosen, at = b"", 0
    with contextlib.suppress(IndexError, struct.error):
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = _fields(data[at + 12 : at + 12 + size])
            at += size + 16
            for summary in event.get(5, ()):
                for scalar in map(_fields, _fields(summary).get(1, ())):
                    tag, value = scalar.get(1, [b""])[0], scalar.get(2, [b""])[0]
                    if len(value) == 4 and b"loss" in tag.lower() and (chosen := chosen or tag) == tag:
                        step = int.from_bytes(event.get(2, [b""])[0], "little")
                        rows.append({"step": step, "loss": struct.unpack("<f", value)[0]})
    return rows


def cut_middle(data: bytes, most: int = 300) -> bytes:
    """Return an event file without its middle: only the first `most` and the last `most` records remain."""
    starts, at = [], 0
    while at + 12 <= len(data):
        starts.append(at)
        at += struct.unpack_from("<Q", data, at)[0] + 16
    return data if len(starts) <= 2 * most else data[: starts[most]] + data[starts[-most] :]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return a protobuf message's fields by number; a varint is returned as 8 little-endian bytes."""
    fields: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size, at = _varint(message, at)
        if key & 7 == 0:
            value = (size & (1 << 64) - 1).to_bytes(8, "little")
        else:
            at, value = at + size, message[at : at + size]
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the varint at position `at` and the position after it; each byte holds 7 bits."""
    last = next((n for n in range(at, at + 10) if message[n] < 128), at + 9)
    return sum((byte & 127) << 7 * n for n, byte in enumerate(message[at : last + 1])), last + 1
