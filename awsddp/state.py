"""A cluster's folder on this machine, with its record, keys, ssh_config, ledger and locks. It may be lost.

`$AWSDDP_HOME/clusters/NAME/` holds the private key (created with mode 0600), the host keys by instance id,
the ssh_config, and the record, which has facts about the nodes and the intent. The intent is a launch's
request, which is synced to disk before it is sent. `down` moves the ledger and the log of AWS calls to
`$AWSDDP_HOME/history/NAME-ID/`.
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
from awsddp.model.records import Frozen, JobRecord, LaunchIntent, Node, PreparedNode, RecordedCluster, Target
from awsddp.util.formatting import node_name

_VERSION = 1
TAG_CHANGE_S = 600.0
"""How long to wait while another client on this machine changes the tags that name jobs."""
_UNNAMED_S = 2.0
"""How long a process may hold a lock before it writes its name to the lock file."""


def awsddp_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return $AWSDDP_HOME, by default ~/.awsddp."""
    return Path(environ.get("AWSDDP_HOME") or Path.home() / ".awsddp").absolute()


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents with mode 0700 (mkdir applies its mode only to the last one).

    Existing folders keep their mode. Raises OSError.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def open_to_append(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a file for reading and appending.

    A new file gets mode 0600. `buffering` is passed to open(). Raises OSError.
    """
    return open(path, "a+b", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_private(path: Path, data: bytes) -> None:
    """Atomically replace the file `path` with a file that has the content `data` and mode 0600.

    Raises ConfigError if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with _writing_errors(path):
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
def _writing_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the context into a ConfigError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        next_step = "free disk space, or set another AWSDDP_HOME"
        raise ConfigError(f"cannot write {path}", why, next_step) from error


class Record(Frozen):
    """A cluster's record (cluster.json), with its identity, target, settings, prepared nodes and jobs.

    `account` is its AWS account ("" if an older awsddp wrote the record), and `created` is the time of its
    last launch. `expires` is when the nodes terminate themselves; the nodes have this expiry already or are
    about to get it. `nodes` and `asked` (awsddp.toml keys with their values) are the last requested settings.
    `price_usd_per_hour` is the price of all nodes, and `disk_usd_per_hour` is the price of one node's disk.
    `internet` is True if the nodes can reach the internet, and `idle` is the idle time set on the nodes.
    `addresses` has the nodes' addresses by instance id. `jobs` has the jobs as last seen, and `seen` is when
    a running job was last seen.
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
    intent: LaunchIntent | None = None
    prepared: tuple[PreparedNode, ...] = ()
    addresses: dict[str, str] = field(default_factory=dict)
    jobs: tuple[JobRecord, ...] = ()
    seen: dict[str, datetime] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The cluster's settings by key, including its size; empty if nothing was ever launched."""
        made = self.prepared or self.intent or self.asked
        return {**self.asked, "cluster.nodes": self.nodes} if made else {}

    @property
    def known_nodes(self) -> RecordedCluster:
        """The cluster's id, and the node numbers of its prepared instances."""
        return RecordedCluster(
            id=self.id, numbers={prepared.instance_id: prepared.node for prepared in self.prepared}
        )

    @property
    def prepared_by_node(self) -> dict[int, PreparedNode]:
        """The prepared nodes, by node number."""
        return {prepared.node: prepared for prepared in self.prepared}

    def is_prepared(self, node: Node) -> bool:
        """Return True if `up` has prepared this instance, so that its host key is known."""
        return any(prepared.instance_id == node.instance_id for prepared in self.prepared)

    def describe_node_state(self, node: Node) -> str:
        """Return the node's name and EC2 state, or "being prepared" if it is started but not prepared."""
        is_starting = node.state in ("pending", "running") and not self.is_prepared(node)
        return f"{node_name(node.node)} is {'being prepared' if is_starting else node.state}"


class ClusterFolder:
    """One cluster's folder."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.path = root / "clusters" / name
        self.key = self.path / "key"
        """The private key that logs in to the nodes."""
        self.known_hosts = self.path / "known_hosts"
        """The host keys, by instance id."""
        self.ssh_config = self.path / "ssh_config"
        """The configuration that awsddp's ssh and rsync use to reach node0, node1, ..."""
        self.ledger = self.path / "ledger.jsonl"
        """The cluster's events, one JSON document per line; `down` keeps this file."""

    def write_ssh_config(self, entries: Callable[[str, Record], str]) -> None:
        """Write the cluster's ssh_config and its part of the shared ssh_config. Only this method writes them.

        `entries(prefix, record)` returns the entries for an ssh_config, with `prefix` (which may be "")
        before each name. `entries` is called while the write lock is held, so that it gets the newest record.
        Raises ConfigError if a file cannot be written.
        """
        with self._write_lock():
            if (record := self.read(ignore_newer=True)) is None:  # `down` has archived the cluster
                return
            _write_or_remove(self.ssh_config, entries("", record))
            _write_or_remove(self.path / "hosts", entries(f"{self.name}-", record))
            _join_ssh_configs(self.root)

    @contextlib.contextmanager
    def _write_lock(self) -> Iterator[None]:
        """Lock out other commands on this machine while small files are read, changed and written."""
        path = self.root / "locks" / ".writing"
        with _writing_errors(path):
            make_folder(path.parent)
            stream = open_to_append(path)
        with stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def read(self, *, ignore_newer: bool = False) -> Record | None:
        """Return the record, or None if it is missing or damaged.

        Raises ConfigError if a newer awsddp wrote the record; with `ignore_newer`, returns None instead.
        """
        try:
            document = msgspec.json.decode((self.path / "cluster.json").read_bytes())
            if document.get("version", 0) > _VERSION:
                if ignore_newer:
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
        """Write a new record, synced to disk; `update` changes an existing record.

        Raises ConfigError if the record cannot be written.
        """
        write_private(
            self.path / "cluster.json", msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
        )

    def update(self, change: Callable[[Record], Record]) -> Record | None:
        """Replace the record with `change(record)` while holding the write lock; return the new record.

        Returns None if the record is missing. Raises ConfigError if the record cannot be written.
        """
        with self._write_lock():
            record = self.read()
            changed = record and change(record)
            if changed is not None and changed != record:
                self.write(changed)
            return changed

    def save_jobs(self, *jobs: JobRecord) -> None:
        """Write jobs to the record as last seen; running jobs get the current time. Raises ConfigError."""
        names = {job.job for job in jobs}
        running = dict.fromkeys((job.job for job in jobs if job.state == "running"), datetime.now(UTC))

        def change(record: Record) -> Record:
            other_jobs = [job for job in record.jobs if job.job not in names]
            seen = {name: time for name, time in record.seen.items() if name not in names}
            return replace(record, jobs=(*other_jobs, *jobs), seen=seen | running)

        self.update(change)

    def append_event(self, event: str, **facts: object) -> None:
        """Append an event to the ledger. Raises ConfigError if the ledger cannot be written."""
        line = msgspec.json.encode({"time": datetime.now(UTC), "event": event, **facts})
        with _writing_errors(self.ledger):
            make_folder(self.path)
            with open_to_append(self.ledger) as stream:
                stream.write(line + b"\n")

    def archive(self, cluster_id: str) -> None:
        """Move the ledger and the log of AWS calls to history/NAME-ID/, and delete the rest of the folder.

        Deletes what can be deleted, then raises ConfigError if a file could not be written or deleted.
        """
        history = self.root / "history" / f"{self.name}-{cluster_id}"
        try:
            with _writing_errors(history):
                for file in (self.ledger, self.path / "calls.jsonl"):
                    if file.exists():
                        make_folder(history)
                        with open_to_append(history / file.name) as stream:
                            stream.write(file.read_bytes())
        finally:
            with self._write_lock():
                shutil.rmtree(self.path, ignore_errors=True)
                _join_ssh_configs(self.root)
        if self.path.exists():
            raise ConfigError(
                f"cannot remove {self.path}",
                "",
                "remove it, because it contains the private key of a terminated cluster",
            )

    def find_lock_holder(self) -> str | None:
        """Return a string that names the lock's holder on this machine, or None if the lock is free."""
        with contextlib.suppress(OSError), (self.root / "locks" / self.name).open("rb") as stream:
            if not try_lock(stream, fcntl.LOCK_SH):
                return _read_holder(stream)
        return None

    def end_runs(self, verb: str, *, run_id: str = "") -> None:
        """Record that the user ended this cluster's runs by `verb`, or only the run `run_id`.

        No client continues a run that began before. Raises ConfigError if the file cannot be written.
        """
        write_private(self._end_path(run_id), verb.encode())

    def find_end_of_runs(self, run_id: str) -> tuple[str, datetime] | None:
        """Return the verb with which the user last ended this cluster's runs or `run_id`, and the time."""
        ends = []
        for path in (self._end_path(""), self._end_path(run_id)):
            with contextlib.suppress(OSError):
                ends.append((datetime.fromtimestamp(path.stat().st_mtime, UTC), path.read_text("utf-8")))
        return max(ends)[::-1] if ends else None

    def _end_path(self, run_id: str) -> Path:
        return self.root / "locks" / f"{self.name}.ended{run_id and '-'}{run_id}"

    @contextlib.contextmanager
    def lock(self, verb: str, *, part: str = "", wait_s: float = 0.0) -> Iterator[float]:
        """Lock the cluster against other commands on this machine. The kernel releases a dead process's lock.

        `part` names a part of the cluster that has its own lock. Yields the seconds since the lock was last
        held. Raises ConfigError, which names the holder (host, process, verb, time), if the lock is not free
        within `wait_s` seconds, or if the lock file cannot be written.
        """
        path = self.root / "locks" / f"{self.name}{part and '.'}{part}"
        deadline = time.monotonic() + wait_s
        with _writing_errors(path):
            make_folder(path.parent)
            # The file is not buffered: otherwise, a write that fails on a full disk would be repeated when
            # the file is closed.
            stream = open_to_append(path, buffering=0)
        with stream:
            while not try_lock(stream, fcntl.LOCK_EX):
                late_s = time.monotonic() - deadline
                holder = _read_holder(stream)
                if late_s > _UNNAMED_S or (late_s > 0 and holder):
                    raise ConfigError(
                        f"cluster {self.name} is in use",
                        f"held by {holder or 'another awsddp on this machine'}",
                        "wait for that process, or end it",
                    )
                time.sleep(0.05)
            free_s = time.time() - os.fstat(stream.fileno()).st_mtime
            stream.truncate(0)
            since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "verb": verb, "since": since}
            with contextlib.suppress(OSError):  # `down` must work on a full disk
                stream.write(msgspec.json.encode(owner))
            try:
                yield free_s
            finally:
                stream.truncate(0)


