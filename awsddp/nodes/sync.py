"""Send a folder to the nodes: everything, less what .awsddpignore names (without it, what git ignores).

Only what differs there is sent, and never over files that a node made.
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
from awsddp.nodes.project_files import Entry, Listing, files_to_send
from awsddp.util.format import amount, node_name, size_text
from awsddp.util.parallel import both, ignore, run_on_nodes, split
from awsddp.util.shipped_files import BUNDLED, REMOTE_DIR, shipped_folder, template

if TYPE_CHECKING:
    from awsddp.nodes.fleet import Fleet

WORK = "work"
"""The synced folder in it."""
AT_ONCE_BYTES = 1 << 20
"""How much a node gets over its open connection, the rest goes by rsync.

Both are needed. To two local nodes, on two cores: 1 kB in 0.10 s (rsync: 0.41 s; 0.13 s where its ssh shares
an open connection), 100 ms away in 1.1 s (3.8 s; 2.1 s). But 256 MB take 10.8 s (4.8 s), as paramiko needs
more than twice the CPU of ssh for each byte.
"""
LARGE_BYTES = 100e6
"""From when on it is said how much goes to a node."""
HOLES_BYTES = 1 << 20
"""How much of a file must be holes to be worth the time of a transfer that leaves them out."""
_ASK_S = 120.0


def push(
    listing: Listing,
    fleet: "Fleet",
    *,
    folder: str = WORK,
    nodes: Collection[int] | None = None,
    bundled: bool = False,
    on_event: OnEvent = ignore,
) -> dict[int, NodeFiles]:
    """Make ~/awsddp/FOLDER on the nodes (all that are connected) hold what `listing` names, all at once; with
    `bundled` ~/awsddp/BUNDLED the programs that ship with awsddp, too.

    Each node reports which paths differ; only those are sent: up to AT_ONCE_BYTES over the open connection,
    else by rsync. Digests decide on a file of the same size and time that was written since it was sent, on
    either side. A path that an earlier sync sent and that no longer exists here is removed, unless the node
    changed it; files that a node made stay. Raises NodesFailed; the other nodes are complete then.
    """
    if bundled:
        programs = files_to_send(shipped_folder(BUNDLED))
        work = partial(push, listing, fleet, folder=folder, nodes=nodes, on_event=on_event)
        return both(work, partial(push, programs, fleet, folder=BUNDLED, nodes=nodes))[0]
    sending = _Push(listing, fleet, folder)
    sending.compare(nodes)
    sending.tell_large(on_event)
    sending.change()
    left = [node for node in sending.changed if node not in sending.failures]
    return split({**run_on_nodes(sending.carry, left, on_event=on_event), **sending.failures})


class _Push:
    """A push: by node the entries that differ there, those that need not be sent, and why it failed."""

    def __init__(self, listing: Listing, fleet: "Fleet", folder: str) -> None:
        self._listing, self._root, self._fleet, self._folder = listing, listing.root, fleet, folder
        self.changed: dict[int, list[Entry]] = {}
        self.failures: dict[int, NodeError] = {}
        self._same: dict[int, list[Entry]] = {}  # by their digests
        self._digests: dict[str, str] = {}
        self._gone: dict[int, list[bytes]] = {}  # paths sent earlier that no longer exist here

    def compare(self, nodes: Collection[int] | None) -> None:
        """Ask the nodes (None: all) what differs. An answer is not trusted: only listed entries are sent."""
        entries = {os.fsencode(entry.path): entry for entry in self._listing.entries}
        records = b"\0".join(map(_record, self._listing.entries))
        told = self._ask(dict.fromkeys(self._fleet.nodes if nodes is None else nodes, records))
        for node, told_of in told.items():
            answers = [answer.partition(b" ") for answer in told_of.split(b"\0")]
            differing = [path for word, _, path in answers if word == b"changed"]
            self.changed[node] = [entries[path] for path in differing if path in entries]
            self._decide(node, (answer for word, _, answer in answers if word == b"unsure"), entries)
            missing = [path for word, _, path in answers if word == b"missing"]
            self._gone[node] = [path for path in missing if not self._is_here(path)]

    def _decide(self, node: int, unsure: Iterable[bytes], entries: Mapping[bytes, Entry]) -> None:
        """Decide by their digests, which the node sent, on files that may differ."""
        self._same[node] = []
        for answer in unsure:
            told, _, path = answer.partition(b" ")
            if entry := entries.get(path):
                same = self._digest(entry) == told.decode(errors="replace")
                (self._same if same else self.changed)[node].append(entry)

    def tell_large(self, on_event: OnEvent) -> None:
        """Report what goes to the node that lacks most, if that is much, and its largest parts."""
        lacking = [replace(self._listing, entries=entries) for entries in self.changed.values()]
        most = max(lacking, key=lambda one: one.size, default=None)
        if most is not None and most.size > LARGE_BYTES:
            parts = [(name, size) for name, size in most.largest() if size > most.size / 100]
            largest = ", ".join(f"{name} {size_text(size)}" for name, size in parts)
            on_event(Event(f"{size_text(most.size)} go to each node; the largest: {largest}"))

    def change(self) -> None:
        """Have the nodes remove what no longer exists here and, where little differs, put that in place."""
        little = {
            node: tuple(entries) if sum(entry.size for entry in entries) <= AT_ONCE_BYTES else ()
            for node, entries in self.changed.items()
        }
        packed = {entries: self._packed(entries) for entries in set(little.values())}
        contents = {
            node: _changes(self._gone[node], self._same[node], packed[entries])
            for node, entries in little.items()
            if self._gone[node] or self._same[node] or packed[entries]
        }
        self._complete = {node for node in self._ask(contents, "change") if packed[little[node]]}

    def carry(self, node: int, on_event: OnEvent, stop: threading.Event) -> NodeFiles:
        """Send by rsync what a node does not have yet. Raises NodeFailure."""
        changed, who = self.changed[node], node_name(node)
        sent = NodeFiles(node=node, files=len(changed), bytes=sum(entry.size for entry in changed))
        size = amount(sent.files, sent.bytes)
        if changed and node not in self._complete:
            # Which files differ is known: rsync is not to find, by whole seconds, that they do not.
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
            self._ask({node: _changes(here=changed)}, "change")
        on_event(Event(f"synced: {size}", who=who, fraction=1.0))
        return sent

    def _ask(self, contents: Mapping[int, bytes], *words: str) -> dict[int, bytes]:
        """Run the program of the work folder on nodes, and return its answers; `failures` gets the others."""
        argv = ["python3", "-I", "-S", "-c", template("work_folder.py"), self._folder, *words]
        requests = {node: (argv, content) for node, content in contents.items()}
        answers = {}
        for node, end in self._fleet.run_each(requests, timeout_s=_ASK_S).items():
            if isinstance(end, NodeError):
                self.failures[node] = end
            elif end.exit_code:
                self.failures[node] = NodeFailure(node, "files", "its folders are not usable", end.tail())
            else:
                answers[node] = end.stdout
        return answers

    def _is_here(self, path: bytes) -> bool:
        """Return whether the path still exists here: as no folder, and below no link."""
        whole = Path(self._root, os.fsdecode(path))
        is_folder = whole.is_dir() and not whole.is_symlink()
        return os.path.lexists(whole) and not is_folder and whole.parent.resolve() == whole.parent

    def _packed(self, entries: Iterable[Entry]) -> bytes:
        """Return entries with their contents, without those that are gone; b"" if one cannot be read."""
        parts = []
        try:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    held = _held(Path(self._root, entry.path), entry.kind)
                    parts += [_record(replace(entry, size=len(held))), b"\0", held]
        except OSError:
            return b""  # rsync says which
        return b"".join(parts)

    def _check_readable(self, entries: Iterable[Entry]) -> None:
        """Raise ConfigError if this machine, and not the node, is why a file could not be sent."""
        for entry in entries:
            path = Path(self._root, entry.path)
            try:
                if entry.kind == "f":
                    path.open("rb").close()
            except FileNotFoundError:
                continue
            except OSError as error:
                ignore = f"awsddp sync -o 'sync.ignore=[\"{entry.path}\"]'   # or leave it here"
                raise ConfigError(f"cannot read {path}", error.strerror or str(error), ignore) from error

    def _digest(self, entry: Entry) -> str:
        """Return the SHA-256 of what a file or link holds, "" of one that cannot be read."""
        with contextlib.suppress(OSError):
            if entry.path not in self._digests:
                path = Path(self._root, entry.path)
                if entry.kind == "l":
                    digest = hashlib.sha256(_held(path, entry.kind))
                else:
                    with path.open("rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256")
                self._digests[entry.path] = digest.hexdigest()
        return self._digests.get(entry.path, "")

    def _has_holes(self, entry: Entry) -> bool:
        with contextlib.suppress(OSError):
            return entry.size - Path(self._root, entry.path).lstat().st_blocks * 512 >= HOLES_BYTES
        return False


def _held(path: Path, kind: str) -> bytes:
    if kind == "l":
        return os.fsencode(path.readlink())
    return path.read_bytes() if kind == "f" else b""


def _record(entry: Entry) -> bytes:
    fields = f"{entry.kind} {entry.mode:o} {entry.size} {entry.mtime_ns} {entry.version} "
    return fields.encode() + os.fsencode(entry.path)


def _changes(gone: Iterable[bytes] = (), here: Iterable[Entry] = (), held: bytes = b"") -> bytes:
    """Return the request to remove paths, to note which are there as they are here, and to put others."""
    return b"\0\0".join([b"\0".join(gone), b"\0".join(map(_record, here)), held])
