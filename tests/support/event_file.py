"""An event file, as TensorBoard's writers make it."""

import struct


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
    """Return a TFRecord that holds an Event."""
    values = (field(1, tag) + (b"" if value is None else field(2, value)) for tag, value in scalars)
    event = b"\x09" + struct.pack("<d", 1.5e9) + field(2, step)
    event += b"".join(field(5, field(1, value)) for value in values)
    return struct.pack("<Q", len(event)) + b"crc4" + event + b"crc4"