def _join_ssh_configs(root: Path) -> None:
    """Write `ROOT/ssh_config` from the parts for all clusters that have running nodes. Raises ConfigError."""
    parts = [_read_text(part) for part in sorted(root.glob("clusters/*/hosts"))]
    first = f"# Written by awsddp. In ~/.ssh/config, as its first line: Include {root / 'ssh_config'}\n"
    _write_or_remove(root / "ssh_config", "".join((first, *parts)))


def _write_or_remove(path: Path, text: str) -> None:
    """Write `text` to a file if that changes it; remove the file if `text` is empty. Raises ConfigError."""
    if not text:
        path.unlink(missing_ok=True)
    elif _read_text(path) != text:
        write_private(path, text.encode())


def _read_text(path: Path) -> str:
    """Return the text of a file, or "" if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def try_lock(stream: IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Try to lock a file; return False if another process holds a lock that excludes this one."""
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(stream: IO[bytes]) -> str | None:
    """Return a string that names a lock's holder, or None if the lock file does not name the holder."""
    stream.seek(0)
    try:
        return "`awsddp {verb}` on {host}, process {pid}, since {since}".format(
            **msgspec.json.decode(stream.read())
        )
    except (ValueError, KeyError, TypeError):
        return None


def read_ledger(ledger: Path) -> list[billing.LedgerRow]:
    """Return the rows of a ledger, or an empty list if the file is missing."""
    if not ledger.is_file():
        return []
    return billing.parse_ledger(ledger.read_text(encoding="utf-8", errors="replace"))


