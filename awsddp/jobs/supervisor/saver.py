"""Saves this node's results of a job to S3 while it runs, each file once it is whole (shelf.py: where).

It is a process of its own beside the job's guard, in a Python that has boto3, and takes the least of the
machine: few looks, the lowest priority. What fails is tried again: for as long as the job runs, and for half
an hour after its end. Its name tells the watchdog that the machine is in use, and a shutdown to wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from posixpath import dirname
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO

from awsddp.jobs.supervisor.checkpoints import SUFFIXES, is_whole
from awsddp.jobs.supervisor.folder import CommandError, JobFolder, write_json
from awsddp.jobs.supervisor.manifest import EVENTS, OURS, manifest
from awsddp.jobs.supervisor.objects import AT_ONCE, Place
from awsddp.jobs.supervisor.requests import Manifest, plain
from awsddp.jobs.supervisor.shelf import Shelf, keys
from awsddp.jobs.supervisor.trial import attempt, store_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from awsddp.jobs.supervisor.manifest import Line
    from awsddp.jobs.supervisor.objects import Store

_PART_BYTES = 8 << 20
_HELD = 100
"""How many files are held open at once, to be sent."""
_SHARE = 0.01
"""The part of the time that looks may take, of one core."""
_END_S = 0.5
"""Between two looks once the job has ended."""
_LATE_S = 1800.0
"""For how long after the job's end, or the last success since, what fails is tried again, and what is
still open for writing waited for."""
_HURRY_S = 90.0
"""The same when the machine is shut down: awsddp-jobs.service holds that up for 120 s."""
_OTHERS_S = 90.0
"""For how long the first node waits for another one of which nothing is heard."""
_SLOWEST_S = 60.0
_OWN_BEATS, _OTHERS_BEATS = 6, 90
"""For how many beats a key rests before it is used again: on other nodes than the first as long as a request
with all its attempts may take (objects.py), as what the first one has heard may be that old."""


def main(stdin: BinaryIO) -> int:
    """Do what stdin says (a line with its length, then JSON): claim a job's name, or save a job."""
    order = json.loads(stdin.read(int(stdin.readline())))
    if order["do"] == "claim":
        sys.stdout.write(json.dumps(attempt(order)) + "\n")
        return 0
    Path("/proc/self/comm").write_text("awsddp-job", encoding="ascii")
    os.nice(19)
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["ionice", "-c", "3", "-p", str(os.getpid())], check=False)
    with contextlib.suppress(CommandError):  # the job's folder is gone
        return Saver(order, JobFolder(order["job"]), store_of(order)).run()
    return 1


class _File:
    """A result: `parts` of it ([key, size]) are in S3, and hold what it was at the stamp `saved`."""

    def __init__(self) -> None:
        self.parts: list[list[Any]] = []
        self.version = 0
        self.left: dict[int, float] = {}
        self.seen: tuple[int, int] | None = None
        self.saved: tuple[int, int] | None = None
        self.sent_at = -math.inf
        self.checked: tuple[int, int] | None = None
        self.digest = hashlib.sha256()
        self.is_torn = False
        self.moved = self.fails = 0

    @property
    def length(self) -> int:
        """How many of its bytes are saved."""
        return sum(size for _, size in self.parts)

    def key(self, home: str, version: int) -> str:
        """Return the key of a version, which no other file has; a name that is no Unicode is written out."""
        name = home.replace("\\", r"\\").encode("utf-8", "backslashreplace").decode()
        return f"{name}~{version + 1}" if version or re.search(r"~\d+$", name) else name

    def move(self, count: int) -> None:
        """Count bytes that are on their way; a negative count takes some back."""
        self.moved += count

    def turn(self, version: int) -> None:
        """Leave the keys of the version that was saved for those of one that is."""
        self.left[self.version] = time.monotonic()
        self.left.pop(version, None)
        self.version = version


