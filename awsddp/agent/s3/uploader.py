"""Saves a node's results of a job to S3 while it runs, each file once whole (where: checkpoint_index.py).

It is a process of its own beside the job's guard, in a Python that has boto3, and takes the least of the
machine: few looks, the lowest priority. What fails is tried again: for as long as the job runs, and for half
an hour after its end. Its name tells the watchdog that the machine is in use, and a shutdown to wait for it.
One that is started again goes on from its own list in S3.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from posixpath import basename, dirname
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from awsddp.agent.file_tree import open_file, stamp_of
from awsddp.agent.job_folder import CommandError, JobFolder, write_json
from awsddp.agent.manifest import EVENTS, OURS, manifest, sample
from awsddp.agent.messages import Manifest, plain
from awsddp.agent.s3.checkpoint_index import Shelf, keys
from awsddp.agent.s3.checkpoints import MARKS, SUFFIXES, flaw_of, folders_above
from awsddp.agent.s3.claim import attempt, store_of
from awsddp.agent.s3.list_pages import PageReader, Pages
from awsddp.agent.s3.store import AT_ONCE, MOST_PART_BYTES, PART_BYTES, Changed, Place, is_refusal, signature

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from awsddp.agent.manifest import Line
    from awsddp.agent.s3.store import Store, Upload

    Stamp = tuple[int, int, int, int]  # size, times of modification and change (ns), inode

_HELD = 64
"""How many files are held open at once, to be sent."""
_PARTS_AT_ONCE = 8
"""How many parts of one file are sent before others have their turn."""
_SHORT_PARTS, _MOST_PARTS = 500, 4000
"""After how many parts of a file they get twice as long, and how many its row in the list has room for."""
_SHARE = 0.05
"""The part of the time that looks, and lists, may take, of one core."""
_LIST_S = 1.0
"""How often a list, and saving.json, are written at most."""
_TICK_S = 0.2
"""Between two looks at what is under way, and at whether the job has ended."""
_BATCH_S = 0.02
"""For how long uploads that end are collected before others begin."""
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
with all its attempts may take (store.py), as what the first one has heard may be that old."""
_MOST_GONE = 1000
"""How many files that the job has removed are remembered for long."""
_MOST_FOLDERS = 1000
"""How many folders with pending files are named one by one."""


def main(stdin: BinaryIO) -> int:
    """Do what stdin says (a line with its length, then JSON): claim a job's name, or save a job."""
    order = json.loads(stdin.read(int(stdin.readline())))
    if order["do"] == "claim":
        sys.stdout.write(json.dumps(attempt(order)) + "\n")
        return 0
    Path("/proc/self/comm").write_text("awsddp-job", encoding="ascii")
    os.nice(19)
    _set_disk_priority("3")  # after everybody else
    with contextlib.suppress(CommandError):  # the job's folder is gone
        folder = JobFolder(order["job"])
        if not _is_alone(folder):
            return 0
        code = Saver(order, folder, store_of(order)).run()
        os._exit(code)  # threads with requests that were given up are not waited for
    return 1


def _set_disk_priority(scheduling_class: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["ionice", "-c", scheduling_class, "-p", str(os.getpid())], check=False)


