"""Upload a job's results on one node to S3 while the job runs (keys: checkpoint_index.py).

The uploader is a separate process, which runs under a Python that has boto3, with a low CPU priority and the
lowest disk priority. Failures are retried while the job runs and for half an hour after the job's end. The
watchdog recognizes the process by its name and keeps the machine running, and a shutdown waits for the
process. An uploader that is restarted continues from its list in S3.
"""

from __future__ import annotations

import contextlib
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

from awsddp.agent.file_tree import open_file, stat_stamp
from awsddp.agent.job_folder import CommandError, JobFolder, try_lock, write_json
from awsddp.agent.manifest import EVENTS, INTERNAL_FOLDER, manifest, sample
from awsddp.agent.messages import Manifest, to_json_value
from awsddp.agent.s3.checkpoint_index import CheckpointIndex, checkpoint_keys
from awsddp.agent.s3.checkpoints import MARKER_FILES, SUFFIXES, find_flaw, parent_folders
from awsddp.agent.s3.claim import open_store, try_claim
from awsddp.agent.s3.list_pages import PageReader, Pages
from awsddp.agent.s3.store import (
    CONCURRENCY,
    MOST_PART_BYTES,
    PART_BYTES,
    ObjectChanged,
    S3Uri,
    is_refusal,
    signature,
)
from awsddp.agent.shutdown import read_shutdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from awsddp.agent.manifest import ManifestEntry
    from awsddp.agent.s3.store import Store, Upload

    Stamp = tuple[int, int, int, int]  # size, modification time and change time (ns), inode

_MAX_OPEN = 64
"""How many files are open for upload at once."""
_PARTS_AT_ONCE = 8
"""How many of a file's parts are sent before it is the next file's turn."""
_SHORT_PARTS, _MAX_PARTS = 500, 4000
"""The number of parts after which a file's part size doubles, and the maximum number of parts."""
_MAX_LOAD = 0.05
"""The maximum share of one core that scans take, and the maximum share that writing the lists takes."""
_LIST_S = 1.0
"""The minimum interval between two writes of a list, and of saving.json."""
_TICK_S = 0.2
"""The interval at which the uploader checks whether uploads have finished or the job has ended."""
_BATCH_S = 0.02
"""How long finished uploads are collected before other uploads start."""
_LATE_S = 1800.0
"""How long to retry failures and to wait for open files, from the job's end or from a later success."""
_HURRY_S = 90.0
"""The same limit at a shutdown of the machine, which awsddp-jobs.service delays by at most 120 s. If the time
of a spot reclaim is known, it is the limit."""
_OTHER_NODES_S = 90.0
"""How long the first node waits for another node whose list does not change."""
_SLOWEST_S = 60.0
_OWN_BEATS, _OTHER_BEATS = 6, 90
"""How many intervals of `beat_s` pass before a key is reused, on the first node and on other nodes. On
another node, this is the longest time that a request with all its retries can take (store.py), because the
first node's copy of the node's list can be that old."""
_MAX_REMOVED = 1000
"""How many removed files are remembered."""
_MAX_FOLDERS = 1000
"""How many folders with pending files are listed one by one."""


def main(stdin: BinaryIO) -> int:
    """Execute the order on stdin (a line with its length, then JSON): claim a job's name, or upload a job."""
    order = json.loads(stdin.read(int(stdin.readline())))
    if order["do"] == "claim":
        sys.stdout.write(json.dumps(try_claim(order)) + "\n")
        return 0
    Path("/proc/self/comm").write_text("awsddp-job", encoding="ascii")
    # With 19, the uploader would get about 1 % of a core while the ranks or their loaders use all cores.
    os.nice(10)
    _set_disk_priority("3")  # idle
    with contextlib.suppress(CommandError):  # raised if the job's folder is gone
        folder = JobFolder(order["job"])
        if not _is_alone(folder):
            return 0
        code = Uploader(order, folder, open_store(order)).run()
        os._exit(code)  # does not wait for threads with cancelled requests
    return 1


def _set_disk_priority(scheduling_class: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["ionice", "-c", scheduling_class, "-p", str(os.getpid())], check=False)


def _is_alone(folder: JobFolder) -> bool:
    """Acquire the job's uploader lock for this process's lifetime. Return False if the lock is taken."""
    return try_lock(folder.uploader_lock) is not None


