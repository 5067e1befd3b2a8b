"""The results of a job on this node: which files are fetched, and what is not, with the reason.

Three sources: the run folder, the `outputs` that the launch or this request names, and what is new or changed
in the synced folder since the snapshot that was taken before the ranks started. Paths are text with surrogate
escapes, so that any bytes in a name survive JSON. Half of a checkpoint is no result: what is in the middle of
a write is marked.
"""

from __future__ import annotations

import base64
import errno
import glob
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from awsddp.agent.file_tree import (
    file_kind,
    in_range,
    is_ephemeral,
    is_stamp,
    is_touched,
    open_file,
    readlink,
    real,
    stamp,
    stamp_of,
    walk,
)
from awsddp.agent.job_folder import JobFolder, folders
from awsddp.agent.messages import Launch, Manifest, Sparse, Told

EVENTS = "events.out.tfevents."
OURS = ".awsddp/"
"""Where a job's results hold what only awsddp reads."""
LIST_BYTES = 48 << 20
"""How long the list of results may be; the client reads no answer of more than 64 MB."""
HOLES_BYTES = 1 << 20
"""How much of a file must be holes to be worth the time of a transfer that leaves them out."""
DIGEST_BYTES = 32 << 30
"""How much is read to tell whether files whose time of change alone differs still hold what they held."""
_BLOCK, _BLOCKS = 16 << 10, 8
_FRESH_SECONDS = 60.0
_LONGEST = 255  # bytes of a name


def manifest(request: Manifest, folder: JobFolder | None = None) -> Told:
    """Return the job's results here. Logs of ranks come without data: who watched has them."""
    folder = folder or JobFolder(request.job)
    launched = folder.request()
    node = launched.node
    found = _Found(node, Path(launched.workdir), folder, request)
    for rank in launched.own_ranks:
        found.add(folder.logs / f"rank{rank}.log", f"logs/rank{rank}.log")
    found.add(folder.logs / f"launcher{node}.log", f"{OURS}launcher{node}.log")
    found.add(folder.path / "supervisor.log", f"{OURS}supervisor{node}.log")
    found.add(folder.samples, f"{OURS}samples{node}.json")
    found.add_tree(folder.run, f"{found.node}/run")
    for output in dict.fromkeys([*launched.outputs, *request.outputs]):
        found.add_output(output)
    found.add_changed(json.loads(folder.snapshot.read_text(encoding="utf-8")), _next_job(folder, launched))
    found.separate_homes()
    if request.events is not None:
        found.keep_new_events(request.events)
    found.add_links()
    return found.listed()


