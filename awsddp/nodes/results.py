"""Fetch results: into a temporary folder, verified, then moved into place all at once.

A node is not trusted: names are checked, a file counts once its size and sha256 match, nothing is written
through a link, and links are made last.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from awsddp.cluster import HomeLink
from awsddp.errors import ConfigError
from awsddp.nodes import rsync
from awsddp.nodes.failures import NodeFailure, split
from awsddp.nodes.parallel import ignore, run_on_nodes
from awsddp.report import Event, OnEvent, amount, node_name, size_text

_CHUNK = 2**20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A file on a node: its absolute path there, where it belongs at home (relative), and what it must be.

    `data` is its content where that is here already; `modified` is when it was written (0: not known).
    """

    remote: str
    home: str
    size: int
    sha256: str
    data: bytes | None = field(default=None, repr=False)
    modified: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What was fetched from a node: files that were missing here, and their bytes."""

    files: int
    bytes: int


def pull(
    wanted: Mapping[int, Sequence[Wanted]],
    target: Path,
    *,
    ssh_config: Path,
    links: Sequence[HomeLink] = (),
    also: Mapping[str, bytes] | None = None,
    on_event: OnEvent = ignore,
) -> dict[int, Fetched]:
    """Fetch files of several nodes into the folder `target`, from all nodes at once.

    Everything is fetched into a folder beside it, checked, and only then put in place: a new `target`
    appears by one rename; in one that exists each file is replaced whole, and files that are there as they
    should be are not fetched again. The same bytes under the same path on several nodes travel once. `also`
    holds small files that belong beside the rest. Raises NodesFailed (then `target` is as it was) for nodes
    that did not send what they said, and ConfigError for a disk without the room or for names that are none.
    """
    _check(wanted, links, also or {})
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link that the user made)
    part = target.with_name(f".{target.name}.part")  # no job has such a name
    shutil.rmtree(part, ignore_errors=True)
    whole = part / "whole"
    missing, copies = _split(wanted, target, whole)
    to_come = [*(one for files in missing.values() for one in files), *(one for _, one in copies)]
    _check_room(target, sum(one.size for one in to_come))
    try:
        whole.mkdir(parents=True)
        outcomes = run_on_nodes(
            lambda node, tell, stop: _fetch(node, missing[node], part, ssh_config, tell, stop),
            wanted,
            on_event=on_event,
        )
        fetched = split(outcomes)
        for source, one in copies:
            _copy(source, whole, one)
        for path, data in (also or {}).items():
            (whole / path).parent.mkdir(parents=True, exist_ok=True)
            (whole / path).write_bytes(data)
        _close(whole, also or {})
        _show(whole, target, links)
        for one in (one for files in wanted.values() for one in files if one.modified):
            os.utime(target / one.home, (one.modified, one.modified))
    except OSError as error:
        raise ConfigError(f"cannot write {target}", error.strerror or str(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return fetched


def _split(
    wanted: Mapping[int, Sequence[Wanted]], target: Path, whole: Path
) -> tuple[dict[int, list[Wanted]], list[tuple[Path, Wanted]]]:
    """Return what each node must send, and what is copied here from another file that came or is at home."""
    sources: dict[tuple[object, ...], Path] = {}
    missing: dict[int, list[Wanted]] = {node: [] for node in wanted}
    copies: list[tuple[Path, Wanted]] = []
    for node, files in sorted(wanted.items()):
        for one in files:
            place = (target if is_at(target, one) else whole) / one.home
            own, alike = (
                (node, one.remote),
                (one.home.removeprefix(f"{node_name(node)}/"), one.sha256, one.size),
            )
            source = sources.get(own) or sources.get(alike)
            sources[own] = sources[alike] = source or place
            if place == target / one.home:
                continue
            if source is None or one.data is not None:
                missing[node].append(one)
            else:
                copies.append((source, one))
    return missing, copies


def _copy(source: Path, whole: Path, one: Wanted) -> None:
    """Put a file aside that another one at home is equal to. Raises OSError."""
    place = whole / one.home
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, place, follow_symlinks=False)
    if not _is(place, one):
        raise OSError(errno.EIO, f"{one.home} was copied incorrectly")


def _check(
    wanted: Mapping[int, Sequence[Wanted]], links: Sequence[HomeLink], also: Mapping[str, bytes]
) -> None:
    """Refuse names and link targets that lead out of the folder, and two files of one name."""
    homes = [*also, *(one.home for files in wanted.values() for one in files), *(one.home for one in links)]
    for name in homes:
        parts = name.split("/")
        if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ConfigError(f"invalid result path {name!r}", "a node sent it; nothing was fetched")
    places: set[PurePosixPath] = set()
    for name in homes:
        if PurePosixPath(name) in places:
            raise ConfigError(f"two results have the name {name!r}", "nothing was fetched")
        places.add(PurePosixPath(name))
    for link in links:
        place = os.path.normpath(f"{os.path.dirname(link.home)}/{link.target}".lstrip("/"))  # noqa: PTH120
        if link.target.startswith("/") or "\0" in link.target or f"{place}/".startswith("../"):
            raise ConfigError(f"the link {link.home!r} leads out of the results", "nothing was fetched")
        if link.target != os.path.normpath(link.target):
            raise ConfigError(f"invalid link target {link.target!r}", "nothing was fetched")
    for files in wanted.values():
        for one in files:
            if not one.remote.startswith("/") or "\0" in one.remote or "/../" in f"{one.remote}/":
                raise ConfigError(f"{one.remote!r} is not an absolute path on a node", "nothing was fetched")


def _check_room(target: Path, size: int) -> None:
    folder = next(parent for parent in target.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"the results need {size_text(size)}, {folder} has {size_text(free)} free",
            "nothing was fetched",
            "free disk space, or choose another folder: awsddp fetch --to DIR",
        )


def _fetch(
    node: int,
    files: Sequence[Wanted],
    part: Path,
    ssh_config: Path,
    on_event: OnEvent,
    stop: threading.Event,
) -> Fetched:
    """Fetch and verify the files of one node, into `part`. Raises NodeFailure."""
    who, size = node_name(node), sum(one.size for one in files)
    came = part / who
    came.mkdir()
    for one in files:
        if one.data is not None:
            path = came / one.remote.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(one.data)
    far = [one.remote for one in files if one.data is None]
    if far:
        text = f"fetching {amount(len(files), size)}"

        def on_bytes(done: int) -> None:
            on_event(Event(text, who=who, fraction=min(1.0, done / max(1, size)), size=size))

        on_bytes(0)
        # Neither links nor devices nor owners nor modes: what is left are files and their times.
        words = ["-t", "--no-implied-dirs", "--", f"{who}:/", f"{os.fspath(came)}/"]
        rsync.transfer(
            words,
            far,
            node=node,
            ssh_config=ssh_config,
            stop=stop,
            on_bytes=on_bytes,
        )
    for one in files:
        if stop.is_set():
            break
        path = came / one.remote.lstrip("/")
        if not _is(path, one):
            raise NodeFailure(
                node,
                "files",
                f"{one.remote} does not match what the node described",
                f"expected {one.size} bytes, sha256 {one.sha256}; {_found(path)}",
                "awsddp fetch   # once nothing writes to it any more",
            )
        place = part / "whole" / one.home
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    on_event(Event(f"fetched: {amount(len(files), size)}", who=who, fraction=1.0))
    return Fetched(files=len(files), bytes=size)


def _close(whole: Path, also: Mapping[str, bytes]) -> None:
    """Let the owner alone read what is no result: what awsddp wrote itself, and the logs. Raises OSError."""
    logs = whole / "logs"
    for path in (*map(whole.joinpath, also), *logs.glob("*")):
        path.chmod(0o600)
    if logs.is_dir():
        logs.chmod(0o700)


def is_at(target: Path, one: Wanted) -> bool:
    """Return whether exactly this file is there already, below no link."""
    folders = [target / parent for parent in PurePosixPath(one.home).parents]
    return not any(folder.is_symlink() for folder in folders[:-1]) and _is(target / one.home, one)


def _is(path: Path, one: Wanted) -> bool:
    """Whether a path is exactly this file."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size == one.size:
            return _sha256(path) == one.sha256
    return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _found(path: Path) -> str:
    try:
        return f"there are {path.lstat().st_size} bytes"
    except OSError:
        return "nothing arrived"


def _show(whole: Path, target: Path, links: Sequence[HomeLink]) -> None:
    """Put a complete tree alternatives: by one rename, or file by file into a folder that is there."""
    if not target.exists():
        _link(whole, links)
        whole.rename(target)
        return
    for folder, _, names in os.walk(whole, topdown=False):  # job.json, at the top, comes last
        place = _folder(target, Path(folder).relative_to(whole))
        for name in names:
            Path(folder, name).replace(place / name)
    _link(target, links)


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
            folder.unlink()
        folder.mkdir(exist_ok=True)
    return folder
