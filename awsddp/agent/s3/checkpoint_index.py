"""Select the newest complete checkpoint in S3 from the lists that all nodes write.

This module does no I/O. A job has these keys in S3:

PREFIX/JOB/job.json      the job and its newest complete checkpoint, from the first node; readers start here
PREFIX/JOB/nodeK.json    node K's state: the pages of its list, its folders with pending files, its end
PREFIX/JOB/lists/...     pages that list saved files with the keys of their parts, and links (list_pages.py)
PREFIX/JOB/node0/...     a file, at its path in the results folder; later versions are node0/...~2 and so on
PREFIX/JOB/parts/...     an append-only file's parts, which readers truncate to their sizes and join
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from awsddp.agent.s3.checkpoints import LATEST, CheckpointPath, checkpoint_sort_key, find_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Rows = Mapping[str, Mapping[str, Any]]

_QUIET_SCANS = 2
"""A folder counts as complete if it has stayed unchanged during this many scans by every node."""


class CheckpointIndex:
    """The newest complete checkpoint: {"name", "modified", "files": rows by results path}."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] | None = None
        self._quiet_since: dict[str, tuple[Any, dict[int, int]]] = {}

    def update(
        self, documents: Mapping[int, Mapping[str, Any]], files: Rows, links: Mapping[str, str]
    ) -> None:
        """Update the checkpoint.

        `documents` maps each node to its nodeK.json ({} if it has not been read yet). `files` and `links` are
        the rows in the lists that these documents name.
        """
        named_paths = {_path_in_node(links.get(f"node{node}/{LATEST}", "")) for node in documents}

        def rank(checkpoint: Mapping[str, Any]) -> tuple[bool, bool, float]:
            weights = {
                _path_in_node(result) for result, row in checkpoint["files"].items() if row.get("weights")
            }
            is_weights = CheckpointPath(checkpoint["name"]).is_weights_only(weights)
            return checkpoint_sort_key(
                checkpoint["name"], checkpoint["modified"], is_weights=is_weights, named=named_paths
            )

        best = max(self._complete_checkpoints(documents, files, named_paths), key=rank, default=None)
        if best and (self.checkpoint is None or rank(best) >= rank(self.checkpoint)):
            self.checkpoint = best

    def _complete_checkpoints(
        self, documents: Mapping[int, Mapping[str, Any]], files: Rows, named_paths: set[str]
    ) -> Iterator[dict[str, Any]]:
        by_path: defaultdict[str, list[str]] = defaultdict(list)
        for result in sorted(result for result in files if result.startswith("node")):
            by_path[_path_in_node(result)].append(result)
        for checkpoint, paths in find_checkpoints(by_path, named_paths).items():
            if checkpoint.trees:
                folder_files = {result: files[result] for path in paths for result in by_path[path]}
                if self._is_quiet(checkpoint, folder_files, documents):
                    yield _checkpoint(checkpoint.name, folder_files)
                continue
            for result in by_path[checkpoint.name]:
                if not files[result].get("torn"):
                    yield _checkpoint(checkpoint.name, {result: files[result]})

    def _is_quiet(
        self, checkpoint: CheckpointPath, folder_files: Rows, documents: Mapping[int, Mapping[str, Any]]
    ) -> bool:
        """Return True if no node has changed the checkpoint's folders in the last _QUIET_SCANS scans."""
        scans = {node: document.get("look", -1) for node, document in documents.items()}
        is_pending = any(
            _may_contain(pending, f"node{node}/{tree}/")
            for tree in checkpoint.trees
            for node, document in documents.items()
            for pending in document.get("pending", ())
        )
        previous = self._quiet_since.get(checkpoint.name)
        if is_pending or min(scans.values()) < 0 or previous is None or previous[0] != folder_files:
            self._quiet_since[checkpoint.name] = (folder_files, scans)
            return False
        quiet_at = {node: scan + _QUIET_SCANS for node, scan in previous[1].items()}
        return all(documents[node].get("ended") or scan >= quiet_at[node] for node, scan in scans.items())


def checkpoint_keys(checkpoint: Mapping[str, Any] | None) -> set[str]:
    """Return the keys of all parts of a checkpoint's files."""
    return {part[0] for row in checkpoint["files"].values() for part in row["parts"]} if checkpoint else set()


def _may_contain(pending: str, folder: str) -> bool:
    """Return True if files in the folder `pending` may be in `folder`.

    If `pending` ends with "/", its subfolders may contain pending files, too.
    """
    return f"{pending}/".startswith(folder) or (pending.endswith("/") and folder.startswith(pending))


def _path_in_node(result: str) -> str:
    """Return a results path without its node's folder."""
    return result.partition("/")[2]


def _checkpoint(name: str, files: Rows) -> dict[str, Any]:
    modified = max(row["modified"] for row in files.values())
    return {"name": name, "modified": modified, "files": dict(files)}
