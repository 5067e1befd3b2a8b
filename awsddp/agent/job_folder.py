"""The folder of a job on its node: what lies where, whether its supervisor lives, and what it says.

~/.awsddp/jobs/JOB/  job.json       the launch request; it holds the job's secret (0600)
                     state.json     the job as this node knows it, replaced whole
                     lock           held for as long as the supervisor lives: no pid that can be reused
                     cancel.json    how to end, written before the supervisor is signalled
                     snapshot.json  the synced folder as it was before the ranks started
                     logs/          rank3.log, written by the rank itself
                     worker.py      what torch's elastic agent starts for each rank (torchrun_worker.py)
                     workers.jsonl  its notes: how the ranks started and ended
                     reserve        room for the last state.json on a full disk
                     samples.json   what the ranks use (samples.py)
                     saving.json    how far its results are in S3 (s3/uploader.py); saver.log
                     saver.json     how the saver is started; it holds the secret of its lists (0600)
                     saver.lock     held for as long as the saver lives
                     helper/        the sitecustomize of the ranks (diagnosis/helper.py)
                     stacks/        its requests and answers (diagnosis/stacks.py)
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
from awsddp.agent.messages import NOTHING, Fields, Launch, Machine, Sparse, each, plain, reader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from awsddp.agent.messages import Fact, Place, Told

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FINAL = ("succeeded", "failed", "cancelled", "interrupted")


class CommandError(Exception):
    """A request that cannot be done; `kind` is usage, taken, busy, notfound, node or job."""

    def __init__(self, message: str, why: str = "", *, kind: str = "job") -> None:
        super().__init__(message)
        self.document = {"message": message, "why": why, "kind": kind}


class RankLine(NamedTuple):
    """A rank as a document tells of it: where it runs, when it started (Unix time), and how it ended."""

    rank: int
    local_rank: int
    node: int
    exit_code: int | None = None
    seconds: float = 0.0
    started: float | None = None


class Report(NamedTuple):
    """What a node reports of a rank, or of its agent: when it started and, with an exit code, how it ended.

    With another code than 0 `cause` says why, and `fault` whose it was: "own", "echo" (of another rank's
    fault) or "stopped" (it was asked to end). `restart` counts the lives before this one.
    """

    rank: int
    started: float | None = None
    seconds: float = 0.0
    exit_code: int | None = None
    restart: int = 0
    cause: Cause | None = None
    fault: str = ""


read_cause = reader(Cause)
read_report = reader(Report, cause=read_cause)
_PARTS = {"cause": read_cause, "ranks": each(reader(RankLine))}


class Whole(Fields):
    """What the first node knows of a job, and every node copies to its document."""

    parts = _PARTS
    state: str
    cause: Cause | None
    ranks: list[RankLine]
    complete: bool
    restarts: Sequence[str] = ()


class Document(Fields):
    """What a node knows of a job: state.json, and what it answers.

    `complete`: of the whole job, as the first node does; else of this node's ranks alone. `boot` is the run
    of the kernel, `pid` the supervisor, `restarts` those of torchrun's rounds. Of a job
    that runs `metrics` and `samples` tell a client of its ranks; `saving` is saving.json.
    """

    parts = _PARTS
    job: str
    node: int
    state: str
    cause: Cause | None
    complete: bool
    boot: str
    created: str
    ranks: list[RankLine]
    pid: int | None = None
    restarts: Sequence[str] = ()
    nodes: Sequence[Machine] = ()
    facts: Mapping[str, Fact] = NOTHING
    metrics: Sequence[Told] = ()
    samples: Sequence[Told] = ()
    saving: Mapping[str, Any] | None = None

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL


class Ending(Sparse):
    """How a job is to end, in cancel.json: its state, the grace (s) and the cause.

    Where a client knows that the first node is gone, `lost` says why instead, and `kind` is the cause's. A
    supervisor of another awsddp may read it.
    """

    parts = {"cause": read_cause}
    state: str
    grace: float = 0.0
    cause: Cause | None = None
    lost: str | None = None
    kind: str = "node_lost"


class JobFolder:
    """The folder of the job `job`. Raises CommandError for a name that is no name."""

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
        self.saver = self.path / "saver.json"
        self.saver_lock = self.path / "saver.lock"
        self.workers = self.path / "workers.jsonl"

    def log(self, rank: int) -> Path:
        """Return the log of `rank`."""
        return self.logs / f"rank{rank}.log"

    def log_sizes(self) -> dict[str, int]:
        """Return how long each log of the ranks is now, by its name."""
        return {path.name: path.stat().st_size for path in self.logs.glob("rank*.log")}

    def request(self) -> Launch:
        """Return the request that launched the job. Raises CommandError where there is no such job."""
        request = read_json(self.path / "job.json")
        if request is None:
            raise CommandError(f"job {self.job} not found on this node", kind="notfound")
        return Launch.from_json(request)

    def lock(self) -> int:
        """Take the lock and return its descriptor; it lives until every copy of it is closed."""
        descriptor = os.open(str(self.path / "lock"), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def held(self) -> bool:
        """Tell whether the job's supervisor lives: a reboot and kill -9 release its lock, too."""
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

    def active(self) -> bool:
        """Tell whether the job runs or waits; one that has ended may say farewell yet."""
        return self.held() and not self.document().final

    def document(self) -> Document:
        """Return what the node knows of the job now; a job whose supervisor is gone is not running."""
        request = self.request()
        alive = self.held()  # asked first: what a supervisor that is gone has written does not change
        written = read_json(self.state)
        document = Document.from_json(written) if written else initial(request)
        document.nodes, document.facts = request.nodes, request.facts
        if not document.final and not alive:
            document.cause = document.cause or _loss(request, document)
            document.state = "interrupted"
        if document.state == "running":
            document.ranks = [_until_now(rank) for rank in document.ranks]
        return document


