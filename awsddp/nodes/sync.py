"""Sync a folder to the nodes, except ignored files.

The patterns in .awsddpignore determine which files are ignored. Without this file, git's ignore files are
used. Only paths that differ are sent, and files that a node created are not overwritten.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.errors import ConfigError, NodeError
from awsddp.model.documents import NodeFiles
from awsddp.model.events import Event, OnEvent
from awsddp.nodes import rsync
from awsddp.nodes.node_failures import NodeFailure
from awsddp.nodes.project_files import Entry, Listing, list_files_to_send
from awsddp.util.formatting import files_text, node_name, size_text
from awsddp.util.parallel import ignore_event, results_or_raise, run_both, run_on_nodes
from awsddp.util.shipped_files import BUNDLED, REMOTE_DIR, shipped_folder, template

if TYPE_CHECKING:
    from awsddp.nodes.fleet import Fleet

WORK = "work"
"""The name of the project folder in REMOTE_DIR."""
AT_ONCE_BYTES = 1 << 20
"""Files with up to this total size are sent over the open connection; larger syncs use rsync.

These times were measured with two local nodes on two cores. Over the open connection, 1 kB takes 0.10 s.
rsync takes 0.41 s, or 0.13 s if its ssh shares an open connection. With a latency of 100 ms, the three times
are 1.1 s, 3.8 s and 2.1 s. However, 256 MB take 10.8 s over the open connection and 4.8 s with rsync, because
paramiko needs more than twice the CPU time of ssh for each byte.
"""
LARGE_BYTES = 100e6
"""A sync that is larger than this is reported before it starts."""
HOLES_BYTES = 1 << 20
"""Files with at least this many bytes of holes are sent with rsync's options for sparse files."""
_REQUEST_S = 120.0


def push(
    listing: Listing,
    fleet: "Fleet",
    *,
    folder: str = WORK,
    nodes: Collection[int] | None = None,
    bundled: bool = False,
    on_event: OnEvent = ignore_event,
) -> dict[int, NodeFiles]:
    """Sync the files in `listing` to ~/awsddp/FOLDER on the nodes (default: all connected), all at once.

    If `bundled` is set, also sync the programs that ship with awsddp to ~/awsddp/BUNDLED. Each node reports
    which paths differ, and only these paths are sent. Up to AT_ONCE_BYTES are sent over the open connection,
    larger amounts by rsync. If a file has the same size and mtime on both sides, but was written on either
    side since it was sent, the digests are compared. A path that was synced earlier and no longer exists on
    this machine is removed, unless the node changed it. Files that a node created stay. Raises NodesFailed
    after the other nodes are complete.
    """
    if bundled:
        programs = list_files_to_send(shipped_folder(BUNDLED))
        work = partial(push, listing, fleet, folder=folder, nodes=nodes, on_event=on_event)
        return run_both(work, partial(push, programs, fleet, folder=BUNDLED, nodes=nodes))[0]
    sync = _Push(listing, fleet, folder)
    sync.compare(nodes)
    sync.report_large(on_event)
    sync.change()
    remaining = [node for node in sync.changed if node not in sync.failures]
    return results_or_raise({**run_on_nodes(sync.send, remaining, on_event=on_event), **sync.failures})


