"""Fetch results: by rsync, or from S3, into a folder within theirs, and each then moved to its name.

A node is not trusted: its names are checked where its answer comes in (model/node_answers.py), a file
counts once rsync has found it whole and its node says that it is still as described, nothing is written
through a link, and links are made last.
"""

import contextlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from awsddp.errors import ConfigError
from awsddp.model.documents import NodeFiles
from awsddp.model.events import Event, OnEvent
from awsddp.model.node_answers import ResultFile
from awsddp.nodes import rsync
from awsddp.util.format import amount, node_name, size_text
from awsddp.util.parallel import ignore, run_on_nodes, split

PART = ".part"
"""The folder among the results that holds what has not come whole: a fetch that was cut goes on with it."""
ALIKE_BYTES = 1 << 20
"""From what size on a file is worth a second connection if another one here is the same in all likelihood."""
SAMPLED_BYTES = 128 << 10
"""Up to what size a sample of a file is of all its bytes."""
VERSIONS = ".awsddp/versions.json"
"""Of each larger file that came, the time of change and the inode that it had on its node."""
_UNITS = (1, 100, 1000, 10**6, 10**7, 10**9, 2 * 10**9)
"""The ns in which file systems keep time: 2 s on FAT."""
Listed = Mapping[tuple[int, str], ResultFile]
"""What nodes list, by node and path."""
Look = Callable[[Collection[int]], Listed]
Begins = Callable[[Path, ResultFile], bool]
Transfer = Callable[[Sequence[ResultFile], Path, rsync.Progress, threading.Event], None]
"""Brings files of a node to their paths below a folder, with their times, until the event is set."""


def pull(
    wanted: Mapping[int, Sequence[ResultFile]],
    target: Path,
    *,
    transfer: Transfer,
    look: Look = lambda _: {},
    begins: Begins = lambda path, one: True,
    grown: bool = False,
    also: Callable[[Sequence[ResultFile]], Mapping[str, bytes]] | None = None,
    on_event: OnEvent = ignore,
) -> dict[int, NodeFiles]:
    """Fetch files of several nodes into the folder `target`, from all nodes at once, and make the links last.

    A file gets its name, in place of what has it, once it is whole, and as `look` lists it afterwards. Files
    that are there as they should be are not fetched again; the same bytes travel once. `begins` tells
    whether a file begins as described; with `grown` it may be longer. What was cut stays in `target`/.part,
    and the next call goes on there. `also`, called once every node has sent all that it could, gets what
    changed meanwhile, which is not here, and returns small files that are written last: then nothing is kept
    for a next call. Raises NodesFailed for nodes that were lost, and ConfigError for a disk without the room.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link that the user made)
    results = _Results(target, transfer, wanted, begins=begins, grown=grown)
    try:
        results.make_room(clear=also is not None)
        outcomes = run_on_nodes(partial(results.bring, results.missing), wanted, on_event=on_event)
        alike = {node: some for node, some in results.alike.items() if outcomes[node] is None}
        outcomes |= run_on_nodes(partial(results.bring, alike), alike, on_event=on_event)
        good = [node for node, failure in outcomes.items() if failure is None]
        results.take(good, look)
        for one in results.fetched.values():
            text = f"fetched: {amount(one.files, one.bytes)}"
            on_event(Event(text, who=node_name(one.node), fraction=1.0))
        split(outcomes)
        results.make_links()
        if also is not None:
            results.write_last({**also(results.changed), **results.versions()})
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}",
            error.strerror or str(error),
            "awsddp fetch -o job.results=DIR   # another folder; or correct this one, then: awsddp fetch",
        ) from error
    finally:
        _remove_empty(results.part)
    return results.fetched


def by_rsync(ssh_config: Path) -> Transfer:
    """Return what brings files of a node by rsync over ssh."""

    def transfer(
        files: Sequence[ResultFile], came: Path, progress: rsync.Progress, stop: threading.Event
    ) -> None:
        # Neither devices nor owners nor modes, and links as what they lead to: what is left are files and
        # their times. What an earlier fetch was cut in is written on, and compared by blocks.
        # What is whole there already may be of bytes that were rewritten since with their time kept.
        words = ["-tL", "--modify-window=-1", "--ignore-times", "--inplace", "--no-implied-dirs"]
        words += rsync.SPARSE if any(one.sparse for one in files) else ()
        try:
            rsync.transfer(
                [*words, "--", f"{node_name(progress.node)}:/", f"{os.fspath(came)}/"],
                [one.path for one in files],
                ssh_config=ssh_config,
                stop=stop,
                progress=progress,
                partly=True,
            )
        finally:
            missing = [path for one in files if not (path := came / one.path.lstrip("/")).exists()]
            if missing and not stop.is_set():
                _try_to_write(max(missing, key=lambda path: len(path.name)))

    return transfer


def _try_to_write(path: Path) -> None:
    """Raise OSError if this machine, and not the node, is why a file did not come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(4096))
    path.unlink()


