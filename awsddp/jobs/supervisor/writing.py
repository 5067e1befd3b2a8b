"""Which files were read in the middle of a write: half of a checkpoint is no result."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_TRIES = 3
_FRESH_SECONDS = 60.0


class Read(NamedTuple):
    """A file, as it was before it was read, and what was read: `line` is sent to the client."""

    path: str
    before: Any  # an os.stat_result, None where it was not there
    line: dict[str, Any]


def looked_at(path: str) -> os.stat_result | None:
    """Return the state of a file, None where it cannot be had."""
    try:
        return os.stat(path)  # noqa: PTH116 (a path may hold any bytes)
    except OSError:
        return None


def mark_writing(read: list[Read], read_again: Callable[[str], dict[str, Any]]) -> None:
    """Set `writing` in the lines of files that may have been read in the middle of a write.

    That is one that a process has opened for writing, other than to append, and one that has changed since
    before it was read. Of the latter the write may be over: it is read again.
    """
    for _ in range(_TRIES):
        writing, appending = _opened()
        changed = []
        for path, before, line in read:
            now = looked_at(path)
            if before is None or now is None:
                continue
            line.pop("writing", None)
            if _id(now) in writing or _is_fresh_of_another(now):
                line["writing"] = True
            elif _id(now) not in appending and _state(now) != _state(before):
                line["writing"] = True
                changed.append(Read(path, now, line))
        for path, _, line in changed:
            line.pop("data", None)
            line.update(read_again(path))
        read = changed


def _opened() -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return the files that processes of this user have opened for writing, and those only to append."""
    files: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    for descriptor in _descriptors():
        try:
            if not descriptor.lstat().st_mode & stat.S_IWUSR:
                continue
            info = descriptor.stat()
            if stat.S_ISREG(info.st_mode):
                details = (descriptor.parent.parent / "fdinfo" / descriptor.name).read_text()
                appends = int(details.split("flags:")[1].split()[0], 8) & os.O_APPEND
                files[bool(appends)].add(_id(info))
        except (OSError, LookupError, ValueError):
            continue
    return files[False], files[True]


def _descriptors() -> Iterator[Path]:
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            yield from list(folder.iterdir())
        except OSError:
            continue


def _id(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _state(info: os.stat_result) -> tuple[int, int, int, int]:
    return (*_id(info), info.st_size, info.st_mtime_ns)


def _is_fresh_of_another(info: os.stat_result) -> bool:
    """Tell whether another user wrote a file just now: what that user has open is hidden from this one."""
    return os.getuid() not in (0, info.st_uid) and time.time() - info.st_mtime < _FRESH_SECONDS
