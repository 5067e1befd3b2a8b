"""Fetch results by rsync or from S3 into a staging folder, and move each complete file to its final path.

Nodes are untrusted. File names are validated when a response is parsed (model/node_answers.py). A file is
accepted once rsync has verified it and the file's node still lists the file unchanged. Nothing is written
through a symbolic link, and links are created last.
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
from awsddp.util.formatting import files_text, node_name, size_text
from awsddp.util.parallel import ignore_event, results_or_raise, run_on_nodes

STAGING_FOLDER = ".part"
"""The staging folder in the results folder. After an interrupted fetch, the next fetch resumes from this
folder."""
DEDUPLICATE_FROM_BYTES = 1 << 20
"""A file that is at least this large is fetched as a delta if a local file is probably identical to it."""
SAMPLED_BYTES = 128 << 10
"""If a file is not larger than this, the file's sample covers the whole file."""
VERSIONS = ".awsddp/versions.json"
"""This file records the ctime and inode that each larger file had on its node when it was fetched."""
_UNITS = (1, 100, 1000, 10**6, 10**7, 10**9, 2 * 10**9)
"""File systems' timestamp resolutions in ns; the last is FAT's resolution, 2 s."""
Listed = Mapping[tuple[int, str], ResultFile]
"""The nodes' files: {(node, path): file}."""
ListFiles = Callable[[Collection[int]], Listed]
MatchesSample = Callable[[Path, ResultFile], bool]
Transfer = Callable[[Sequence[ResultFile], Path, rsync.Progress, threading.Event], None]
"""A function that downloads a node's files, with their mtimes, to paths in a folder until the event is
set."""


def pull(
    wanted: Mapping[int, Sequence[ResultFile]],
    target: Path,
    *,
    transfer: Transfer,
    list_files: ListFiles = lambda _: {},
    matches_sample: MatchesSample = lambda path, file: True,
    accept_grown: bool = False,
    last_files: Callable[[Sequence[ResultFile]], Mapping[str, bytes]] | None = None,
    on_event: OnEvent = ignore_event,
) -> dict[int, NodeFiles]:
    """Fetch several nodes' files into the folder `target`, from all nodes at once.

    A fetched file replaces an existing file if the fetched file is complete and the list that `list_files`
    returns after the transfer shows no change. Up-to-date files are skipped, and identical content is
    transferred once. `matches_sample` compares a local file's sampled blocks with the file's description. If
    `accept_grown` is set, a file may be longer than its description says. Incomplete files stay in
    `target`/.part, and the next call resumes them. Files that change during the transfers are left out. After
    all transfers, `last_files` is called with these changed files, and returns small files, which are written
    last. Then .part is removed. Raises NodesFailed for lost nodes, and ConfigError if the disk has too little
    space.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link that the user made)
    results = _Results(target, transfer, wanted, begins=matches_sample, grown=accept_grown)
    try:
        results.make_room(clear=last_files is not None)
        outcomes = run_on_nodes(partial(results.download, results.missing), wanted, on_event=on_event)
        similar = {node: files for node, files in results.similar.items() if outcomes[node] is None}
        outcomes |= run_on_nodes(partial(results.download, similar), similar, on_event=on_event)
        succeeded = [node for node, failure in outcomes.items() if failure is None]
        results.move(succeeded, list_files)
        for counts in results.fetched.values():
            text = f"fetched: {files_text(counts.files, counts.bytes)}"
            on_event(Event(text, who=node_name(counts.node), fraction=1.0))
        results_or_raise(outcomes)
        results.make_links()
        if last_files is not None:
            results.write_last({**last_files(results.changed), **results.versions()})
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}",
            error.strerror or str(error),
            "awsddp fetch -o job.results=DIR   # another folder; or correct this one and repeat",
        ) from error
    finally:
        _remove_empty(results.part)
    return results.fetched


def rsync_transfer(ssh_config: Path) -> Transfer:
    """Return a Transfer that uses rsync over ssh."""

    def transfer(
        files: Sequence[ResultFile], staging: Path, progress: rsync.Progress, stop: threading.Event
    ) -> None:
        # Transfer only contents and mtimes, without devices, owners or modes, and follow links. A partial
        # file of an interrupted fetch is updated in place, block by block. --ignore-times is needed because
        # the staged file looks complete if the file was rewritten on the node without a change to its mtime.
        args = ["-tL", "--modify-window=-1", "--ignore-times", "--inplace", "--no-implied-dirs"]
        args += rsync.SPARSE if any(file.sparse for file in files) else ()
        try:
            rsync.transfer(
                [*args, "--", f"{node_name(progress.node)}:/", f"{os.fspath(staging)}/"],
                [file.path for file in files],
                ssh_config=ssh_config,
                stop=stop,
                progress=progress,
                allow_partial=True,
            )
        finally:
            missing = [path for file in files if not (path := staging / file.path.lstrip("/")).exists()]
            if missing and not stop.is_set():
                _try_to_write(max(missing, key=lambda path: len(path.name)))

    return transfer


def _try_to_write(path: Path) -> None:
    """Raise OSError if this machine cannot write a file at `path`.

    The error shows that a missing file is this machine's fault, not the node's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(4096))
    path.unlink()


