"""What of a folder is sent to the nodes: everything, less what .awsddpignore (else .gitignore) names."""

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from awsddp.errors import ConfigError

_NEVER = frozenset({".git", ".venv", "__pycache__", ".awsddp"})
_OURSELVES = "awsddp"
_MOST_FILES = 200_000
_MOST_BYTES = 100 * 10**9
_Spec = tuple[str, GitIgnoreSpec]
"""Patterns, and what holds them: the path of an ignore file, or sync.ignore."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One path to send, relative to the folder, with "/" between its parts.

    `kind` is f (a file), l (a link) or d (a folder that would be empty). Bytes of a name that are no UTF-8
    are kept as Python's surrogates (os.fsencode gives them back). `mode` holds the permission bits.
    """

    path: str
    kind: str
    mode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What of a folder is sent. `skipped` tells what is not, and why: links that lead out, sockets.

    `kept` are the paths that stay here, a folder with a "/" at its end, each with what names it: an
    ignore file, "sync.ignore", or "awsddp" (results, virtual environments).
    """

    root: Path
    entries: tuple[Entry, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    kept: tuple[tuple[str, str], ...] = ()

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
    return _Walk(root, ignore, never).listing()


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
        self._root = os.fspath(root)
        self._name = ".awsddpignore" if (root / ".awsddpignore").is_file() else ".gitignore"
        self._own = _spec(ignore, "sync.ignore")
        self._never = never
        self._entries: list[Entry] = []
        self._skipped: list[tuple[str, str]] = []
        self._kept: list[tuple[str, str]] = []
        self._size = 0

    def listing(self) -> Listing:
        self._folder("", ())
        return Listing(
            root=Path(self._root),
            entries=tuple(self._entries),
            skipped=tuple(self._skipped),
            kept=tuple(self._kept),
        )

    def _folder(self, folder: str, specs: tuple[_Spec, ...]) -> int:
        """Add what a folder holds; return how many entries that gave. `folder` is "" or ends with "/"."""
        try:
            found = sorted(os.scandir(Path(self._root, folder)), key=lambda item: item.name)
        except OSError as error:
            self._skipped.append((folder, error.strerror or str(error)))
            return 1
        names = {item.name for item in found}
        if folder and "pyvenv.cfg" in names:
            self._kept.append((folder, _OURSELVES))  # it holds paths of this machine
            return 1
        if self._name in names:
            specs = (self._ignore_file(folder + self._name), *specs)
        before = len(self._entries)
        for item in found:
            path = folder + item.name
            is_folder = item.is_dir(follow_symlinks=False)
            if item.name in _NEVER:
                continue
            if by := self._ignored_by(path + "/" * is_folder, specs):
                self._kept.append((path + "/" * is_folder, by))
            elif is_folder:
                if os.path.realpath(item.path) in self._never:
                    self._kept.append((path + "/", _OURSELVES))
                elif not self._folder(path + "/", specs):
                    self._add(path, "d", item.stat(follow_symlinks=False))
            else:
                self._file(path, item)
        return len(self._entries) - before

    def _ignored_by(self, path: str, specs: tuple[_Spec, ...]) -> str:
        """Return what keeps the path here, "" if it goes.

        As git decides: the innermost file that names it, and in it the last line that does.
        """
        for place, spec in (self._own, *specs):
            verdict = spec.check_file(path[place.rfind("/") + 1 :]).include  # relative to the file's folder
            if verdict is not None:
                return place if verdict else ""
        return ""

    def _ignore_file(self, path: str) -> _Spec:
        try:
            text = Path(self._root, path).read_bytes().decode("utf-8-sig", "surrogateescape")
        except OSError as error:
            raise ConfigError(f"cannot read {path}", error.strerror or str(error)) from error
        return _spec(text.splitlines(), path)

    def _file(self, path: str, item: "os.DirEntry[str]") -> None:
        found = item.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            self._add(path, "f", found)
        elif not stat.S_ISLNK(found.st_mode):
            self._skipped.append((path, "neither a file nor a folder"))
        elif _leads_out(self._root, path):
            self._skipped.append((path, "a link that leads out of the folder"))
        else:
            self._add(path, "l", found)

    def _add(self, path: str, kind: str, found: os.stat_result) -> None:
        size = 0 if kind == "d" else found.st_size
        mode = 0 if kind == "l" else stat.S_IMODE(found.st_mode) & 0o777
        mtime_ns = 0 if kind == "d" else found.st_mtime_ns
        self._entries.append(Entry(path=path, kind=kind, mode=mode, size=size, mtime_ns=mtime_ns))
        self._size += size
        if len(self._entries) > _MOST_FILES or self._size > _MOST_BYTES:
            sofar = Listing(root=Path(self._root), entries=tuple(self._entries))
            largest = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in sofar.largest())
            raise ConfigError(
                f"the folder to sync, {self._root}, is far too large",
                f"over {len(self._entries):,} files or {self._size / 1e9:.0f} GB; the largest: {largest}",
                "name what is not needed in .awsddpignore, or set sync.workdir",
            )


def _spec(lines: Iterable[str], place: str) -> _Spec:
    try:
        return place, GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ConfigError(f"{place}: not a gitignore pattern", str(error)) from error


def _leads_out(root: str, path: str) -> bool:
    """Whether a link would point to something else on another machine."""
    link = Path(root, path)
    return link.readlink().is_absolute() or not Path(os.path.realpath(link)).is_relative_to(root)
