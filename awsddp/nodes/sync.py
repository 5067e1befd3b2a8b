"""Send files to the nodes: only those that differ, and never over files that a node made."""

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from awsddp.errors import NodeError
from awsddp.nodes import rsync
from awsddp.nodes.command import Result
from awsddp.nodes.connection import Endpoint
from awsddp.nodes.failures import NodeFailure, NodesFailed, split
from awsddp.nodes.jump import Jump
from awsddp.nodes.listing import Entry, Listing
from awsddp.nodes.parallel import ignore, run_on_nodes
from awsddp.nodes.rendering import config_path, render
from awsddp.nodes.transport import Fleet
from awsddp.report import Event, OnEvent, amount, node_name
from awsddp.resources import template

REMOTE_DIR = "awsddp"
"""The folder of the synced folders, in the home folder of the node's user."""
WORK = "work"
"""The synced folder in it."""
AT_ONCE_BYTES = 1 << 20
"""How much a node gets over its open connection, the rest goes by rsync.

Both are needed. To two local nodes, on two busy cores: 1 kB in 0.6 s (rsync: 4.6 s), 1 MB in 0.5 s (2.8 s),
64 MB in 6.2 s (7.7 s), but 256 MB in 21 s (11 s), as paramiko needs twice the CPU of ssh for each byte.
"""
HOLES_BYTES = 1 << 20
"""How much of a file must be holes to be worth the time of a transfer that leaves them out."""
_ASK_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What was sent to a node: files (links and empty folders counted) and their bytes."""

    files: int
    bytes: int


def ssh_config(
    endpoints: Sequence[Endpoint], key: Path, known_hosts: Path, *, jump: Jump | None = None, prefix: str = ""
) -> str:
    """Return an ssh_config that reaches the nodes as node0, node1...: strict, by this key alone.

    It sets nothing for other hosts; `prefix` is put before each name. Host keys go by instance id. Raises
    ConfigError for a path that ssh_config cannot hold.
    """
    over = f"    ProxyCommand {jump.proxy_command()}\n" if jump else ""
    hosts = "".join(
        f"Host {prefix}{node_name(one.node)}\n"
        f"    HostName {one.host}\n"
        f"    Port {one.port}\n"
        f"    User {one.user}\n"
        f"    HostKeyAlias {one.instance_id}\n"
        f"{over}"
        for one in endpoints
    )
    return render(
        "ssh_config",
        hosts=hosts,
        names=" ".join(f"{prefix}{node_name(one.node)}" for one in endpoints),
        key=config_path(key),
        known_hosts=config_path(known_hosts),
    )


def push(
    listing: Listing,
    fleet: Fleet,
    *,
    ssh_config: Path,
    folder: str = WORK,
    nodes: Collection[int] | None = None,
    on_event: OnEvent = ignore,
) -> dict[int, Sent]:
    """Make ~/awsddp/FOLDER on the nodes (all that are connected) hold what `listing` names, all at once.

    Each node reports which paths differ; only those are sent: up to AT_ONCE_BYTES over the open connection,
    else by rsync. A path that an earlier sync sent and that no longer exists here is removed, unless the node
    changed it; files that a node made stay. Raises NodesFailed; the other nodes are complete then.
    """
    failures: dict[int, NodeError] = {}
    changed, gone = _compare(listing, fleet, folder, failures, nodes)
    _remove(fleet, folder, gone, failures)
    complete = _send_at_once(listing.root, fleet, folder, changed)

    def carry(node: int, tell: OnEvent, stop: threading.Event) -> Sent:
        sent = Sent(files=len(changed[node]), bytes=sum(entry.size for entry in changed[node]))
        who, size = node_name(node), amount(sent.files, sent.bytes)

        def on_bytes(done: int) -> None:
            done_part = min(1.0, done / max(1, sent.bytes))
            tell(Event(f"sending {size}", who=who, fraction=done_part, size=sent.bytes))

        if changed[node] and node not in complete:
            # Which files differ is known: rsync is not to find, by whole seconds, that they do not.
            options = ["-lpt", "--dirs", "--no-implied-dirs", "--ignore-times", "--modify-window=-1"]
            options += rsync.SPARSE if any(_has_holes(listing.root, entry) for entry in changed[node]) else ()
            rsync.transfer(
                [*options, "--", f"{os.fspath(listing.root)}/", f"{who}:{REMOTE_DIR}/{folder}/"],
                [f"./{entry.path}" for entry in changed[node]],  # rsync drops names that begin with # or ;
                node=node,
                ssh_config=ssh_config,
                stop=stop,
                on_bytes=on_bytes,
            )
        tell(Event(f"synced: {size}", who=who, fraction=1.0))
        return sent

    outcomes = run_on_nodes(carry, [node for node in changed if node not in failures], on_event=on_event)
    return split({**outcomes, **failures})


def _compare(
    listing: Listing,
    fleet: Fleet,
    folder: str,
    failures: dict[int, NodeError],
    nodes: Collection[int] | None,
) -> tuple[dict[int, list[Entry]], dict[int, list[bytes]]]:
    """Return, by node, the entries that differ there, and the paths sent earlier that no longer exist here.

    A node's answer is not trusted: only listed entries are sent.
    """
    entries = {os.fsencode(entry.path): entry for entry in listing.entries}
    records = b"".join(_record(entry) for entry in listing.entries)
    changed, gone = {}, {}
    for node, result in fleet.run(_script(folder), stdin=records, nodes=nodes, timeout_s=_ASK_S).items():
        if result.exit_code:
            failures[node] = _refused(node, result)
            continue
        answers = [answer.partition(b" ") for answer in result.stdout.split(b"\0")]
        differing = [path for word, _, path in answers if word == b"changed"]
        changed[node] = [entries[path] for path in differing if path in entries]
        missing = [path for word, _, path in answers if word == b"missing"]
        gone[node] = [path for path in missing if not _at_home(listing.root, path)]
    return changed, gone


def _at_home(root: Path, path: bytes) -> bool:
    """Return whether the path still exists here: as no folder, and below no link."""
    whole = Path(root, os.fsdecode(path))
    is_folder = whole.is_dir() and not whole.is_symlink()
    return os.path.lexists(whole) and not is_folder and whole.parent.resolve() == whole.parent


def _remove(
    fleet: Fleet, folder: str, gone: Mapping[int, list[bytes]], failures: dict[int, NodeError]
) -> None:
    requests = {
        node: (_script(folder, "remove"), b"".join(path + b"\0" for path in paths))
        for node, paths in gone.items()
        if paths
    }
    for node, result in fleet.run_each(requests, timeout_s=_ASK_S).items():
        if result.exit_code:
            failures[node] = _refused(node, result)


def _send_at_once(
    root: Path, fleet: Fleet, folder: str, changed: Mapping[int, list[Entry]]
) -> frozenset[int]:
    """Send small differences over the open connection, and return the nodes that have all of theirs now.

    A failure is silent: rsync is tried next, and reports it.
    """
    little = {
        node: tuple(entries)
        for node, entries in changed.items()
        if entries and sum(entry.size for entry in entries) <= AT_ONCE_BYTES
    }
    try:
        packed = {entries: _packed(root, entries) for entries in set(little.values())}
    except OSError:
        return frozenset()
    requests = {node: (_script(folder, "receive"), packed[entries]) for node, entries in little.items()}
    try:
        told = fleet.run_each(requests, timeout_s=_ASK_S)
    except NodesFailed as error:
        told = error.results
    return frozenset(node for node, one in told.items() if one.stdout.endswith(b"\0received\0"))


def _packed(root: Path, entries: Iterable[Entry]) -> bytes:
    """Return entries with their contents, without those that no longer exist. Raises OSError."""
    parts = []
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            held = _held(Path(root, entry.path), entry.kind)
            parts += [_record(replace(entry, size=len(held))), held]
    return b"".join(parts)


def _held(path: Path, kind: str) -> bytes:
    if kind == "l":
        return os.fsencode(path.readlink())
    return path.read_bytes() if kind == "f" else b""


def _has_holes(root: Path, entry: Entry) -> bool:
    with contextlib.suppress(OSError):
        return entry.size - Path(root, entry.path).lstat().st_blocks * 512 >= HOLES_BYTES
    return False


def _script(*words: str) -> list[str]:
    return ["python3", "-I", "-c", template("work_folder.py"), *words]


def _refused(node: int, result: Result) -> NodeFailure:
    return NodeFailure(node, "files", "its folders are not usable", result.tail())


def _record(entry: Entry) -> bytes:
    return (
        f"{entry.kind} {entry.mode:o} {entry.size} {entry.mtime_ns} ".encode()
        + os.fsencode(entry.path)
        + b"\0"
    )
