"""The folder of a job on its node: what lies where, whether its supervisor lives, and what it says.

~/.awsddp/jobs/JOB/  job.json       the launch request; it holds the job's secret (0600)
                     state.json     the job as this node knows it, replaced whole
                     lock           held for as long as the supervisor lives: no pid that can be reused
                     cancel.json    how to end, written before the supervisor is signalled
                     snapshot.json  the synced folder as it was before the ranks started
                     logs/          rank3.log, written by the rank itself
                     worker.py      what torch's elastic agent starts for each rank
                     workers.jsonl  its notes: how the ranks started and ended
                     reserve        room for the last state.json on a full disk
                     samples.json   what the ranks use (samples.py)
                     helper/        the sitecustomize of the ranks (helper.py)
                     stacks/        its requests and answers (stacks.py)
                     run/           AWSDDP_RUN_DIR
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.jobs.supervisor.job_causes import cause_of_node
from awsddp.jobs.supervisor.requests import NOTHING, Fields, Launch, Machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from awsddp.jobs.supervisor.requests import Place

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NOT_STARTED = {"exit_code": None, "seconds": 0.0, "started": None}
"""What is known of a rank before it starts."""
FINAL = ("succeeded", "failed", "cancelled", "interrupted")


class CommandError(Exception):
    """A request that cannot be done; `kind` is usage, notfound, node or job."""

    def __init__(self, message: str, why: str = "", *, kind: str = "job") -> None:
        super().__init__(message)
        self.document = {"message": message, "why": why, "kind": kind}


class Document(Fields):
    """What a node knows of a job: state.json, and what it answers.

    `complete`: of the whole job, as the first node does; else of this node's ranks alone. `boot` is the run
    of the kernel, `pid` the supervisor, `restarts` those of torchrun's rounds.
    """

    job: str
    node: int
    state: str
    cause: dict[str, Any] | None
    complete: bool
    boot: str
    created: str
    ranks: list[dict[str, Any]]
    pid: int | None = None
    restarts: Sequence[str] = ()
    nodes: Sequence[Machine] = ()
    facts: Mapping[str, Any] = NOTHING

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL


class Ending(Fields):
    """How a job is to end, in cancel.json: its state, the grace (s) and the cause.

    Where a client knows that the first node is gone, `lost` says why instead, and `kind` is the cause's. As
    JSON it has only what is set: a supervisor of another awsddp may read it.
    """

    state: str
    grace: float = 0.0
    cause: dict[str, Any] | None = None
    lost: str | None = None
    kind: str = "node_lost"

    def to_json(self) -> dict[str, Any]:
        """Return what is set."""
        return dict(vars(self))


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
        for rank in document.ranks:
            if document.state == "running" and rank["exit_code"] is None and rank.get("started"):
                rank["seconds"] = round(time.time() - rank["started"], 3)
        return document


def jobs_folder() -> Path:
    """Return the folder of all jobs of this node."""
    return Path.home() / ".awsddp" / "jobs"


def folders() -> list[JobFolder]:
    """Return the folders of all jobs of this node, oldest first."""
    found = [path for path in jobs_folder().glob("*/job.json") if NAME.fullmatch(path.parent.name)]
    return [JobFolder(path.parent.name) for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


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


def rank_lines(layout: Sequence[Place], known: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a document says of each rank, by what is `known` of those that have started."""
    return [{**place._asdict(), **known.get(place.rank, NOT_STARTED)} for place in layout]


def programs(path: str) -> str:
    """Return the PATH of a rank: `path`, the programs of its Python's environment, comes first."""
    return os.pathsep.join([path, os.environ.get("PATH", os.defpath)])


def boot_id() -> str:
    """Return what tells this run of the kernel from the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_json(path: Path) -> dict[str, Any] | None:
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


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file `path` by `document` (0600): a reader finds the old or the new, never a half."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(str(part), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _loss(request: Launch, document: Document) -> dict[str, Any]:
    node = request.node
    why = f"The supervisor of node{node} was killed; its ranks ended with it"
    if document.boot != boot_id():
        did = "waited" if document.state == "waiting" else "ran"
        why = f"node{node} was restarted while the job {did}"
    return cause_of_node(request, node, "interrupted", why=why)
