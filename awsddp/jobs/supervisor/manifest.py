"""The results of a job on this node: which files come home, their sizes and hashes.

Three places: the run folder, the `outputs` that the job names, and what is new or changed in the synced
folder since the snapshot that was taken before the ranks started. Paths are text with surrogate escapes, so
that any bytes in a name survive JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from awsddp.jobs.supervisor.folder import JobFolder

LIMIT = 2 << 30
"""Bytes of the synced folder's files that come home unasked; `outputs` and the run folder know no limit."""
_TOO_MUCH = "the new and changed files are over 2 GB in all; name it in job.outputs"
_NOT_COUNTED = ("__pycache__", ".git")
_NOT_COUNTED_ABOVE = ("runs",)  # at the top of the synced folder alone


def snapshot(workdir: Path) -> dict[str, list[int]]:
    """Return size and modification time (ns) of each file of the synced folder, by relative path."""
    return {path: [info.st_size, info.st_mtime_ns] for path, info in _synced(workdir)}


def manifest(folder: JobFolder, *, at_once: int = 0) -> dict[str, Any]:
    """Return {"files": [...], "skipped": [...]} of the job's results here.

    A file has `path` (absolute), `home` (relative to the job's folder of results), `size` in bytes, and
    `sha256`, or `link` where it is a symbolic link. What is skipped has `path`, `size` and `why`. Files of
    `at_once` bytes in all have `data` (base64), too; logs of ranks have not: who watched has them already.
    """
    request = folder.request()
    found = _Found(f"node{request['node']}")
    for entry in request["ranks"]:
        found.add(folder.log(entry["rank"]), f"logs/rank{entry['rank']}.log")
    found.at_once = at_once
    found.add(folder.times, f"logs/times{request['node']}.jsonl")
    found.add(folder.path / "supervisor.log", f"logs/supervisor{request['node']}.log")
    for path, _ in _walk(folder.run):
        found.add(folder.run / path, f"{found.node}/run/{path}")
    workdir = Path(request["workdir"])
    for output in request["outputs"]:
        _add_output(found, workdir, output)
    _add_changed(found, workdir, json.loads(folder.snapshot.read_text(encoding="utf-8")))
    return {"files": found.files, "skipped": found.skipped}


class _Found:
    def __init__(self, node: str) -> None:
        self.node = node
        self.files: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.at_once = 0
        self._paths: set[str] = set()
        self._homes: set[str] = set()

    def known(self, path: Path) -> bool:
        return str(path) in self._paths

    def add(self, path: Path, home: str) -> None:
        """Take the file `path` in, once. A name at home that is taken already gets a tilde."""
        if self.known(path):
            return
        self._paths.add(str(path))
        while home in self._homes:
            home += "~"
        self._homes.add(home)
        try:
            info = path.lstat()
            if stat.S_ISLNK(info.st_mode):
                link = os.readlink(str(path))  # noqa: PTH115 (Path.readlink came with Python 3.9)
                self.files.append({"path": str(path), "home": home, "size": 0, "link": link})
            elif stat.S_ISREG(info.st_mode):
                file = _hashed(path, self.at_once)
                self.at_once -= file["size"] if "data" in file else 0
                self.files.append({"path": str(path), "home": home, **file})
        except FileNotFoundError:
            return
        except OSError as error:
            self.skip(path, 0, error.strerror or str(error))

    def skip(self, path: Path, size: int, why: str) -> None:
        self.skipped.append({"path": str(path), "size": size, "why": why})


def _add_output(found: _Found, workdir: Path, output: str) -> None:
    """Take in the file or folder `output`: relative to the synced folder, absolute, or below ~."""
    path = Path(os.path.normpath(workdir / Path(output).expanduser()))
    files = [path / name for name, _ in _walk(path)] if path.is_dir() else [path]
    if not path.is_dir() and not path.is_symlink() and not path.exists():
        found.skip(path, 0, "it is not there")
    for file in files:
        inside = workdir in file.parents
        found.add(file, f"{found.node}/{file.relative_to(workdir) if inside else 'outside' + str(file)}")


def _add_changed(found: _Found, workdir: Path, before: dict[str, list[int]]) -> None:
    changed = [
        (info.st_size, path)
        for path, info in _synced(workdir)
        if before.get(path) != [info.st_size, info.st_mtime_ns] and not found.known(workdir / path)
    ]
    total = 0
    for size, path in sorted(changed):
        total += size
        if total > LIMIT:
            found.skip(workdir / path, size, _TOO_MUCH)
        else:
            found.add(workdir / path, f"{found.node}/{path}")


def _synced(workdir: Path) -> Iterator[tuple[str, os.stat_result]]:
    return _walk(workdir, skip=_NOT_COUNTED, skip_above=_NOT_COUNTED_ABOVE)


def _walk(
    top: Path, *, skip: tuple[str, ...] = (), skip_above: tuple[str, ...] = ()
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path relative to `top`, lstat) of each regular file and symbolic link, following none."""
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(str(top / folder)))
        except OSError:
            continue
        for entry in entries:
            if entry.name in skip or (not folder and entry.name in skip_above):
                continue
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                yield path, info


def _hashed(path: Path, at_once: int) -> dict[str, Any]:
    """Return size and hash of what was read, as a file may grow meanwhile; `data` up to `at_once` bytes."""
    digest, size, data = hashlib.sha256(), 0, b""
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
            size += len(block)
            data = block if size == len(block) else b""
    found: dict[str, Any] = {"size": size, "sha256": digest.hexdigest()}
    return {**found, "data": base64.b64encode(data).decode()} if size <= at_once else found