def sample(path: Path, size: int) -> str:
    """Return a hash of blocks of the first `size` bytes of a file, of all where they are few. Raises OSError.

    Files that differ in it differ; those that do not are the same in all likelihood.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        for at in (*range(0, size, max(_BLOCK, size // _BLOCKS)), max(0, size - _BLOCK)):
            file.seek(at)
            digest.update(file.read(min(_BLOCK, size - at)))
    return digest.hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    found = hashlib.sha256()
    with open_file(path) as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            found.update(part)
    return found.hexdigest()


class Line(Sparse):
    """A file, a link, or what is skipped, as the list tells of it: with the fields that are set.

    `path` is absolute and leads through no link, `home` where it belongs in the folder of results. A file is
    `limited` where it counts against job.results_limit, `ephemeral` where a stop loses it, `sparse` where it
    has holes, `writing` where it is in the middle of a write; one that is small has `data` (base64). Each has
    a `home` of its own; `changed` (ns) and `inode` tell a file that was rewritten with its size and time. A
    synced file whose time of change alone differs has the `digest` of all of it: chown -R changes no byte. A
    link has `target`: where it leads in the folder of results. What is skipped has `why` and `owed`: the job
    made it, and it is not fetched.
    """

    path: str = ""
    home: str = ""
    size: int = 0
    modified: int = 0  # ns since 1970
    changed: int = 0
    inode: int = 0
    limited: bool = False
    ephemeral: bool = False
    sparse: bool = False
    writing: bool = False
    sample: str = ""
    digest: str = ""
    data: str | None = None
    target: str = ""
    why: str = ""
    owed: bool = False


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
    def __init__(self, node: int, workdir: Path, folder: JobFolder, request: Manifest) -> None:
        self.node, self._excluded = f"node{node}", _Excluded(request.exclude)
        self._at_once = self._data_left = request.at_once
        self._watched = real(folder.logs)
        self._workdir = real(workdir)
        self._roots = [(real(folder.run), f"{self.node}/run"), (self._workdir, self.node)]
        self._lines: list[Line] = []
        self._skipped: list[Line] = []
        self._touched: set[Path] = set()
        self._digests_left = DIGEST_BYTES
        self._homes: dict[Path, str] = {}  # of every file and link that was taken in
        self._parents: dict[Path, Path] = {}
        self._links: list[tuple[Path, str, bool]] = []

    def listed(self) -> Told:
        """Return the answer: the files as they are now; what the list has no room for is one line of it.

        `excluded` counts the files and bytes that `exclude` of the request matches.
        """
        self._settle()
        room, beyond = LIST_BYTES, []

        def fits(line: Line) -> bool:
            nonlocal room
            room -= len(json.dumps(vars(line)))
            if room < 0 and (line.owed or not (line.why or line.target)):
                beyond.append(line.size)
            return room >= 0

        files = [line for line in self._lines if not line.why and fits(line)]
        skipped = [line for line in self._skipped if fits(line)]
        if beyond:
            why = f"{len(beyond)} more files than the list of results has room for; pack them into fewer"
            skipped.append(Line(path=str(self._workdir), size=sum(beyond), why=why, owed=True))
        excluded = {"files": self._excluded.files, "size": self._excluded.size}
        return Told(files=files, skipped=skipped, excluded=excluded)

    def _settle(self) -> None:
        """Read the files, and mark those that may be in the middle of a write.

        That is what a process has opened for writing, other than to append. What has changed since it was
        read comes without data.
        """
        files = [line for line in self._lines if not line.target and self._read(line)]
        opened = _opened()
        for line in files:
            _mark(line, opened)

    def _read(self, line: Line) -> bool:
        """Describe a file, and take in its data where that is little. One that cannot be read is skipped."""
        path = Path(line.path)
        try:
            info = path.stat()
            line.size, line.modified, line.changed, line.inode = stamp_of(info)
            if self._at_once:
                line.sample = sample(path, line.size)
                if path in self._touched and line.size <= self._digests_left:
                    line.digest = digest(path)
                    self._digests_left -= line.size
            is_here = path.parent == self._watched and line.size  # who watched has what was said
            if line.size <= self._data_left and not is_here:
                with open_file(path) as file:
                    line.data = base64.b64encode(file.read(line.size)).decode()
                self._data_left -= line.size
        except OSError as error:
            line.why = error.strerror or str(error)
            if not isinstance(error, FileNotFoundError):
                self.skip(path, line.why, owed=True)
        return not line.why

    def add(self, path: Path, home: str, *, limited: bool = False) -> None:
        """Take in one file, or keep a link for later; each path once."""
        path = self._resolved(path)
        if path in self._homes:
            return
        try:
            info = path.lstat()
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
        place = Path(output).expanduser() if output.startswith("~") else output  # "./~" is a folder's name
        path = self._resolved(Path(os.path.normpath(str(self._workdir / place))))
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

    def add_changed(self, before: dict[str, list[int]], later: tuple[str, int] | None) -> None:
        """Take in what the synced folder holds that was not there before, or was another then.

        What the next job, `later`, has written since is not this one's any more.
        """

        def trouble(path: str, why: str) -> None:
            if before.get(path) != [] and not self._excluded.match(f"{path}/"):
                self.skip(self._workdir / path, why, owed=True)

        for path, info in walk(self._workdir, trouble):
            whole = self._workdir / path
            then, now = before.get(path, []), stamp(whole, info)
            if self._resolved(whole) in self._homes or is_stamp(then, now):
                continue
            was_touched = is_touched(then, now)
            if was_touched and stat.S_ISLNK(info.st_mode) and self._home(real(whole)):
                continue  # its file is decided on for itself
            if later is not None and info.st_ctime_ns > later[1]:
                why = f"job {later[0]} has written it since"
                self._skipped.append(Line(path=str(whole), home=f"{self.node}/{path}", size=0, why=why))
            elif not self._excluded.count(path, info.st_size):
                self.add(whole, f"{self.node}/{path}", limited=True)
                if was_touched:
                    self._touched.add(self._resolved(whole))

    def separate_homes(self) -> None:
        """Give each file and link a home of its own: of those with one home all but the first get a suffix.

        Files come before links, then the order is that of their paths: model.pt, model.pt~2, model.pt~3.
        """
        homes = [line.home for line in self._lines] + [home for _, home, _ in self._links]
        taken: set[str] = set()
        if len(set(homes)) == len(homes):
            return
        files, links = (Path(line.path) for line in self._lines), (path for path, *_ in self._links)
        for paths in (files, links):
            for path in sorted(paths, key=lambda path: (self._homes[path], str(path))):
                home, count = self._homes[path], 1
                while self._homes[path] in taken:
                    count += 1
                    self._homes[path] = _numbered(home, count)
                taken.add(self._homes[path])
        for line in self._lines:
            line.home = self._homes[Path(line.path)]

    def keep_new_events(self, known: Mapping[str, int]) -> None:
        """Leave only event files that have another size than is known, and that still come with the list."""
        self._links = []
        self._lines = [
            line
            for line in self._lines
            if Path(line.path).name.startswith(EVENTS)
            and line.size <= self._data_left
            and known.get(line.home) != line.size
        ]

    def add_links(self) -> None:
        """Decide on the links, once it is known what is fetched."""
        for path, _, limited in self._links:
            home = self._homes[path]
            try:
                self._add_link(path, home, limited)
            except FileNotFoundError:
                continue
            except OSError as error:
                leads_nowhere = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
                self.skip(path, error.strerror or str(error), owed=not leads_nowhere)

    def skip(self, path: Path, why: str, *, owed: bool = False) -> None:
        """Name what is not fetched. `owed`: the job made it, so that the node must be kept."""
        self._skipped.append(Line(path=str(path), size=0, why=why, owed=owed))

    def _add_link(self, path: Path, home: str, limited: bool) -> None:
        """A link to what is fetched stays a link, else it becomes the file that it points to."""
        first, target = readlink(path), real(path)
        inside = self._homes.get(target) or self._home(target)
        if inside is not None and (target in self._homes or not target.is_file() or self._excludes(target)):
            shown = self._homes.get(first) or (self._home(first) if real(first) == target else None)
            self._lines.append(Line(path=str(path), home=home, size=0, target=shown or inside))
        elif target.is_file():
            self._add_file(path, home, target.stat(), limited)
        elif target.is_dir():
            self.skip(path, f"a link to the folder {target}; it is fetched if an --output names it")
        else:
            self.skip(path, f"a link to {target}, which is not a file")

    def _add_file(self, path: Path, home: str, info: os.stat_result, limited: bool) -> None:
        line = Line(path=str(path), home=home, size=info.st_size, limited=limited)
        if info.st_size - info.st_blocks * 512 >= HOLES_BYTES:
            line.sparse = True
        if is_ephemeral(info.st_dev):
            line.ephemeral = True
        self._lines.append(line)

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


def _next_job(folder: JobFolder, launched: Launch) -> tuple[str, int] | None:
    """Return the first job that was launched in the same folder after this one's end, and when (ns)."""
    if not folder.document().final:
        return None
    wrote = folder.state if folder.state.exists() else folder.path / "job.json"
    ended_ns = wrote.stat().st_mtime_ns
    for later in folders(folder.path.parent):  # the oldest first
        at_ns = (later.path / "job.json").stat().st_mtime_ns
        if later.job != folder.job and at_ns > ended_ns and later.request().workdir == launched.workdir:
            return later.job, at_ns
    return None


