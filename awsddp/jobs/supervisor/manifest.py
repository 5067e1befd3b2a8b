"""The results of a job on this node: which files are fetched, and what is not, with the reason.

Three sources: the run folder, the `outputs` that the launch or this request names, and what is new or changed
in the synced folder since the snapshot that was taken before the ranks started. Paths are text with surrogate
escapes, so that any bytes in a name survive JSON. Half of a checkpoint is no result: what was read in the
middle of a write is marked.
"""

from __future__ import annotations

import base64
import functools
import glob
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from awsddp.jobs.supervisor.folder import JobFolder
from awsddp.jobs.supervisor.requests import Fields, Hashes, Manifest, Sparse
from awsddp.jobs.supervisor.walk import file_kind, readlink, real, stamp, walk

EVENTS = "events.out.tfevents."
OURS = ".awsddp/"
"""Where a job's results hold what only awsddp reads."""
LIST_BYTES = 48 << 20
"""How long the list of results may be; the client reads no answer of more than 64 MB."""
HASH_BYTES = 64 << 20
"""How much is hashed for the list; the client asks for the other hashes once it knows what it fetches."""
HOLES_BYTES = 1 << 20
"""How much of a file must be holes to be worth the time of a transfer that leaves them out."""
_INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
_SYSFS = Path("/sys/dev/block")
_TRIES = 3
_FRESH_SECONDS = 60.0


def manifest(request: Manifest, folder: JobFolder | None = None) -> Listed:
    """Return the job's results here. Logs of ranks come without data: who watched has them."""
    folder = folder or JobFolder(request.job)
    launched = folder.request()
    node, excluded = launched.node, _Excluded(request.exclude)
    found = _Found(f"node{node}", Path(launched.workdir), folder.run, excluded, request.events)
    for rank in launched.own_ranks:
        found.add(folder.logs / f"rank{rank}.log", f"logs/rank{rank}.log")
    found.add(folder.logs / f"launcher{node}.log", f"{OURS}launcher{node}.log")
    found.data_left = request.at_once
    found.add(folder.path / "supervisor.log", f"{OURS}supervisor{node}.log")
    found.add(folder.samples, f"{OURS}samples{node}.json")
    found.add_tree(folder.run, f"{found.node}/run")
    for output in dict.fromkeys([*launched.outputs, *request.outputs]):
        found.add_output(output)
    found.add_changed(json.loads(folder.snapshot.read_text(encoding="utf-8")))
    found.add_links()
    return found.listed()


def hashes(request: Hashes) -> dict[str, list[Line]]:
    """Return {"hashes": [...]}, in the order of `paths`: `size` and `sha256`, or `why` there are none."""
    read = [_Read(path, _looked_at(path), _hashed_or_why(path)) for path in request.paths]
    _mark_writing(read)
    return {"hashes": [one.line for one in read]}


class Line(Sparse):
    """A file, a link, or what is skipped, as the list tells of it: with the fields that are set.

    `path` is absolute and without links, `home` where it belongs in the folder of results. A file is
    `limited` where it counts against job.results_limit, `ephemeral` where a stop loses it, `sparse` where it
    has holes, `writing` where it was read in the middle of a write; one that is small has `sha256` and `data`
    (base64). A link has `target`: where it leads in the folder of results. What is skipped has `why` and
    `owed`: the job made it, and it is not fetched.
    """

    path: str = ""
    home: str = ""
    size: int = 0
    modified: float = 0.0  # s since 1970
    limited: bool = False
    ephemeral: bool = False
    sparse: bool = False
    writing: bool = False
    sha256: str | None = None
    data: str | None = None
    target: str = ""
    why: str = ""
    owed: bool = False


class Listed(Fields):
    """The results; `excluded` counts the files and bytes that `exclude` of the request matches."""

    files: list[Line]
    skipped: list[Line]
    excluded: Mapping[str, int]