def jobs_folder() -> Path:
    """Return the folder of all jobs of this node."""
    return Path.home() / ".awsddp" / "jobs"


def folders(top: Path | None = None) -> list[JobFolder]:
    """Return the folders of all jobs of this node, or in another folder, oldest first."""
    found = [path for path in (top or jobs_folder()).glob("*/job.json") if NAME.fullmatch(path.parent.name)]
    found.sort(key=lambda path: path.stat().st_mtime_ns)
    return [JobFolder(path.parent.name, path.parent) for path in found]


def initial(request: Launch) -> Document:
    """Return the document of a job whose ranks have not started."""
    return Document(
        job=request.job,
        node=request.node,
        state="waiting" if request.after else "running",
        cause=None,
        complete=False,
        boot=boot_id(),
        created=request.created,
        ranks=rank_lines(request.layout, {}),
    )


def rank_lines(layout: Sequence[Place], known: Mapping[int, Report]) -> list[RankLine]:
    """Return what a document says of each rank, by what is `known` of those that have started."""
    lines = []
    for place in layout:
        report = known.get(place.rank)
        ended = (report.exit_code, report.seconds, report.started) if report else ()
        lines.append(RankLine(*place, *ended))
    return lines


def _until_now(rank: RankLine) -> RankLine:
    """Return a rank of a job that runs: one that has not ended has run until now."""
    if rank.started is None or rank.exit_code is not None:
        return rank
    return rank._replace(seconds=round(time.time() - rank.started, 3))


def programs(path: str) -> str:
    """Return the PATH of a rank: `path`, the programs of its Python's environment, comes first."""
    return os.pathsep.join([path, os.environ.get("PATH", os.defpath)])


def boot_id() -> str:
    """Return what tells this run of the kernel from the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_json(path: Path) -> Any:
    """Return the object in the file `path`, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def counters(path: Path) -> dict[str, int]:
    """Return the numbers of a file of the kernel by their names; none where it cannot be read."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name.rstrip(":"): int(number) for name, number, *_ in map(str.split, lines)}


def write_json(path: Path, document: object, *, sync: bool = True) -> None:
    """Replace the file `path` by `document` (0600): a reader finds the old or the new, never a half.

    Without `sync` a crash of the node may lose it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(str(part), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(plain(document), file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)


def _loss(request: Launch, document: Document) -> Cause:
    node = request.node
    why = f"The supervisor of node{node} was killed; its ranks ended with it"
    if document.boot != boot_id():
        did = "waited" if document.state == "waiting" else "ran"
        why = f"node{node} was restarted while the job {did}"
    return cause_of_node(request, node, "interrupted", why=why)
