"""List the files in the project folder that are synced to the nodes."""

import contextlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.model.events import Event, OnEvent
from awsddp.nodes.ignores import Rules, list_tracked_files, parse_rules, read_git_rules, read_rules
from awsddp.settings.spec import JobSpec
from awsddp.util.parallel import ignore_event

_MOST_BYTES = 100 * 10**9
_MOST_FILES = 200_000
_NEVER = frozenset({".git", ".venv", "__pycache__", ".awsddp"})
_AWSDDP = "awsddp"
_MOST_LINKS = 40  # the maximum number of symbolic links that Linux follows in a path
UNRESOLVABLE_LINK = "a link into the folder by a path that the nodes do not have"
EXTERNAL_LINK = "a link that leads out of the folder"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A path to send, relative to the project folder, with "/" between its parts.

    `kind` is f (a file), l (a link) or d (an empty folder). Bytes in a name that are not UTF-8 are stored as
    Python's surrogates (os.fsencode restores them). `mode` holds the permission bits. `version` holds the
    ctime and the inode. It changes with every write, even if a program sets the mtime.
    """

    path: str
    kind: str
    mode: int
    size: int
    mtime_ns: int
    version: str = "-"


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The entries in a folder that are sent.

    `skipped`: paths that cannot be sent, such as sockets and links that lead out of the folder, each with the
    reason. `ignored`: paths that are not sent (folders end with "/"), each with the source of the rule that
    ignores it: an ignore file, "sync.ignore", or "awsddp" (for results and virtual environments).
    """

    root: Path
    entries: list[Entry] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The entries' total size in bytes."""
        return sum(entry.size for entry in self.entries)

    def find_ignored(self, path: str) -> tuple[str, str] | None:
        """Return the item in `ignored` that is the relative path `path` or contains it, or None."""
        for ignored, source in self.ignored:
            if f"{path}/".startswith(f"{ignored.rstrip('/')}/"):
                return ignored, source
        return None

    def largest(self, count: int = 3) -> tuple[tuple[str, int], ...]:
        """Return the top-level folders and files with the most bytes, largest first."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            top, slash, _ = entry.path.partition("/")
            sizes[top + slash] = sizes.get(top + slash, 0) + entry.size
        return tuple(sorted(sizes.items(), key=lambda item: -item[1])[:count])


def list_project_files(job: JobSpec, *, awsddp_home: Path, on_event: OnEvent = ignore_event) -> Listing:
    """Return the files in a job's project folder that are sent. Raises ConfigError."""
    workdir, results = Path(job.sync.workdir), job.job.results
    listing = list_files_to_send(workdir, job.sync.ignore, results=results, exclude=(awsddp_home,))
    for path, why in listing.skipped:
        on_event(Event(f"not sent: {path}: {why}"))
    return listing


def list_files_to_send(
    workdir: Path, ignore: Sequence[str] = (), *, results: str = "runs", exclude: Iterable[Path] = ()
) -> Listing:
    """Return the files in `workdir` that are sent.

    `ignore`: gitignore patterns that override those in ignore files. `results`: the results folder.
    `exclude`: folders that are never sent, such as AWSDDP_HOME. Raises ConfigError if `workdir` does not
    exist, is / or a home folder, or is far too large.
    """
    root = _check_folder(workdir)
    never = {os.path.realpath(path) for path in (*exclude, root / results)}
    walk = _Walk(root, ignore, never)
    walk.add_folder("", walk.git_rules())
    walk.add_tracked()
    return walk.listing


def _check_folder(workdir: Path) -> Path:
    """Return the resolved path of a folder after checking that it can be synced. Raises ConfigError."""
    root = workdir.resolve()
    if not root.is_dir():
        raise ConfigError(f"folder to sync not found: {workdir}", "", "set sync.workdir")
    user_home = Path.home().resolve()
    if root == user_home or root in user_home.parents:
        raise ConfigError(
            f"the folder to sync is {root}",
            "the whole home folder or system would be sent to every node",
            "go to your project's folder (cd), or set sync.workdir",
        )
    return root


