"""Fetch results: into a folder within theirs, verified, and each then moved to its name.

A node is not trusted: its names are checked where its answer comes in (answers.py, jobs/files.py), a file
counts once its size and sha256 match, nothing is written through a link, and links are made last.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from awsddp.answers import OURS, ResultFile
from awsddp.errors import ConfigError
from awsddp.nodes import rsync
from awsddp.parallel import ignore, run_on_nodes, split
from awsddp.report import Event, OnEvent, amount, node_name, size_text
from awsddp.returns import NodeFiles

PART = ".part"
"""The folder among the results that holds what has not come whole: a fetch that was cut goes on with it."""


def pull(
    wanted: Mapping[int, Sequence[ResultFile]],
    target: Path,
    *,
    ssh_config: Path,
    grows: bool = False,
    also: Callable[[Sequence[ResultFile]], Mapping[str, bytes]] | None = None,
    on_event: OnEvent = ignore,
) -> dict[int, NodeFiles]:
    """Fetch files of several nodes into the folder `target`, from all nodes at once, and make the links last.

    A file gets its name, in place of what has it, once it is whole and checked; files that are there as they
    should be are not fetched again, and the same bytes travel once. With `grows` they may have become longer:
    then they come as they were described. What was cut stays in `target`/.part, and the next call goes on
    there. `also`, called once every node has sent all that it could, gets what came otherwise than described,
    which is not here, and returns small files that are written last: then nothing is kept for a next call.
    Raises NodesFailed for nodes that were lost, and ConfigError for a disk without the room.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link that the user made)
    results = _Results(target, ssh_config, wanted, grows=grows)
    try:
        results.make_room(keep=also is not None)
        outcomes = run_on_nodes(results.fetch, wanted, on_event=on_event)
        for source, one in results.copies:
            results.copy(source, one)
        fetched = split(outcomes)
        results.make_links()
        if also is not None:
            results.write_last(also(sorted(results.changed, key=lambda one: one.node)))
    except OSError as error:
        raise ConfigError(f"cannot write {target}", error.strerror or str(error)) from error
    finally:
        _remove_empty(results.part)
    return fetched


