"""Files out to the nodes: only what differs, and never over what a node made by itself."""

import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from awsddp.errors import NodeError
from awsddp.nodes import rsync
from awsddp.nodes.failures import NodeFailure, NodesFailed, split
from awsddp.nodes.jump import Jump
from awsddp.nodes.listing import Entry, Listing, files_to_send
from awsddp.nodes.parallel import ignore, side_by_side
from awsddp.nodes.rendering import config_path, render
from awsddp.nodes.results import Fetched, Wanted, WantedLink, pull
from awsddp.nodes.transport import Endpoint, Fleet, Result
from awsddp.report import Event, OnEvent, amount, node_name
from awsddp.resources import template

__all__ = [
    "Fetched",
    "Listing",
    "Sent",
    "Wanted",
    "WantedLink",
    "files_to_send",
    "pull",
    "push",
    "read_ssh_config",
    "ssh_config",
]

PLACE = "awsddp"  # where our folders are on a node, in the user's home
WORK = "work"  # the synced one
AT_ONCE_BYTES = 1 << 20
"""How much a node gets over its open connection; a handshake and an rsync of their own cost more."""
_ASK_S = 120.0
_HOST = re.compile(
    r"^Host node(\d+)\n    HostName (\S+)\n    Port (\d+)\n    User (\S+)\n    HostKeyAlias (\S+)\n(?! )",
    re.M,
)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What went over the wire for a node: files (links and empty folders counted) and their bytes."""

    files: int
    bytes: int


def ssh_config(
    endpoints: Iterable[Endpoint], key: Path, known_hosts: Path, *, jump: Jump | None = None
) -> str:
    """Return an ssh_config that reaches the nodes as node0, node1...: strict, by this key alone.

    Host keys go by instance id. Raises ConfigError for a path that ssh_config cannot hold.
    """
    over = f"    ProxyCommand {jump.proxy_command()}\n" if jump else ""
    hosts = "".join(
        f"Host {node_name(one.node)}\n"
        f"    HostName {one.host}\n"
        f"    Port {one.port}\n"
        f"    User {one.user}\n"
        f"    HostKeyAlias {one.instance_id}\n"
        f"{over}"
        for one in endpoints
    )
    return render("ssh_config", hosts=hosts, key=config_path(key), known_hosts=config_path(known_hosts))


def read_ssh_config(text: str) -> tuple[Endpoint, ...]:
    """Return the nodes that an ssh_config of ours reaches, and how; what is not understood is left out."""
    return tuple(
        Endpoint(node=int(node), host=host, port=int(port), user=user, instance_id=instance_id)
        for node, host, port, user, instance_id in _HOST.findall(text)
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

    Each node says which paths differ from home; only those travel: a few small ones over the connection that
    is open, the rest by rsync. A path that an earlier sync sent and that is gone at home is removed, unless
    the node changed it; what a node made stays. Raises NodesFailed; the other nodes are complete then.
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
            options = ["-lpt", "--dirs", "--no-implied-dirs", "--ignore-times", "--modify-window=-1", "--"]
            rsync.transfer(
                [*options, f"{os.fspath(listing.root)}/", f"{who}:{PLACE}/{folder}/"],
                [f"./{entry.path}" for entry in changed[node]],  # rsync drops names that begin with # or ;
                node=node,
                ssh_config=ssh_config,
                stop=stop,
                on_bytes=on_bytes,
            )
        tell(Event(f"synced: {size}", who=who, fraction=1.0))
        return sent

    outcomes = side_by_side(carry, [node for node in changed if node not in failures], on_event=on_event)
    return split({**outcomes, **failures})


def _compare(
    listing: Listing,
    fleet: Fleet,
    folder: str,
    failures: dict[int, NodeError],
    nodes: Collection[int] | None,
) -> tuple[dict[int, list[Entry]], dict[int, list[bytes]]]:
    """Return, by node, the entries that differ there, and the paths sent earlier that are gone at home.

    What a node answers is no instruction: only what is listed is ever sent.
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
    """Whether home has what was sent: no folder in its place, nothing that a link on the way leads to."""
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
    """Send what differs where that is little, and return the nodes that have all of it now.

    Where anything stands in the way nothing is said: rsync then tries, and tells.
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
    """Return entries with what they hold; what has vanished meanwhile is left out. Raises OSError."""
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


def _script(*words: str) -> list[str]:
    return ["python3", "-I", "-c", template("work_folder.py"), *words]


def _refused(node: int, result: Result) -> NodeFailure:
    return NodeFailure(node, "files", "its folders cannot be used", result.tail())


def _record(entry: Entry) -> bytes:
    return (
        f"{entry.kind} {entry.mode:o} {entry.size} {entry.mtime_ns} ".encode()
        + os.fsencode(entry.path)
        + b"\0"
    )
