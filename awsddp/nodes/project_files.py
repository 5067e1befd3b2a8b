"""Which files of the working folder go to the nodes."""

import contextlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.model.events import Event, OnEvent
from awsddp.nodes.ignores import Rules, rules, rules_of, rules_of_git, tracked_files
from awsddp.settings.spec import JobSpec
from awsddp.util.parallel import ignore

_MOST_BYTES = 100 * 10**9
_MOST_FILES = 200_000
_NEVER = frozenset({".git", ".venv", "__pycache__", ".awsddp"})
_OURSELVES = "awsddp"
_MOST_LINKS = 40  # as Linux follows
ASTRAY = "a link into the folder by a path that the nodes do not have"
OUT = "a link that leads out of the folder"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One path to send, relative to the folder, with "/" between its parts.

    `kind` is f (a file), l (a link) or d (a folder that would be empty). Bytes of a name that are no UTF-8
    are kept as Python's surrogates (os.fsencode gives them back). `mode` holds the permission bits. `version`
    changes with every write, whatever time a program sets: the time of change and the inode.
    """

    path: str
    kind: str
    mode: int
    size: int
    mtime_ns: int
    version: str = "-"


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What of a folder is sent. `skipped` tells what is not, and why: links that lead out, sockets.

    `kept` are the paths that stay here, a folder with a "/" at its end, each with what names it: an
    ignore file, "sync.ignore", or "awsddp" (results, virtual environments).
    """

    root: Path
    entries: list[Entry] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(entry.size for entry in self.entries)

    def keeper(self, path: str) -> tuple[str, str] | None:
        """Return what of `kept` is `path` (relative), or is a folder that holds it, and what names it."""
        return next(
            ((kept, by) for kept, by in self.kept if f"{path}/".startswith(f"{kept.rstrip('/')}/")), None
        )

    def largest(self, count: int = 3) -> tuple[tuple[str, int], ...]:
        """Return the top folders and files with the most bytes: what to name in .awsddpignore first."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            top, slash, _ = entry.path.partition("/")
            sizes[top + slash] = sizes.get(top + slash, 0) + entry.size
        return tuple(sorted(sizes.items(), key=lambda item: -item[1])[:count])


def project_files(job: JobSpec, *, home: Path, on_event: OnEvent = ignore) -> Listing:
    """Return what to send of the working folder of a job; `home` is $AWSDDP_HOME. Raises ConfigError."""
    workdir, results = Path(job.sync.workdir), job.job.results
    listing = files_to_send(workdir, job.sync.ignore, results=results, exclude=(home,))
    for path, why in listing.skipped:
        on_event(Event(f"not sent: {path}: {why}"))
    return listing


def files_to_send(
    workdir: Path, ignore: Sequence[str] = (), *, results: str = "runs", exclude: Iterable[Path] = ()
) -> Listing:
    """Return what of `workdir` is sent.

    `ignore` holds gitignore patterns that win over those of the ignore files; `results` is the folder of
    results, `exclude` holds folders (awsddp's own home) that are never sent. Raises ConfigError for a folder
    that is not there, that cannot be meant (/, the home folder), or that is far too large.
    """
    root = _checked(workdir)
    never = {os.path.realpath(path) for path in (*exclude, root / results)}
    walk = _Walk(root, ignore, never)
    walk.add_folder("", walk.above())
    walk.add_tracked()
    return walk.found


def _checked(workdir: Path) -> Path:
    root = workdir.resolve()
    if not root.is_dir():
        raise ConfigError(f"folder to sync not found: {workdir}", "", "set sync.workdir")
    home = Path.home().resolve()
    if root == home or root in home.parents:
        raise ConfigError(
            f"the folder to sync is {root}",
            "the whole home folder or system would be sent to every node",
            "go to your project's folder (cd), or set sync.workdir",
        )
    return root


class _Walk:
    """Walks the folder once, with the ignore files met on the way."""

    def __init__(self, root: Path, ignore: Sequence[str], never: set[str]) -> None:
        self.found = Listing(root=root)
        self._name = ".awsddpignore" if (root / ".awsddpignore").is_file() else ".gitignore"
        self._own = rules(ignore, "sync.ignore")
        self._never = never
        self._size = 0

    def above(self) -> tuple[Rules, ...]:
        """Return the rules that hold for all of the folder and are not in it."""
        return rules_of_git(self.found.root) if self._name == ".gitignore" else ()

    def add_folder(self, folder: str, specs: tuple[Rules, ...]) -> int:
        """Add what a folder holds; return how many entries that gave. `folder` is "" or ends with "/"."""
        try:
            found = sorted(os.scandir(Path(self.found.root, folder)), key=lambda item: item.name)
        except OSError as error:
            self.found.skipped.append((folder, error.strerror or str(error)))
            return 1
        names = {item.name for item in found}
        if folder and "pyvenv.cfg" in names:
            self.found.kept.append((folder, _OURSELVES))  # it holds paths of this machine
            return 1
        if self._name in names:
            path = folder + self._name
            specs = (rules_of(Path(self.found.root, path), path, folder=folder), *specs)
        before = len(self.found.entries)
        for item in found:
            path = folder + item.name
            is_folder = item.is_dir(follow_symlinks=False)
            if item.name in _NEVER:
                continue
            if by := self._ignored_by(path + "/" * is_folder, specs):
                self.found.kept.append((path + "/" * is_folder, by))
            elif is_folder:
                if os.path.realpath(item.path) in self._never:
                    self.found.kept.append((path + "/", _OURSELVES))
                elif not self.add_folder(path + "/", specs):
                    self._add(path, "d", item.stat(follow_symlinks=False))
            else:
                self._file(path, item)
        return len(self.found.entries) - before

    def add_tracked(self) -> None:
        """Add the files that git tracks although an ignore file of its names them."""
        if self._name != ".gitignore" or all(by in (_OURSELVES, "sync.ignore") for _, by in self.found.kept):
            return
        sent = {entry.path for entry in self.found.entries}
        try:
            tracked = tracked_files(self.found.root)
        except OSError as error:
            self.found.skipped.append(("files that git tracks and ignores", str(error)))
            return
        for path in tracked:
            whole = Path(self.found.root, path)
            is_ours = _NEVER.intersection(Path(path).parts) or self._own.spec.check_file(path).include
            is_ours = is_ours or any(os.path.realpath(folder) in self._never for folder in whole.parents)
            if path not in sent and not is_ours and whole.is_file() and not whole.is_symlink():
                self._add(path, "f", whole.lstat())

    def _ignored_by(self, path: str, specs: tuple[Rules, ...]) -> str:
        """Return what keeps the path here, "" if it goes.

        As git decides: the innermost file that names it, and in it the last line that does.
        """
        for one in (self._own, *specs):
            # Here "!/data/" lets in all that data/ holds, whatever an ignore file says of it.
            verdict = one.spec.check_file(path).include if one is self._own else one.verdict(path)
            if verdict is not None:
                return one.by if verdict else ""
        return ""

    def _file(self, path: str, item: "os.DirEntry[str]") -> None:
        found = item.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            self._add(path, "f", found)
        elif not stat.S_ISLNK(found.st_mode):
            self.found.skipped.append((path, "neither a file nor a folder"))
        elif _leads_out(self.found.root, path):
            is_within = Path(os.path.realpath(item.path)).is_relative_to(self.found.root)
            self.found.skipped.append((path, ASTRAY if is_within else OUT))
        else:
            self._add(path, "l", found)

    def _add(self, path: str, kind: str, status: os.stat_result) -> None:
        size = 0 if kind == "d" else status.st_size
        mode = 0 if kind == "l" else stat.S_IMODE(status.st_mode) & 0o777
        mtime_ns = 0 if kind == "d" else status.st_mtime_ns
        found = self.found
        version = "-" if kind == "d" else f"{status.st_ctime_ns}.{status.st_ino}"
        one = Entry(path=path, kind=kind, mode=mode, size=size, mtime_ns=mtime_ns, version=version)
        found.entries.append(one)
        self._size += size
        if len(found.entries) > _MOST_FILES or self._size > _MOST_BYTES:
            largest = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in found.largest())
            raise ConfigError(
                f"the folder to sync, {found.root}, is far too large",
                f"over {len(found.entries):,} files or {self._size / 1e9:.0f} GB; the largest: {largest}",
                "name what is not needed in .awsddpignore, or set sync.workdir",
            )


def _leads_out(root: Path, path: str) -> bool:
    """Tell whether a link leads elsewhere on a node: its text, or one on its way, leaves the folder."""
    at: list[str] = []
    pending, links = path.split("/")[::-1], 0
    while pending and links <= _MOST_LINKS:  # a loop stays in the folder
        name = pending.pop()
        if name == "..":
            if not at:
                return True
            at.pop()
        elif name not in ("", "."):
            at.append(name)
            with contextlib.suppress(OSError):  # what is no link
                text = os.fspath(Path(root, *at).readlink())
                if text.startswith("/"):
                    return True
                at.pop()
                pending += text.split("/")[::-1]
                links += 1
    return False
