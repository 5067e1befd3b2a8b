"""The files below a folder of this node, and the links among them; no link to a folder is followed."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    # Gets the path of a folder that cannot be read, relative to the top ("" for itself), and the reason.
    # Python 3.8 could not evaluate it.
    OnTrouble = Callable[[str, str], None]

NEVER_RESULTS = ("__pycache__",)
_INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
_SYSFS = Path("/sys/dev/block")


def snapshot(workdir: Path) -> dict[str, list[int]]:
    """Return the stamp of each file below `workdir` by relative path; of a folder that cannot be read []."""
    stamps: dict[str, list[int]] = {}
    for path, info in walk(workdir, lambda path, _: stamps.update({path: []})):
        stamps[path] = stamp(workdir / path, info)
    return stamps


def stamp_of(info: os.stat_result) -> tuple[int, int, int, int]:
    """Return what of a file changes when it is written to: size, times of modification and change, inode.

    A program can set the time of modification, not that of change.
    """
    return info.st_size, in_range(info.st_mtime_ns), in_range(info.st_ctime_ns), info.st_ino


def stamp(path: Path, info: os.stat_result) -> list[int]:
    """Return the stamp of a file; for a link, which is never written to, also of the file it leads to."""
    if not stat.S_ISLNK(info.st_mode):
        return [*stamp_of(info)]
    own = [info.st_size, info.st_mtime_ns, 0, info.st_ino]  # chown -R is no reason to fetch it
    try:
        target = path.stat()
    except OSError:
        return own
    return [*own, *stamp_of(target)] if stat.S_ISREG(target.st_mode) else own


def is_stamp(before: list[int], now: list[int]) -> bool:
    """Tell whether a stamp of a snapshot is this one; those of older versions lack the times of change."""
    return before == (_without_changes(now) if len(before) % 4 else now)


def is_touched(before: list[int], now: list[int]) -> bool:
    """Tell whether two stamps differ in times of change alone, as after chown -R."""
    return len(before) == len(now) and _without_changes(before) == _without_changes(now)


def _without_changes(stamps: list[int]) -> list[int]:
    return [value for at, value in enumerate(stamps) if at % 4 != 2]


def walk(top: Path, on_trouble: OnTrouble) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path relative to `top`, lstat) of everything below it that is no folder."""
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(str(top / folder)), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            on_trouble(folder, error.strerror or str(error))
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name in NEVER_RESULTS:
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
                continue
            try:
                yield path, entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                on_trouble(path, error.strerror or str(error))


def in_range(time_ns: int) -> int:
    """Return a time of a file, or the nearest one that 64 bits hold."""
    return max(-(1 << 63), min(time_ns, (1 << 63) - 1))


def open_file(path: Path) -> BinaryIO:
    """Open a file to read it. Raises FileNotFoundError for a FIFO in its place, which would wait."""
    stream = os.fdopen(os.open(str(path), os.O_RDONLY | os.O_NONBLOCK), "rb")
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise FileNotFoundError(f"{path} is no file any more")


def real(path: Path) -> Path:
    """Return the path with its links resolved; a loop of links ends somewhere in it."""
    return Path(os.path.realpath(str(path)))


def readlink(path: Path) -> Path:
    """Return where a link points, one step only, as an absolute path."""
    target = os.readlink(str(path))  # noqa: PTH115 (Path.readlink came with Python 3.9)
    return Path(os.path.normpath(str(real(path.parent) / target)))


def file_kind(mode: int) -> str:
    """Return what is neither file, folder nor link, in a word."""
    kinds: dict[Any, str] = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


@functools.lru_cache  # a request asks once a file, for few devices
def is_ephemeral(device: int, sysfs: Path = _SYSFS) -> bool:
    """Tell whether a device (st_dev) is instance store, or made of it, as DLAMIs do at /opt/dlami/nvme."""
    return _is_instance_store(Path(os.path.realpath(str(sysfs / f"{os.major(device)}:{os.minor(device)}"))))


def _is_instance_store(block: Path) -> bool:
    below = list((block / "slaves").glob("*"))  # of a volume of LVM or a RAID
    if below:
        return any(_is_instance_store(Path(os.path.realpath(str(path)))) for path in below)
    models = [place / "device" / "model" for place in (block, block.parent)]  # a partition lies in its disk
    return any(path.is_file() and path.read_text().strip() == _INSTANCE_STORE for path in models)
