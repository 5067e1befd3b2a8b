"""Under which names the results of all nodes come together here, and which are too large."""

import os
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from os import fsdecode, fsencode
from pathlib import Path

from msgspec.structs import replace

from awsddp.agent.manifest import sample
from awsddp.model.node_answers import Manifest, ResultFile
from awsddp.util import terminal_safe

_LONGEST = 255  # bytes of a name, on all file systems of today


def name_at_home(manifests: Mapping[int, Manifest]) -> list[ResultFile]:
    """Return the files, then the links, of all nodes under names that differ on every local file system.

    Names that differ in case or Unicode form only, or are equal, are told apart by a suffix: name~2. Control
    characters are written out, as in "a\\x1b": `ls` and a prompt show a name as it is.
    """
    names = _Names()
    found = [replace(one, node=node) for node, manifest in manifests.items() for one in manifest.files]
    found.sort(key=lambda one: (one.target is not None, one.node, one.home, one.path))
    homes = [names.add(one.home) for one in found]
    return [
        replace(one, home=home, target=one.target and names.of(one.target))
        for one, home in zip(found, homes, strict=True)
    ]


def begins(path: Path, one: ResultFile) -> bool:
    """Tell whether a file begins, in all likelihood, with what a node described. Raises OSError."""
    return sample(path, one.size) == one.sample


def over_limit(files: Iterable[ResultFile], limit: float, *, results: Path) -> list[ResultFile]:
    """Return what exceeds `limit` bytes in all: the largest files are left out first.

    What is in `results` (runs/JOB) already costs nothing more.
    """
    total, excess = 0, []
    for one in sorted(files, key=lambda one: (one.size, one.home)):
        path = results / one.home
        if not one.limited or (os.path.lexists(path) and path.lstat().st_size == one.size):
            continue
        total += one.size
        if total > limit:
            excess.append(one)
    return excess


class _Names:
    """Names within one local folder. The first that asks for a name gets it."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(lambda: 1)
        self._folders = {"": ""}
        self._files: dict[str, str] = {}

    def add(self, path: str) -> str:
        """Return the name of one more file that would be `path`."""
        given = self._free(path)
        self._files.setdefault(path, given)
        return given

    def of(self, path: str) -> str:
        """Return the name of the file or folder that would be `path`, as far as there is one."""
        return self._files.get(path) or self._folders.get(path) or terminal_safe.name(path)

    def _free(self, path: str) -> str:
        above, name = posixpath.split(path)
        if above not in self._folders:
            self._folders[above] = self._free(above)
        folder = self._folders[above]
        name = fsdecode(fsencode(terminal_safe.name(name))[:_LONGEST])
        stem = f"{name}~" if _key(name) == ".git" else name  # git runs what the settings in a .git say
        name, wanted = stem, (folder, _key(stem))
        while (folder, _key(name)) in self._taken:
            self._counts[wanted] += 1
            suffix = f"~{self._counts[wanted]}"
            name = fsdecode(fsencode(stem)[: _LONGEST - len(suffix)]) + suffix
        self._taken.add((folder, _key(name)))
        return posixpath.join(folder, name)


def _key(name: str) -> str:
    """Return what names have in common that some file system takes for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
