"""Parse, merge and label the nodes' log streams, and write the logs to local files.

Labels are added per chunk, because a loop over lines is 20 times slower.
"""

import codecs
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec

from awsddp.agent.log_stream import HEADER, MAGIC, tail_start
from awsddp.errors import ConfigError, NodeError
from awsddp.model.node_answers import FailureResponse, NodeJob, read_node_job

_PROGRESS_SECONDS = 1.0
"""The interval at which a line that overwrites itself, such as a progress bar, is shown."""
_LONGEST_LINE = 32 << 20
_MAGIC_WITHIN = 1 << 20
_FRAME_BYTES = 16 << 20  # a document with 10,000 ranks has 2 MB
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_OVERWRITTEN = re.compile(rb"^[^\n]*\r(?=[^\n])", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame in a node's stream; see agent/log_stream.py for `kind`."""

    kind: bytes
    rank: int
    offset: int
    payload: bytes


class Stream:
    """Parses the response to one `Follow` request into frames."""

    def __init__(self, who: str = "a node") -> None:
        self._who = who
        self._data = bytearray()
        self._begun = False

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes and return the frames that they complete. Raises NodeError."""
        self._data += data
        if not self._begun:
            start = self._data.find(MAGIC)
            if start < 0 and len(self._data) > _MAGIC_WITHIN:
                raise self._unexpected(bytes(self._data[:4000]))
            if start < 0:
                return []
            del self._data[: start + len(MAGIC)]
            self._begun = True
        frames, end = [], 0
        while len(self._data) - end >= HEADER.size:
            kind, rank, offset, length = HEADER.unpack_from(self._data, end)
            if kind not in (b"L", b"P", b"S", b"H", b"E"):
                raise self._unexpected(bytes(self._data[end : end + 4000]))
            if length > _FRAME_BYTES:
                raise self._unexpected(b"a frame of %d bytes" % length)
            start = end + HEADER.size
            if len(self._data) - start < length:
                break
            end = start + length
            frames.append(Frame(kind=kind, rank=rank, offset=offset, payload=bytes(self._data[start:end])))
        del self._data[:end]
        return frames

    def _unexpected(self, data: bytes) -> NodeError:
        """Return the error to raise for data that is not a frame, such as an error document."""
        text = data.decode("utf-8", "replace").strip()
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            text = msgspec.json.decode(text, type=FailureResponse).error.message
        return NodeError(f"the logs of {self._who} cannot be followed", text, "awsddp logs -f")


@dataclass(frozen=True)
class LogLine:
    """A line of a rank's log, without its newline, and the rank's node."""

    rank: int
    node: int
    text: str


_LABEL = re.compile(rb"\[rank (\d+) @ node(\d+)\] (.*)")


def parse_lines(labelled: bytes) -> list[LogLine]:
    """Parse a Labeller's output."""
    matches = (_LABEL.match(line) for line in labelled.split(b"\n") if line)
    return [
        LogLine(rank=int(match[1]), node=int(match[2]), text=match[3].decode("utf-8", "replace"))
        for match in matches
        if match is not None
    ]


def last_lines(pieces: Iterable[bytes], count: int) -> bytes:
    """Return the last `count` lines of a Merger's output, with about the same number from each rank."""
    lines: dict[bytes, deque[bytes]] = {}
    for line in (line for piece in pieces for line in piece.splitlines(keepends=True)):
        lines.setdefault(line.partition(b"]")[0], deque(maxlen=count)).append(line)
    free, ranks_left = count, len(lines)
    for rank_lines in sorted(lines.values(), key=len):
        for _ in range(len(rank_lines) - free // ranks_left):
            rank_lines.popleft()
        free, ranks_left = free - len(rank_lines), ranks_left - 1
    return b"".join(line for rank_lines in lines.values() for line in rank_lines)


class Labeller:
    """Prepends a rank's label to each line of the rank's log.

    A line is returned when it is complete. An unfinished line is returned when the node reports that the rank
    paused in this line (for example after a prompt), or when the line reaches 32 MB. If a line overwrites
    itself with \\r, its latest state is returned about once a second.
    """

    def __init__(self, label: bytes) -> None:
        self._label = label
        self._chunks: list[bytes] = []  # the pieces of the unfinished line, joined only once
        self._since = 0.0  # when the unfinished line began, or when part of it was returned
        self._broken = False  # True if the next line's beginning was already returned

    def feed(self, data: bytes, *, now: float) -> bytes:
        """Add bytes from the rank's log, and return the labelled lines that they complete."""
        if not self._chunks:
            self._since = now
        end = data.rfind(b"\n") + 1
        body = b"".join((*self._chunks, data[:end])) if end else b""
        if end:
            self._chunks, self._since = [], now
        if end < len(data):
            self._chunks.append(data[end:])
        if body and self._broken:
            self._broken = False
            body = body[1:] if body.startswith(b"\n") else body
        return self._lines(body) + self._progress(now)

    def pause(self, *, now: float) -> bytes:
        """Return the labelled line in which the rank paused."""
        body = b"".join(self._chunks)
        return self._flush(body, len(body) - _unfinished(body), now)

    def finish(self) -> bytes:
        """Return the unfinished line at the end of the log, with a label and a newline."""
        body, self._chunks = b"".join(self._chunks), []
        return self._partial(body)

    def _progress(self, now: float) -> bytes:
        """Return a line over 32 MB or, if due, the latest complete state of a line that overwrites itself."""
        if sum(map(len, self._chunks)) >= _LONGEST_LINE:
            return self.pause(now=now)
        if now - self._since < _PROGRESS_SECONDS or not any(b"\r" in chunk for chunk in self._chunks):
            return b""
        body = b"".join(self._chunks)
        return self._flush(body, body.rfind(b"\r") + 1, now)

    def _flush(self, body: bytes, cut: int, now: float) -> bytes:
        """Return an unfinished line up to `cut`, with a label, and buffer the remainder."""
        self._chunks, self._since = ([body[cut:]] if cut < len(body) else []), now
        return self._partial(body[:cut])

    def _lines(self, body: bytes) -> bytes:
        if b"\r" in body:
            body = _OVERWRITTEN.sub(b"", _LINE_END.sub(b"\n", body))
        if not body:
            return b""
        return self._label + body[:-1].replace(b"\n", b"\n" + self._label) + b"\n"

    def _partial(self, body: bytes) -> bytes:
        text = body.rstrip(b"\r").rpartition(b"\r")[2]
        if not text:
            return b""
        self._broken = True
        return self._label + text + b"\n"


@dataclass(eq=False)
class Merger:
    """Writes a job's complete logs to a local folder, and returns them labelled and merged for display.

    `feed` takes the nodes' streams, which may continue over several connections. Each byte of a rank's log is
    written and displayed once. `nodes` has each rank's node, and `folder` is the folder for the logs
    (rank3.log). `shown_ranks` are the ranks to display (None: all). `documents` has each node's latest
    report. With `tail`, the display begins that many lines before the end of each log, and nothing is
    written.
    """

    nodes: Mapping[int, int]
    _: KW_ONLY
    folder: Path
    job: str | None = None
    shown_ranks: Collection[int] | None = None
    tail: int | None = None
    clock: Callable[[], float] = time.monotonic
    documents: dict[int, NodeJob] = field(default_factory=dict, init=False)
    _streams: dict[int, Stream] = field(default_factory=dict, init=False)
    _files: dict[int, int] = field(default_factory=dict, init=False)
    _ended: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._offsets = dict.fromkeys(self.nodes, 0)
        self._labellers = {
            rank: Labeller(b"[rank %d @ node%d] " % (rank, node)) for rank, node in self.nodes.items()
        }

    def has_ended(self, node: int) -> bool:
        """Return True if the job's part on `node` has ended and the node has sent all of its logs."""
        return node in self._ended

    def clear_ended(self) -> None:
        """Mark all nodes as not ended, so that following them resumes at their offsets."""
        self._ended.clear()

    def replay(self) -> Iterator[bytes]:
        """Yield the lines of existing local files; afterwards, `attach` returns the files' end offsets."""
        for rank, labeller in self._labellers.items():
            path = self._path(rank)
            if not path.exists():
                continue
            with path.open("rb") as file:
                if self.tail:
                    file.seek(tail_start(file.fileno(), self.tail))
                while data := file.read(1 << 20):
                    self._offsets[rank] += len(data)
                    yield self._label(rank, labeller, data)

    def attach(self, node: int) -> dict[int, int]:
        """Start a stream from `node`, and return the offsets for its `Follow` request."""
        self._streams[node] = Stream(f"node{node}")
        return {rank: offset for rank, offset in self._offsets.items() if self.nodes[rank] == node}

    def feed(self, node: int, data: bytes) -> bytes:
        """Process bytes from `node`'s stream, and return the labelled lines that they complete.

        Raises NodeError for an invalid stream or missing bytes, or ConfigError if `folder` is not writable.
        """
        try:
            return b"".join(self._process(node, frame) for frame in self._streams[node].feed(data))
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.folder}",
                f"{error.strerror or error}\nthe job continues, because it does not need this machine",
                f"awsddp logs -f {self.job}   # once the folder can be written\n"
                f"awsddp logs -f {self.job} -o job.results=DIR   # writes to another folder",
            ) from error

    def finish(self) -> bytes:
        """Return the last unfinished lines, and close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        return b"".join(labeller.finish() for labeller in self._labellers.values())

    def _process(self, node: int, frame: Frame) -> bytes:
        if frame.kind in (b"S", b"E"):
            self.documents[node] = read_node_job(frame.payload, node=node, job=self.job, ranks=self.nodes)
        if frame.kind == b"E":
            self._ended.add(node)
        if frame.kind not in (b"L", b"P"):
            return b""
        if self.nodes.get(frame.rank) != node:
            raise NodeError(f"node{node} sent a log of rank {frame.rank}, which does not run there")
        if frame.kind == b"P":
            return self._labellers[frame.rank].pause(now=self.clock())
        return self._log(node, frame)

    def _log(self, node: int, frame: Frame) -> bytes:
        """Write and display the new bytes in a frame of a rank's log."""
        if self.tail and not self._offsets[frame.rank]:
            self._offsets[frame.rank] = frame.offset
        overlap = self._offsets[frame.rank] - frame.offset
        if overlap < 0:
            raise NodeError(f"node{node} omitted {-overlap} bytes of the log of rank {frame.rank}")
        data = frame.payload[overlap:]
        if not self.tail:
            os.pwrite(self._open(frame.rank), data, self._offsets[frame.rank])
        self._offsets[frame.rank] += len(data)
        return self._label(frame.rank, self._labellers[frame.rank], data)

    def _label(self, rank: int, labeller: Labeller, data: bytes) -> bytes:
        """Return the labelled lines of new data, or b"" for a rank that is not displayed."""
        if not data or (self.shown_ranks is not None and rank not in self.shown_ranks):
            return b""
        return labeller.feed(data, now=self.clock())

    def _open(self, rank: int) -> int:
        if rank not in self._files:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._files[rank] = os.open(self._path(rank), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        return self._files[rank]

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


def _unfinished(data: bytes) -> int:
    """Return how many bytes (0 to 3) at the end of `data` begin a UTF-8 character without completing it."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])
