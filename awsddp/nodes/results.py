"""Fetch results: into a folder within theirs, verified, and each then moved to its name.

A node is not trusted: its names are checked where its answer comes in (answers.py, jobs/selection.py), a file
counts once its size and sha256 match, nothing is written through a link, and links are made last.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from awsddp.errors import ConfigError
from awsddp.nodes import rsync
from awsddp.nodes.failures import split
from awsddp.nodes.parallel import ignore, run_on_nodes
from awsddp.records import HomeLink
from awsddp.report import Event, OnEvent, amount, node_name, size_text

PART = ".part"
"""The folder among the results that holds what has not come whole: a fetch that was cut goes on with it."""
_CHUNK = 2**20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A file on a node: its absolute path there, where it belongs at home (relative), and what it must be.

    `data` is its content where that is here already; `modified` is when it was written (0: not known). One
    that `grows` may have become longer: then it comes as it was described. `sparse` tells that it has holes.
    """

    remote: str
    home: str
    size: int
    sha256: str
    data: bytes | None = field(default=None, repr=False)
    modified: float = 0.0
    grows: bool = False
    sparse: bool = False


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What was fetched from a node: files that were missing here, and their bytes.

    `changed` are not here: what came is not what the node described.
    """

    files: int
    bytes: int
    changed: tuple[Wanted, ...] = ()


def pull(
    wanted: Mapping[int, Sequence[Wanted]],
    target: Path,
    *,
    ssh_config: Path,
    links: Sequence[HomeLink] = (),
    also: Callable[[Mapping[int, Fetched]], Mapping[str, bytes]] | None = None,
    on_event: OnEvent = ignore,
) -> dict[int, Fetched]:
    """Fetch files of several nodes into the folder `target`, from all nodes at once.

    A file gets its name, in place of what has it, once it is whole and checked; files that are there as they
    should be are not fetched again, and the same bytes travel once. What was cut stays in `target`/.part, and
    the next call goes on there. `also`, called once every node has sent all that it could, returns small
    files that are written last: then nothing is kept for a next call. Raises NodesFailed for nodes that were
    lost, and ConfigError for a disk without the room.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link that the user made)
    part, is_new = target / PART, not target.exists()
    missing, copies = _split(wanted, target)
    far = {part / _staged(node, one) for node, files in missing.items() for one in files if one.data is None}
    to_come = [*(one for files in missing.values() for one in files), *(one for _, _, one in copies)]
    try:
        kept = _clear(part, far) if also is not None else 0
        _check_room(target, sum(one.size for one in to_come) - kept)
        part.mkdir(parents=True, exist_ok=True, mode=0o700)
        outcomes = run_on_nodes(
            lambda node, tell, stop: _fetch(node, missing[node], target, ssh_config, tell, stop),
            wanted,
            on_event=on_event,
        )
        changed = [(node, one) for node, source, one in copies if not _copy(node, source, target, one)]
        fetched = {
            node: replace(came, changed=(*came.changed, *(one for there, one in changed if there == node)))
            for node, came in split(outcomes).items()
        }
        _link(target, links)
        for path, data in also(fetched).items() if also is not None else ():
            (part / "also").write_bytes(data)
            _place(part / "also", target, path)
        if also is not None:
            shutil.rmtree(part)
    except OSError as error:
        raise ConfigError(f"cannot write {target}", error.strerror or str(error)) from error
    finally:
        _remove_empty(part, above=target if is_new else part)
    return fetched


def _staged(node: int, one: Wanted) -> Path:
    """Return where in PART a file comes: where rsync puts what it has this path on the node."""
    return Path(node_name(node), one.remote.lstrip("/"))


def _clear(part: Path, keep: Collection[Path]) -> int:
    """Remove what an earlier call left in `part` but the files `keep`; return their bytes. Raises OSError."""
    kept = 0
    if part.is_symlink():
        part.unlink()
    for folder, names, files in os.walk(part, topdown=False):
        for path in (Path(folder, name) for name in (*files, *names)):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and path in keep:
                kept += info.st_size
            elif not stat.S_ISDIR(info.st_mode):
                path.unlink()
    _remove_empty(part, above=part)
    return kept


def _remove_empty(part: Path, *, above: Path) -> None:
    """Remove the empty folders in `part`, itself, and `above`."""
    for folder in [*(Path(folder) for folder, _, _ in os.walk(part, topdown=False)), above]:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _split(
    wanted: Mapping[int, Sequence[Wanted]], target: Path
) -> tuple[dict[int, list[Wanted]], list[tuple[int, Path, Wanted]]]:
    """Return what each node must send, and what is copied here from another file that came or is at home."""
    sources: dict[tuple[str, int], Path] = {}
    missing: dict[int, list[Wanted]] = {node: [] for node in wanted}
    copies: list[tuple[int, Path, Wanted]] = []
    for node, files in sorted(wanted.items()):
        for one in files:
            source = sources.setdefault((one.sha256, one.size), target / one.home)
            if is_at(target, one):
                sources[one.sha256, one.size] = target / one.home
            elif source == target / one.home or one.data is not None:
                missing[node].append(one)
            else:
                copies.append((node, source, one))
    return missing, copies


