"""Choose local names for all nodes' results, and find the files that exceed the size limit."""

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

_LONGEST = 255  # the longest name, in bytes, that all current file systems allow


def assign_local_names(manifests: Mapping[int, Manifest]) -> list[ResultFile]:
    """Return all nodes' files, then their links, with names that are unique on every local file system.

    Equal names, and names that differ only in case or Unicode form, get a suffix: name~2. Control characters
    are escaped, as in "a\\x1b", because `ls` and prompts would otherwise send them to the terminal.
    """
    names = _Names()
    files = [replace(file, node=node) for node, manifest in manifests.items() for file in manifest.files]
    files.sort(key=lambda file: (file.target is not None, file.node, file.home, file.path))
    local_names = [names.add(file.home) for file in files]
    return [
        replace(file, home=local_name, target=file.target and names.of(file.target))
        for file, local_name in zip(files, local_names, strict=True)
    ]


def matches_sample(path: Path, described: ResultFile) -> bool:
    """Return True if a file begins with the content that a node sent as a sample. Raises OSError."""
    return sample(path, described.size) == described.sample


def find_excess_files(files: Iterable[ResultFile], limit: float, *, results: Path) -> list[ResultFile]:
    """Return the largest files, which must be left out so that all other files together have at most `limit`
    bytes.

    Files that are not limited, or are already in `results` (runs/JOB), do not count.
    """
    total, excess = 0, []
    for file in sorted(files, key=lambda file: (file.size, file.home)):
        path = results / file.home
        if not file.limited or (os.path.lexists(path) and path.lstat().st_size == file.size):
            continue
        total += file.size
        if total > limit:
            excess.append(file)
    return excess


class _Names:
    """Assigns names within one local folder. If several files need the same name, the first one gets it."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(lambda: 1)
        self._folders = {"": ""}
        self._files: dict[str, str] = {}

    def add(self, path: str) -> str:
        """Return a free name for one more file with the remote path `path`."""
        name = self._assign(path)
        self._files.setdefault(path, name)
        return name

    def of(self, path: str) -> str:
        """Return the name assigned to the first file or folder with the remote path `path`."""
        return self._files.get(path) or self._folders.get(path) or terminal_safe.escape_name(path)

    def _assign(self, path: str) -> str:
        parent, name = posixpath.split(path)
        if parent not in self._folders:
            self._folders[parent] = self._assign(parent)
        folder = self._folders[parent]
        name = fsdecode(fsencode(terminal_safe.escape_name(name))[:_LONGEST])
        stem = f"{name}~" if _key(name) == ".git" else name  # git would run commands from .git/config
        name, requested = stem, (folder, _key(stem))
        while (folder, _key(name)) in self._taken:
            self._counts[requested] += 1
            suffix = f"~{self._counts[requested]}"
            name = fsdecode(fsencode(stem)[: _LONGEST - len(suffix)]) + suffix
        self._taken.add((folder, _key(name)))
        return posixpath.join(folder, name)


def _key(name: str) -> str:
    """Return a key that is equal for any names that some file system treats as the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