class _Read(NamedTuple):
    """A file, as it was before it was read, and what was read: `line` is sent to the client."""

    path: str
    before: Any  # an os.stat_result, None where it was not there
    line: Line


class _Excluded:
    """Counts what job.exclude matches: regular expressions, of which the last that matches decides."""

    def __init__(self, patterns: Sequence[Sequence[Any]]) -> None:
        self._patterns = [(re.compile(pattern), bool(exclude)) for pattern, exclude in patterns]
        self.files = self.size = 0

    def match(self, path: str) -> bool:
        return next((exclude for pattern, exclude in reversed(self._patterns) if pattern.match(path)), False)

    def count(self, path: str, size: int) -> bool:
        matches = self.match(path)
        self.files += matches
        self.size += size * matches
        return matches


class _Found:
    def __init__(
        self, node: str, workdir: Path, run: Path, excluded: _Excluded, events: Mapping[str, int] | None
    ) -> None:
        self.node, self._excluded, self._events = node, excluded, events
        self.hash_left, self.data_left = HASH_BYTES, 0
        self._workdir = real(workdir)
        self._roots = [(real(run), f"{node}/run"), (self._workdir, node)]
        self._lines: list[Line] = []
        self._skipped: list[Line] = []
        self._homes: dict[Path, str] = {}  # of every file and link that was taken in
        self._parents: dict[Path, Path] = {}
        self._links: list[tuple[Path, str, bool]] = []
        self._read: list[_Read] = []
        self._room = LIST_BYTES
        self._beyond: list[int] = []  # sizes of files

    def listed(self) -> Listed:
        """Return the answer; what the list has no room for is one line of it.

        What was read in the middle of a write is marked, what has no hash yet with its hash.
        """
        _mark_writing([one for one in self._read if one.line.sha256])
        if self._beyond:
            why = (
                f"{len(self._beyond)} more files than the list of results has room for; pack them into fewer"
            )
            line = Line(path=str(self._workdir), size=sum(self._beyond), why=why, owed=True)
            self._skipped.append(line)
        excluded = {"files": self._excluded.files, "size": self._excluded.size}
        return Listed(files=self._lines, skipped=self._skipped, excluded=excluded)

    def add(self, path: Path, home: str, *, limited: bool = False) -> None:
        """Take in one file, or keep a link for later; each path once."""
        path = self._resolved(path)
        if path in self._homes:
            return
        try:
            info = path.lstat()
            if self._events is not None and not self._is_new_event(path.name, home, info):
                return
            self._homes[path] = home
            if stat.S_ISLNK(info.st_mode):
                self._links.append((path, home, limited))
            elif stat.S_ISREG(info.st_mode):
                self._add_file(path, home, info, limited)
            else:
                self.skip(path, file_kind(info.st_mode))
        except FileNotFoundError:
            return
        except OSError as error:
            self.skip(path, error.strerror or str(error), owed=True)

    def _is_new_event(self, name: str, home: str, info: os.stat_result) -> bool:
        """Tell whether a file is an event file that has grown, and still comes with the list."""
        fits = stat.S_ISREG(info.st_mode) and info.st_size <= self.data_left
        return name.startswith(EVENTS) and fits and (self._events or {}).get(home) != info.st_size

    def add_tree(self, top: Path, home: str) -> None:
        """Take in what a folder holds. `home` is where the folder belongs."""

        def trouble(path: str, why: str) -> None:
            self.skip(top / path, why, owed=True)

        for path, _ in walk(top, trouble):
            self.add(top / path, f"{home}/{path}")

    def add_output(self, output: str) -> None:
        """Take in the file or folder `output`: relative to the synced folder, absolute, or below ~.

        A folder that lies outside and that a link leads to is followed.
        """
        path = self._resolved(Path(os.path.normpath(str(self._workdir / Path(output).expanduser()))))
        target = real(path)
        home = self._home(target) or self._given_home(path)
        if not path.is_dir():
            if not os.path.lexists(str(path)):
                self.skip(path, "it is not there")
            self.add(path, self._home(path) or home)
            return
        if path != target and self._home(target) is not None:
            self.add(path, self._home(path) or self._given_home(path))
        elif self._home(target) is None:
            self._homes[path] = home
            self._roots.append((target, home))
        self.add_tree(target, home)

    def add_changed(self, before: dict[str, list[int]]) -> None:
        """Take in what the synced folder holds that was not there before, or was another then."""

        def trouble(path: str, why: str) -> None:
            if before.get(path) != [] and not self._excluded.match(f"{path}/"):
                self.skip(self._workdir / path, why, owed=True)

        for path, info in walk(self._workdir, trouble):
            whole = self._workdir / path
            if self._resolved(whole) in self._homes or before.get(path) == stamp(whole, info):
                continue
            if not self._excluded.count(path, info.st_size):
                self.add(whole, f"{self.node}/{path}", limited=True)

    def add_links(self) -> None:
        """Decide on the links, once it is known what is fetched."""
        for path, home, limited in self._links:
            try:
                self._add_link(path, home, limited)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.skip(path, error.strerror or str(error), owed=True)

    def skip(self, path: Path, why: str, *, owed: bool = False) -> None:
        """Name what is not fetched. `owed`: the job made it, so that the node must be kept."""
        self._append(self._skipped, Line(path=str(path), size=0, why=why, owed=owed), needed=owed)

    def _add_link(self, path: Path, home: str, limited: bool) -> None:
        """A link to what is fetched stays a link, else it becomes the file that it points to."""
        first, target = readlink(path), real(path)
        inside = self._homes.get(target) or self._home(target)
        if inside is not None and (target in self._homes or not target.is_file() or self._excludes(target)):
            shown = self._homes.get(first) or (self._home(first) if real(first) == target else None)
            line = Line(path=str(path), home=home, size=0, target=shown or inside)
            self._append(self._lines, line, needed=False)
        elif target.is_file():
            self._add_file(target, home, target.stat(), limited)
        elif target.is_dir():
            self.skip(path, f"a link to the folder {target}; it is fetched if an --output names it")
        else:
            self.skip(path, f"a link to {target}, which is not a file")

    def _add_file(self, path: Path, home: str, info: os.stat_result, limited: bool) -> None:
        line = Line(path=str(path), home=home, size=info.st_size, limited=limited, modified=info.st_mtime)
        if info.st_size - info.st_blocks * 512 >= HOLES_BYTES:
            line.sparse = True
        if not home.startswith(("logs/", OURS)):  # they are only appended to
            self._read.append(_Read(str(path), info, line))
        if is_ephemeral(info.st_dev):
            line.ephemeral = True
        if info.st_size <= self.hash_left:
            line.take(_hashed(path, at_once=self.data_left))
            self.hash_left -= line.size
            self.data_left -= line.size if line.data is not None else 0
        elif not os.access(str(path), os.R_OK):
            self.skip(path, os.strerror(13), owed=True)
            return
        self._append(self._lines, line, needed=True)

    def _append(self, lines: list[Line], line: Line, *, needed: bool) -> None:
        self._room -= len(json.dumps(vars(line)))
        if self._room > 0:
            lines.append(line)
        elif needed:
            self._beyond.append(line.size)

    def _home(self, path: Path) -> str | None:
        """Return where a path without links belongs, None for one that is not fetched."""
        for root, home in self._roots:
            if path == root or root in path.parents:
                return os.path.normpath(f"{home}/{path.relative_to(root)}")
        return None

    def _excludes(self, path: Path) -> bool:
        return self._workdir in path.parents and self._excluded.match(str(path.relative_to(self._workdir)))

    def _resolved(self, path: Path) -> Path:
        """Return a path whose folder is without links."""
        if path.parent not in self._parents:
            self._parents[path.parent] = real(path.parent)
        return self._parents[path.parent] / path.name

    def _given_home(self, path: Path) -> str:
        """Return where an output belongs by the path that names it."""
        if self._workdir in path.parents:
            return f"{self.node}/{path.relative_to(self._workdir)}"
        return f"{self.node}/outside{path}"