class ClusterHistory(Frozen):
    """One of this machine's clusters, existing or terminated, with its name, folder and ledger rows.

    `record` is None for a terminated cluster.
    """

    name: str
    folder: Path
    rows: list[billing.LedgerRow]
    record: Record | None = None

    @property
    def bill(self) -> billing.Bill | None:
        """The bill until now, computed only from the ledger, or None if nothing was launched."""
        return billing.make_bill(self.rows, datetime.now(UTC))

    @property
    def launch_row(self) -> billing.LedgerRow | None:
        """The row of the first launch, with the cluster's id, target and settings."""
        return next((row for row in self.rows if row.event == "launched"), None)

    @property
    def instance_ids(self) -> set[str]:
        """The ids of all instances that the cluster has ever had."""
        return {key for row in self.rows if row.event == "launched" for key in row.instances}


def list_cluster_histories(home: Path) -> Iterator[ClusterHistory]:
    """Yield each of this machine's clusters, terminated clusters first; `home` is $AWSDDP_HOME."""
    for folder in sorted(home.glob("history/*")):
        yield ClusterHistory(name=folder.name[:-9], folder=folder, rows=read_ledger(folder / "ledger.jsonl"))
    for folder in sorted(home.glob("clusters/*")):
        yield read_cluster_history(ClusterFolder(home, folder.name))


def read_cluster_history(folder: ClusterFolder) -> ClusterHistory:
    """Return the history of a cluster that has not been archived."""
    record = folder.read(ignore_newer=True)
    return ClusterHistory(
        name=folder.name, folder=folder.path, rows=read_ledger(folder.ledger), record=record
    )