def _is_alone(folder: JobFolder) -> bool:
    """Take the lock of the job's saver for the life of this process; tell whether no other one has it."""
    descriptor = os.open(str(folder.path / "saver.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True


class _File:
    """A result: `parts` of it ([key, size, ETag, digest]) are in S3, and hold what it was at `saved`."""

    def __init__(self) -> None:
        self.parts: list[list[Any]] = []
        self.version = 0
        self.left: dict[int, float] = {}
        self.seen: Stamp | None = None
        self.saved: Stamp | None = None
        self.sample = ""
        self.inode = 0
        self.sent_at = self.check_at = -math.inf
        self.checked: Stamp | None = None
        self.flaw = ""
        self.moved = self.fails = 0

    @property
    def length(self) -> int:
        """How many of its bytes are saved."""
        return sum(size for _, size, *_ in self.parts)

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

    def leave(self, version: int) -> None:
        """Use other keys than those of a version whose upload was given up, for what is sent next."""
        self.moved, self.left[version] = 0, time.monotonic()
        if not self.parts:
            self.version = max(self.version, *self.left) + 1

    def row(self) -> dict[str, Any]:
        """Return what the node's list says of it."""
        assert self.saved is not None
        row = {"size": self.length, "modified": self.saved[1], "stamp": self.saved[2:], "sample": self.sample}
        return {**row, "parts": self.parts, **({self.flaw: True} if self.flaw else {})}


class _Sending(NamedTuple):
    """A file under way: its upload, the keys' version, and what it was when that began; it is `held` open."""

    upload: Upload
    version: int
    line: Line
    held: int
    info: os.stat_result


class _Growing(NamedTuple):
    """A growing file of which parts are under way; `is_checked`: what was sent before is compared with it."""

    future: Future[list[list[Any]]]
    line: Line
    is_checked: bool


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
        self._changed: set[str] = set()
        self._pending: dict[str, int] = {}
        self._queue: deque[Line] = deque()
        self._sending: dict[str, _Sending] = {}
        self._cancelled: list[_Sending] = []
        self._has_cancelled = False
        self._growing: dict[str, _Growing] = {}
        self._look = self._rested = 0
        self._look_at = self._list_at = self._tell_at = -math.inf
        self._has_list = self._is_verified = self._is_over = False
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._owed = self._error = self._error_told = ""
        self._generation = 0
        self._pages = Pages("")
        self._written: Any = None
        self._written_at = self._heard_at = -math.inf
        self._changed_at = time.monotonic()
        self._shelf = Shelf()
        self._checkpoint = Pages("")
        self._told: dict[int, Any] = {}
        self._others_rows: dict[int, dict[str, dict[str, Any]]] = {}
        self._readers = {node: PageReader() for node in self._others}
        self._published: Any = None
        self._wake: SimpleQueue[None] = SimpleQueue()  # unlike an Event it may be told by a signal's handler
        self._end_by = math.inf
        self._fails = 0
        self._good_at = time.monotonic()

    def run(self) -> int:
        """Save until the job has ended and all is saved, or nothing more can be; return 0 or 1."""
        signal.signal(signal.SIGTERM, self._on_term)
        while True:
            all_done = False
            try:
                all_done = self.step()
            except Exception as error:  # of S3, of the disk, or of what another one wrote there
                self._fails, self._error = self._fails + 1, str(error)
                sys.stderr.write(f"{time.strftime('%FT%TZ', time.gmtime())} {error}\n")
                sys.stderr.flush()
            now = time.monotonic()
            is_stuck = self._is_over and (self._fails > 0 or (bool(self._pending) and self._is_idle))
            if not is_stuck:
                self._good_at = now
            gives_up = is_stuck and now > min(self._good_at + _LATE_S, self._end_by)
            if gives_up:
                self._error = self._error or f"still being written: {', '.join(self._pending)}"
            self._tell(ended=all_done or (gives_up and self._end_by == math.inf))  # after a boot it goes on
            if all_done or gives_up:
                self.close()
                return 1 if gives_up else 0
            self._rest()

    def step(self) -> bool:
        """Look, send, and write the lists, as far as each is due; return whether all is done.

        Raises what failed.
        """
        if not self._is_over and self._folder.document().final:
            self._is_over, self._look_at = True, -math.inf
            self._queue.clear()
            _set_disk_priority("2")  # as everybody: no rank reads or writes any more
        if not self._has_list:
            self._recover()
        failed = self._save()
        all_done = self._say()
        if failed is not None:
            raise failed
        if self._is_idle:
            self._fails, self._error = 0, self._owed
        return all_done

    def close(self) -> None:
        """Wait for what travels, and end the threads, unless requests that were given up may be under way."""
        if not self._has_cancelled:
            self._pool.shutdown()
            self._store.close()

    def _rest(self) -> None:
        """Wait for a moment, after errors for a longer one; an upload that ends cuts it short."""
        pause_s = min(_TICK_S, self._order["look_s"])
        if self._is_over:
            pause_s = min(pause_s, max(0.0, self._look_at - time.monotonic()))
        if self._fails and self._end_by == math.inf and not self._sending:
            pause_s = max(pause_s, min(_SLOWEST_S, 2.0 ** min(self._fails, 9)))
        with contextlib.suppress(Empty):
            self._wake.get(timeout=pause_s)
            time.sleep(_BATCH_S)
            while True:
                self._wake.get_nowait()

    @property
    def _is_idle(self) -> bool:
        return not self._sending and not self._growing

    def _on_term(self, *_: object) -> None:
        """The machine is shut down: the job ends now, and what cannot be saved soon never will be."""
        self._end_by = min(self._end_by, time.monotonic() + _HURRY_S)
        self._wake.put(None)

    def _woken(self, *_: object) -> None:
        self._wake.put(None)

    # ---- what was saved before this process began

    def _recover(self) -> None:
        """Go on from the list that a saver of this launch wrote, where there is one."""
        found = self._signed(f"node{self._node}.json")
        if found is not None:
            self._generation, self._look = found["generation"] + 1, found["look"]
            for home, row in self._listed(found).items():
                file = self._files[home] = _File()
                file.parts, file.sample = row["parts"], row["sample"]
                file.flaw = next((one for one in ("torn", "weights") if one in row), "")
                file.saved = file.seen = (row["size"], row["modified"], *row["stamp"])
                file.inode = row["stamp"][1]
                file.version = self._version(home, row["parts"])
                self._changed.add(home)
        job = self._signed("job.json") if self._is_first else None
        if job and job["checkpoint"] and (files := self._listed(job["checkpoint"])):
            self._shelf.checkpoint = {**job["checkpoint"], "files": files}
        self._pages = Pages(f"lists/node{self._node}-{self._generation}")
        self._checkpoint = Pages(f"lists/checkpoint-{self._generation}")
        self._has_list = True

    def _listed(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows that a document lists, none where another writer has replaced a page of it."""
        try:
            return PageReader().read(self._store, self._at, document["pages"]).get("files", {})
        except Changed:
            return {}

    def _version(self, home: str, parts: list[list[Any]]) -> int:
        """Return the version that the keys of a file's parts have."""
        file, key = _File(), parts[0][0]
        name = key if not parts[0][3] else dirname(key).partition("/")[2]
        end = re.search(r"~(\d+)$", name)
        return int(end[1]) - 1 if end and name == file.key(home, int(end[1]) - 1) else 0

    def _signature(self, name: str, body: bytes) -> str:
        return signature(self._order["secret"], self._order["launch"], name, body)

    def _signed(self, name: str) -> Any:
        """Return a document that a saver of this launch wrote; None where there is no such one."""
        try:
            found = self._store.document(self._at, name)
        except ValueError:  # it is longer than what a saver writes
            return None
        if found is None:
            return None
        wanted = self._signature(name, found.body)
        return found.parse() if hmac.compare_digest(found.signature.encode(), wanted.encode()) else None

    def _write(self, name: str, document: object) -> None:
        self._store.write(self._at, name, document, sign=self._signature)

    # ---- the files of this node

    def _save(self) -> BaseException | None:
        """Take in what was sent, look at the results where it is time to, and send; return what failed."""
        failed = self._settle()
        is_drained = self._is_idle and not self._queue
        if time.monotonic() >= self._look_at and (is_drained or not self._is_over):
            self._see()
        self._cancel_outdated()
        return self._begin() or failed

    def _see(self) -> None:
        """Look at the results once, and queue what is whole and not saved: checkpoints first."""
        began = time.thread_time()
        listed: Any = manifest(self._asked, self._folder)
        self._look += 1
        self._take_links({line.home: line.target for line in listed.files if line.target})
        lines = {line.home: line for line in listed.files if not line.target}
        self._owed = "; ".join(f"{one.path}: {one.why}" for one in listed.skipped if one.owed)[:2000]
        self._owed = "; ".join(filter(None, (self._owed, self._lost(listed.skipped))))[:2000]
        self._forget(self._files.keys() - lines.keys() - {one.home for one in listed.skipped})
        self._pending = {}
        due = [line for line in lines.values() if self._is_due(line)]
        marked = {dirname(home) for home in lines if basename(home) in MARKS}
        self._queue = deque(sorted(due, key=lambda line: self._urgency(line.home, marked)))
        self._rested = self._rested + 1 if self._is_over and not self._pending else 0
        self._is_verified = self._is_verified and self._rested > 0
        took_s = time.thread_time() - began
        pause_s = max(self._order["look_s"], took_s / _SHARE)
        if self._is_over:  # nothing but this is left to do
            pause_s = max(_TICK_S if self._pending or self._is_verified else _BATCH_S, took_s)
        self._look_at = time.monotonic() + pause_s

    def _lost(self, skipped: Iterable[Line]) -> str:
        """Return which files the next job wrote before they were saved, "" for none; what is saved stays."""
        files = ((one, self._files.get(one.home)) for one in skipped if one.home)
        return "; ".join(
            f"{one.path}: {one.why}" for one, file in files if file is not None and not file.saved
        )

    def _is_due(self, line: Line) -> bool:
        """Note how a file is now, and tell whether it is to be sent."""
        home, file, stamp = line.home, self._files.setdefault(line.home, _File()), _stamp(line)
        is_known, file.seen = file.seen == stamp, stamp
        if file.saved == stamp and not (self._is_over and _grows(home) and file.checked != stamp):
            return False
        if not os.access(line.path, os.R_OK):
            self._owed = f"{line.path} cannot be read"
            if not self._is_over:
                self._pending[home] = line.size
            return False
        self._pending[home] = line.size
        if home in self._sending or home in self._growing:
            return False
        if _grows(home):
            return self._is_over or time.monotonic() - file.sent_at >= self._order["parts_s"]
        is_renamed = line.changed > line.modified  # into place, when it was whole
        return not line.writing and (is_known or is_renamed or self._is_over)

    def _urgency(self, home: str, marked: set[str]) -> tuple[int, bool]:
        is_checkpoint = home.endswith(SUFFIXES) or not marked.isdisjoint(folders_above(home))
        return self._files[home].fails, not is_checkpoint and not _grows(home)

    def _take_links(self, links: dict[str, str]) -> None:
        for home in self._links.keys() - links.keys():
            self._pages.remove("links", home)
        for home, target in links.items():
            self._pages.set("links", home, target)
        self._links = links

    def _begin(self) -> BaseException | None:
        """Begin to send what is due, as much as may be under way; return what failed."""
        failed: BaseException | None = None
        while self._queue and len(self._sending) + len(self._growing) < _HELD:
            line = self._queue.popleft()
            if line.home in self._sending or line.home in self._growing:
                continue
            begin = self._begin_parts if _grows(line.home) else self._begin_whole
            try:
                begin(line, self._files[line.home])
            except FileNotFoundError:  # the next look sees that
                continue
            except Exception as error:
                failed = error
        return failed

    def _begin_whole(self, line: Line, file: _File) -> None:
        """Send a file: one that is listed as saved gets another key, so that it stays.

        It is held open, so that it arrives, too, where the job removes or replaces it meanwhile.
        """
        with open_file(Path(line.path)) as stream:
            held, info = os.dup(stream.fileno()), os.fstat(stream.fileno())
        if stamp_of(info) != _stamp(line):
            os.close(held)
            return
        version = self._free(line.home, file) if file.parts else file.version
        upload = self._store.upload(
            _path(held), self._at, file.key(line.home, version), file.move, self._woken
        )
        self._sending[line.home] = _Sending(upload, version, line, held, info)

    def _free(self, home: str, file: _File) -> int:
        """Return a version whose keys no list names, nor will: one that was left, else a new one."""
        rest_s = self._order["beat_s"] * (_OWN_BEATS if self._is_first else _OTHERS_BEATS)
        rested = [one for one, left_at in file.left.items() if time.monotonic() - left_at >= rest_s]
        if rested:
            named = self._named()
            rested = [one for one in rested if named is not None and file.key(home, one) not in named]
        return min(rested, default=max(file.version, *file.left, 0) + 1)

    def _named(self) -> set[str] | None:
        """Return the keys that a checkpoint of job.json names, or will; None where it cannot be read now."""
        if self._is_first:
            named = keys(self._published[1]) if self._published else set()
        else:
            found = self._signed("job.json")
            if found is None:
                return None
            try:
                pages = (found["checkpoint"] or {"pages": ()})["pages"]
                named = keys(PageReader().read(self._store, self._at, pages))
            except Changed:
                return None
        named |= keys(self._shelf.checkpoint)
        return named | {dirname(key).partition("/")[2] for key in named}

    def _cancel_outdated(self) -> None:
        """Give up the uploads of files that were written to since they began: they would be mixtures.

        One that was only replaced or removed goes on: what is held open is whole. A request whose file has
        become shorter ends late, as S3 waits for the rest: nobody waits for that.
        """
        for home, one in list(self._sending.items()):
            if not one.upload.done() and not _is_same(one.info, os.fstat(one.held)):
                one.upload.cancel()
                self._has_cancelled = True
                self._cancelled.append(self._sending.pop(home))
                self._files[home].leave(one.version)
        for one in [one for one in self._cancelled if one.upload.done()]:
            self._cancelled.remove(one)
            os.close(one.held)

    def _settle(self) -> BaseException | None:
        """Take in what was sent: a file that is another one by now is not saved. Return what failed."""
        failed: BaseException | None = None
        for home, one in list(self._sending.items()):
            if not one.upload.done():
                continue
            del self._sending[home]
            file = self._files[home]
            file.moved = 0
            with os.fdopen(one.held, "rb"):
                try:
                    self._take_whole(home, one)
                except (CancelledError, Changed):
                    continue
                except Exception as error:
                    failed = error
                    file.fails += 1
                    if not is_refusal(error):
                        file.leave(one.version)  # it may arrive later
        for home, part in list(self._growing.items()):
            if part.future.done():
                del self._growing[home]
                try:
                    self._take_parts(self._files[home], part)
                except Exception as error:
                    failed = error
                    self._files[home].fails += 1
        return failed

    def _take_whole(self, home: str, one: _Sending) -> None:
        file, key = self._files[home], self._files[home].key(home, one.version)
        one.upload.result()
        etag, now = self._store.etag(self._at, key), os.fstat(one.held)
        if not _is_same(one.info, now):
            raise Changed(key)
        file.flaw = flaw_of(_path(one.held), home)
        file.sample = sample(_path(one.held), now.st_size)
        file.turn(one.version)
        file.parts = [[key, now.st_size, etag, ""]]
        file.saved = _stamp(one.line)
        self._is_saved(home, file)

    def _is_saved(self, home: str, file: _File) -> None:
        file.fails = 0
        self._changed.add(home)
        if file.saved == file.seen:
            self._pending.pop(home, None)
        self._fails, self._good_at = 0, time.monotonic()

    def _begin_parts(self, line: Line, file: _File) -> None:
        """Send in another thread what a file has grown by."""
        if len(file.parts) >= _MOST_PARTS:
            self._owed = f"{line.path} is longer than what is saved in parts"
            return
        if file.inode != line.inode or line.size < file.length:
            self._again(line.home, file)
        file.inode, file.sent_at = line.inode, time.monotonic()
        is_checked = file.sent_at >= file.check_at or (self._is_over and file.length == line.size)
        key = f"parts/{file.key(line.home, file.version)}"
        future = self._pool.submit(self._send_parts, line, key, file, is_checked)
        self._growing[line.home] = _Growing(future, line, is_checked)
        future.add_done_callback(self._woken)

    def _send_parts(self, line: Line, key: str, file: _File, is_checked: bool) -> list[list[Any]]:
        """Return the parts of a file once more of it was sent; the last one is replaced until it is long.

        Raises Changed where what was sent before is not what it begins with by now, OSError, ClientError.
        """
        parts = [*file.parts]
        with open_file(Path(line.path)) as stream:
            if os.fstat(stream.fileno()).st_ino != line.inode:
                raise Changed(line.home)
            if is_checked:
                began = time.thread_time()
                _check(stream, parts, line.home)
                file.check_at = time.monotonic() + (time.thread_time() - began) / _SHARE
            for _ in range(_PARTS_AT_ONCE):
                most = PART_BYTES if len(parts) < _SHORT_PARTS else MOST_PART_BYTES
                last = parts[-1] if parts and parts[-1][1] < most else None
                start = sum(size for _, size, *_ in parts) - (last[1] if last else 0)
                length = min(most, line.size - start)
                if parts and (length <= (last[1] if last else 0)):
                    return parts
                stream.seek(start)
                data = stream.read(length)
                if len(data) < length or (last and _digest(data[: last[1]]) != last[3]):
                    raise Changed(line.home)
                name = f"{key}/{start:015}"
                part = [name, len(data), self._store.put(self._at, name, data), _digest(data)]
                parts[len(parts) - bool(last) :] = [part]
        return parts

    def _take_parts(self, file: _File, part: _Growing) -> None:
        """Take in what was sent of a file that grows; what was written anew is sent again as a whole."""
        line = part.line
        try:
            file.parts = part.future.result()
        except (Changed, FileNotFoundError):
            self._again(line.home, file)
            file.sent_at = -math.inf
            return
        if file.length < line.size:
            self._queue.appendleft(line)
            return
        with contextlib.suppress(FileNotFoundError):
            file.sample = sample(Path(line.path), file.length)
        file.saved = _stamp(line)
        if part.is_checked:
            file.checked = file.saved
        self._is_saved(line.home, file)

    def _again(self, home: str, file: _File) -> None:
        """Forget what is saved of a file; what it is now gets other keys."""
        if file.parts:
            file.turn(self._free(home, file))
        file.parts, file.saved, file.seen = [], None, None
        self._changed.add(home)

    def _forget(self, gone: set[str]) -> None:
        """Take files that the job has removed from the list; their keys rest before they are used again."""
        for home in gone - self._changed:  # what has just been saved is listed first: it may be a checkpoint
            if self._files[home].seen or self._files[home].saved:
                self._again(home, self._files[home])
        if len(gone) > _MOST_GONE and (named := self._named()) is not None:
            rest_s = self._order["beat_s"] * _OTHERS_BEATS
            for home in gone - self._sending.keys() - self._growing.keys():
                file = self._files[home]
                is_rested = all(time.monotonic() - left_at > rest_s for left_at in file.left.values())
                if is_rested and named.isdisjoint(file.key(home, one) for one in file.left):
                    del self._files[home]

    # ---- the lists

    def _say(self) -> bool:
        """Write what is saved, on the first node also of the job; return whether all is done.

        The longer a list takes the less often it is written.
        """
        now = time.monotonic()
        if now < self._list_at and self._rested == 0:
            return False
        if self._rested > 1 and not self._is_verified:
            self._verify()
        document = self._list()
        beats = self._others and not self._is_first and now - self._written_at >= self._order["beat_s"]
        if beats or {**document, "look": 0} != self._written:
            self._write(f"node{self._node}.json", document)
            self._pages.publish()
            self._written, self._written_at = {**document, "look": 0}, now
        pause_s = max(min(_LIST_S, self._order["look_s"]), (time.monotonic() - now) / _SHARE)
        self._list_at = time.monotonic() + pause_s
        if not self._is_first:
            return self._is_verified
        self._hear(document)
        all_done = self._is_verified and (self._all_ended() or now - self._changed_at > _OTHERS_S)
        self._publish(all_done=all_done)
        if all_done:
            self._store.abort(self._at)
        return all_done

    def _list(self) -> dict[str, Any]:
        """Write the pages of the list, and return nodeK.json, which names them."""
        for home in self._changed:
            file = self._files.get(home)
            if file is not None and file.saved is not None:
                self._pages.set("files", home, file.row())
            else:
                self._pages.remove("files", home)
        self._changed = set()
        return {
            "node": self._node,
            "launch": self._order["launch"],
            "generation": self._generation,
            "look": self._look,
            "pages": self._pages.write(self._store, self._at),
            "pending": _folders(self._pending),
            "pending_files": len(self._pending),
            "ended": self._is_verified,
            "error": self._owed,
        }

    def _verify(self) -> None:
        """Compare what is listed, and the lists, with what S3 holds; what differs is sent again."""
        keys_of = {home: [part[0] for part in file.parts] for home, file in self._files.items()}
        tops = {"lists/", *(_top(key) for several in keys_of.values() for key in several)}
        start = len(self._at.key(""))
        there = {
            one.key[start:]: (one.size, one.etag)
            for top in tops
            for one in self._store.list(self._at, name=top)
        }
        self._is_verified = True
        self._pages.rewrite_missing(there)
        self._checkpoint.rewrite_missing(there)
        for home, file in self._files.items():
            if any(there.get(key) != (size, etag) for key, size, etag, _ in file.parts):
                sys.stderr.write(f"{home} is not in S3 as it was sent: again\n")
                self._again(home, file)
                self._is_verified, self._rested = False, 0

    def _tell(self, *, ended: bool) -> None:
        """Write down for this node's clients how far it is."""
        now = time.monotonic()
        if now < self._tell_at and not ended and self._error == self._error_told:
            return
        saved = [file.length for file in self._files.values() if file.saved is not None]
        left = 0
        for home, size in self._pending.items():
            left += size - (self._files[home].length if _grows(home) else self._files[home].moved)
        told: dict[str, Any] = {"files": len(saved), "bytes": sum(saved), "pending_files": len(self._pending)}
        told |= {"pending_bytes": max(0, left), "error": self._error[:2000], "ended": ended}
        with contextlib.suppress(OSError):
            write_json(self._folder.saving, {**told, "at": time.time()}, sync=False)
        self._error_told = self._error
        self._tell_at = time.monotonic() + max(_LIST_S, (time.monotonic() - now) / _SHARE)

    # ---- on the first node: the job

    def _hear(self, own: Mapping[str, Any]) -> None:
        """Look at what this node has saved, and from time to time at what the others have."""
        now = time.monotonic()
        if self._others and now - self._heard_at >= (_TICK_S if self._is_over else self._order["beat_s"]):
            self._heard_at = now
            self._read_lists(now)
        rows: dict[str, dict[str, Any]] = {"files": {}, "links": {}}
        for node, pages in self._others_rows.items():
            for kind, several in pages.items():
                rows[kind] |= {home: row for home, row in several.items() if home.startswith(f"node{node}/")}
        rows["files"] |= {home: file.row() for home, file in self._files.items() if file.saved}
        rows["links"] |= self._links
        told = {self._node: own, **{node: self._told.get(node, {}) for node in self._others}}
        self._shelf.take(told, rows["files"], rows["links"])

    def _read_lists(self, now: float) -> None:
        """Read the lists of the other nodes; of one that changes meanwhile the former one counts."""
        for node, reader in self._readers.items():
            document = self._signed(f"node{node}.json")
            if document is None or document == self._told.get(node):
                continue
            with contextlib.suppress(Changed):
                self._others_rows[node] = reader.read(self._store, self._at, document["pages"])
                self._told[node], self._changed_at = document, now

    def _all_ended(self) -> bool:
        """Tell whether the other nodes have ended, or are lost."""
        cause = self._folder.document().cause
        lost = cause.node if cause is not None and cause.kind == "node_lost" else None
        return all(node == lost or self._told.get(node, {}).get("ended") for node in self._others)

    def _publish(self, *, all_done: bool) -> None:
        """Write job.json where it says something new."""
        document, checkpoint = self._folder.document(), self._shelf.checkpoint
        state = document.state if all_done or not document.final else "running"
        if (state, checkpoint) == self._published:
            return
        named = None
        if checkpoint is not None:
            before = self._published[1]["files"] if self._published and self._published[1] else {}
            for home in before.keys() - checkpoint["files"].keys():
                self._checkpoint.remove("files", home)
            for home, row in checkpoint["files"].items():
                self._checkpoint.set("files", home, row)
            pages = self._checkpoint.write(self._store, self._at)
            named = {"name": checkpoint["name"], "modified": checkpoint["modified"], "pages": pages}
        whole = {
            "job": self._folder.job,
            "save": 2,
            "launch": self._order["launch"],
            "by": self._order["by"],
            "nodes": sorted([self._node, *self._others]),
            "state": state,
            "facts": plain(document.facts),
            "document": plain(document),
            "checkpoint": named,
        }
        self._write("job.json", whole)
        self._checkpoint.publish()
        self._published = (state, checkpoint)


def _stamp(line: Line) -> Stamp:
    return line.size, line.modified, line.changed, line.inode


def _is_same(before: os.stat_result, now: os.stat_result) -> bool:
    """Tell whether a file that is held open was not written to; it may have been removed or replaced."""
    is_alike = (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
    return is_alike and (before.st_ctime_ns == now.st_ctime_ns or before.st_nlink != now.st_nlink)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check(stream: BinaryIO, parts: Iterable[Sequence[Any]], home: str) -> None:
    """Raise Changed where a file does not begin with the parts that were sent."""
    stream.seek(0)
    for _, size, _, digest in parts:
        if _digest(stream.read(size)) != digest:
            raise Changed(home)


def _top(key: str) -> str:
    """Return the beginning of a key that many have in common."""
    return "/".join(key.split("/")[: 2 if key.startswith("parts/") else 1]) + "/"


def _folders(homes: Iterable[str]) -> list[str]:
    """Return the folders in which files lie; where there are many, some above them, with a "/" at the end."""
    folders = {dirname(home) for home in homes}
    while len(folders) > _MOST_FOLDERS:
        deepest = max(folder.count("/") for folder in folders)
        folders = {f"{dirname(one.rstrip('/'))}/" if one.count("/") == deepest else one for one in folders}
    return sorted(folders)


def _path(held: int) -> Path:
    """Return the path of a file that is held open; it leads there when the file has no name any more."""
    return Path(f"/proc/self/fd/{held}")


def _grows(home: str) -> bool:
    """Tell whether a result is taken for one that is only appended to."""
    name = home.rpartition("/")[2]
    is_log = name.endswith((".log", ".jsonl")) or name.startswith(EVENTS)
    return is_log and not home.startswith(f"{OURS}samples")