class _Results:
    """The folder `top` with a job's results, and its staging folder `part`.

    `missing`: files to download, by node. `similar`: files that probably equal a local file or a file in
    `missing`, and are downloaded last, as a delta against the equal file. `links`: symbolic links to create.
    `changed`: files that changed during the transfer.
    """

    def __init__(
        self,
        top: Path,
        transfer: Transfer,
        wanted: Mapping[int, Sequence[ResultFile]],
        *,
        begins: MatchesSample,
        grown: bool,
    ) -> None:
        self.top, self.part, self._transfer = top, top / STAGING_FOLDER, transfer
        self._begins, self._grown = begins, grown
        self._versions = _read_versions(top / VERSIONS)
        self.missing: dict[int, list[ResultFile]] = {node: [] for node in wanted}
        self.similar: dict[int, list[ResultFile]] = {}
        self.fetched: dict[int, NodeFiles] = {}
        self.changed: list[ResultFile] = []
        described = [file for _, files in sorted(wanted.items()) for file in files]
        self.links = [(Path(file.home), file.target) for file in described if file.target is not None]
        files = [file for file in described if file.target is None]
        local = [file for file in files if self._seems_downloaded(file)]
        current = {file.home for file in local if self._versions.get(file.home) in (None, _version(file))}
        self._sources = {(file.sample, file.size): self.top / file.home for file in local}
        for file in (file for file in files if file.home not in current):
            if file.size >= DEDUPLICATE_FROM_BYTES and (file.sample, file.size) in self._sources:
                self.similar.setdefault(file.node, []).append(file)
            else:
                self._sources.setdefault((file.sample, file.size), self._staging_path(file))
                self.missing[file.node].append(file)

    def make_room(self, *, clear: bool) -> None:
        """Create `part`. If `clear` is set, remove earlier calls' files that this call does not need.

        Raises OSError, and ConfigError if the disk has too little space.
        """
        if self.part.is_symlink():
            self.part.unlink()
        pending = [file for files in (*self.missing.values(), *self.similar.values()) for file in files]
        keep = {self._staging_path(file) for file in pending if file.data is None}
        for path in sorted(self.part.rglob("*"), reverse=True) if clear else ():
            if path not in keep or _size(path) is None:
                with contextlib.suppress(OSError):  # a folder may still have files in it
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        size = sum(file.size for file in pending) - sum(_size(path) or 0 for path in keep)
        folder = next(parent for parent in self.top.parents if parent.is_dir())
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ConfigError(
                f"the results need {size_text(size)}, but {folder} has only {size_text(free)} free",
                "nothing was fetched",
                "awsddp fetch -o job.results=DIR   # another folder; or free disk space",
            )
        self.part.mkdir(parents=True, exist_ok=True, mode=0o700)

    def download(
        self, files: Mapping[int, Sequence[ResultFile]], node: int, on_event: OnEvent, stop: threading.Event
    ) -> None:
        """Download one node's files into `part`. Raises NodeFailure, OSError."""
        who, size = node_name(node), sum(file.size for file in files[node])
        staging = self.part / who
        staging.mkdir(exist_ok=True)
        remote = [file for file in files[node] if file.data is None]
        for file in files[node]:
            path, source = self._staging_path(file), self._sources[file.sample, file.size]
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.data is not None:
                path.write_bytes(file.data)
                os.utime(path, ns=(file.modified, file.modified))
            elif files is not self.missing and source.exists() and not path.exists():
                shutil.copyfile(source, path, follow_symlinks=False)  # rsync transfers the differences
        if not remote:
            return
        progress = rsync.Progress(node, f"fetching {files_text(len(files[node]), size)}", size, on_event)
        progress.report(0)
        self._transfer(remote, staging, progress, stop)

    def move(self, nodes: Sequence[int], look: ListFiles) -> None:
        """Move staged files to their final paths if their nodes list them unchanged. Raises OSError."""
        similar = [file for node in nodes for file in self.similar.get(node, ())]
        remote = [file.node for node in nodes for file in self.missing[node] if file.data is None]
        listed = look({*remote, *(file.node for file in similar)}) if remote or similar else {}
        for node in nodes:
            sizes = [file.size for file in self.missing[node] if self._move(file, listed)]
            self.fetched[node] = NodeFiles(node=node, files=len(sizes), bytes=sum(sizes))
        for file in similar:
            self._move(file, listed)

    def _move(self, file: ResultFile, listed: Listed) -> bool:
        """Move a file to its final path and return True if it is complete."""
        path, latest = self._staging_path(file), listed.get((file.node, file.path))
        is_complete = file.data is not None or (latest is not None and self._is_complete(path, file, latest))
        if is_complete:
            self._replace(path, file.home)
            if file.size > SAMPLED_BYTES:
                self._versions[file.home] = _version(latest or file)
        else:
            self.changed.append(file)
        return is_complete

    def _is_complete(self, path: Path, file: ResultFile, latest: ResultFile) -> bool:
        """Return True if a staged file matches its node's current list. If files may grow (`accept_grown`),
        the staged file may be longer than `file`.

        rsync sets the mtime of a file only after it has verified the content.
        """
        has_same_stamp = (latest.size, latest.modified) == (file.size, file.modified)
        if has_same_stamp and file.size > SAMPLED_BYTES and _version(latest) != _version(file):
            return False  # the file was rewritten in place during the transfer
        if is_downloaded(path, latest, self._begins):
            return True
        size = _size(path)
        is_longer = size is not None and file.size <= size <= latest.size and not latest.writing
        return is_longer and self._grown and self._begins(path, file)

    def make_links(self) -> None:
        """Create the links. A link replaces an existing link or file with the same name. Raises OSError."""
        for relative, target in self.links:
            path = self._folder(relative.parent) / relative.name
            if path.is_symlink() or path.is_file():
                path.unlink()
            path.symlink_to(os.path.relpath(f"/{target}", f"/{relative.parent}"))

    def write_last(self, files: Mapping[str, bytes]) -> None:
        """Write small files, and remove `part`. Raises OSError."""
        for relative, data in files.items():
            (self.part / "also").write_bytes(data)
            self._replace(self.part / "also", relative)
        shutil.rmtree(self.part)

    def _staging_path(self, file: ResultFile) -> Path:
        """Return the path of a file in `part`, to which rsync writes the file."""
        return self.part / node_name(file.node) / file.path.lstrip("/")

    def _replace(self, path: Path, relative: str) -> None:
        """Move a file to its final path. Only the owner can read logs and awsddp's own files."""
        folder = self._folder(Path(relative).parent)
        if not relative.startswith("node"):
            path.chmod(0o600)
            if folder != self.top:
                folder.chmod(0o700)
        path.replace(folder / Path(relative).name)

    def _seems_downloaded(self, file: ResultFile) -> bool:
        """Return True if the results folder probably has this file already.

        A log may be longer than listed. A file that is larger than SAMPLED_BYTES is certainly the same only
        if its recorded version matches. A path through a symbolic link does not count.
        """
        path = self.top / file.home
        size = _size(path)
        if size is None or any(
            (self.top / folder).is_symlink() for folder in PurePosixPath(file.home).parents[:-1]
        ):
            return False
        if file.home.endswith(".log") and not file.home.startswith("node"):  # logged while the job ran
            return size == file.size or (self._grown and size > file.size)
        return is_downloaded(path, file, self._begins)

    def versions(self) -> dict[str, bytes]:
        """Return {path: content} of the versions file, or {} if there are no versions."""
        return {VERSIONS: json.dumps(self._versions).encode()} if self._versions else {}

    def _folder(self, path: Path) -> Path:
        """Create the folder `path` in the results folder and return it. Links in `path` are removed."""
        folder = self.top
        for name in path.parts:
            folder /= name
            if folder.is_symlink():
                folder.unlink(missing_ok=True)
            folder.mkdir(exist_ok=True)
        return folder


