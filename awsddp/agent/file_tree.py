"""List files and links in a folder tree, without following links to folders, and detect changed files."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    # A function that takes an unreadable path, relative to the top ("" for the top itself), and the reason.
    # The type is defined under TYPE_CHECKING because Python 3.8 cannot evaluate it.
    OnTrouble = Callable[[str, str], None]

NEVER_RESULTS = ("__pycache__",)
_INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
_SYSFS = Path("/sys/dev/block")


def snapshot(workdir: Path) -> dict[str, list[int]]:
    """Return {relative path: stamp} for all files under `workdir`; the stamp of an unreadable path is []."""
    stamps: dict[str, list[int]] = {}
    for path, info in walk(workdir, lambda path, _: stamps.update({path: []})):
        stamps[path] = make_stamp(workdir / path, info)
    return stamps


def stat_stamp(info: os.stat_result) -> tuple[int, int, int, int]:
    """Return the properties that change when a file is written.

    These are the size, the modification time and change time (ns), and the inode. A program can set the
    modification time, but not the change time.
    """
    return info.st_size, in_range(info.st_mtime_ns), in_range(info.st_ctime_ns), info.st_ino


def make_stamp(path: Path, info: os.stat_result) -> list[int]:
    """Return a file's stamp. A link's stamp also contains the stamp of the file that the link points to."""
    if not stat.S_ISLNK(info.st_mode):
        return [*stat_stamp(info)]
    # The change time is recorded as 0, because chown -R changes a link's change time.
    link_stamp = [info.st_size, info.st_mtime_ns, 0, info.st_ino]
    try:
        target = path.stat()
    except OSError:
        return link_stamp
    return [*link_stamp, *stat_stamp(target)] if stat.S_ISREG(target.st_mode) else link_stamp


def is_same_stamp(before: list[int], now: list[int]) -> bool:
    """Return True if a snapshot's stamp `before` equals the stamp `now`.

    Snapshots by older versions of awsddp lack the change times, which are then not compared.
    """
    return before == (_without_changes(now) if len(before) % 4 else now)


def is_touched(before: list[int], now: list[int]) -> bool:
    """Return True if two stamps differ only in their change times (for example after chown -R)."""
    return len(before) == len(now) and _without_changes(before) == _without_changes(now)


def _without_changes(stamps: list[int]) -> list[int]:
    return [value for at, value in enumerate(stamps) if at % 4 != 2]


def walk(top: Path, on_trouble: OnTrouble) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path relative to `top`, lstat) for everything under `top` that is not a folder."""
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
    """Return a file's time (ns), limited to 64 bits."""
    return max(-(1 << 63), min(time_ns, (1 << 63) - 1))


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises FileNotFoundError for any other file, because reading from a FIFO would block.
    """
    stream = os.fdopen(os.open(str(path), os.O_RDONLY | os.O_NONBLOCK), "rb")
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise FileNotFoundError(f"{path} is no longer a file")


def resolve_links(path: Path) -> Path:
    """Return the path with its links resolved. Never raises an error, not even if links form a loop."""
    return Path(os.path.realpath(str(path)))


def readlink(path: Path) -> Path:
    """Return the absolute path that a link points to. This path may itself be a link."""
    target = os.readlink(str(path))  # noqa: PTH115 (Path.readlink came with Python 3.9)
    return Path(os.path.normpath(str(resolve_links(path.parent) / target)))


def file_kind(mode: int) -> str:
    """Return the type of a special file (not a regular file, folder or link) as text, such as "a pipe"."""
    kinds: dict[Any, str] = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


@functools.lru_cache  # called once per file, but with only a few distinct devices
def is_ephemeral(device: int, sysfs: Path = _SYSFS) -> bool:
    """Return True if a device (st_dev) is an instance store, or contains one (/opt/dlami/nvme on a DLAMI)."""
    return _is_instance_store(Path(os.path.realpath(str(sysfs / f"{os.major(device)}:{os.minor(device)}"))))


def _is_instance_store(block: Path) -> bool:
    slaves = list((block / "slaves").glob("*"))  # the disks of an LVM volume or a RAID
    if slaves:
        return any(_is_instance_store(Path(os.path.realpath(str(path)))) for path in slaves)
    # A partition's parent folder is the disk's folder, which contains the disk's model.
    models = [device / "device" / "model" for device in (block, block.parent)]
    return any(path.is_file() and path.read_text().strip() == _INSTANCE_STORE for path in models)
