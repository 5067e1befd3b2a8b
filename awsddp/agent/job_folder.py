"""A job's folder on a node: the job's files and document, and whether the job's agent is running.

~/.awsddp/jobs/JOB/  job.json       the launch request; it holds the job's secret (0600)
                     state.json     this node's document about the job, replaced atomically
                     lock           held while the agent runs (a pid could be reused by another process)
                     cancel.json    how the job is to end, written before the agent is signalled
                     snapshot.json  the stamps of the project folder's files before the ranks started
                     logs/          rank3.log, written by the rank itself
                     worker.py      started for each rank by torchrun's elastic agent (torchrun_worker.py)
                     workers.jsonl  notes by worker.py on how the ranks started and ended
                     reserve        a file that is removed to make space for the last state.json
                     samples.json   the ranks' resource use (samples.py)
                     saving.json    the progress of the upload to S3 (s3/uploader.py)
                     saver.log      the uploader's errors
                     saver.json     the uploader's command, with the secret that signs its lists (0600)
                     saver.lock     held while the uploader runs
                     events.json    the job's events, and which of them were sent (notify/outbox.py)
                     notify.json    what the notifier knows about the job, without the URL
                     notify.log     the notifier's errors
                     notify.lock    held while the notifier runs
                     helper/        the ranks' sitecustomize (diagnosis/helper.py)
                     stacks/        requests to the helpers and responses (diagnosis/stacks.py)
                     run/           AWSDDP_RUN_DIR
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp.agent.diagnosis.job_causes import Cause, cause_of_node
from awsddp.agent.messages import (
    NOTHING,
    Fields,
    Launch,
    LaunchNode,
    OmitsUnset,
    list_reader,
    make_reader,
    to_json_value,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from awsddp.agent.messages import Fact, LayoutRow, Response

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FINAL = ("succeeded", "failed", "cancelled", "interrupted")


class CommandError(Exception):
    """The error for a failed request. `kind` is usage, taken, busy, notfound, node or job."""

    def __init__(self, message: str, why: str = "", *, kind: str = "job") -> None:
        super().__init__(message)
        self.document = {"message": message, "why": why, "kind": kind}


class RankRow(NamedTuple):
    """A rank's row in a document says where the rank runs, when it started (Unix time), and how it ended."""

    rank: int
    local_rank: int
    node: int
    exit_code: int | None = None
    seconds: float = 0.0
    started: float | None = None


class RankReport(NamedTuple):
    """A report on when a rank or an elastic agent started and, if the rank or agent has ended, how it ended.

    If the exit code is not 0, `cause` says why, and `fault` is "own", "echo" (caused by another rank's fault)
    or "stopped" (the rank was sent a signal to end). `restart` counts earlier starts of the rank.
    """

    rank: int
    started: float | None = None
    seconds: float = 0.0
    exit_code: int | None = None
    restart: int = 0
    cause: Cause | None = None
    fault: str = ""


read_cause = make_reader(Cause)
read_report = make_reader(RankReport, cause=read_cause)
_PARTS = {"cause": read_cause, "ranks": list_reader(make_reader(RankRow))}


class JobSummary(Fields):
    """The first node's summary of a job; all nodes copy it to their documents."""

    parts = _PARTS
    state: str
    cause: Cause | None
    ranks: list[RankRow]
    complete: bool
    restarts: Sequence[str] = ()
    hang: Mapping[str, Any] | None = None


class Document(Fields):
    """A node's document about a job: the content of state.json and of the response to `State`.

    `complete` is true if the document describes the whole job, not only this node's ranks. `boot` is the boot
    ID, `pid` is the agent's process ID, and `restarts` describes torchrun's restarts. `metrics` and `samples`
    describe the ranks of a running job, and `saving` is the content of saving.json. While no rank writes a
    line, `hang` has what two looks at the ranks found (diagnosis/hang_watch.py). `acknowledged` is true on
    the first node once all other nodes know that the job has ended.
    """

    parts = _PARTS
    job: str
    node: int
    state: str
    cause: Cause | None
    complete: bool
    boot: str
    created: str
    ranks: list[RankRow]
    pid: int | None = None
    restarts: Sequence[str] = ()
    nodes: Sequence[LaunchNode] = ()
    facts: Mapping[str, Fact] = NOTHING
    metrics: Sequence[Response] = ()
    samples: Sequence[Response] = ()
    saving: Mapping[str, Any] | None = None
    hang: Mapping[str, Any] | None = None
    acknowledged: bool = False

    @property
    def final(self) -> bool:
        """True if the job has ended."""
        return self.state in FINAL


class Ending(OmitsUnset):
    """The content of cancel.json, which says how a job is to end: the final state, grace (s) and cause.

    If a client reports that the first node is gone, `cause` is None, `lost` says why the node is gone, and
    `kind` is the kind of the cause. The agent that reads cancel.json may be from another version of awsddp.
    """

    parts = {"cause": read_cause}
    state: str
    grace: float = 0.0
    cause: Cause | None = None
    lost: str | None = None
    kind: str = "node_lost"


