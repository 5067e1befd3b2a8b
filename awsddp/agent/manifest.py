"""List a job's results on this node: the files to fetch, and the files to skip, with reasons.

Results come from three sources: the run folder, the `outputs` of the launch and of the request, and files in
the project folder that are new or changed since the snapshot taken before the ranks started. Paths are
strings with surrogate escapes, so that any bytes in a name survive JSON. A file that is being written is
marked, because it may be an incomplete checkpoint.
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
    is_same_stamp,
    is_touched,
    make_stamp,
    open_file,
    readlink,
    resolve_links,
    stat_stamp,
    walk,
)
from awsddp.agent.job_folder import JobFolder, list_job_folders
from awsddp.agent.messages import Launch, Manifest, OmitsUnset, Response

EVENTS = "events.out.tfevents."
INTERNAL_FOLDER = ".awsddp/"
"""The subfolder of a job's results for files that only awsddp reads."""
LIST_BYTES = 48 << 20
"""Maximum size of the list of results; the client rejects responses of more than 64 MB."""
HOLES_BYTES = 1 << 20
"""How many bytes of a file must be holes to make a sparse transfer worthwhile."""
DIGEST_BYTES = 32 << 30
"""Maximum number of bytes read to compute digests of files that differ only in their change time."""
_BLOCK, _BLOCKS = 16 << 10, 8
_FRESH_SECONDS = 60.0
_MAX_NAME = 255  # how many bytes a file name can have


def manifest(request: Manifest, folder: JobFolder | None = None) -> Response:
    """Return the job's results on this node.

    The ranks' logs are listed without data, because a client that follows the job already has them.
    """
    folder = folder or JobFolder(request.job)
    launched = folder.request()
    node = launched.node
    results = _ResultsList(node, Path(launched.workdir), folder, request)
    for rank in launched.own_ranks:
        results.add(folder.logs / f"rank{rank}.log", f"logs/rank{rank}.log")
    results.add(folder.logs / f"launcher{node}.log", f"{INTERNAL_FOLDER}launcher{node}.log")
    results.add(folder.path / "supervisor.log", f"{INTERNAL_FOLDER}supervisor{node}.log")
    results.add(folder.samples, f"{INTERNAL_FOLDER}samples{node}.json")
    results.add_tree(folder.run, f"{results.node}/run")
    for output in dict.fromkeys([*launched.outputs, *request.outputs]):
        results.add_output(output)
    results.add_changed(json.loads(folder.snapshot.read_text(encoding="utf-8")), _next_job(folder, launched))
    results.make_result_paths_unique()
    if request.events is not None:
        results.keep_new_events(request.events)
    results.add_links()
    return results.listed()


def sample(path: Path, size: int) -> str:
    """Return a hash of a file's first `size` bytes, or of some blocks if there are many bytes. Raises
    OSError.

    Files with the same sample are very likely equal.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        for at in (*range(0, size, max(_BLOCK, size // _BLOCKS)), max(0, size - _BLOCK)):
            file.seek(at)
            digest.update(file.read(min(_BLOCK, size - at)))
    return digest.hexdigest()


def digest(path: Path) -> str:
    """Return a file's SHA-256. Raises OSError."""
    sha256 = hashlib.sha256()
    with open_file(path) as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            sha256.update(block)
    return sha256.hexdigest()