class _Walk:
    """A single walk through the folder that applies its ignore files."""

    def __init__(self, root: Path, ignore: Sequence[str], never: set[str]) -> None:
        self.listing = Listing(root=root)
        self._name = ".awsddpignore" if (root / ".awsddpignore").is_file() else ".gitignore"
        self._settings_rules = parse_rules(ignore, "sync.ignore")
        self._never = never
        self._size = 0

    def git_rules(self) -> tuple[Rules, ...]:
        """Return git's rules from outside the folder, or () if the folder has an .awsddpignore."""
        return read_git_rules(self.listing.root) if self._name == ".gitignore" else ()

    def add_folder(self, folder: str, specs: tuple[Rules, ...]) -> int:
        """Add a folder's content and return the number of entries. `folder` is "" or ends with "/"."""
        try:
            items = sorted(os.scandir(Path(self.listing.root, folder)), key=lambda item: item.name)
        except OSError as error:
            self.listing.skipped.append((folder, error.strerror or str(error)))
            return 1
        names = {item.name for item in items}
        if folder and "pyvenv.cfg" in names:
            self.listing.ignored.append((folder, _AWSDDP))  # its paths exist only on this machine
            return 1
        if self._name in names:
            path = folder + self._name
            specs = (read_rules(Path(self.listing.root, path), path, folder=folder), *specs)
        before = len(self.listing.entries)
        for item in items:
            path = folder + item.name
            is_folder = item.is_dir(follow_symlinks=False)
            if item.name in _NEVER:
                continue
            if source := self._ignored_by(path + "/" * is_folder, specs):
                self.listing.ignored.append((path + "/" * is_folder, source))
            elif is_folder:
                if os.path.realpath(item.path) in self._never:
                    self.listing.ignored.append((path + "/", _AWSDDP))
                elif not self.add_folder(path + "/", specs):
                    self._add(path, "d", item.stat(follow_symlinks=False))
            else:
                self._add_file(path, item)
        return len(self.listing.entries) - before

    def add_tracked(self) -> None:
        """Add the files that git tracks although a .gitignore matches them."""
        sources = {source for _, source in self.listing.ignored}
        if self._name != ".gitignore" or sources <= {_AWSDDP, "sync.ignore"}:
            return
        sent = {entry.path for entry in self.listing.entries}
        try:
            tracked = list_tracked_files(self.listing.root)
        except OSError as error:
            self.listing.skipped.append(("files that git tracks and ignores", str(error)))
            return
        for path in tracked:
            file = Path(self.listing.root, path)
            is_excluded = (
                _NEVER.intersection(Path(path).parts)
                or self._settings_rules.spec.check_file(path).include
                or any(os.path.realpath(folder) in self._never for folder in file.parents)
            )
            if path not in sent and not is_excluded and file.is_file() and not file.is_symlink():
                self._add(path, "f", file.lstat())

    def _ignored_by(self, path: str, specs: tuple[Rules, ...]) -> str:
        """Return the source of the rule that ignores a path, or "" if the path is sent.

        As in git, the innermost ignore file with a matching line decides. If several lines in that file
        match, the last of these lines decides.
        """
        # "!/data/" in sync.ignore includes all of data/, even if ignore files match.
        include = self._settings_rules.spec.check_file(path).include
        if include is not None:
            return self._settings_rules.source if include else ""
        for file_rules in specs:
            verdict = file_rules.verdict(path)
            if verdict is not None:
                return file_rules.source if verdict else ""
        return ""

    def _add_file(self, path: str, item: "os.DirEntry[str]") -> None:
        status = item.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            self._add(path, "f", status)
        elif not stat.S_ISLNK(status.st_mode):
            self.listing.skipped.append((path, "neither a file nor a folder"))
        elif _leads_out(self.listing.root, path):
            is_within = Path(os.path.realpath(item.path)).is_relative_to(self.listing.root)
            self.listing.skipped.append((path, UNRESOLVABLE_LINK if is_within else EXTERNAL_LINK))
        else:
            self._add(path, "l", status)

    def _add(self, path: str, kind: str, status: os.stat_result) -> None:
        size = 0 if kind == "d" else status.st_size
        mode = 0 if kind == "l" else stat.S_IMODE(status.st_mode) & 0o777
        mtime_ns = 0 if kind == "d" else status.st_mtime_ns
        version = "-" if kind == "d" else f"{status.st_ctime_ns}.{status.st_ino}"
        entry = Entry(path=path, kind=kind, mode=mode, size=size, mtime_ns=mtime_ns, version=version)
        listing = self.listing
        listing.entries.append(entry)
        self._size += size
        if len(listing.entries) > _MOST_FILES or self._size > _MOST_BYTES:
            largest = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in listing.largest())
            raise ConfigError(
                f"the folder to sync, {listing.root}, is far too large",
                f"over {len(listing.entries):,} files or {self._size / 1e9:.0f} GB; the largest: {largest}",
                "add paths that the job does not need to .awsddpignore, or set sync.workdir",
            )


def _leads_out(root: Path, path: str) -> bool:
    """Return True if a link, or another link that it leads through, leads out of the folder `root`."""
    parts: list[str] = []
    pending, links = path.split("/")[::-1], 0
    while pending and links <= _MOST_LINKS:  # links in a loop stay in the folder
        name = pending.pop()
        if name == "..":
            if not parts:
                return True
            parts.pop()
        elif name not in ("", "."):
            parts.append(name)
            with contextlib.suppress(OSError):  # perhaps the path is not a link
                text = os.fspath(Path(root, *parts).readlink())
                if text.startswith("/"):
                    return True
                parts.pop()
                pending += text.split("/")[::-1]
                links += 1
    return False
