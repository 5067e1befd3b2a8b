"""What is saved of a job, by all its nodes, and which checkpoint is whole there. Pure.

PREFIX/JOB/job.json      by the first node: the job, and the newest whole checkpoint; a reader trusts it alone
PREFIX/JOB/nodeK.json    by node K: the pages that list its files; folders with pending ones; if it has ended
PREFIX/JOB/lists/...     pages: the saved files, with the keys of their parts; the links (list_pages.py)
PREFIX/JOB/node0/...     a file, under its place in the results; node0/...~2 once it has changed, in turns
PREFIX/JOB/parts/...     the parts of a file that is appended to: to be cut to their sizes, and joined
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from awsddp.agent.s3.checkpoints import LATEST, Found, find_checkpoints, worth

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Rows = Mapping[str, Mapping[str, Any]]

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
        named = {_path(links.get(f"node{node}/{LATEST}", "")) for node in told}

        def rank(one: Mapping[str, Any]) -> tuple[bool, bool, float]:
            weights = {_path(home) for home, row in one["files"].items() if row.get("weights")}
            is_weights = Found(one["name"]).is_weights(weights)
            return worth(one["name"], one["modified"], is_weights=is_weights, named=named)

        chosen = max(self._whole(told, files, named), key=rank, default=None)
        if chosen and (self.checkpoint is None or rank(chosen) >= rank(self.checkpoint)):
            self.checkpoint = chosen

    def _whole(
        self, told: Mapping[int, Mapping[str, Any]], files: Rows, named: set[str]
    ) -> Iterator[dict[str, Any]]:
        by_path: defaultdict[str, list[str]] = defaultdict(list)
        for home in sorted(home for home in files if home.startswith("node")):
            by_path[_path(home)].append(home)
        for one, paths in find_checkpoints(by_path, named).items():
            if one.trees:
                inside = {home: files[home] for path in paths for home in by_path[path]}
                if self._rests(one, inside, told):
                    yield _checkpoint(one.name, inside)
                continue
            for home in by_path[one.name]:
                if not files[home].get("torn"):
                    yield _checkpoint(one.name, {home: files[home]})

    def _rests(self, one: Found, inside: Rows, told: Mapping[int, Mapping[str, Any]]) -> bool:
        """Tell whether a folder has not changed on any node for some looks since it was seen as it is."""
        looks = {node: document.get("look", -1) for node, document in told.items()}
        is_pending = any(
            _touches(pending, f"node{node}/{tree}/")
            for tree in one.trees
            for node, document in told.items()
            for pending in document.get("pending", ())
        )
        seen = self._resting.get(one.name)
        if is_pending or min(looks.values()) < 0 or seen is None or seen[0] != inside:
            self._resting[one.name] = (inside, looks)
            return False
        return all(told[node].get("ended") or look >= seen[1][node] + _RESTS for node, look in looks.items())


def keys(checkpoint: Mapping[str, Any] | None) -> set[str]:
    """Return the keys that a checkpoint needs."""
    return {part[0] for row in checkpoint["files"].values() for part in row["parts"]} if checkpoint else set()


def _touches(pending: str, folder: str) -> bool:
    """Tell whether pending files may lie below a folder; with a "/" at the end they lie anywhere below it."""
    return f"{pending}/".startswith(folder) or (pending.endswith("/") and folder.startswith(pending))


def _path(home: str) -> str:
    """Return a place in the results without its node."""
    return home.partition("/")[2]


def _checkpoint(name: str, files: Rows) -> dict[str, Any]:
    modified = max(row["modified"] for row in files.values())
    return {"name": name, "modified": modified, "files": dict(files)}
