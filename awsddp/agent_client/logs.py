"""The logs of the ranks: the nodes' streams are parsed, merged, labelled, and written byte by byte.

Labels are added per chunk, not per line: a loop over lines is 20 times slower.
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
from awsddp.model.node_answers import Failed, NodeJob, node_job

_PROGRESS_SECONDS = 1.0
"""How often a line that overwrites itself is shown."""
_LONGEST_LINE = 32 << 20
_MAGIC_WITHIN = 1 << 20
_FRAME_BYTES = 16 << 20  # a document of 10,000 ranks has 2 MB
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_OVERWRITTEN = re.compile(rb"^[^\n]*\r(?=[^\n])", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A piece of a node's stream; see agent/log_stream.py for `kind`."""

    kind: bytes
    rank: int
    offset: int
    payload: bytes


class Stream:
    """Parses the stream of one follow request into frames."""

    def __init__(self, who: str = "a node") -> None:
        self._who = who
        self._data = bytearray()
        self._begun = False

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes and return the frames that they complete. Raises NodeError."""
        self._data += data
        if not self._begun:
            found = self._data.find(MAGIC)
            if found < 0 and len(self._data) > _MAGIC_WITHIN:
                raise self._unexpected(bytes(self._data[:4000]))
            if found < 0:
                return []
            del self._data[: found + len(MAGIC)]
            self._begun = True
        frames, at = [], 0
        while len(self._data) - at >= HEADER.size:
            kind, rank, offset, length = HEADER.unpack_from(self._data, at)
            if kind not in (b"L", b"P", b"S", b"H", b"E"):
                raise self._unexpected(bytes(self._data[at : at + 4000]))
            if length > _FRAME_BYTES:
                raise self._unexpected(b"a frame of %d bytes" % length)
            start = at + HEADER.size
            if len(self._data) - start < length:
                break
            at = start + length
            frames.append(Frame(kind=kind, rank=rank, offset=offset, payload=bytes(self._data[start:at])))
        del self._data[:at]
        return frames

    def _unexpected(self, said: bytes) -> NodeError:
        """Return the error for data that is not a frame: an error document, or anything else."""
        text = said.decode("utf-8", "replace").strip()
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            text = msgspec.json.decode(text, type=Failed).error.message
        return NodeError(f"the logs of {self._who} cannot be followed", text, "awsddp logs -f")


@dataclass(frozen=True)
class LogLine:
    """A line of a rank: on which node it runs, and the text without its end."""

    rank: int
    node: int
    text: str


_LABEL = re.compile(rb"\[rank (\d+) @ node(\d+)\] (.*)")


def split_lines(labelled: bytes) -> list[LogLine]:
    """Return the lines that a Labeller gave out."""
    matches = (_LABEL.match(line) for line in labelled.split(b"\n") if line)
    return [
        LogLine(rank=int(match[1]), node=int(match[2]), text=match[3].decode("utf-8", "replace"))
        for match in matches
        if match is not None
    ]


def last_lines(pieces: Iterable[bytes], count: int) -> bytes:
    """Return the last `count` lines of what a Merger gave out, about equally many of each rank."""
    lines: dict[bytes, deque[bytes]] = {}
    for line in (line for piece in pieces for line in piece.splitlines(keepends=True)):
        lines.setdefault(line.partition(b"]")[0], deque(maxlen=count)).append(line)
    room, left = count, len(lines)
    for rank in sorted(lines.values(), key=len):
        for _ in range(len(rank) - room // left):
            rank.popleft()
        room, left = room - len(rank), left - 1
    return b"".join(line for rank in lines.values() for line in rank)


class Labeller:
    """Puts the label of one rank before each of its lines.

    A line is given out when it is complete; one without an end when the node says that its rank paused in it,
    so that a prompt does not stall, or when it has 32 MB. Of a line that overwrites itself with \\r the last
    state shows, while it grows about once a second.
    """

    def __init__(self, label: bytes) -> None:
        self._label = label
        self._chunks: list[bytes] = []  # of a line that has not ended; joined once
        self._since = 0.0  # when it began, or when a part of it was given out
        self._broken = False  # the beginning of the line that comes next was given out already

    def feed(self, data: bytes, *, now: float) -> bytes:
        """Add bytes of the rank and return the lines that they complete, labelled."""
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
        """Return the line in which the rank paused, labelled."""
        body = b"".join(self._chunks)
        return self._give_out(body, len(body) - _unfinished(body), now)

    def finish(self) -> bytes:
        """Return the rest at the end, labelled and with a newline."""
        body, self._chunks = b"".join(self._chunks), []
        return self._partial(body)

    def _progress(self, now: float) -> bytes:
        """Return the last whole state of a line that overwrites itself, if it is due, or a line too long."""
        if sum(map(len, self._chunks)) >= _LONGEST_LINE:
            return self.pause(now=now)
        if now - self._since < _PROGRESS_SECONDS or not any(b"\r" in chunk for chunk in self._chunks):
            return b""
        body = b"".join(self._chunks)
        return self._give_out(body, body.rfind(b"\r") + 1, now)

    def _give_out(self, body: bytes, cut: int, now: float) -> bytes:
        """Return an unfinished line up to `cut`, labelled, and keep the rest."""
        self._chunks, self._since = ([body[cut:]] if cut < len(body) else []), now
        return self._partial(body[:cut])

    def _lines(self, body: bytes) -> bytes:
        if b"\r" in body:
            body = _OVERWRITTEN.sub(b"", _LINE_END.sub(b"\n", body))
        if not body:
            return b""
        return self._label + body[:-1].replace(b"\n", b"\n" + self._label) + b"\n"

    def _partial(self, body: bytes) -> bytes:
        shown = body.rstrip(b"\r").rpartition(b"\r")[2]
        if not shown:
            return b""
        self._broken = True
        return self._label + shown + b"\n"


@dataclass(eq=False)
class Merger:
    """The logs of a job: raw and whole in a local folder, labelled and merged for display.

    Feed it what each node's follow sends, over as many connections as it takes: each byte of a rank is
    written and shown once. `nodes` has the node of each rank; `folder` receives rank3.log; `shown` are the
    ranks to show (None: all); `documents` holds the last document of each node. With `tail` each rank begins
    so many lines before its end, and nothing is written.
    """

    nodes: Mapping[int, int]
    _: KW_ONLY
    folder: Path
    job: str | None = None
    shown: Collection[int] | None = None
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

    def ended(self, node: int) -> bool:
        """Return whether `node` has sent everything: its part of the job has ended."""
        return node in self._ended

    def again(self) -> None:
        """Let every node be followed once more, from where it is."""
        self._ended.clear()

    def replay(self) -> Iterator[bytes]:
        """Yield the lines that were fetched before; `attach` then returns the offsets of the rest."""
        for rank, labeller in self._labellers.items():
            path = self._path(rank)
            if not path.exists():
                continue
            with path.open("rb") as file:
                if self.tail:
                    file.seek(tail_start(file.fileno(), self.tail))
                while data := file.read(1 << 20):
                    self._offsets[rank] += len(data)
                    yield self._show(rank, labeller, data)

    def attach(self, node: int) -> dict[int, int]:
        """Begin a stream of `node`, and return the offsets for its follow request."""
        self._streams[node] = Stream(f"node{node}")
        return {rank: offset for rank, offset in self._offsets.items() if self.nodes[rank] == node}

    def feed(self, node: int, data: bytes) -> bytes:
        """Take bytes of `node`'s stream in and return the labelled lines they complete.

        Raises NodeError where the stream is no supervisor's, or leaves bytes out, and ConfigError where the
        folder cannot be written.
        """
        try:
            return b"".join(self._take(node, frame) for frame in self._streams[node].feed(data))
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.folder}",
                f"{error.strerror or error}\nthe job does not need this machine, and goes on",
                f"awsddp logs -f {self.job}   # once it can be written\n"
                f"awsddp logs -f {self.job} -o job.results=DIR   # or into another folder",
            ) from error

    def finish(self) -> bytes:
        """Return the last unfinished lines, and close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        return b"".join(labeller.finish() for labeller in self._labellers.values())

    def _take(self, node: int, frame: Frame) -> bytes:
        if frame.kind in (b"S", b"E"):
            self.documents[node] = node_job(frame.payload, node=node, job=self.job, ranks=self.nodes)
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
        """Write and show what is new in a piece of a rank's log."""
        if self.tail and not self._offsets[frame.rank]:
            self._offsets[frame.rank] = frame.offset
        known = self._offsets[frame.rank] - frame.offset
        if known < 0:
            raise NodeError(f"node{node} left {-known} bytes of rank {frame.rank} out")
        data = frame.payload[known:]
        if not self.tail:
            os.pwrite(self._file(frame.rank), data, self._offsets[frame.rank])
        self._offsets[frame.rank] += len(data)
        return self._show(frame.rank, self._labellers[frame.rank], data)

    def _show(self, rank: int, labeller: Labeller, data: bytes) -> bytes:
        """Label what is to be shown of a piece that ends at the rank's offset."""
        if not data or (self.shown is not None and rank not in self.shown):
            return b""
        return labeller.feed(data, now=self.clock())

    def _file(self, rank: int) -> int:
        if rank not in self._files:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._files[rank] = os.open(self._path(rank), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        return self._files[rank]

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


def _unfinished(data: bytes) -> int:
    """Return how many bytes at the end of `data` (0 to 3) begin a UTF-8 character without completing it."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])