def _hashed_or_why(path: str) -> Line:
    try:
        return _hashed(Path(path))
    except OSError as error:
        return Line(why=error.strerror or str(error))


def _hashed(path: Path, *, at_once: int = -1) -> Line:
    """Return size and hash of what was read, as a file may grow meanwhile; `data` up to `at_once` bytes."""
    digest, size, read = hashlib.sha256(), 0, b""
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
            size += len(block)
            read = block if size == len(block) else b""
    found = Line(size=size, sha256=digest.hexdigest())
    if size <= at_once:
        found.data = base64.b64encode(read).decode()
    return found


@functools.lru_cache  # a request asks once a file, for few devices
def is_ephemeral(device: int, sysfs: Path = _SYSFS) -> bool:
    """Tell whether a device (st_dev) is instance store, or made of it, as DLAMIs do at /opt/dlami/nvme."""
    return _is_instance_store(Path(os.path.realpath(str(sysfs / f"{os.major(device)}:{os.minor(device)}"))))


def _is_instance_store(block: Path) -> bool:
    below = list((block / "slaves").glob("*"))  # of a volume of LVM or a RAID
    if below:
        return any(_is_instance_store(Path(os.path.realpath(str(path)))) for path in below)
    models = [place / "device" / "model" for place in (block, block.parent)]  # a partition lies in its disk
    return any(path.is_file() and path.read_text().strip() == _INSTANCE_STORE for path in models)


