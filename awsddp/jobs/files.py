"""The files of a job on this machine: the commit of its code, the names of its results, its checkpoint."""

import contextlib
import os
import posixpath
import shutil
import subprocess
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import fsdecode, fsencode
from pathlib import Path, PurePosixPath

from awsddp import harmless
from awsddp.answers import Manifest, ResultFile
from awsddp.errors import ConfigError
from awsddp.records import HomeLink

_GIT_S = 2.0
_LONGEST = 255  # bytes of a name, on all file systems of today
SUFFIXES = (".pt", ".pth", ".ckpt")
_MARKS = (".metadata", "trainer_state.json")
"""Files that make their folder a checkpoint, of torch.distributed.checkpoint and Hugging Face's Trainer: one
node writes them, as the last."""


def commit_of(workdir: Path, *, results: str) -> tuple[str | None, bool | None]:
    """Return the commit of `workdir`, and whether files differ from it (new ones count); None if unknown.

    Ignored files and the folder `results` do not count. Takes 2 s at most, and is silent without git, without
    a repository or without a commit.
    """
    argv = ["git", "-C", os.fspath(workdir), "status", "--porcelain=v2", "--branch", "--no-ahead-behind"]
    inside = not PurePosixPath(results).is_absolute() and ".." not in PurePosixPath(results).parts
    try:
        done = subprocess.run(
            [*argv, "--", ".", *([f":(exclude,literal){results}"] if inside else [])],
            capture_output=True,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    head, *rest = done.stdout.decode(errors="replace").splitlines()
    commit = head.removeprefix("# branch.oid ")
    return (None, None) if commit == "(initial)" else (commit, any(line[:1] != "#" for line in rest))


@dataclass(frozen=True, kw_only=True)
class NodeFile:
    """A result of a node, and its local name: relative to runs/JOB, and unique."""

    node: int
    file: ResultFile
    home: str


def exclude_patterns(lines: Iterable[str]) -> list[tuple[str, bool]]:
    """Return gitignore patterns as the node matches them: regular expressions, and whether each excludes.

    Raises ConfigError.
    """
    from pathspec import GitIgnoreSpec

    try:
        spec = GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ConfigError("job.exclude: not a gitignore pattern", str(error)) from error
    return [
        (one.regex.pattern, one.include) for one in spec.patterns if one.regex and one.include is not None
    ]


def name_at_home(manifests: Mapping[int, Manifest]) -> tuple[list[NodeFile], list[HomeLink]]:
    """Return the files and links of all nodes under names that differ on every local file system.

    Names that differ in case or Unicode form only, or are equal, are told apart by a suffix: name~2. Control
    characters are written out, as in "a\\x1b": `ls` and a prompt show a name as it is.
    """
    names = _Names()
    files = []
    for node, manifest in sorted(manifests.items()):
        for file in sorted(manifest.files, key=lambda file: (file.home, file.path)):
            files.append(NodeFile(node=node, file=file, home=names.add(file.home)))
    links = [link for _, manifest in sorted(manifests.items()) for link in manifest.links]
    placed = [(names.add(link.home), link) for link in sorted(links, key=lambda link: link.home)]
    return files, [
        HomeLink(home=home, target=names.target(home, link.home, link.target)) for home, link in placed
    ]


def over_limit(
    files: Iterable[NodeFile], limit: float, *, is_home: Callable[[NodeFile], bool]
) -> list[NodeFile]:
    """Return what exceeds `limit` bytes in all: the largest files are left out first.

    What is at home already costs nothing more.
    """
    counted = [file for file in files if file.file.limited and not is_home(file)]
    total, excess = 0, []
    for one in sorted(counted, key=lambda one: (one.file.size, one.home)):
        total += one.file.size
        if total > limit:
            excess.append(one)
    return excess


class _Names:
    """Names within one local folder. The first that asks for a name gets it."""

    def __init__(self) -> None:
        self._taken: dict[str, set[str]] = {}
        self._folders = {"": ""}
        self._files: dict[str, str] = {}

    def add(self, path: str) -> str:
        """Return the name of one more file that would be `path`."""
        folder, name = posixpath.split(path)
        given = self._free(self._folder(folder), name)
        self._files.setdefault(path, given)
        return given

    def target(self, home: str, path: str, target: str) -> str:
        """Return the target of the link `home` that would be `path`."""
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        given = self._files.get(place) or self._folders.get(place) or harmless.name(place)
        return posixpath.relpath(f"/{given}", f"/{posixpath.dirname(home)}")

    def _folder(self, path: str) -> str:
        if path not in self._folders:
            parent, name = posixpath.split(path)
            self._folders[path] = self._free(self._folder(parent), name)
        return self._folders[path]

    def _free(self, folder: str, name: str) -> str:
        taken = self._taken.setdefault(folder, set())
        name = fsdecode(fsencode(harmless.name(name))[:_LONGEST])
        stem = f"{name}~" if _key(name) == ".git" else name  # git runs what the settings in a .git say
        name, count = stem, 1
        while _key(name) in taken:
            count += 1
            suffix = f"~{count}"
            name = fsdecode(fsencode(stem)[: _LONGEST - len(suffix)]) + suffix
        taken.add(_key(name))
        return posixpath.join(folder, name)


def _key(name: str) -> str:
    """Return what names have in common that some file system takes for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def newest_checkpoint(results: Path) -> list[Path]:
    """Return the newest checkpoint of `results` (runs/JOB), a file or the parts of a folder, one per node.

    A file or folder run/latest counts before all others. Nodes share no file system: a folder may have files
    on each. Files of such a folder, and those whose end is missing, are not counted. Empty where there is
    none.
    """
    results = results.resolve()
    nodes = sorted(path for path in results.glob("node*") if path.is_dir())
    latest = [one for node in nodes if (one := _inside(node / "run" / "latest", results)) is not None]
    if not latest:
        latest = _checkpoints(nodes)
    if not latest:
        return []
    chosen = max(latest, key=_modified)
    if chosen.is_file():
        return [chosen]
    path = Path(*chosen.relative_to(results).parts[1:])
    return [node / path for node in nodes if (node / path).is_dir()]


def _inside(path: Path, results: Path) -> Path | None:
    """Return what `path` leads to, None where that is nothing, or outside of the results."""
    found = path.resolve()
    return found if found.exists() and found.is_relative_to(results) else None


def _checkpoints(nodes: list[Path]) -> list[Path]:
    paths = [(node, path.relative_to(node)) for node in nodes for path in node.rglob("*") if _is_file(path)]
    folders = {path.parent for _, path in paths if path.name in _MARKS}
    files = [
        node / path
        for node, path in paths
        if path.suffix in SUFFIXES and folders.isdisjoint(path.parents) and _is_whole(node / path)
    ]
    return files + [node / folder for node in nodes for folder in folders if (node / folder).is_dir()]


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_whole(path: Path) -> bool:
    """Tell whether the end of a file of torch.save was written: a rank may be killed while it saves."""
    with path.open("rb") as file:
        begin = file.read(4)
    return begin != b"PK\x03\x04" or zipfile.is_zipfile(path)


def _modified(path: Path) -> float:
    if path.is_file():
        return path.stat().st_mtime
    files = [one.stat().st_mtime for one in path.rglob("*") if one.is_file()]
    return max(files, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the job `job`: a file, or the parts of a folder that its nodes have."""

    job: str
    parts: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Its name in the folder `folder` on a node."""
        return self.parts[0].name

    @property
    def folder(self) -> str:
        """The folder beside the synced one that holds it on a node."""
        return f"resume-{self.job}"

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a folder that holds it alone, for as long as the context; files are linked, not copied."""
        import tempfile

        beside = self.parts[0].parent
        with tempfile.TemporaryDirectory(dir=beside, prefix=".resume-") as folder:
            for part in self.parts:
                if part.is_file():
                    _link(part, Path(folder, self.name))
                else:
                    shutil.copytree(part, Path(folder, self.name), copy_function=_link, dirs_exist_ok=True)
            yield Path(folder)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