def _copy(node: int, source: Path, target: Path, one: Wanted) -> bool:
    """Copy a file from another one at home that is equal to it; tell whether it is. Raises OSError."""
    path = target / PART / _staged(node, one)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, path, follow_symlinks=False)
    return _take(path, target, one)


def _check_room(target: Path, size: int) -> None:
    folder = next(parent for parent in target.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"the results need {size_text(size)}, {folder} has {size_text(free)} free",
            "nothing was fetched",
            "awsddp fetch -o job.results=DIR   # another folder; or free disk space",
        )


def _fetch(
    node: int,
    files: Sequence[Wanted],
    target: Path,
    ssh_config: Path,
    on_event: OnEvent,
    stop: threading.Event,
) -> Fetched:
    """Fetch the files of one node, verify each and give it its name. Raises NodeFailure."""
    who, size = node_name(node), sum(one.size for one in files)
    came = target / PART / who
    came.mkdir(exist_ok=True)
    for one in files:
        if one.data is not None:
            path = target / PART / _staged(node, one)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(one.data)
    far = [one for one in files if one.data is None]
    if far:
        text = f"fetching {amount(len(files), size)}"

        def on_bytes(done: int) -> None:
            on_event(Event(text, who=who, fraction=min(1.0, done / max(1, size)), size=size))

        on_bytes(0)
        # Neither links nor devices nor owners nor modes: what is left are files and their times. What an
        # earlier fetch was cut in is written on, and compared by blocks.
        words = ["-t", "--inplace", "--no-implied-dirs"]
        words += rsync.SPARSE if any(one.sparse for one in far) else ()
        rsync.transfer(
            [*words, "--", f"{who}:/", f"{os.fspath(came)}/"],
            [one.remote for one in far],
            node=node,
            ssh_config=ssh_config,
            stop=stop,
            on_bytes=on_bytes,
            partly=True,
        )
    changed = []
    for one in files:
        if stop.is_set():
            break
        if not _take(target / PART / _staged(node, one), target, one):
            changed.append(one)
    size -= sum(one.size for one in changed)
    count = len(files) - len(changed)
    on_event(Event(f"fetched: {amount(count, size)}", who=who, fraction=1.0))
    return Fetched(files=count, bytes=size, changed=tuple(changed))


def _take(path: Path, target: Path, one: Wanted) -> bool:
    """Give a file its name if it is as the node described it, else remove it; tell which. Raises OSError."""
    if not _is(path, one, longer=one.grows):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return False
    if path.stat().st_size > one.size:
        os.truncate(path, one.size)
    if one.modified:
        os.utime(path, (one.modified, one.modified))
    _place(path, target, one.home)
    return True


def _place(path: Path, target: Path, home: str) -> None:
    """Move a file to its name. The owner alone reads logs and what awsddp wrote. Raises OSError."""
    folder = _folder(target, Path(home).parent)
    if not home.startswith("node"):
        path.chmod(0o600)
        if folder != target:
            folder.chmod(0o700)
    path.replace(folder / Path(home).name)


def is_at(target: Path, one: Wanted) -> bool:
    """Return whether exactly this file is there already, below no link; of a log that grows at least that."""
    folders = [target / parent for parent in PurePosixPath(one.home).parents]
    longer = one.grows and one.home.startswith("logs/")
    return not any(folder.is_symlink() for folder in folders[:-1]) and _is(
        target / one.home, one, longer=longer
    )


def _is(path: Path, one: Wanted, *, longer: bool) -> bool:
    """Whether a path is exactly this file, or, with `longer`, begins with it."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and (
            found.st_size == one.size or (longer and found.st_size > one.size)
        ):
            return _sha256(path, one.size) == one.sha256
    return False


def _sha256(path: Path, size: int) -> str:
    """Return the hash of the first `size` bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while size and (chunk := stream.read(min(size, _CHUNK))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


def _link(top: Path, links: Sequence[HomeLink]) -> None:
    """Make links below `top`, in place of a link or file that has the name. Raises OSError."""
    for link in links:
        place = _folder(top, Path(link.home).parent) / Path(link.home).name
        if place.is_symlink() or place.is_file():
            place.unlink()
        place.symlink_to(link.target)


def _folder(top: Path, path: Path) -> Path:
    """Return the folder `path` below `top`, made where it is not there; a link in its place is removed."""
    folder = top
    for name in path.parts:
        folder /= name
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
        folder.mkdir(exist_ok=True)
    return folder