def _looked_at(path: str) -> os.stat_result | None:
    """Return the state of a file, None where it cannot be had."""
    try:
        return os.stat(path)  # noqa: PTH116 (a path may hold any bytes)
    except OSError:
        return None


def _mark_writing(read: list[_Read]) -> None:
    """Set `writing` in the lines of files that may have been read in the middle of a write.

    That is one that a process has opened for writing, other than to append, and one that has changed since
    before it was read. Of the latter the write may be over: it is read again.
    """
    for _ in range(_TRIES):
        opened, changed = _opened(), []
        for path, before, line in read:
            now = _looked_at(path)
            if before is None or now is None:
                continue
            line.writing = opened.get(_id(now)) is False or _is_fresh_of_another(now)
            if not line.writing and _id(now) not in opened and _state(now) != _state(before):
                line.writing = True
                changed.append(_Read(path, now, line))
        for path, _, line in changed:
            line.data = None
            line.take(_hashed_or_why(path))
        read = changed


def _opened() -> dict[tuple[int, int], bool]:
    """Return the files that processes of this user have opened for writing, and whether only to append."""
    files: dict[tuple[int, int], bool] = {}
    for name in glob.glob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 (it passes over processes that end meanwhile)
        descriptor = Path(name)
        try:
            if not descriptor.lstat().st_mode & stat.S_IWUSR:
                continue
            info = descriptor.stat()
            if stat.S_ISREG(info.st_mode):
                details = (descriptor.parent.parent / "fdinfo" / descriptor.name).read_text()
                appends = bool(int(details.split("flags:")[1].split()[0], 8) & os.O_APPEND)
                files[_id(info)] = appends and files.get(_id(info), True)
        except (OSError, LookupError, ValueError):
            continue
    return files


def _id(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _state(info: os.stat_result) -> tuple[int, int, int, int]:
    return (*_id(info), info.st_size, info.st_mtime_ns)


def _is_fresh_of_another(info: os.stat_result) -> bool:
    """Tell whether another user wrote a file just now: what that user has open is hidden from this one."""
    return os.getuid() not in (0, info.st_uid) and time.time() - info.st_mtime < _FRESH_SECONDS