class ManifestEntry(OmitsUnset):
    """A file, a link or a skipped path in the list of results.

    `path` is absolute and without links, and `home` is the file's unique path in the results folder.
    `limited` is true if the file counts against job.results_limit, `ephemeral` if it is lost when the
    instance stops, `sparse` if it has holes, and `writing` if it is being written. A small file has `data`
    (base64). `changed` (ns) and `inode` show whether a file was rewritten with the same size and modification
    time. A synced file has a `digest` if only its change time has changed (for example after chown -R). A
    link has a `target`, a path in the results folder. A skipped path has the reason `why`. If the job created
    the path, `owed` is true, and the node must be kept.
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


class _ExcludePatterns:
    """The patterns in job.exclude, and the number and total size of the files that they exclude.

    The last pattern that matches a file decides whether the file is excluded.
    """

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


class _ResultsList:
    def __init__(self, node: int, workdir: Path, folder: JobFolder, request: Manifest) -> None:
        self.node, self._excluded = f"node{node}", _ExcludePatterns(request.exclude)
        self._at_once = self._data_left = request.at_once
        self._logs_folder = resolve_links(folder.logs)
        self._workdir = resolve_links(workdir)
        self._roots = [(resolve_links(folder.run), f"{self.node}/run"), (self._workdir, self.node)]
        self._lines: list[ManifestEntry] = []
        self._skipped: list[ManifestEntry] = []
        self._ctime_changed: set[Path] = set()
        self._digests_left = DIGEST_BYTES
        self._path_of: dict[Path, str] = {}  # the results path of each added file and link
        self._parents: dict[Path, Path] = {}
        self._links: list[tuple[Path, str, bool]] = []

    def listed(self) -> Response:
        """Return the response. A single entry represents all files that do not fit into the list.

        `excluded` counts the files and bytes that match the request's `exclude`.
        """
        self._read_files()
        room, omitted_sizes = LIST_BYTES, []

        def fits(line: ManifestEntry) -> bool:
            nonlocal room
            room -= len(json.dumps(vars(line)))
            if room < 0 and (line.owed or not (line.why or line.target)):
                omitted_sizes.append(line.size)
            return room >= 0

        files = [line for line in self._lines if not line.why and fits(line)]
        skipped = [line for line in self._skipped if fits(line)]
        if omitted_sizes:
            why = f"{len(omitted_sizes)} files do not fit into the list of results; write fewer, larger files"
            skipped.append(
                ManifestEntry(path=str(self._workdir), size=sum(omitted_sizes), why=why, owed=True)
            )
        excluded = {"files": self._excluded.files, "size": self._excluded.size}
        return Response(files=files, skipped=skipped, excluded=excluded)

    def _read_files(self) -> None:
        """Read the files, and mark those that may be incomplete because a process is writing to them.

        Removes the data of files that have changed since they were read.
        """
        files = [line for line in self._lines if not line.target and self._read(line)]
        opened = _open_for_writing()
        for line in files:
            _mark_writing(line, opened)

    def _read(self, line: ManifestEntry) -> bool:
        """Set a file's stamp and, if the file is small, its data. Return False if the file is unreadable."""
        path = Path(line.path)
        try:
            info = path.stat()
            line.size, line.modified, line.changed, line.inode = stat_stamp(info)
            if self._at_once:
                line.sample = sample(path, line.size)
                if path in self._ctime_changed and line.size <= self._digests_left:
                    line.digest = digest(path)
                    self._digests_left -= line.size
            # A client that follows the job has the logs.
            is_log = path.parent == self._logs_folder and line.size
            if line.size <= self._data_left and not is_log:
                with open_file(path) as file:
                    line.data = base64.b64encode(file.read(line.size)).decode()
                self._data_left -= line.size
        except OSError as error:
            line.why = error.strerror or str(error)
            if not isinstance(error, FileNotFoundError):
                self.skip(path, line.why, owed=True)
        return not line.why

    def add(self, path: Path, result_path: str, *, limited: bool = False) -> None:
        """Add a file, or queue a link. A path that was already added is ignored."""
        path = self._resolved(path)
        if path in self._path_of:
            return
        try:
            info = path.lstat()
            self._path_of[path] = result_path
            if stat.S_ISLNK(info.st_mode):
                self._links.append((path, result_path, limited))
            elif stat.S_ISREG(info.st_mode):
                self._add_file(path, result_path, info, limited)
            else:
                self.skip(path, file_kind(info.st_mode))
        except FileNotFoundError:
            return
        except OSError as error:
            self.skip(path, error.strerror or str(error), owed=True)

    def add_tree(self, top: Path, result_path: str) -> None:
        """Add all files under a folder. `result_path` is the folder's path in the results folder."""

        def skip_unreadable(path: str, why: str) -> None:
            self.skip(top / path, why, owed=True)

        for path, _ in walk(top, skip_unreadable):
            self.add(top / path, f"{result_path}/{path}")

    def add_output(self, output: str) -> None:
        """Add the file or folder `output`, whose path is absolute, under ~, or relative to the project
        folder.

        A link to a folder outside the project folder is followed.
        """
        # A folder named ~ can be given as "./~".
        expanded = Path(output).expanduser() if output.startswith("~") else output
        path = self._resolved(Path(os.path.normpath(str(self._workdir / expanded))))
        target = resolve_links(path)
        result_path = self._results_path(target) or self._path_of_output(path)
        if not path.is_dir():
            if not os.path.lexists(str(path)):
                self.skip(path, "it does not exist")
            self.add(path, self._results_path(path) or result_path)
            return
        if path != target and self._results_path(target) is not None:
            self.add(path, self._results_path(path) or self._path_of_output(path))
        elif self._results_path(target) is None:
            self._path_of[path] = result_path
            self._roots.append((target, result_path))
        self.add_tree(target, result_path)

    def add_changed(self, before: dict[str, list[int]], later: tuple[str, int] | None) -> None:
        """Add the project folder's new and changed files. `before` has the stamps from the snapshot.

        `later` is the next job in the folder (name, launch time in ns). Skips files that were written after
        that job's launch.
        """

        def skip_unreadable(path: str, why: str) -> None:
            if before.get(path) != [] and not self._excluded.match(f"{path}/"):
                self.skip(self._workdir / path, why, owed=True)

        for path, info in walk(self._workdir, skip_unreadable):
            absolute = self._workdir / path
            then, now = before.get(path, []), make_stamp(absolute, info)
            if self._resolved(absolute) in self._path_of or is_same_stamp(then, now):
                continue
            was_touched = is_touched(then, now)
            if was_touched and stat.S_ISLNK(info.st_mode) and self._results_path(resolve_links(absolute)):
                continue  # the file that the link points to is checked separately
            if later is not None and info.st_ctime_ns > later[1]:
                why = f"job {later[0]} has written to the file since its launch"
                self._skipped.append(
                    ManifestEntry(path=str(absolute), home=f"{self.node}/{path}", size=0, why=why)
                )
            elif not self._excluded.count(path, info.st_size):
                self.add(absolute, f"{self.node}/{path}", limited=True)
                if was_touched:
                    self._ctime_changed.add(self._resolved(absolute))

    def make_result_paths_unique(self) -> None:
        """Make each file's and link's results path unique with a suffix: model.pt, model.pt~2, model.pt~3.

        Files come before links; both are sorted by path.
        """
        result_paths = [line.home for line in self._lines] + [path for _, path, _ in self._links]
        taken: set[str] = set()
        if len(set(result_paths)) == len(result_paths):
            return
        files, links = (Path(line.path) for line in self._lines), (path for path, *_ in self._links)
        for paths in (files, links):
            for path in sorted(paths, key=lambda path: (self._path_of[path], str(path))):
                result_path, count = self._path_of[path], 1
                while self._path_of[path] in taken:
                    count += 1
                    self._path_of[path] = _add_suffix(result_path, count)
                taken.add(self._path_of[path])
        for line in self._lines:
            line.home = self._path_of[Path(line.path)]

    def keep_new_events(self, client_sizes: Mapping[str, int]) -> None:
        """Keep only event files that differ in size from the client's copies and that fit in the list."""
        self._links = []
        self._lines = [
            line
            for line in self._lines
            if Path(line.path).name.startswith(EVENTS)
            and line.size <= self._data_left
            and client_sizes.get(line.home) != line.size
        ]

    def add_links(self) -> None:
        """Add the queued links, once all files to fetch have been added."""
        for path, _, limited in self._links:
            result_path = self._path_of[path]
            try:
                self._add_link(path, result_path, limited)
            except FileNotFoundError:
                continue
            except OSError as error:
                is_dangling = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
                self.skip(path, error.strerror or str(error), owed=not is_dangling)

    def skip(self, path: Path, why: str, *, owed: bool = False) -> None:
        """Add a path that is not fetched.

        `owed` means that the job created the path, so that the node must be kept.
        """
        self._skipped.append(ManifestEntry(path=str(path), size=0, why=why, owed=owed))

    def _add_link(self, path: Path, result_path: str, limited: bool) -> None:
        """Add a link as a link if its target is fetched. Otherwise, add the file that the link points to."""
        next_target, target = readlink(path), resolve_links(path)
        target_path = self._path_of.get(target) or self._results_path(target)
        if target_path is not None and (
            target in self._path_of or not target.is_file() or self._excludes(target)
        ):
            next_path = self._path_of.get(next_target)
            if next_path is None and resolve_links(next_target) == target:
                next_path = self._results_path(next_target)
            self._lines.append(
                ManifestEntry(path=str(path), home=result_path, size=0, target=next_path or target_path)
            )
        elif target.is_file():
            self._add_file(path, result_path, target.stat(), limited)
        elif target.is_dir():
            self.skip(path, f"a link to the folder {target}, which is fetched if an --output names the link")
        else:
            self.skip(path, f"a link to {target}, which is not a file")

    def _add_file(self, path: Path, result_path: str, info: os.stat_result, limited: bool) -> None:
        line = ManifestEntry(path=str(path), home=result_path, size=info.st_size, limited=limited)
        if info.st_size - info.st_blocks * 512 >= HOLES_BYTES:
            line.sparse = True
        if is_ephemeral(info.st_dev):
            line.ephemeral = True
        self._lines.append(line)

    def _results_path(self, path: Path) -> str | None:
        """Return the results path for a path without links, or None if the path is not fetched."""
        for root, result_path in self._roots:
            if path == root or root in path.parents:
                return os.path.normpath(f"{result_path}/{path.relative_to(root)}")
        return None

    def _excludes(self, path: Path) -> bool:
        return self._workdir in path.parents and self._excluded.match(str(path.relative_to(self._workdir)))

    def _resolved(self, path: Path) -> Path:
        """Return a path with the links in its folder's path resolved."""
        if path.parent not in self._parents:
            self._parents[path.parent] = resolve_links(path.parent)
        return self._parents[path.parent] / path.name

    def _path_of_output(self, path: Path) -> str:
        """Return an output's results path, which is derived from the path that the user gave."""
        if self._workdir in path.parents:
            return f"{self.node}/{path.relative_to(self._workdir)}"
        return f"{self.node}/outside{path}"