class _File:
    """A result.

    `parts` are the result's parts in S3 ([key, size, ETag, digest]), and `saved` is the stamp of their
    content.
    """

    def __init__(self) -> None:
        self.parts: list[list[Any]] = []
        self.version = 0
        self.left: dict[int, float] = {}
        self.current: Stamp | None = None
        self.saved: Stamp | None = None
        self.sample = ""
        self.inode = 0
        self.sent_at = self.check_at = -math.inf
        self.checked: Stamp | None = None
        self.flaw = ""
        self.sent_bytes = self.fails = 0

    @property
    def length(self) -> int:
        """The number of saved bytes."""
        return sum(size for _, size, *_ in self.parts)

    def key(self, result: str, version: int) -> str:
        """Return a version's unique key. Bytes in the name that are not valid UTF-8 are escaped."""
        name = result.replace("\\", r"\\").encode("utf-8", "backslashreplace").decode()
        return f"{name}~{version + 1}" if version or re.search(r"~\d+$", name) else name

    def count_sent(self, count: int) -> None:
        """Add `count`, which can be negative, to the number of sent bytes."""
        self.sent_bytes += count

    def switch_version(self, version: int) -> None:
        """Switch from the previous version's keys to the uploaded version's keys."""
        self.left[self.version] = time.monotonic()
        self.left.pop(version, None)
        self.version = version

    def abandon_version(self, version: int) -> None:
        """Stop using the keys of a version whose upload was cancelled."""
        self.sent_bytes, self.left[version] = 0, time.monotonic()
        if not self.parts:
            self.version = max(self.version, *self.left) + 1

    def row(self) -> dict[str, Any]:
        """Return the file's row in the node's list."""
        assert self.saved is not None
        row = {"size": self.length, "modified": self.saved[1], "stamp": self.saved[2:], "sample": self.sample}
        return {**row, "parts": self.parts, **({self.flaw: True} if self.flaw else {})}


class _Sending(NamedTuple):
    """A file that is being uploaded, with its open descriptor `held` and its state `info` at the start."""

    upload: Upload
    version: int
    line: ManifestEntry
    held: int
    info: os.stat_result


class _Growing(NamedTuple):
    """A growing file whose new parts are being sent.

    If `is_checked` is true, its earlier parts are compared first.
    """

    future: Future[list[list[Any]]]
    line: ManifestEntry
    is_checked: bool