class _Push:
    """A sync in progress. `changed` has {node: entries to send}, and `failures` has {node: error}."""

    def __init__(self, listing: Listing, fleet: "Fleet", folder: str) -> None:
        self._listing, self._root, self._fleet, self._folder = listing, listing.root, fleet, folder
        self.changed: dict[int, list[Entry]] = {}
        self.failures: dict[int, NodeError] = {}
        self._same: dict[int, list[Entry]] = {}  # entries with the same digest on the node
        self._digests: dict[str, str] = {}
        self._gone: dict[int, list[bytes]] = {}  # paths that were synced earlier and no longer exist here

    def compare(self, nodes: Collection[int] | None) -> None:
        """Ask the nodes (None: all nodes) which paths differ.

        Responses are untrusted: only entries in the listing are sent.
        """
        entries = {os.fsencode(entry.path): entry for entry in self._listing.entries}
        records = b"\0".join(map(_record, self._listing.entries))
        responses = self._request(dict.fromkeys(self._fleet.nodes if nodes is None else nodes, records))
        for node, response in responses.items():
            lines = [line.partition(b" ") for line in response.split(b"\0")]
            differing = [path for kind, _, path in lines if kind == b"changed"]
            self.changed[node] = [entries[path] for path in differing if path in entries]
            self._compare_digests(node, (line for kind, _, line in lines if kind == b"unsure"), entries)
            missing = [path for kind, _, path in lines if kind == b"missing"]
            self._gone[node] = [path for path in missing if not self._exists(path)]

    def _compare_digests(self, node: int, unsure: Iterable[bytes], entries: Mapping[bytes, Entry]) -> None:
        """Use a node's digests to divide the files that may differ into unchanged and changed files."""
        self._same[node] = []
        for line in unsure:
            digest, _, path = line.partition(b" ")
            if entry := entries.get(path):
                is_same = self._digest(entry) == digest.decode(errors="replace")
                (self._same if is_same else self.changed)[node].append(entry)

    def report_large(self, on_event: OnEvent) -> None:
        """Report the largest sync's size and largest parts if the sync is larger than LARGE_BYTES."""
        listings = [replace(self._listing, entries=entries) for entries in self.changed.values()]
        most = max(listings, key=lambda listing: listing.size, default=None)
        if most is not None and most.size > LARGE_BYTES:
            parts = [(name, size) for name, size in most.largest() if size > most.size / 100]
            largest = ", ".join(f"{name} {size_text(size)}" for name, size in parts)
            on_event(Event(f"{size_text(most.size)} go to each node; the largest: {largest}"))

    def change(self) -> None:
        """Make the nodes remove paths that no longer exist on this machine, and write small changes."""
        small = {
            node: tuple(entries) if sum(entry.size for entry in entries) <= AT_ONCE_BYTES else ()
            for node, entries in self.changed.items()
        }
        packed = {entries: self._packed(entries) for entries in set(small.values())}
        contents = {
            node: _changes(self._gone[node], self._same[node], packed[entries])
            for node, entries in small.items()
            if self._gone[node] or self._same[node] or packed[entries]
        }
        self._complete = {node for node in self._request(contents, "change") if packed[small[node]]}

    def send(self, node: int, on_event: OnEvent, stop: threading.Event) -> NodeFiles:
        """Send a node's remaining changes with rsync. Raises NodeFailure."""
        changed, who = self.changed[node], node_name(node)
        sent = NodeFiles(node=node, files=len(changed), bytes=sum(entry.size for entry in changed))
        size = files_text(sent.files, sent.bytes)
        if changed and node not in self._complete:
            # --ignore-times is needed, because these files differ even if rsync sees the same sizes and
            # mtimes.
            options = ["-lpt", "--dirs", "--no-implied-dirs", "--ignore-times", "--modify-window=-1"]
            options += rsync.SPARSE if any(self._has_holes(entry) for entry in changed) else ()
            try:
                rsync.transfer(
                    [*options, "--", f"{os.fspath(self._root)}/", f"{who}:{REMOTE_DIR}/{self._folder}/"],
                    [f"./{entry.path}" for entry in changed],  # rsync drops names that begin with # or ;
                    ssh_config=self._fleet.login.ssh_config,
                    stop=stop,
                    progress=rsync.Progress(node, f"sending {size}", sent.bytes, on_event),
                )
            except NodeFailure:
                self._check_readable(changed)
                raise
            self._request({node: _changes(current=changed)}, "change")
        on_event(Event(f"synced: {size}", who=who, fraction=1.0))
        return sent

    def _request(self, contents: Mapping[int, bytes], *args: str) -> dict[int, bytes]:
        """Run templates/work_folder.py on nodes and return its output; errors are added to `failures`."""
        argv = ["python3", "-I", "-S", "-c", template("work_folder.py"), self._folder, *args]
        requests = {node: (argv, content) for node, content in contents.items()}
        responses = {}
        for node, end in self._fleet.run_each(requests, timeout_s=_REQUEST_S).items():
            if isinstance(end, NodeError):
                self.failures[node] = end
            elif end.exit_code:
                self.failures[node] = NodeFailure(node, "files", "its folders are not usable", end.tail())
            else:
                responses[node] = end.stdout
        return responses

    def _exists(self, path: bytes) -> bool:
        """Return True if this machine has the path, unless it is a folder or is reached through a symbolic
        link."""
        local_path = Path(self._root, os.fsdecode(path))
        is_folder = local_path.is_dir() and not local_path.is_symlink()
        return (
            os.path.lexists(local_path) and not is_folder and local_path.parent.resolve() == local_path.parent
        )

    def _packed(self, entries: Iterable[Entry]) -> bytes:
        """Return the existing entries with their contents, or b"" if any entry cannot be read."""
        parts = []
        try:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    content = _read_content(Path(self._root, entry.path), entry.kind)
                    parts += [_record(replace(entry, size=len(content))), b"\0", content]
        except OSError:
            return b""  # rsync then sends the entries, and its error names the file
        return b"".join(parts)

    def _check_readable(self, entries: Iterable[Entry]) -> None:
        """Raise ConfigError if a file could not be sent because this machine cannot read it."""
        for entry in entries:
            path = Path(self._root, entry.path)
            try:
                if entry.kind == "f":
                    path.open("rb").close()
            except FileNotFoundError:
                continue
            except OSError as error:
                advice = f"awsddp sync -o 'sync.ignore=[\"{entry.path}\"]'   # or exclude the file"
                raise ConfigError(f"cannot read {path}", error.strerror or str(error), advice) from error

    def _digest(self, entry: Entry) -> str:
        """Return the SHA-256 of what a file or link contains, or "" if it cannot be read."""
        with contextlib.suppress(OSError):
            if entry.path not in self._digests:
                path = Path(self._root, entry.path)
                if entry.kind == "l":
                    digest = hashlib.sha256(_read_content(path, entry.kind))
                else:
                    with path.open("rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256")
                self._digests[entry.path] = digest.hexdigest()
        return self._digests.get(entry.path, "")

    def _has_holes(self, entry: Entry) -> bool:
        with contextlib.suppress(OSError):
            return entry.size - Path(self._root, entry.path).lstat().st_blocks * 512 >= HOLES_BYTES
        return False


def _read_content(path: Path, kind: str) -> bytes:
    if kind == "l":
        return os.fsencode(path.readlink())
    return path.read_bytes() if kind == "f" else b""


def _record(entry: Entry) -> bytes:
    fields = f"{entry.kind} {entry.mode:o} {entry.size} {entry.mtime_ns} {entry.version} "
    return fields.encode() + os.fsencode(entry.path)


def _changes(gone: Iterable[bytes] = (), current: Iterable[Entry] = (), packed: bytes = b"") -> bytes:
    """Return the request to remove the paths `gone`, record the entries `current`, and write `packed`."""
    return b"\0\0".join([b"\0".join(gone), b"\0".join(map(_record, current)), packed])
