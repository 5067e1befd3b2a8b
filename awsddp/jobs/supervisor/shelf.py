"""What is saved of a job, by all its nodes, and which checkpoint is whole there. Pure.

PREFIX/JOB/job.json      by the first node: the job, and the newest whole checkpoint; a reader trusts it alone
PREFIX/JOB/nodeK.json    by node K: its files that are saved, with the keys of their parts; what is pending
PREFIX/JOB/node0/...     a file, under its place in the results; node0/...~2 once it has changed, in turns
PREFIX/JOB/parts/...     the parts of a file that is appended to: to be cut to their sizes, and joined
"""

from __future__ import annotations

from posixpath import basename, dirname, splitext
from typing import TYPE_CHECKING, Any

from awsddp.jobs.supervisor.checkpoints import MARKS, SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LATEST = "run/latest"
_RESTS = 2
"""For how many looks of every node a folder must not have changed."""


class Shelf:
    """Knows the newest checkpoint that is whole, from what the nodes tell: nodeK.json by node."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] | None = None
        self._resting: dict[str, tuple[Any, dict[int, int]]] = {}

    def take(self, told: Mapping[int, Mapping[str, Any]]) -> None:
        """Look at what all nodes of the job tell now; an empty one has told nothing yet."""
        whole = list(self._whole(told))
        links = (one.get("links", {}).get(f"node{node}/{_LATEST}", "") for node, one in told.items())
        named = {_LATEST, *map(_path, links)}
        preferred = [one for one in whole if one["name"] in named]
        chosen = max(preferred or whole, key=lambda one: one["modified"], default=None)
        now = self.checkpoint
        if chosen and (now is None or preferred or chosen["modified"] >= now["modified"]):
            self.checkpoint = chosen

    def _whole(self, told: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        rows = [
            (node, home, one)
            for node, document in sorted(told.items())
            for home, one in document.get("files", {}).items()
            if home.startswith(f"node{node}/")
        ]
        marked = {dirname(_path(home)) for _, home, _ in rows if basename(home) in MARKS} - {""}
        for folder in sorted(marked):
            below = [row for row in rows if _path(row[1]).startswith(f"{folder}/")]
            if self._rests(folder, below, told):
                yield _checkpoint(folder, below)
        for row in rows:
            path, is_torn = _path(row[1]), row[2].get("torn")
            is_below = any(path.startswith(f"{folder}/") for folder in marked)
            if splitext(path)[1] in SUFFIXES and not is_torn and not is_below:
                yield _checkpoint(path, [row])

    def _rests(self, folder: str, below: list[Any], told: Mapping[int, Mapping[str, Any]]) -> bool:
        """Tell whether a folder has not changed on any node for some looks since it was seen as it is."""
        looks = {node: document.get("look", -1) for node, document in told.items()}
        pending = [
            home
            for node, document in told.items()
            for home in document.get("pending", ())
            if home.startswith(f"node{node}/{folder}/")
        ]
        seen = self._resting.get(folder)
        if pending or min(looks.values()) < 0 or seen is None or seen[0] != below:
            self._resting[folder] = (below, looks)
            return False
        return all(told[node].get("ended") or look >= seen[1][node] + _RESTS for node, look in looks.items())


def keys(checkpoint: Mapping[str, Any] | None) -> set[str]:
    """Return the keys that a checkpoint needs."""
    return {key for *_, parts in checkpoint["files"] for key, _ in parts} if checkpoint else set()


def _path(home: str) -> str:
    """Return a place in the results without its node."""
    return home.partition("/")[2]


def _checkpoint(name: str, rows: list[Any]) -> dict[str, Any]:
    files = [[node, home, one["size"], one["parts"]] for node, home, one in rows]
    return {"name": name, "modified": max(one["modified"] for *_, one in rows), "files": files}