def _next_job(folder: JobFolder, launched: Launch) -> tuple[str, int] | None:
    """Return the name and launch time (ns) of the next job in this job's project folder, or None.

    Only jobs that were launched after this job's end count.
    """
    if not folder.document().final:
        return None
    last_file = folder.state if folder.state.exists() else folder.path / "job.json"
    ended_ns = last_file.stat().st_mtime_ns
    for other in list_job_folders(folder.path.parent):  # oldest first
        at_ns = (other.path / "job.json").stat().st_mtime_ns
        if other.job != folder.job and at_ns > ended_ns and other.request().workdir == launched.workdir:
            return other.job, at_ns
    return None


def _add_suffix(result_path: str, count: int) -> str:
    """Return a path with a suffix. The name is truncated to the file system's maximum length."""
    folder, _, name = result_path.rpartition("/")
    suffix = f"~{count}"
    return f"{folder}/{os.fsdecode(os.fsencode(name)[: _MAX_NAME - len(suffix)])}{suffix}"


def _mark_writing(line: ManifestEntry, opened: Mapping[tuple[int, int], bool]) -> None:
    """Mark a file that is being written. Logs are not marked, because they are only appended to."""
    try:
        now = Path(line.path).stat()
    except OSError:
        return
    appends = opened.get((now.st_dev, now.st_ino))
    if not line.home.startswith(("logs/", INTERNAL_FOLDER)) and (
        appends is False or _is_recent_of_other_user(now)
    ):
        line.writing = True
    if not appends and (now.st_size, in_range(now.st_mtime_ns)) != (line.size, line.modified):
        line.data = None


def _open_for_writing() -> dict[tuple[int, int], bool]:
    """Return {(device, inode): value} for the files that this user's processes have open for writing.

    The value is True if the processes only append to the file.
    """
    files: dict[tuple[int, int], bool] = {}
    for name in glob.glob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 (unlike pathlib it skips processes that end)
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


def _is_recent_of_other_user(info: os.stat_result) -> bool:
    """Return True if the file was just written by another user, whose open files are not visible."""
    return os.getuid() not in (0, info.st_uid) and time.time() - info.st_mtime < _FRESH_SECONDS
