"""Read the loss from event files of TensorBoard."""

import contextlib
import struct


def read_loss_rows(data: bytes) -> list[dict[str, float]]:
    """Return step and loss of a TensorBoard event file: of the first tag that names a loss.

    Records of TFRecord, each an Event: step is field 2, summary 5, of which a value has tag 1 and
    simple_value 2 (tensorboard/compat/proto in github.com/tensorflow/tensorboard). An incomplete last
    record is ignored.
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
    """Return an event file without its middle: at most its first and its last `most` records."""
    starts, at = [], 0
    while at + 12 <= len(data):
        starts.append(at)
        at += struct.unpack_from("<Q", data, at)[0] + 16
    return data if len(starts) <= 2 * most else data[: starts[most]] + data[starts[-most] :]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the fields of a protobuf message by number; a varint as 8 bytes, little-endian."""
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
    """Return the varint at position `at` and the position after it; 7 bits per byte."""
    last = next((n for n in range(at, at + 10) if message[n] < 128), at + 9)
    return sum((byte & 127) << 7 * n for n, byte in enumerate(message[at : last + 1])), last + 1