class Uploader:
    """Uploads a job's results on this node; on the first node, it also publishes the whole job's state."""

    def __init__(self, order: Mapping[str, Any], folder: JobFolder, store: Store) -> None:
        self._order, self._folder, self._store = order, folder, store
        request = folder.request()
        self._node = request.node
        self._other_nodes = [node.node for node in request.nodes if node.node != self._node]
        self._is_first = self._node == request.first_node.node
        self._uri = S3Uri(*order["place"]).join(folder.job)
        self._request = Manifest(job=folder.job, exclude=order["exclude"], at_once=0)
        self._files: dict[str, _File] = {}
        self._links: dict[str, str] = {}
        self._changed: set[str] = set()
        self._pending: dict[str, int] = {}
        self._queue: deque[ManifestEntry] = deque()
        self._sending: dict[str, _Sending] = {}
        self._cancelled: list[_Sending] = []
        self._has_cancelled = False
        self._growing: dict[str, _Growing] = {}
        self._scans = self._quiet_scans = 0
        self._scan_at = self._list_at = self._progress_at = -math.inf
        self._has_list = self._is_verified = self._is_over = False
        self._pool = ThreadPoolExecutor(CONCURRENCY)
        self._unsaved_text = self._error = self._reported_error = ""
        self._generation = 0
        self._pages = Pages("")
        self._written: Any = None
        self._written_at = self._lists_read_at = -math.inf
        self._changed_at = time.monotonic()
        self._index = CheckpointIndex()
        self._checkpoint = Pages("")
        self._node_documents: dict[int, Any] = {}
        self._other_rows: dict[int, dict[str, dict[str, Any]]] = {}
        self._readers = {node: PageReader() for node in self._other_nodes}
        self._published: Any = None
        self._wake: SimpleQueue[None] = SimpleQueue()  # unlike Event, safe in a signal handler
        self._end_by = math.inf
        self._fails = 0
        self._succeeded_at = time.monotonic()

    def run(self) -> int:
        """Upload until the job has ended and all results are saved.

        Return 0, or 1 if the deadline passes before all results are saved.
        """
        signal.signal(signal.SIGTERM, self._on_term)
        while True:
            all_done = False
            try:
                all_done = self.step()
            except Exception as error:  # from S3, the disk, or a malformed object
                self._fails, self._error = self._fails + 1, str(error)
                sys.stderr.write(f"{time.strftime('%FT%TZ', time.gmtime())} {error}\n")
                sys.stderr.flush()
            now = time.monotonic()
            is_stuck = self._is_over and (self._fails > 0 or (bool(self._pending) and self._is_idle))
            if not is_stuck:
                self._succeeded_at = now
            gives_up = is_stuck and now > min(self._succeeded_at + _LATE_S, self._end_by)
            if gives_up:
                self._error = self._error or f"programs still write to: {', '.join(self._pending)}"
            is_final = all_done or (gives_up and self._end_by == math.inf)  # otherwise resumed after boot
            self._write_progress(ended=is_final)
            if all_done or gives_up:
                self.close()
                return 1 if gives_up else 0
            self._pause()

    def step(self) -> bool:
        """Scan the results, upload files and write the lists, if due. Return True if everything is done.

        If an upload has failed, raises its error.
        """
        if not self._is_over and self._folder.document().final:
            self._is_over, self._scan_at = True, -math.inf
            self._queue.clear()
            _set_disk_priority("2")  # the default (best effort), because no rank uses the disk any more
        if not self._has_list:
            self._recover()
        error = self._upload_results()
        all_done = self._publish_lists()
        if error is not None:
            raise error
        if self._is_idle:
            self._fails, self._error = 0, self._unsaved_text
        return all_done

    def close(self) -> None:
        """Wait for requests and end the threads, unless cancelled requests may still be running."""
        if not self._has_cancelled:
            self._pool.shutdown()
            self._store.close()

    def _pause(self) -> None:
        """Sleep until the next step (longer after errors), but wake up early when an upload ends."""
        pause_s = min(_TICK_S, self._order["look_s"])
        if self._is_over:
            pause_s = min(pause_s, max(0.0, self._scan_at - time.monotonic()))
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
        """Handle the machine's shutdown: set the deadline for the remaining uploads."""
        left_s = read_shutdown().seconds_left()
        self._end_by = min(self._end_by, time.monotonic() + (_HURRY_S if left_s is None else left_s))
        self._wake.put(None)

    def _wake_up(self, *_: object) -> None:
        self._wake.put(None)

    # ---- an earlier process's state

    def _recover(self) -> None:
        """Continue from the list that an earlier uploader of this launch wrote, if there is one."""
        document = self._read_signed(f"node{self._node}.json")
        if document is not None:
            self._generation, self._scans = document["generation"] + 1, document["look"]
            for result, row in self._listed_rows(document).items():
                file = self._files[result] = _File()
                file.parts, file.sample = row["parts"], row["sample"]
                file.flaw = next((flaw for flaw in ("torn", "weights") if flaw in row), "")
                file.saved = file.current = (row["size"], row["modified"], *row["stamp"])
                file.inode = row["stamp"][1]
                file.version = self._version_of(result, row["parts"])
                self._changed.add(result)
        job = self._read_signed("job.json") if self._is_first else None
        if job and job["checkpoint"] and (files := self._listed_rows(job["checkpoint"])):
            self._index.checkpoint = {**job["checkpoint"], "files": files}
        self._pages = Pages(f"lists/node{self._node}-{self._generation}")
        self._checkpoint = Pages(f"lists/checkpoint-{self._generation}")
        self._has_list = True

    def _listed_rows(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows that a document lists, or {} if a page has been replaced."""
        try:
            return PageReader().read(self._store, self._uri, document["pages"]).get("files", {})
        except ObjectChanged:
            return {}

    def _version_of(self, result: str, parts: list[list[Any]]) -> int:
        """Return the version in the keys of a file's parts."""
        file, key = _File(), parts[0][0]
        name = key if not parts[0][3] else dirname(key).partition("/")[2]
        suffix = re.search(r"~(\d+)$", name)
        return int(suffix[1]) - 1 if suffix and name == file.key(result, int(suffix[1]) - 1) else 0

    def _signature(self, name: str, body: bytes) -> str:
        return signature(self._order["secret"], self._order["launch"], name, body)

    def _read_signed(self, name: str) -> Any:
        """Return a document that an uploader of this launch has signed, or None if there is none."""
        try:
            document = self._store.document(self._uri, name)
        except ValueError:  # the document is longer than any that an uploader writes
            return None
        if document is None:
            return None
        expected = self._signature(name, document.body)
        is_ours = hmac.compare_digest(document.signature.encode(), expected.encode())
        return document.parse() if is_ours else None

    def _write(self, name: str, document: object) -> None:
        self._store.write(self._uri, name, document, sign=self._signature)

    # ---- this node's files

    def _upload_results(self) -> BaseException | None:
        """Collect finished uploads, scan if a scan is due, and start uploads. Return the last error."""
        error = self._collect_finished()
        is_drained = self._is_idle and not self._queue
        if time.monotonic() >= self._scan_at and (is_drained or not self._is_over):
            self._scan()
        self._cancel_outdated()
        return self._start_uploads() or error

    def _scan(self) -> None:
        """List the results, and queue files that are complete and not saved, checkpoints first."""
        began = time.thread_time()
        results: Any = manifest(self._request, self._folder)
        self._scans += 1
        self._take_links({line.home: line.target for line in results.files if line.target})
        lines = {line.home: line for line in results.files if not line.target}
        skipped = "; ".join(f"{line.path}: {line.why}" for line in results.skipped if line.owed)[:2000]
        self._unsaved_text = "; ".join(filter(None, (skipped, self._lost_files(results.skipped))))[:2000]
        self._forget_removed(self._files.keys() - lines.keys() - {line.home for line in results.skipped})
        self._pending = {}
        due = [line for line in lines.values() if self._is_due(line)]
        marked_folders = {dirname(result) for result in lines if basename(result) in MARKER_FILES}
        self._queue = deque(sorted(due, key=lambda line: self._urgency(line.home, marked_folders)))
        self._quiet_scans = self._quiet_scans + 1 if self._is_over and not self._pending else 0
        self._is_verified = self._is_verified and self._quiet_scans > 0
        took_s = time.thread_time() - began
        pause_s = max(self._order["look_s"], took_s / _MAX_LOAD)
        if self._is_over:  # there is nothing else to do
            pause_s = max(_TICK_S if self._pending or self._is_verified else _BATCH_S, took_s)
        self._scan_at = time.monotonic() + pause_s

    def _lost_files(self, skipped: Iterable[ManifestEntry]) -> str:
        """Return text on files that the next job wrote to before they were saved ("" for no files)."""
        files = ((line, self._files.get(line.home)) for line in skipped if line.home)
        return "; ".join(
            f"{line.path}: {line.why}" for line, file in files if file is not None and not file.saved
        )

    def _is_due(self, line: ManifestEntry) -> bool:
        """Record a file's current stamp. Return True if the file should be uploaded now."""
        result, file, stamp = line.home, self._files.setdefault(line.home, _File()), _stamp(line)
        is_known, file.current = file.current == stamp, stamp
        if file.saved == stamp and not (self._is_over and _is_append_only(result) and file.checked != stamp):
            return False
        if not os.access(line.path, os.R_OK):
            self._unsaved_text = f"{line.path} cannot be read"
            if not self._is_over:
                self._pending[result] = line.size
            return False
        self._pending[result] = line.size
        if result in self._sending or result in self._growing:
            return False
        if _is_append_only(result):
            return self._is_over or time.monotonic() - file.sent_at >= self._order["parts_s"]
        is_renamed = line.changed > line.modified  # for example, a complete file was renamed
        return not line.writing and (is_known or is_renamed or self._is_over)

    def _urgency(self, result: str, marked_folders: set[str]) -> tuple[int, bool]:
        is_checkpoint = result.endswith(SUFFIXES) or not marked_folders.isdisjoint(parent_folders(result))
        return self._files[result].fails, not is_checkpoint and not _is_append_only(result)

    def _take_links(self, links: dict[str, str]) -> None:
        for result in self._links.keys() - links.keys():
            self._pages.remove("links", result)
        for result, target in links.items():
            self._pages.set("links", result, target)
        self._links = links

    def _start_uploads(self) -> BaseException | None:
        """Start queued uploads, at most _MAX_OPEN at once. Return the last error."""
        failure: BaseException | None = None
        while self._queue and len(self._sending) + len(self._growing) < _MAX_OPEN:
            line = self._queue.popleft()
            if line.home in self._sending or line.home in self._growing:
                continue
            begin = self._start_parts if _is_append_only(line.home) else self._start_file
            try:
                begin(line, self._files[line.home])
            except FileNotFoundError:  # the next scan handles it
                continue
            except Exception as error:
                failure = error
        return failure

    def _start_file(self, line: ManifestEntry, file: _File) -> None:
        """Start uploading a file. If the current key is listed, use another key, so that the listed object is
        kept.

        The file stays open, so that the upload succeeds even if the job removes or replaces the file.
        """
        with open_file(Path(line.path)) as stream:
            held, info = os.dup(stream.fileno()), os.fstat(stream.fileno())
        if stat_stamp(info) != _stamp(line):
            os.close(held)
            return
        version = self._free_version(line.home, file) if file.parts else file.version
        upload = self._store.upload(
            _open_path(held), self._uri, file.key(line.home, version), file.count_sent, self._wake_up
        )
        self._sending[line.home] = _Sending(upload, version, line, held, info)

    def _free_version(self, result: str, file: _File) -> int:
        """Return a version whose keys are not in a current list, and will not be in a later one.

        This is an earlier version if possible, or else a new version.
        """
        pause_s = self._order["beat_s"] * (_OWN_BEATS if self._is_first else _OTHER_BEATS)
        free = [version for version, left_at in file.left.items() if time.monotonic() - left_at >= pause_s]
        if free:
            used = self._named_keys()
            free = [version for version in free if used is not None and file.key(result, version) not in used]
        return min(free, default=max(file.version, *file.left, 0) + 1)

    def _named_keys(self) -> set[str] | None:
        """Return the checkpoint keys in the current and next job.json.

        Returns None if the current job.json cannot be read.
        """
        if self._is_first:
            named_keys = checkpoint_keys(self._published[1]) if self._published else set()
        else:
            document = self._read_signed("job.json")
            if document is None:
                return None
            try:
                pages = (document["checkpoint"] or {"pages": ()})["pages"]
                named_keys = checkpoint_keys(PageReader().read(self._store, self._uri, pages))
            except ObjectChanged:
                return None
        named_keys |= checkpoint_keys(self._index.checkpoint)
        return named_keys | {dirname(key).partition("/")[2] for key in named_keys}

    def _cancel_outdated(self) -> None:
        """Cancel uploads whose files were written to after the start, because these uploads would mix old and
        new data.

        If a file was only replaced or removed, its upload continues, because the open file is unchanged. If a
        file was truncated, its request ends late, because S3 waits for more bytes; the uploader does not wait
        for such a request.
        """
        for result, sending in list(self._sending.items()):
            if not sending.upload.done() and not _is_same(sending.info, os.fstat(sending.held)):
                sending.upload.cancel()
                self._has_cancelled = True
                self._cancelled.append(self._sending.pop(result))
                self._files[result].abandon_version(sending.version)
        for sending in [sending for sending in self._cancelled if sending.upload.done()]:
            self._cancelled.remove(sending)
            os.close(sending.held)

    def _collect_finished(self) -> BaseException | None:
        """Record finished uploads, except those of files that have changed. Return the last error."""
        failure: BaseException | None = None
        for result, sending in list(self._sending.items()):
            if not sending.upload.done():
                continue
            del self._sending[result]
            file = self._files[result]
            file.sent_bytes = 0
            with os.fdopen(sending.held, "rb"):
                try:
                    self._finish_file(result, sending)
                except (CancelledError, ObjectChanged):
                    continue
                except Exception as error:
                    failure = error
                    file.fails += 1
                    if not is_refusal(error):
                        file.abandon_version(sending.version)  # the request may still take effect
        for result, part in list(self._growing.items()):
            if part.future.done():
                del self._growing[result]
                try:
                    self._finish_parts(self._files[result], part)
                except Exception as error:
                    failure = error
                    self._files[result].fails += 1
        return failure

    def _finish_file(self, result: str, sending: _Sending) -> None:
        file, key = self._files[result], self._files[result].key(result, sending.version)
        sending.upload.result()
        etag, now = self._store.pop_etag(self._uri, key), os.fstat(sending.held)
        if not _is_same(sending.info, now):
            raise ObjectChanged(key)
        file.flaw = find_flaw(_open_path(sending.held), result)
        file.sample = sample(_open_path(sending.held), now.st_size)
        file.switch_version(sending.version)
        file.parts = [[key, now.st_size, etag, ""]]
        file.saved = _stamp(sending.line)
        self._mark_saved(result, file)

    def _mark_saved(self, result: str, file: _File) -> None:
        file.fails = 0
        self._changed.add(result)
        if file.saved == file.current:
            self._pending.pop(result, None)
        self._fails, self._succeeded_at = 0, time.monotonic()

    def _start_parts(self, line: ManifestEntry, file: _File) -> None:
        """Send the new bytes of a file in another thread."""
        if len(file.parts) >= _MAX_PARTS:
            self._unsaved_text = f"{line.path} is too large to be uploaded in parts"
            return
        if file.inode != line.inode or line.size < file.length:
            self._reset_file(line.home, file)
        file.inode, file.sent_at = line.inode, time.monotonic()
        is_checked = file.sent_at >= file.check_at or (self._is_over and file.length == line.size)
        key = f"parts/{file.key(line.home, file.version)}"
        future = self._pool.submit(self._send_parts, line, key, file, is_checked)
        self._growing[line.home] = _Growing(future, line, is_checked)
        future.add_done_callback(self._wake_up)

    def _send_parts(self, line: ManifestEntry, key: str, file: _File, is_checked: bool) -> list[list[Any]]:
        """Send the new bytes of a file and return its parts. If the last part is not full, it is replaced.

        Raises ObjectChanged if the file no longer begins with its earlier parts, and OSError or ClientError.
        """
        parts = [*file.parts]
        with open_file(Path(line.path)) as stream:
            if os.fstat(stream.fileno()).st_ino != line.inode:
                raise ObjectChanged(line.home)
            if is_checked:
                began = time.thread_time()
                _check_parts(stream, parts, line.home)
                file.check_at = time.monotonic() + (time.thread_time() - began) / _MAX_LOAD
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
                    raise ObjectChanged(line.home)
                name = f"{key}/{start:015}"
                part = [name, len(data), self._store.put(self._uri, name, data), _digest(data)]
                parts[len(parts) - bool(last) :] = [part]
        return parts

    def _finish_parts(self, file: _File, part: _Growing) -> None:
        """Record a growing file's sent parts. A rewritten file is sent again from the beginning."""
        line = part.line
        try:
            file.parts = part.future.result()
        except (ObjectChanged, FileNotFoundError):
            self._reset_file(line.home, file)
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
        self._mark_saved(line.home, file)

    def _reset_file(self, result: str, file: _File) -> None:
        """Discard a file's saved parts. The file's next upload uses other keys."""
        if file.parts:
            file.switch_version(self._free_version(result, file))
        file.parts, file.saved, file.current = [], None, None
        self._changed.add(result)

    def _forget_removed(self, removed: set[str]) -> None:
        """Remove from the list the files that the job has removed. Their keys are not reused immediately."""
        # A file that was just saved is listed first, because it may be a checkpoint.
        for result in removed - self._changed:
            if self._files[result].current or self._files[result].saved:
                self._reset_file(result, self._files[result])
        if len(removed) > _MAX_REMOVED and (named_keys := self._named_keys()) is not None:
            pause_s = self._order["beat_s"] * _OTHER_BEATS
            for result in removed - self._sending.keys() - self._growing.keys():
                file = self._files[result]
                is_rested = all(time.monotonic() - left_at > pause_s for left_at in file.left.values())
                if is_rested and named_keys.isdisjoint(file.key(result, version) for version in file.left):
                    del self._files[result]

    # ---- the lists

    def _publish_lists(self) -> bool:
        """Write the list of saved files and, on the first node, job.json. Return True if everything is done.

        The longer it takes to write a list, the less often the list is written.
        """
        now = time.monotonic()
        if now < self._list_at and self._quiet_scans == 0:
            return False
        if self._quiet_scans > 1 and not self._is_verified:
            self._verify()
        document = self._write_list()
        is_late = now - self._written_at >= self._order["beat_s"]
        is_beat_due = self._other_nodes and not self._is_first and is_late
        if is_beat_due or {**document, "look": 0} != self._written:
            self._write(f"node{self._node}.json", document)
            self._pages.publish()
            self._written, self._written_at = {**document, "look": 0}, now
        pause_s = max(min(_LIST_S, self._order["look_s"]), (time.monotonic() - now) / _MAX_LOAD)
        self._list_at = time.monotonic() + pause_s
        if not self._is_first:
            return self._is_verified
        self._update_index(document)
        all_done = self._is_verified and (self._all_ended() or now - self._changed_at > _OTHER_NODES_S)
        self._publish(all_done=all_done)
        if all_done:
            self._store.abort(self._uri)
        return all_done

    def _write_list(self) -> dict[str, Any]:
        """Write the list's pages, and return the content for nodeK.json, which names the pages."""
        for result in self._changed:
            file = self._files.get(result)
            if file is not None and file.saved is not None:
                self._pages.set("files", result, file.row())
            else:
                self._pages.remove("files", result)
        self._changed = set()
        return {
            "node": self._node,
            "launch": self._order["launch"],
            "generation": self._generation,
            "look": self._scans,
            "pages": self._pages.write(self._store, self._uri),
            "pending": _folders(self._pending),
            "pending_files": len(self._pending),
            "ended": self._is_verified,
            "error": self._unsaved_text,
        }

    def _verify(self) -> None:
        """Compare the files and lists with the objects in S3, and resend the files and lists that differ."""
        keys_by_result = {result: [part[0] for part in file.parts] for result, file in self._files.items()}
        prefixes = {
            "lists/",
            *(_key_prefix(key) for part_keys in keys_by_result.values() for key in part_keys),
        }
        start = len(self._uri.key(""))
        objects = {
            listed.key[start:]: (listed.size, listed.etag)
            for prefix in prefixes
            for listed in self._store.list(self._uri, name=prefix)
        }
        self._is_verified = True
        self._pages.rewrite_missing(objects)
        self._checkpoint.rewrite_missing(objects)
        for result, file in self._files.items():
            if any(objects.get(key) != (size, etag) for key, size, etag, _ in file.parts):
                sys.stderr.write(f"{result} in S3 differs from what was sent, and is sent again\n")
                self._reset_file(result, file)
                self._is_verified, self._quiet_scans = False, 0

    def _write_progress(self, *, ended: bool) -> None:
        """Write the progress to saving.json."""
        now = time.monotonic()
        if now < self._progress_at and not ended and self._error == self._reported_error:
            return
        saved = [file.length for file in self._files.values() if file.saved is not None]
        left_bytes = 0
        for result, size in self._pending.items():
            file = self._files[result]
            left_bytes += size - (file.length if _is_append_only(result) else file.sent_bytes)
        progress = {
            "files": len(saved),
            "bytes": sum(saved),
            "pending_files": len(self._pending),
            "pending_bytes": max(0, left_bytes),
            "error": self._error[:2000],
            "ended": ended,
            "at": time.time(),
        }
        with contextlib.suppress(OSError):
            write_json(self._folder.saving, progress, sync=False)
        self._reported_error = self._error
        self._progress_at = time.monotonic() + max(_LIST_S, (time.monotonic() - now) / _MAX_LOAD)

    # ---- the job's state, on the first node

    def _update_index(self, own_document: Mapping[str, Any]) -> None:
        """Update the checkpoint index from this node's list and, at intervals, the other nodes' lists."""
        now = time.monotonic()
        interval_s = _TICK_S if self._is_over else self._order["beat_s"]
        if self._other_nodes and now - self._lists_read_at >= interval_s:
            self._lists_read_at = now
            self._read_lists(now)
        rows: dict[str, dict[str, Any]] = {"files": {}, "links": {}}
        for node, pages in self._other_rows.items():
            prefix = f"node{node}/"
            for kind, page_rows in pages.items():
                rows[kind] |= {name: row for name, row in page_rows.items() if name.startswith(prefix)}
        rows["files"] |= {result: file.row() for result, file in self._files.items() if file.saved}
        rows["links"] |= self._links
        documents = {node: self._node_documents.get(node, {}) for node in self._other_nodes}
        documents[self._node] = own_document
        self._index.update(documents, rows["files"], rows["links"])

    def _read_lists(self, now: float) -> None:
        """Read the other nodes' lists. If a list changes during the read, its old version is used."""
        for node, reader in self._readers.items():
            document = self._read_signed(f"node{node}.json")
            if document is None or document == self._node_documents.get(node):
                continue
            with contextlib.suppress(ObjectChanged):
                self._other_rows[node] = reader.read(self._store, self._uri, document["pages"])
                self._node_documents[node], self._changed_at = document, now

    def _all_ended(self) -> bool:
        """Return True if each other node is lost or its uploader has ended."""
        cause = self._folder.document().cause
        lost = cause.node if cause is not None and cause.kind == "node_lost" else None
        documents = self._node_documents
        return all(node == lost or documents.get(node, {}).get("ended") for node in self._other_nodes)

    def _publish(self, *, all_done: bool) -> None:
        """Write job.json if the job's state or checkpoint has changed."""
        document, checkpoint = self._folder.document(), self._index.checkpoint
        state = document.state if all_done or not document.final else "running"
        if (state, checkpoint) == self._published:
            return
        listed_checkpoint = None
        if checkpoint is not None:
            before = self._published[1]["files"] if self._published and self._published[1] else {}
            for result in before.keys() - checkpoint["files"].keys():
                self._checkpoint.remove("files", result)
            for result, row in checkpoint["files"].items():
                self._checkpoint.set("files", result, row)
            pages = self._checkpoint.write(self._store, self._uri)
            name, modified = checkpoint["name"], checkpoint["modified"]
            listed_checkpoint = {"name": name, "modified": modified, "pages": pages}
        job = {
            "job": self._folder.job,
            "save": 2,
            "launch": self._order["launch"],
            "by": self._order["by"],
            "nodes": sorted([self._node, *self._other_nodes]),
            "state": state,
            "facts": to_json_value(document.facts),
            "document": to_json_value(document),
            "checkpoint": listed_checkpoint,
        }
        self._write("job.json", job)
        self._checkpoint.publish()
        self._published = (state, checkpoint)


def _stamp(line: ManifestEntry) -> Stamp:
    return line.size, line.modified, line.changed, line.inode


def _is_same(before: os.stat_result, now: os.stat_result) -> bool:
    """Return True if an open file was not written to, even if it was removed or replaced."""
    is_alike = (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
    return is_alike and (before.st_ctime_ns == now.st_ctime_ns or before.st_nlink != now.st_nlink)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_parts(stream: BinaryIO, parts: Iterable[Sequence[Any]], result: str) -> None:
    """Raise ObjectChanged if a file does not begin with the parts that were sent."""
    stream.seek(0)
    for _, size, _, digest in parts:
        if _digest(stream.read(size)) != digest:
            raise ObjectChanged(result)


def _key_prefix(key: str) -> str:
    """Return a key's first folder, or the first two folders of a key in parts/, with a slash at the end."""
    return "/".join(key.split("/")[: 2 if key.startswith("parts/") else 1]) + "/"


def _folders(results: Iterable[str]) -> list[str]:
    """Return the files' folders.

    If there are more than _MAX_FOLDERS, the deepest folders are replaced by their parent folders, which then
    end with "/".
    """
    folders = {dirname(result) for result in results}
    while len(folders) > _MAX_FOLDERS:
        deepest = max(folder.count("/") for folder in folders)
        folders = {_parent(folder) if folder.count("/") == deepest else folder for folder in folders}
    return sorted(folders)


def _parent(folder: str) -> str:
    return f"{dirname(folder.rstrip('/'))}/"


def _open_path(held: int) -> Path:
    """Return a path to an open file, which is valid even if the file has been removed."""
    return Path(f"/proc/self/fd/{held}")


def _is_append_only(result: str) -> bool:
    """Return True if a result counts as a file that is only appended to."""
    name = result.rpartition("/")[2]
    is_log = name.endswith((".log", ".jsonl")) or name.startswith(EVENTS)
    return is_log and not result.startswith(f"{INTERNAL_FOLDER}samples")
