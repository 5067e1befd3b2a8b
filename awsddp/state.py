"""The local folder of a cluster: a cache of what AWS cannot hold, and the intent. It may be lost.

`$AWSDDP_HOME/clusters/NAME/` holds the private key (0600 from birth), the host keys by instance id, the
ssh_config, what was found on the nodes, and the intent: what a launch is about to ask for, written down and
synced before it is asked. After `down` the ledger and the calls move to `$AWSDDP_HOME/history/NAME-ID/`.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from awsddp.errors import ConfigError
from awsddp.model import billing
from awsddp.model.records import Frozen, Intent, JobRecord, Node, Prepared, Remembered, Target
from awsddp.util.format import node_name

_VERSION = 1
TAGS_S = 600.0
"""How long another client of this machine may be at it, changing the tags that name jobs."""
_UNNAMED_S = 2.0
"""How long a lock may be held by nobody that has written a name."""


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return $AWSDDP_HOME, by default ~/.awsddp."""
    return Path(environ.get("AWSDDP_HOME") or Path.home() / ".awsddp").absolute()


def make_folder(path: Path) -> None:
    """Make a folder and what is missing above it, each 0700: mkdir's own mode is for the last one alone.

    One that exists keeps its mode. Raises OSError.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def open_to_append(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a file to read and append; one that is made is 0600. `buffering` as of open(). Raises OSError."""
    return open(path, "a+b", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, readable by its owner alone from birth, old or new and never torn.

    Raises ConfigError where the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with _written(path):
        make_folder(path.parent)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        next = "free disk space, or set another AWSDDP_HOME"
        raise ConfigError(f"cannot write {path}", why, next) from error


class Record(Frozen):
    """What the folder remembers of a cluster: who it is, where it lives, and what was found on its nodes.

    `account` is the AWS account that it is in ("" where an older awsddp wrote it), `created` the time of its
    last launch, `expires` the deadline that the nodes have or are about to be told, `nodes` and `asked`
    (keys of awsddp.toml and their values) what was last asked for. `price_usd_per_hour` is of all nodes
    together, `disk_usd_per_hour` of the disk of one; `internet` tells whether the nodes reach it; `idle`
    is what the nodes were told; `addresses` go by instance id; `jobs` are as last seen, those that ran then
    at the time in `seen`.
    """

    version: int = _VERSION
    id: str
    owner: str
    account: str = ""
    target: Target
    created: datetime
    expires: datetime
    instance_type: str
    nodes: int
    gpus_per_node: int
    pretended: bool
    internet: bool = True
    ssh_user: str
    price_usd_per_hour: float | None = None
    disk_usd_per_hour: float = 0.0
    idle: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    intent: Intent | None = None
    prepared: tuple[Prepared, ...] = ()
    addresses: dict[str, str] = field(default_factory=dict)
    jobs: tuple[JobRecord, ...] = ()
    seen: dict[str, datetime] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the cluster by key, its size included; none where nothing of it was ever made."""
        made = self.prepared or self.intent or self.asked
        return {**self.asked, "cluster.nodes": self.nodes} if made else {}

    @property
    def remembered(self) -> Remembered:
        """The cluster's id and its instances that were prepared."""
        return Remembered(id=self.id, numbers={one.instance_id: one.node for one in self.prepared})

    @property
    def found(self) -> dict[int, Prepared]:
        """What was found on each node, by its number."""
        return {one.node: one for one in self.prepared}

    def is_prepared(self, node: Node) -> bool:
        """Return whether `up` has made this instance ready, so that its host key is known."""
        return any(one.instance_id == node.instance_id for one in self.prepared)

    def state_of(self, node: Node) -> str:
        """Return what a node is, in words: EC2's state, or "being prepared" on its way to ready."""
        starts = node.state in ("pending", "running") and not self.is_prepared(node)
        return f"{node_name(node.node)} is {'being prepared' if starts else node.state}"


class Folder:
    """The folder of one cluster. Reading never fails for want of it: what is lost or torn reads as None."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.path = root / "clusters" / name
        self.key = self.path / "key"
        """The private key that logs in to the nodes."""
        self.known_hosts = self.path / "known_hosts"
        """The host keys, by instance id."""
        self.ssh_config = self.path / "ssh_config"
        """The configuration with which awsddp's own ssh and rsync reach node0, node1, ..."""
        self.ledger = self.path / "ledger.jsonl"
        """What this cluster did, one JSON document a line; it outlives the cluster."""

    def publish(self, entries: Callable[[str, Record], str]) -> None:
        """Write the cluster's ssh_config and its part of the common one; nothing else writes them.

        `entries(prefix, record)` returns the entries of an ssh_config, each name with the prefix ("": none).
        It is called while no other command writes: the last one to write has looked last. Raises ConfigError
        where the disk refuses.
        """
        with self._writing():
            if (record := self.read(newer=True)) is None:  # `down` has retired the cluster meanwhile
                return
            _replace(self.ssh_config, entries("", record))
            _replace(self.path / "hosts", entries(f"{self.name}-", record))
            _join_hosts(self.root)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Read, change and write small files while no other command on this machine does."""
        path = self.root / "locks" / ".writing"
        with _written(path):
            make_folder(path.parent)
            stream = open_to_append(path)
        with stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def read(self, *, newer: bool = False) -> Record | None:
        """Return the record, or None where there is none or it cannot be understood (a cache may be lost).

        Raises ConfigError where a newer awsddp wrote it; with `newer` that counts as lost, too.
        """
        try:
            document = msgspec.json.decode((self.path / "cluster.json").read_bytes())
            if document.get("version", 0) > _VERSION:
                if newer:
                    return None
                raise ConfigError(
                    f"{self.path / 'cluster.json'} was written by a newer awsddp",
                    "",
                    "upgrade awsddp on this machine",
                )
            return msgspec.convert(document, Record)
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return None

    def write(self, record: Record) -> None:
        """Write a new record down, synced to disk; `update` changes one. Raises ConfigError where the disk
        refuses."""
        write_private(
            self.path / "cluster.json", msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
        )

    def update(self, change: Callable[[Record], Record]) -> Record | None:
        """Change the record while no other command does, and return it; None if there is none any more.

        Raises ConfigError where the disk refuses.
        """
        with self._writing():
            record = self.read()
            changed = record and change(record)
            if changed is not None and changed != record:
                self.write(changed)
            return changed

    def remember(self, *jobs: JobRecord) -> None:
        """Keep jobs as last seen, for `status`, and when those that run were seen. Raises ConfigError."""
        names = {job.job for job in jobs}
        running = dict.fromkeys((job.job for job in jobs if job.state == "running"), datetime.now(UTC))

        def change(record: Record) -> Record:
            others = [job for job in record.jobs if job.job not in names]
            seen = {name: time for name, time in record.seen.items() if name not in names}
            return replace(record, jobs=(*others, *jobs), seen=seen | running)

        self.update(change)

    def note(self, event: str, **facts: object) -> None:
        """Append a line to the ledger. Raises ConfigError where the disk refuses."""
        line = msgspec.json.encode({"time": datetime.now(UTC), "event": event, **facts})
        with _written(self.ledger):
            make_folder(self.path)
            with open_to_append(self.ledger) as stream:
                stream.write(line + b"\n")

    def retire(self, cluster_id: str) -> None:
        """After `down`: keep the ledger and the calls under history/NAME-ID/, drop the rest.

        Raises ConfigError where the disk refuses; what could be dropped is.
        """
        history = self.root / "history" / f"{self.name}-{cluster_id}"
        try:
            with _written(history):
                for kept in (self.ledger, self.path / "calls.jsonl"):
                    if kept.exists():
                        make_folder(history)
                        with open_to_append(history / kept.name) as stream:
                            stream.write(kept.read_bytes())
        finally:
            with self._writing():
                shutil.rmtree(self.path, ignore_errors=True)
                _join_hosts(self.root)
        if self.path.exists():
            raise ConfigError(f"cannot remove {self.path}", "", "remove it: it holds the key of what is gone")

    def holder(self) -> str | None:
        """Return which command of this machine holds the cluster, in words; None where none does."""
        with contextlib.suppress(OSError), (self.root / "locks" / self.name).open("rb") as stream:
            if not take(stream, fcntl.LOCK_SH):
                return _holder(stream)
        return None

    @contextlib.contextmanager
    def lock(self, verb: str, *, part: str = "", wait_s: float = 0.0) -> Iterator[float]:
        """Hold the cluster against a second client on this machine; the kernel ends the lock with us.

        `part` names something of the cluster that is held alone, beside the rest. Yields for how long nobody
        has held it (s). Raises ConfigError that says who holds it (host, process, verb, since when) after
        `wait_s` seconds, or that the disk refuses.
        """
        path = self.root / "locks" / f"{self.name}{part and '.'}{part}"
        deadline = time.monotonic() + wait_s
        with _written(path):
            make_folder(path.parent)
            # Not buffered: what a full disk refuses is not written again at the end.
            stream = open_to_append(path, buffering=0)
        with stream:
            while not take(stream, fcntl.LOCK_EX):
                late_s = time.monotonic() - deadline
                holder = _holder(stream)
                if late_s > _UNNAMED_S or (late_s > 0 and holder):
                    raise ConfigError(
                        f"cluster {self.name} is in use",
                        f"held by {holder or 'another awsddp on this machine'}",
                        "wait for it, or end that process",
                    )
                time.sleep(0.05)
            free_s = time.time() - os.fstat(stream.fileno()).st_mtime
            stream.truncate(0)
            since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            me = {"host": socket.gethostname(), "pid": os.getpid(), "verb": verb, "since": since}
            with contextlib.suppress(OSError):  # the lock holds on a full disk, too: `down` must end the bill
                stream.write(msgspec.json.encode(me))
            try:
                yield free_s
            finally:
                stream.truncate(0)


def _join_hosts(root: Path) -> None:
    """Write `ROOT/ssh_config` of the clusters' parts, one each where a node runs. Raises ConfigError."""
    parts = [_text(part) for part in sorted(root.glob("clusters/*/hosts"))]
    first = f"# Written by awsddp. In ~/.ssh/config, as its first line: Include {root / 'ssh_config'}\n"
    _replace(root / "ssh_config", "".join((first, *parts)))


def _replace(path: Path, text: str) -> None:
    """Write a file if it differs, remove it where `text` is empty. Raises ConfigError."""
    if not text:
        path.unlink(missing_ok=True)
    elif _text(path) != text:
        write_private(path, text.encode())


def _text(path: Path) -> str:
    """Return what a file holds, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def take(stream: IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Take a lock of this kind on a file, and tell whether nobody else holds it."""
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(stream: IO[bytes]) -> str | None:
    """Return who holds a lock; None in the moments in which its holder has not yet or no longer a name."""
    stream.seek(0)
    try:
        return "`awsddp {verb}` on {host}, process {pid}, since {since}".format(
            **msgspec.json.decode(stream.read())
        )
    except (ValueError, KeyError, TypeError):
        return None


def read_rows(ledger: Path) -> list[billing.Row]:
    """Return the rows of a ledger; none where there is none."""
    if not ledger.is_file():
        return []
    return billing.ledger_rows(ledger.read_text(encoding="utf-8", errors="replace"))


class Past(Frozen):
    """A cluster that this machine knows, living or ended: its name, its folder, the rows of its ledger.

    `record` is what the folder remembers, None once it has ended.
    """

    name: str
    folder: Path
    rows: list[billing.Row]
    record: Record | None = None

    @property
    def bill(self) -> billing.Bill | None:
        """The account by the ledger alone, now; None where nothing was launched."""
        return billing.account(self.rows, datetime.now(UTC))

    @property
    def launched(self) -> billing.Row | None:
        """The row of the first launch: the cluster's id, place and settings."""
        return next((row for row in self.rows if row.event == "launched"), None)

    @property
    def instances(self) -> set[str]:
        """The ids of all instances that it ever had."""
        return {key for row in self.rows if row.event == "launched" for key in row.instances}


def pasts(home: Path) -> Iterator[Past]:
    """Yield every cluster that this machine knows, those that have ended first; `home` is $AWSDDP_HOME."""
    for folder in sorted(home.glob("history/*")):
        yield Past(name=folder.name[:-9], folder=folder, rows=read_rows(folder / "ledger.jsonl"))
    for folder in sorted(home.glob("clusters/*")):
        yield living(Folder(home, folder.name))


def living(folder: Folder) -> Past:
    """Return the cluster of a folder that `down` has not retired."""
    record = folder.read(newer=True)
    return Past(name=folder.name, folder=folder.path, rows=read_rows(folder.ledger), record=record)