class JobFolder:
    """The folder of job `job`. Raises CommandError for an invalid name."""

    def __init__(self, job: str, path: Path | None = None) -> None:
        if not NAME.fullmatch(job):
            raise CommandError(f"invalid job name {job!r}", kind="usage")
        self.job = job
        self.path = path or jobs_folder() / job
        self.logs = self.path / "logs"
        self.run = self.path / "run"
        self.helper = self.path / "helper"
        self.stacks = self.path / "stacks"
        self.state = self.path / "state.json"
        self.cancel = self.path / "cancel.json"
        self.snapshot = self.path / "snapshot.json"
        self.reserve = self.path / "reserve"
        self.samples = self.path / "samples.json"
        self.saving = self.path / "saving.json"
        self.uploader_command = self.path / "saver.json"
        self.uploader_lock = self.path / "saver.lock"
        self.workers = self.path / "workers.jsonl"

    def log(self, rank: int) -> Path:
        """Return the log of rank `rank`."""
        return self.logs / f"rank{rank}.log"

    def log_sizes(self) -> dict[str, int]:
        """Return {file name: size in bytes} for the ranks' logs."""
        return {path.name: path.stat().st_size for path in self.logs.glob("rank*.log")}

    def request(self) -> Launch:
        """Return the request that launched the job. Raises CommandError if the job does not exist."""
        request = read_json(self.path / "job.json")
        if request is None:
            raise CommandError(f"job {self.job} not found on this node", kind="notfound")
        return Launch.from_json(request)

    def acquire_lock(self) -> int:
        """Acquire the lock, and return its descriptor.

        Closing all copies of the descriptor releases the lock.
        """
        descriptor = os.open(str(self.path / "lock"), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def is_agent_running(self) -> bool:
        """Return True if the job's agent runs and holds the lock, which a reboot or kill -9 releases."""
        try:
            descriptor = os.open(str(self.path / "lock"), os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def is_active(self) -> bool:
        """Return True if the job runs or waits. The agent may keep running briefly after the job's end."""
        return self.is_agent_running() and not self.document().final

    def document(self) -> Document:
        """Return the node's current document. A job without an agent is never shown as running."""
        request = self.request()
        is_alive = self.is_agent_running()  # read before state.json, which is final once the agent has ended
        stored = read_json(self.state)
        document = Document.from_json(stored) if stored else initial_document(request)
        document.nodes, document.facts = request.nodes, request.facts
        if not document.final and not is_alive:
            document.cause = document.cause or _describe_loss(request, document)
            document.state = "interrupted"
        if document.state == "running":
            document.ranks = [_with_current_seconds(rank) for rank in document.ranks]
        return document


def try_lock(path: Path) -> int | None:
    """Lock the file at `path`; return its descriptor, or None if another process has the lock.

    Closing the descriptor releases the lock.
    """
    descriptor = os.open(str(path), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def jobs_folder() -> Path:
    """Return the folder that contains all jobs on this node."""
    return Path.home() / ".awsddp" / "jobs"


def list_job_folders(top: Path | None = None) -> list[JobFolder]:
    """Return the folders of all jobs on this node (or of all jobs under `top`), oldest first."""
    paths = [path for path in (top or jobs_folder()).glob("*/job.json") if NAME.fullmatch(path.parent.name)]
    paths.sort(key=lambda path: path.stat().st_mtime_ns)
    return [JobFolder(path.parent.name, path.parent) for path in paths]


def initial_document(request: Launch) -> Document:
    """Return the document for a job whose ranks have not started."""
    return Document(
        job=request.job,
        node=request.node,
        state="waiting" if request.after else "running",
        cause=None,
        complete=False,
        boot=boot_id(),
        created=request.created,
        ranks=rank_rows(request.layout, {}),
    )


def rank_rows(layout: Sequence[LayoutRow], reports: Mapping[int, RankReport]) -> list[RankRow]:
    """Return each rank's row in a document; `reports` has the reports of the ranks that have started."""
    rows = []
    for row in layout:
        report = reports.get(row.rank)
        outcome = (report.exit_code, report.seconds, report.started) if report else ()
        rows.append(RankRow(*row, *outcome))
    return rows


def _with_current_seconds(rank: RankRow) -> RankRow:
    """Return a rank's row. If the rank is running, set the seconds since it started."""
    if rank.started is None or rank.exit_code is not None:
        return rank
    return rank._replace(seconds=round(time.time() - rank.started, 3))


def rank_search_path(path: str) -> str:
    """Return a rank's PATH, which begins with `path`, the folder with the Python environment's programs."""
    return os.pathsep.join([path, os.environ.get("PATH", os.defpath)])


def boot_id() -> str:
    """Return the kernel's boot ID."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_json(path: Path) -> Any:
    """Return the JSON object in the file at `path`, or None if the file is missing or invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_counters(path: Path) -> dict[str, int]:
    """Return {name: number} from one of the kernel's files, or {} if the file cannot be read."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name.rstrip(":"): int(number) for name, number, *_ in map(str.split, lines)}


def write_json(path: Path, document: object, *, sync: bool = True) -> None:
    """Atomically write `document` to the file at `path`, with mode 0600.

    Without `sync` the new content may be lost if the node crashes.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(str(part), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(to_json_value(document), file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)


def _describe_loss(request: Launch, document: Document) -> Cause:
    node = request.node
    why = f"The agent of node{node} was killed, and its ranks ended with it"
    if document.boot != boot_id():
        activity = "waited" if document.state == "waiting" else "ran"
        why = f"node{node} was restarted while the job {activity}"
    return cause_of_node(request, node, "interrupted", why=why)
