"""Stream the logs of this node's ranks and the job's document, in frames.

A stream only reads files, so any number of clients can follow a job at any time without affecting it.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from typing import BinaryIO

from awsddp.agent.job_folder import Document, JobFolder
from awsddp.agent.messages import Follow

MAGIC = b"\0awsddp\n"
"""The bytes that precede every response, because a login script on the node may print text before it."""

HEADER = struct.Struct(">cIQI")
"""The header of a frame: kind, rank, offset, and the length of the payload that follows.

- L: the frame has a piece of a rank's log, which begins at the offset.
- P: the rank paused in an unfinished line, and all of the line was sent.
- S: the frame has the changed document.
- H: the frame is a heartbeat, sent after 2 s without a frame.
- E: the frame has the last document, and follows the last byte of the logs.
"""
_CHUNK = 1 << 18
_POLL_SECONDS = 0.03
_HEARTBEAT_SECONDS = 2.0
_PAUSE_SECONDS = 1.0
_TAIL_BYTES = 4 << 20


def follow(request: Follow, out: BinaryIO) -> None:
    """Write frames to `out` until all logs have been sent and, with `to_the_end`, the job has ended.

    Raises BrokenPipeError if the client is gone.
    """
    stream = _Stream(JobFolder(request.job), request, out)
    while True:
        # The document is read before the logs, so that the logs are complete if the document is final.
        document = stream.document()
        sent = stream.logs()
        if not sent and (document.final or not request.to_the_end):
            stream.frame(b"E", payload=json.dumps(document.to_json()).encode())
            return
        stream.send_heartbeat()
        if not sent:
            time.sleep(_POLL_SECONDS)


def tail_start(log: int, count: int) -> int:
    """Return the offset at which the last `count` lines of the open file `log` begin.

    If these lines have more than 4 MB, the offset is 4 MB before the end of the file.
    """
    size = os.fstat(log).st_size
    begin = max(0, size - _TAIL_BYTES)
    data = os.pread(log, size - begin, begin)
    at = len(data) - 1  # skip the last newline
    for _ in range(count):
        at = data.rfind(b"\n", 0, max(0, at))
    return begin + at + 1


class _Stream:
    def __init__(self, folder: JobFolder, request: Follow, out: BinaryIO) -> None:
        self._folder = folder
        self._out = out
        self._tail, offsets = request.tail, request.offsets
        self._offsets = dict.fromkeys(folder.request().own_ranks, 0)
        self._offsets.update({int(rank): offset for rank, offset in offsets.items()})  # JSON keys are strings
        self._files: dict[int, int] = {}
        # Each rank whose last line may be unfinished, with the time of the rank's last output.
        self._unfinished = {rank: time.monotonic() for rank, offset in self._offsets.items() if offset}
        self._sent_at = 0.0
        self._document_version: tuple[int, int, bool] | None = None
        self._document: Document

    def document(self) -> Document:
        """Return the document. If the document has changed, send it first."""
        is_alive = self._folder.is_agent_running()
        try:
            info = self._folder.state.stat()
            version = (info.st_ino, info.st_mtime_ns, is_alive)
        except FileNotFoundError:
            version = (0, 0, is_alive)
        if version != self._document_version:
            self._document_version, self._document = version, self._folder.document()
            self.frame(b"S", payload=json.dumps(self._document.to_json()).encode())
        return self._document

    def logs(self) -> bool:
        """Send the next piece of each log. Return True if any log had new data."""
        return sum(self._send_log_piece(rank) for rank in self._offsets) > 0

    def _send_log_piece(self, rank: int) -> bool:
        if rank not in self._files:
            try:
                self._files[rank] = os.open(str(self._folder.log(rank)), os.O_RDONLY)
            except FileNotFoundError:
                return False
            if self._tail and not self._offsets[rank]:
                self._offsets[rank] = tail_start(self._files[rank], self._tail)
        offset = self._offsets[rank]
        data = os.pread(self._files[rank], _CHUNK, offset)
        if data:
            self.frame(b"L", rank=rank, offset=offset, payload=data)
            self._offsets[rank] += len(data)
            self._unfinished.pop(rank, None)
            if not data.endswith(b"\n"):
                self._unfinished[rank] = time.monotonic()
        elif time.monotonic() - self._unfinished.get(rank, math.inf) >= _PAUSE_SECONDS:
            del self._unfinished[rank]
            self.frame(b"P", rank=rank)
        return bool(data)

    def send_heartbeat(self) -> None:
        """Send a heartbeat if no frame was sent for a while."""
        if time.monotonic() - self._sent_at > _HEARTBEAT_SECONDS:
            self.frame(b"H")

    def frame(self, kind: bytes, *, rank: int = 0, offset: int = 0, payload: bytes = b"") -> None:
        self._out.write(HEADER.pack(kind, rank, offset, len(payload)) + payload)
        self._out.flush()
        self._sent_at = time.monotonic()