class _Results:
    """The folder `top` of a job's results, and within it `part`, where files come before they get a name.

    `missing` is what each node must send, `alike` what is in all likelihood the same as another file, which
    is here or comes before; `links` are made, `changed` is what changed while it came.
    """

    def __init__(
        self,
        top: Path,
        transfer: Transfer,
        wanted: Mapping[int, Sequence[ResultFile]],
        *,
        begins: Begins,
        grown: bool,
    ) -> None:
        self.top, self.part, self._transfer = top, top / PART, transfer
        self._begins, self._grown = begins, grown
        self._versions = _read_versions(top / VERSIONS)
        self.missing: dict[int, list[ResultFile]] = {node: [] for node in wanted}
        self.alike: dict[int, list[ResultFile]] = {}
        self.fetched: dict[int, NodeFiles] = {}
        self.changed: list[ResultFile] = []
        described = [one for _, some in sorted(wanted.items()) for one in some]
        self.links = [(Path(one.home), one.target) for one in described if one.target is not None]
        files = [one for one in described if one.target is None]
        alike = [one for one in files if self._seems_here(one)]
        here = {one.home for one in alike if self._versions.get(one.home) in (None, _version(one))}
        self._sources = {(one.sample, one.size): self.top / one.home for one in alike}
        for one in (one for one in files if one.home not in here):
            if one.size >= ALIKE_BYTES and (one.sample, one.size) in self._sources:
                self.alike.setdefault(one.node, []).append(one)
            else:
                self._sources.setdefault((one.sample, one.size), self._staged(one))
                self.missing[one.node].append(one)

    def make_room(self, *, clear: bool) -> None:
        """Make `part`, with `clear` without what an earlier call left and this one cannot go on with.

        Raises OSError, and ConfigError where the disk has too little room.
        """
        if self.part.is_symlink():
            self.part.unlink()
        coming = [one for some in (*self.missing.values(), *self.alike.values()) for one in some]
        keep = {self._staged(one) for one in coming if one.data is None}
        for path in sorted(self.part.rglob("*"), reverse=True) if clear else ():
            if path not in keep or _size(path) is None:
                with contextlib.suppress(OSError):  # a folder that is not empty
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        size = sum(one.size for one in coming) - sum(_size(path) or 0 for path in keep)
        folder = next(parent for parent in self.top.parents if parent.is_dir())
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ConfigError(
                f"the results need {size_text(size)}, {folder} has {size_text(free)} free",
                "nothing was fetched",
                "awsddp fetch -o job.results=DIR   # another folder; or free disk space",
            )
        self.part.mkdir(parents=True, exist_ok=True, mode=0o700)

    def bring(
        self, files: Mapping[int, Sequence[ResultFile]], node: int, on_event: OnEvent, stop: threading.Event
    ) -> None:
        """Bring the files of one node into `part`. Raises NodeFailure, OSError."""
        who, size = node_name(node), sum(one.size for one in files[node])
        came = self.part / who
        came.mkdir(exist_ok=True)
        far = [one for one in files[node] if one.data is None]
        for one in files[node]:
            path, source = self._staged(one), self._sources[one.sample, one.size]
            path.parent.mkdir(parents=True, exist_ok=True)
            if one.data is not None:
                path.write_bytes(one.data)
                os.utime(path, ns=(one.modified, one.modified))
            elif files is not self.missing and source.exists() and not path.exists():
                shutil.copyfile(source, path, follow_symlinks=False)  # rsync brings what differs
        if not far:
            return
        progress = rsync.Progress(node, f"fetching {amount(len(files[node]), size)}", size, on_event)
        progress.report(0)
        self._transfer(far, came, progress, stop)

    def take(self, nodes: Sequence[int], look: Look) -> None:
        """Give what nodes sent its name, if it is as they list it now. Raises OSError."""
        alike = [one for node in nodes for one in self.alike.get(node, ())]
        far = [one.node for node in nodes for one in self.missing[node] if one.data is None]
        now = look({*far, *(one.node for one in alike)}) if far or alike else {}
        for node in nodes:
            sizes = [one.size for one in self.missing[node] if self._take(one, now)]
            self.fetched[node] = NodeFiles(node=node, files=len(sizes), bytes=sum(sizes))
        for one in alike:
            self._take(one, now)

    def _take(self, one: ResultFile, listed: Listed) -> bool:
        """Give a file its name if it is whole; tell whether it is."""
        path, now = self._staged(one), listed.get((one.node, one.path))
        whole = one.data is not None or (now is not None and self._is_whole(path, one, now))
        if whole:
            self._place(path, one.home)
            if one.size > SAMPLED_BYTES:
                self._versions[one.home] = _version(now or one)
        else:
            self.changed.append(one)
        return whole

    def _is_whole(self, path: Path, one: ResultFile, now: ResultFile) -> bool:
        """Tell whether a file came as its node lists it now, or as it was, and longer.

        rsync gives it its time only once it has found it whole.
        """
        has_kept_stamp = (now.size, now.modified) == (one.size, one.modified)
        if has_kept_stamp and one.size > SAMPLED_BYTES and _version(now) != _version(one):
            return False  # it was written in place while it came
        if is_here(path, now, self._begins):
            return True
        size = _size(path)
        longer = size is not None and one.size <= size <= now.size and not now.writing
        return longer and self._grown and self._begins(path, one)

    def make_links(self) -> None:
        """Make the links, each in place of a link or file that has its name. Raises OSError."""
        for home, target in self.links:
            place = self._folder(home.parent) / home.name
            if place.is_symlink() or place.is_file():
                place.unlink()
            place.symlink_to(os.path.relpath(f"/{target}", f"/{home.parent}"))

    def write_last(self, files: Mapping[str, bytes]) -> None:
        """Write small files, and remove `part`: all that was wanted has come. Raises OSError."""
        for home, data in files.items():
            (self.part / "also").write_bytes(data)
            self._place(self.part / "also", home)
        shutil.rmtree(self.part)

    def _staged(self, one: ResultFile) -> Path:
        """Return where in `part` a file comes: where rsync puts what has this path on the node."""
        return self.part / node_name(one.node) / one.path.lstrip("/")

    def _place(self, path: Path, home: str) -> None:
        """Move a file to its name. The owner alone reads logs and what awsddp wrote."""
        folder = self._folder(Path(home).parent)
        if not home.startswith("node"):
            path.chmod(0o600)
            if folder != self.top:
                folder.chmod(0o700)
        path.replace(folder / Path(home).name)

    def _seems_here(self, one: ResultFile) -> bool:
        """Whether this file is here already in all likelihood, below no link; of a log that grows at least
        that. A larger one is here for certain if it has the version that is written down.
        """
        path = self.top / one.home
        size = _size(path)
        if size is None or any(
            (self.top / folder).is_symlink() for folder in PurePosixPath(one.home).parents[:-1]
        ):
            return False
        if one.home.endswith(".log") and not one.home.startswith("node"):  # who watched has written it
            return size == one.size or (self._grown and size > one.size)
        return is_here(path, one, self._begins)

    def versions(self) -> dict[str, bytes]:
        """Return the file that holds the versions of the larger files, where there are any."""
        return {VERSIONS: json.dumps(self._versions).encode()} if self._versions else {}

    def _folder(self, path: Path) -> Path:
        """Return the folder `path`, made where it is not there; a link in its place is removed."""
        folder = self.top
        for name in path.parts:
            folder /= name
            if folder.is_symlink():
                folder.unlink(missing_ok=True)
            folder.mkdir(exist_ok=True)
        return folder


def _remove_empty(part: Path) -> None:
    """Remove the empty folders in `part`, itself, and the one above where it is empty, too."""
    for folder in [*(Path(folder) for folder, _, _ in os.walk(part, topdown=False)), part.parent]:
        with contextlib.suppress(OSError):
            folder.rmdir()


def is_here(path: Path, one: ResultFile, begins: Begins) -> bool:
    """Tell whether a path holds a file as a node described it: of its size and time, and alike by `begins`.

    What was rewritten in place may have kept size and time. Raises OSError.
    """
    if _size(path) != one.size or not _has_time(path, one.modified):
        return False
    return one.sample is None or begins(path, one)


def _version(one: ResultFile) -> list[int]:
    return [one.changed, one.inode]


def _read_versions(path: Path) -> dict[str, list[int]]:
    """Return what was written down of the larger files that came; nothing where that cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _size(path: Path) -> int | None:
    """Return the size of a file, None for what is none."""
    with contextlib.suppress(OSError):
        info = path.lstat()
        return info.st_size if stat.S_ISREG(info.st_mode) else None
    return None


def _has_time(path: Path, modified: int) -> bool:
    return path.lstat().st_mtime_ns in {modified - modified % unit for unit in _UNITS}
