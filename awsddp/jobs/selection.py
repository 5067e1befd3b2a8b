"""Which results are fetched, and under which names: the nodes' lists, the limit, and earlier fetches."""

import posixpath
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import fsdecode, fsencode

from awsddp import harmless
from awsddp.answers import Manifest, ResultFile
from awsddp.errors import ConfigError
from awsddp.records import HomeLink

_LONGEST = 255  # bytes of a name, on all file systems of today


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