def _remove_empty(part: Path) -> None:
    """Remove the empty folders in `part`, then `part` itself and its parent if they are empty."""
    for folder in [*(Path(folder) for folder, _, _ in os.walk(part, topdown=False)), part.parent]:
        with contextlib.suppress(OSError):
            folder.rmdir()


def is_downloaded(path: Path, file: ResultFile, matches_sample: MatchesSample) -> bool:
    """Return True if `path` has the size, mtime and sample of `file`.

    `matches_sample` compares the sample, because a file that was rewritten in place may have the same size
    and mtime. Raises OSError.
    """
    if _size(path) != file.size or not _has_mtime(path, file.modified):
        return False
    return file.sample is None or matches_sample(path, file)


def _version(file: ResultFile) -> list[int]:
    return [file.changed, file.inode]


def _read_versions(path: Path) -> dict[str, list[int]]:
    """Return {path: recorded version} for larger files, or {} if the versions file cannot be read."""
    try:
        versions = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return versions if isinstance(versions, dict) else {}


def _size(path: Path) -> int | None:
    """Return a regular file's size, or None if the path is anything else."""
    with contextlib.suppress(OSError):
        info = path.lstat()
        return info.st_size if stat.S_ISREG(info.st_mode) else None
    return None


def _has_mtime(path: Path, modified: int) -> bool:
    return path.lstat().st_mtime_ns in {modified - modified % unit for unit in _UNITS}
