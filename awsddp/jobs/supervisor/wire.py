"""How a node's answer looks on the wire: what both sides must agree on."""

from __future__ import annotations

import struct

MAGIC = b"\0awsddp\n"
"""Comes before every answer: a login script of the node's user may have said something first."""

HEADER = struct.Struct(">cIQI")
"""Of a frame of follow: kind, rank, offset, length of the payload that comes after it.

L is a piece of a rank's log at that offset; P says that the rank paused in the middle of its last line, and
that all of it was sent; S the document, changed; H nothing new for 2 s; E the final document, after the last
byte.
"""
