"""What is saved of a job, by all its nodes, and which checkpoint is whole there. Pure.

PREFIX/JOB/job.json      by the first node: the job, and the newest whole checkpoint; a reader trusts it alone
PREFIX/JOB/nodeK.json    by node K: the pages that list its files; folders with pending ones; if it has ended
PREFIX/JOB/lists/...     pages: the files that are saved, with the keys of their parts; the links (pages.py)
PREFIX/JOB/node0/...     a file, under its place in the results; node0/...~2 once it has changed, in turns
PREFIX/JOB/parts/...     the parts of a file that is appended to: to be cut to their sizes, and joined
"""

from __future__ import annotations

from posixpath import basename, dirname, splitext
from typing import TYPE_CHECKING, Any

from awsddp.jobs.supervisor.checkpoints import MARKS, SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Rows = Mapping[str, Mapping[str, Any]]

_LATEST = "run/latest"
_RESTS = 2
"""For how many looks of every node a folder must not have changed."""


class Shelf:
    """Knows the newest checkpoint that is whole, {"name", "modified", "files": rows by home}."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] | None = None
        self._resting: dict[str, tuple[Any, dict[int, int]]] = {}

    def take(self, told: Mapping[int, Mapping[str, Any]], files: Rows, links: Mapping[str, str]) -> None:
        """Look at what all nodes of the job tell now, nodeK.json by node (an empty one has told nothing yet),
        and at the rows of their files and links.
        """
        whole = list(self._whole(told, files))
        named = {_LATEST, *(_path(links.get(f"node{node}/{_LATEST}", "")) for node in told)}
        preferred = [one for one in whole if one["name"] in named]
        chosen = max(preferred or whole, key=lambda one: one["modified"], default=None)
        now = self.checkpoint
        if chosen and (now is None or preferred or chosen["modified"] >= now["modified"]):
            self.checkpoint = chosen

    def _whole(self, told: Mapping[int, Mapping[str, Any]], files: Rows) -> Iterator[dict[str, Any]]:
        rows = {home: row for home, row in files.items() if home.startswith("node")}
        marked = {dirname(_path(home)) for home in rows if basename(home) in MARKS} - {""}
        below: dict[str, dict[str, Any]] = {folder: {} for folder in marked}
        for home, row in sorted(rows.items()) if marked else ():
            for folder in marked.intersection(folders_above(_path(home))):
                below[folder][home] = row
        for folder, inside in sorted(below.items()):
            if self._rests(folder, inside, told):
                yield _checkpoint(folder, inside)
        for home, row in rows.items():
            path = _path(home)
            if (
                splitext(path)[1] in SUFFIXES
                and not row.get("torn")
                and marked.isdisjoint(folders_above(path))
            ):
                yield _checkpoint(path, {home: row})

    def _rests(self, folder: str, inside: Rows, told: Mapping[int, Mapping[str, Any]]) -> bool:
        """Tell whether a folder has not changed on any node for some looks since it was seen as it is."""
        looks = {node: document.get("look", -1) for node, document in told.items()}
        is_pending = any(
            _touches(pending, f"node{node}/{folder}/")
            for node, document in told.items()
            for pending in document.get("pending", ())
        )
        seen = self._resting.get(folder)
        if is_pending or min(looks.values()) < 0 or seen is None or seen[0] != inside:
            self._resting[folder] = (inside, looks)
            return False
        return all(told[node].get("ended") or look >= seen[1][node] + _RESTS for node, look in looks.items())


def keys(checkpoint: Mapping[str, Any] | None) -> set[str]:
    """Return the keys that a checkpoint needs."""
    return {part[0] for row in checkpoint["files"].values() for part in row["parts"]} if checkpoint else set()


def folders_above(path: str) -> Iterator[str]:
    """Yield the folders that a path lies in, the nearest first."""
    while path := dirname(path):
        yield path


def _touches(pending: str, folder: str) -> bool:
    """Tell whether pending files may lie below a folder; with a "/" at the end they lie anywhere below it."""
    return f"{pending}/".startswith(folder) or (pending.endswith("/") and folder.startswith(pending))


def _path(home: str) -> str:
    """Return a place in the results without its node."""
    return home.partition("/")[2]


def _checkpoint(name: str, files: Rows) -> dict[str, Any]:
    modified = max(row["modified"] for row in files.values())
    return {"name": name, "modified": modified, "files": dict(files)}