class Saver:
    """What this node saves of a job; on the first one also what is known of all."""

    def __init__(self, order: Mapping[str, Any], folder: JobFolder, store: Store) -> None:
        self._order, self._folder, self._store = order, folder, store
        request = folder.request()
        self._node = request.node
        self._others = [one.node for one in request.nodes if one.node != self._node]
        self._is_first = self._node == request.first.node
        self._at = Place(*order["place"]).below(folder.job)
        self._asked = Manifest(job=folder.job, exclude=order["exclude"], at_once=0)
        self._files: dict[str, _File] = {}
        self._links: dict[str, str] = {}
        self._pending: dict[str, int] = {}
        self._look = self._rested = 0
        self._look_at = -math.inf
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._sending: dict[str, tuple[Future[None], int, Line, int]] = {}
        self._owed = self._error = ""
        self._written: Any = None
        self._written_at = self._heard_at = -math.inf
        self._changed_at = time.monotonic()
        self._shelf = Shelf()
        self._told: dict[int, Any] = {}
        self._published: Any = None
        self._wake: SimpleQueue[None] = SimpleQueue()  # unlike an Event it may be told by a signal's handler
        self._end_by = math.inf
        self._fails = 0
        self._good_at = time.monotonic()

    def run(self) -> int:
        """Save until the job has ended and all is saved, or nothing more can be; return 0 or 1."""
        signal.signal(signal.SIGTERM, self._on_term)
        while True:
            is_over, over = False, self._folder.document().final
            try:
                failed = self._see(over=over)
                is_over = self._say(over=over)
                if failed is not None:
                    raise failed
                if not self._sending:
                    self._fails, self._error = 0, self._owed
            except Exception as error:  # of S3, of the disk, or of what another one wrote there
                self._fails, self._error = self._fails + 1, str(error)
                sys.stderr.write(f"{time.strftime('%FT%TZ', time.gmtime())} {error}\n")
                sys.stderr.flush()
            now = time.monotonic()
            is_stuck = over and (self._fails > 0 or (bool(self._pending) and not self._sending))
            if not is_stuck:
                self._good_at = now
            gives_up = is_stuck and now > min(self._good_at + _LATE_S, self._end_by)
            if gives_up:
                self._error = self._error or f"still being written: {', '.join(self._pending)}"
            self._tell(ended=is_over or gives_up)
            if is_over or gives_up:
                self._store.close()
                return 1 if gives_up else 0
            pause_s = min(_END_S, self._order["look_s"]) if over else max(0.0, self._look_at - now)
            if self._fails and self._end_by == math.inf:
                pause_s = max(pause_s, min(_SLOWEST_S, 2.0 ** min(self._fails, 9)))
            with contextlib.suppress(Empty):
                self._wake.get(timeout=pause_s)

    def _on_term(self, *_: object) -> None:
        """The machine is shut down: the job ends now, and what cannot be saved soon never will be."""
        self._end_by = min(self._end_by, time.monotonic() + _HURRY_S)
        self._wake.put(None)

    def _say(self, *, over: bool) -> bool:
        """Write what is saved, on the first node also of the job; return whether all is done."""
        now = time.monotonic()
        rests = over and not self._pending and not self._sending
        self._rested = self._rested + 1 if rests else 0
        document = self._document()
        beats = self._others and not self._is_first and now - self._written_at >= self._order["beat_s"]
        if beats or {**document, "look": 0} != self._written:
            self._store.write(self._at, f"node{self._node}.json", document)
            self._written, self._written_at = {**document, "look": 0}, now
        if not self._is_first:
            return bool(document["ended"])
        self._hear(now, hurry=over)
        is_over = bool(document["ended"]) and (self._all_ended() or now - self._changed_at > _OTHERS_S)
        self._publish({**self._told, self._node: document}, is_over=is_over)
        if is_over:
            self._store.abort(self._at)
        return is_over

    # ---- the files of this node

    def _see(self, *, over: bool) -> BaseException | None:
        """Look at the results once, send what grows, and begin to send what is whole; return what failed."""
        if not over and time.monotonic() < self._look_at:  # all has arrived
            return self._settle()
        began = time.thread_time()
        listed: Any = manifest(self._asked, self._folder)
        self._look += 1
        pause_s = max(self._order["look_s"], (time.thread_time() - began) / _SHARE)
        self._look_at = time.monotonic() + pause_s
        self._links = {line.home: line.target for line in listed.files if line.target}
        lines = {line.home: line for line in listed.files if not line.target}
        self._owed = "; ".join(f"{one.path}: {one.why}" for one in listed.skipped if one.owed)[:2000]
        for home in self._files.keys() - lines.keys():  # the job has removed it
            if self._files[home].seen or self._files[home].saved:
                self._again(home, self._files[home])
        failed = self._settle()
        self._pending = {}
        ready, growing = [], []
        for home, line in lines.items():
            file, stamp = self._files.setdefault(home, _File()), (line.size, line.modified)
            is_known, file.seen = file.seen == stamp, stamp
            if file.saved == stamp and not (over and _grows(home) and file.checked != stamp):
                continue
            is_readable = os.access(line.path, os.R_OK)
            if not is_readable:
                self._owed = f"{line.path} cannot be read"
            if is_readable or not over:
                self._pending[home] = line.size
            if not is_readable:
                continue
            if _grows(home):
                if over or time.monotonic() - file.sent_at >= self._order["parts_s"]:
                    growing.append(line)
            elif home not in self._sending and not line.writing and (is_known or _is_in_place(line)):
                ready.append(line)
        ready.sort(key=lambda line: self._files[line.home].fails)
        for line in [*ready[: _HELD - len(self._sending)], *growing]:
            try:
                if _grows(line.home):
                    self._append(line, self._files[line.home], over=over)
                else:
                    self._begin(line, self._files[line.home])
            except FileNotFoundError:  # the next look sees that
                continue
            except Exception as error:
                failed = error
        return failed

    def _begin(self, line: Line, file: _File) -> None:
        """Send a file in another thread: one that is listed as saved gets another key, so that it stays.

        It is held open, so that it arrives, too, where the job removes or replaces it meanwhile.
        """
        version = self._free(line.home, file) if file.parts else file.version
        held = os.open(line.path, os.O_RDONLY)
        paths = {file.key(line.home, version): _path(held)}
        future = self._pool.submit(self._store.send, paths, self._at, file.move)
        self._sending[line.home] = future, version, line, held
        future.add_done_callback(self._on_sent)

    def _on_sent(self, _: Future[None]) -> None:
        if all(future.done() for future, *_ in list(self._sending.values())):
            self._wake.put(None)

    def _free(self, home: str, file: _File) -> int:
        """Return a version whose keys no list names, nor will: one that was left, else a new one."""
        rest_s = self._order["beat_s"] * (_OWN_BEATS if self._is_first else _OTHERS_BEATS)
        rested = [one for one, left_at in file.left.items() if time.monotonic() - left_at >= rest_s]
        if rested:
            named = keys(self._shelf.checkpoint) | keys(self._named())
            named |= {dirname(key).removeprefix("parts/") for key in named}
            rested = [one for one in rested if file.key(home, one) not in named]
        return min(rested, default=max(file.version, *file.left, 0) + 1)

    def _named(self) -> Mapping[str, Any] | None:
        """Return the checkpoint that job.json names."""
        if self._is_first:
            return self._published[1] if self._published else None
        found: Mapping[str, Any] = self._store.read(self._at, "job.json") or {}
        return found.get("checkpoint")

    def _settle(self) -> BaseException | None:
        """Take in what was sent: a file that is another one by now is not saved. Return what failed."""
        failed = None
        for home, (future, version, line, held) in list(self._sending.items()):
            if not future.done():
                continue
            del self._sending[home]
            file, error = self._files[home], future.exception()
            file.moved = 0
            with os.fdopen(held, "rb"):
                info = os.fstat(held)
                if error is not None:
                    failed, file.fails = error, file.fails + 1
                elif (info.st_size, info.st_mtime_ns) == (line.size, line.modified):
                    file.is_torn = home.endswith(SUFFIXES) and not is_whole(_path(held))
                    file.turn(version)
                    file.parts = [[file.key(home, version), line.size]]
                    file.saved, file.fails = (line.size, line.modified), 0
                    self._pending.pop(home, None)
                    self._fails, self._good_at = 0, time.monotonic()
        return failed

    def _append(self, line: Line, file: _File, *, over: bool) -> None:
        """Send what a file has grown by; its last part is replaced by a longer one until that is large.

        Once the job is over all is sent again of a file that was written anew.
        """
        if line.size < file.length or (over and _is_another(line, file)):
            self._again(line.home, file)
        file.sent_at = time.monotonic()
        while file.length < line.size or not file.parts:
            is_new = not file.parts or file.parts[-1][1] >= _PART_BYTES
            known = 0 if is_new else file.parts[-1][1]
            start = file.length - known
            with Path(line.path).open("rb") as stream:
                stream.seek(start)
                data = stream.read(min(_PART_BYTES, line.size - start))
            if len(data) < min(_PART_BYTES, line.size - start):
                return  # it is shorter by now: the next look sees that
            key = f"parts/{file.key(line.home, file.version)}/{start:015}"
            self._store.client.put_object(Bucket=self._at.bucket, Key=self._at.key(key), Body=data)
            file.digest.update(data[known:])
            file.parts[len(file.parts) - (not is_new) :] = [[key, len(data)]]
        file.saved = (line.size, line.modified)
        file.checked = file.saved if over else None
        del self._pending[line.home]

    def _again(self, home: str, file: _File) -> None:
        """Forget what is saved of a file; what it is now gets other keys."""
        file.turn(self._free(home, file))
        file.parts, file.digest, file.saved, file.seen = [], hashlib.sha256(), None, None

    def _document(self) -> dict[str, Any]:
        """Return nodeK.json."""
        saved = {home: file for home, file in self._files.items() if file.saved is not None}
        return {
            "look": self._look,
            "files": {
                home: {
                    "size": file.length,
                    "modified": file.saved[1] if file.saved else 0,
                    "parts": [list(part) for part in file.parts],
                    **({"torn": True} if file.is_torn else {}),
                }
                for home, file in sorted(saved.items())
            },
            "links": self._links,
            "pending": sorted(self._pending),
            "ended": self._rested > 1,
            "error": self._owed,
        }

    def _tell(self, *, ended: bool) -> None:
        """Write down for this node's clients how far it is."""
        saved = [file.length for file in self._files.values() if file.saved is not None]
        left = 0
        for home, size in self._pending.items():
            left += size - (self._files[home].length if _grows(home) else self._files[home].moved)
        told: dict[str, Any] = {"files": len(saved), "bytes": sum(saved), "pending_files": len(self._pending)}
        told |= {"pending_bytes": max(0, left), "error": self._error[:2000], "ended": ended}
        with contextlib.suppress(OSError):
            write_json(self._folder.saving, told, sync=False)

    # ---- on the first node: the job

    def _hear(self, now: float, *, hurry: bool) -> None:
        """Read what the other nodes have saved."""
        if now - self._heard_at < (_END_S if hurry else self._order["beat_s"]):
            return
        told = {node: self._store.read(self._at, f"node{node}.json") or {} for node in self._others}
        self._heard_at = now
        if told != self._told:
            self._told, self._changed_at = told, now

    def _all_ended(self) -> bool:
        """Tell whether the other nodes have ended, or are lost."""
        cause = self._folder.document().cause
        lost = cause.node if cause is not None and cause.kind == "node_lost" else None
        return all(node == lost or self._told.get(node, {}).get("ended") for node in self._others)

    def _publish(self, told: Mapping[int, Mapping[str, Any]], *, is_over: bool) -> None:
        """Write job.json where it says something new."""
        self._shelf.take({node: told.get(node, {}) for node in (self._node, *self._others)})
        document = self._folder.document()
        state = document.state if is_over or not document.final else "running"
        if (state, self._shelf.checkpoint) != self._published:
            whole = {
                "job": self._folder.job,
                "save": 1,
                "nodes": sorted([self._node, *self._others]),
                "state": state,
                "facts": plain(document.facts),
                "document": plain(document),
                "checkpoint": self._shelf.checkpoint,
            }
            self._store.write(self._at, "job.json", whole)
            self._published = (state, self._shelf.checkpoint)


def _is_in_place(line: Line) -> bool:
    """Tell whether a file has been renamed, linked or given its times since it was last written."""
    with contextlib.suppress(FileNotFoundError):
        info = Path(line.path).stat()
        return info.st_ctime_ns > info.st_mtime_ns
    return False


def _is_another(line: Line, file: _File) -> bool:
    """Tell whether a file that was taken for one that grows was written anew."""
    digest, left = hashlib.sha256(), file.length
    with Path(line.path).open("rb") as stream:
        while data := stream.read(min(left, 1 << 20)):
            digest.update(data)
            left -= len(data)
    return digest.digest() != file.digest.digest()


def _path(held: int) -> Path:
    """Return the path of a file that is held open; it leads there when the file has no name any more."""
    return Path(f"/proc/self/fd/{held}")


def _grows(home: str) -> bool:
    """Tell whether a result is taken for one that is only appended to."""
    name = home.rpartition("/")[2]
    is_log = name.endswith((".log", ".jsonl")) or name.startswith(EVENTS)
    return is_log and not home.startswith(f"{OURS}samples")