class _Results:
    """The folder `top` of a job's results, and within it `part`, where files come before they get a name.

    `missing` is what each node must send, `copies` what is copied from another file that came or is here,
    `links` are made, `changed` is what came otherwise than described.
    """

    def __init__(
        self, top: Path, ssh_config: Path, wanted: Mapping[int, Sequence[ResultFile]], *, grows: bool
    ) -> None:
        self.top, self.part, self._ssh_config, self._grows = top, top / PART, ssh_config, grows
        self.missing: dict[int, list[ResultFile]] = {node: [] for node in wanted}
        self.changed: list[ResultFile] = []
        self.copies: list[tuple[Path, ResultFile]] = []
        described = [one for _, some in sorted(wanted.items()) for one in some]
        self.links = [(Path(one.home), one.target) for one in described if one.target is not None]
        sources: dict[tuple[str | None, int], Path] = {}
        for one in (one for one in described if one.target is None):
            path = self.top / one.home
            source = sources.setdefault((one.sha256, one.size), path)
            if self._has(one):
                sources[one.sha256, one.size] = path
            elif source == path or one.data is not None:
                self.missing[one.node].append(one)
            else:
                self.copies.append((source, one))

    def make_room(self, *, keep: bool) -> None:
        """Make `part`, with `keep` cleared of what an earlier call left but cannot go on with.

        Raises OSError, and ConfigError where the disk has too little room.
        """
        if self.part.is_symlink():
            self.part.unlink()
        coming = [one for some in self.missing.values() for one in some]
        kept = self._clear({self._staged(one) for one in coming if one.data is None}) if keep else 0
        size = sum(one.size for one in (*coming, *(one for _, one in self.copies))) - kept
        folder = next(parent for parent in self.top.parents if parent.is_dir())
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ConfigError(
                f"the results need {size_text(size)}, {folder} has {size_text(free)} free",
                "nothing was fetched",
                "awsddp fetch -o job.results=DIR   # another folder; or free disk space",
            )
        self.part.mkdir(parents=True, exist_ok=True, mode=0o700)

    def fetch(self, node: int, on_event: OnEvent, stop: threading.Event) -> NodeFiles:
        """Fetch the files of one node, verify each and give it its name. Raises NodeFailure, OSError."""
        files, who = self.missing[node], node_name(node)
        size = sum(one.size for one in files)
        came = self.part / who
        came.mkdir(exist_ok=True)
        for one in files:
            if one.data is not None:
                self._staged(one, make=True).write_bytes(one.data)
        if far := [one for one in files if one.data is None]:
            progress = rsync.Progress(node, f"fetching {amount(len(files), size)}", size, on_event)
            progress.report(0)
            # Neither links nor devices nor owners nor modes: what is left are files and their times. What an
            # earlier fetch was cut in is written on, and compared by blocks.
            words = ["-t", "--inplace", "--no-implied-dirs"]
            words += rsync.SPARSE if any(one.sparse for one in far) else ()
            rsync.transfer(
                [*words, "--", f"{who}:/", f"{os.fspath(came)}/"],
                [one.path for one in far],
                ssh_config=self._ssh_config,
                stop=stop,
                progress=progress,
                partly=True,
            )
        came_whole = [one.size for one in files if not stop.is_set() and self._take(one)]
        fetched = NodeFiles(node=node, files=len(came_whole), bytes=sum(came_whole))
        on_event(Event(f"fetched: {amount(fetched.files, fetched.bytes)}", who=who, fraction=1.0))
        return fetched

    def copy(self, source: Path, one: ResultFile) -> None:
        """Copy a file from another one here that is equal to it. Raises OSError."""
        path = self._staged(one, make=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source, path, follow_symlinks=False)
        self._take(one)

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

    def _staged(self, one: ResultFile, *, make: bool = False) -> Path:
        """Return where in `part` a file comes: where rsync puts what has this path on the node."""
        path = self.part / node_name(one.node) / one.path.lstrip("/")
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _clear(self, keep: Collection[Path]) -> int:
        """Remove what an earlier call left in `part` but the files `keep`; return their bytes."""
        kept = 0
        for path in list(self.part.rglob("*")):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and path in keep:
                kept += info.st_size
            elif not stat.S_ISDIR(info.st_mode):
                path.unlink()
        _remove_empty(self.part)
        return kept

    def _take(self, one: ResultFile) -> bool:
        """Give a file its name if it is as the node described it, else remove it; tell which."""
        path = self._staged(one)
        if not _is(path, one, longer=self._grows):
            if not path.is_dir():  # an empty folder is removed with the others
                path.unlink(missing_ok=True)
            self.changed.append(one)
            return False
        if path.stat().st_size > one.size:
            os.truncate(path, one.size)
        if one.modified:
            os.utime(path, (one.modified, one.modified))
        self._place(path, one.home)
        return True

    def _place(self, path: Path, home: str) -> None:
        """Move a file to its name. The owner alone reads logs and what awsddp wrote."""
        folder = self._folder(Path(home).parent)
        if not home.startswith("node"):
            path.chmod(0o600)
            if folder != self.top:
                folder.chmod(0o700)
        path.replace(folder / Path(home).name)

    def _has(self, one: ResultFile) -> bool:
        """Whether exactly this file is here already, below no link; of a log that grows at least that."""
        folders = [self.top / parent for parent in PurePosixPath(one.home).parents[:-1]]
        longer = self._grows and one.home.startswith(("logs/", OURS))
        linked = any(folder.is_symlink() for folder in folders)
        return not linked and _is(self.top / one.home, one, longer=longer)

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


def _is(path: Path, one: ResultFile, *, longer: bool) -> bool:
    """Whether a path is exactly this file, or, with `longer`, begins with it."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and (
            found.st_size == one.size or (longer and found.st_size > one.size)
        ):
            digest, left = hashlib.sha256(), one.size
            with path.open("rb") as stream:
                while left and (chunk := stream.read(min(left, 1 << 20))):
                    digest.update(chunk)
                    left -= len(chunk)
            return digest.hexdigest() == one.sha256
    return False