def _numbered(home: str, count: int) -> str:
    """Return a place with a suffix; a name is cut where it would be longer than a file system allows."""
    folder, _, name = home.rpartition("/")
    suffix = f"~{count}"
    return f"{folder}/{os.fsdecode(os.fsencode(name)[: _LONGEST - len(suffix)])}{suffix}"


def _mark(line: Line, opened: Mapping[tuple[int, int], bool]) -> None:
    """Mark a file that is in the middle of a write. Logs are only appended to."""
    try:
        now = Path(line.path).stat()
    except OSError:
        return
    appends = opened.get((now.st_dev, now.st_ino))
    if not line.home.startswith(("logs/", OURS)) and (appends is False or _is_fresh_of_another(now)):
        line.writing = True
    if not appends and (now.st_size, in_range(now.st_mtime_ns)) != (line.size, line.modified):
        line.data = None


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
                key = (info.st_dev, info.st_ino)
                files[key] = appends and files.get(key, True)
        except (OSError, LookupError, ValueError):
            continue
    return files


def _is_fresh_of_another(info: os.stat_result) -> bool:
    """Tell whether another user wrote a file just now: what that user has open is hidden from this one."""
    return os.getuid() not in (0, info.st_uid) and time.time() - info.st_mtime < _FRESH_SECONDS
