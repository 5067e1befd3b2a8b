"""The answers that nodes send. Every answer is validated against its type and its request before use.

Nodes are untrusted: code that runs in a rank could replace the agent.
"""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from awsddp.errors import NodeError
from awsddp.model.records import (
    Cause,
    Hang,
    JobNode,
    JobState,
    NodeNumber,
    RankNumber,
    RankProgress,
    RankResult,
    RankUsage,
    Recovery,
    RunId,
    Saving,
    Seconds,
    ShortText,
    Text,
)

Answer = TypeVar("Answer")
MAX_BYTES = 64 << 20
"""The maximum length of an answer, including stderr."""
PRIVATE_FOLDER = ".awsddp/"
"""The results subfolder for files that only awsddp reads; the user's files are in node0/ and so on."""
_MAX_TEXT = 1 << 20
_MAX_ITEMS = 1_000_000

_Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
Nanoseconds = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Port = Annotated[int, Meta(ge=0, lt=65536)]
_Pid = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
_Path = Annotated[str, Meta(min_length=1, max_length=4096)]
_Remote = Annotated[str, Meta(pattern=r"^/", max_length=4096)]
_PrintablePath = Annotated[str, Meta(pattern=r"^/[^\x00-\x1f\x7f]*\Z", max_length=4096)]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Version = Annotated[str, Meta(pattern=r"^[\w.+ -]{0,100}\Z")] | None
_Kind = TypeVar("_Kind")


class ResultFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file to fetch: `path` is absolute on the node, `home` is relative to runs/JOB, `size` is in bytes.

    `limited` is True if it counts towards job.results_limit. `modified` is in ns since 1970, and `sample` is
    a hash of some of the file's blocks (agent/manifest.py). `changed` (ns) and `inode` differ if the file was
    rewritten with the same size and time. `digest` is the SHA-256 of a synced file if only its change time
    has changed since the launch. `data` is the content, if the node sent it with the list. `ephemeral` is
    True if the file is on an instance store, `sparse` if it has holes, and `writing` if it is being written.
    A file with a `target`, relative to runs/JOB, is a symbolic link. `node` is set by the client.
    """

    path: _Remote
    home: _Path
    size: _Size
    limited: bool = False
    modified: Nanoseconds = 0
    changed: Nanoseconds = 0
    inode: _Size = 0
    ephemeral: bool = False
    sparse: bool = False
    writing: bool = False
    sample: _Sha256 | None = None
    digest: _Sha256 | None = None
    data: bytes | None = None
    target: _Path | None = None
    node: NodeNumber = 0


class SkippedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that stays on the node, and the reason.

    `owed` is True if the job wrote the file, so that the node must not be released.
    """

    path: _Path
    size: _Size
    why: Text
    owed: bool = False


class Excluded(msgspec.Struct, frozen=True, kw_only=True):
    """The number of files that job.exclude matches, and their bytes."""

    files: _Size = 0
    size: _Size = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A job's results on one node."""

    files: tuple[ResultFile, ...]
    skipped: tuple[SkippedFile, ...]
    excluded: Excluded = Excluded()


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """The platform that packages must fit: a node's Python, machine and libc, and its image's `packages`."""

    version: Annotated[str, Meta(pattern=r"^3\.\d{1,3}\.\d{1,3}\w{0,8}\Z")]
    machine: Annotated[str, Meta(pattern=r"^\w{1,32}\Z")]
    libc: Annotated[str, Meta(pattern=r"^[\d.]{0,16}\Z")]
    packages: dict[_Name, Annotated[str, Meta(pattern=r"^[\w.+!-]{1,64}\Z")]]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """A node's environment: the ranks' `python` and the `facts`, or `failed`, the step that failed."""

    ready: bool = False
    python: _Remote | None = None
    facts: dict[ShortText, str | int | None] = msgspec.field(default_factory=dict)
    platform: Platform | None = None
    failed: Text = ""
    said: Text = ""


class ReportedRank(RankResult):
    """A rank as its node reports it; `started` is a Unix time, or None before the start."""

    started: Seconds | None = None

    @property
    def result(self) -> RankResult:
        """The rank without `started`."""
        return RankResult(**{key: getattr(self, key) for key in RankResult.__dataclass_fields__})


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a job's launch that the nodes store."""

    script: Text | None = None
    args: Annotated[tuple[Text, ...], Meta(max_length=100_000)] = ()
    commit: ShortText | None = None
    dirty: bool | None = None
    launcher: ShortText = "ssh"
    options: Annotated[tuple[Text, ...], Meta(max_length=1000)] = ()
    resumed: ShortText | None = None
    run_id: RunId | None = None
    instance_type: ShortText | None = None
    price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    save_to: Text | None = None
    recoveries: Annotated[tuple[Recovery, ...], Meta(max_length=1000)] = ()


class NodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a node reports it.

    `complete` is True if the report covers all of the job's nodes, like the report of the job's first node.
    """

    job: _Name
    node: NodeNumber
    state: JobState
    cause: Cause | None
    complete: bool
    created: Annotated[datetime, Meta(tz=True)]
    ranks: Annotated[tuple[ReportedRank, ...], Meta(min_length=1, max_length=100_000)]
    nodes: Annotated[tuple[JobNode, ...], Meta(max_length=10_000)] = ()
    facts: LaunchFacts = LaunchFacts()
    restarts: Annotated[tuple[Text, ...], Meta(max_length=100_000)] = ()
    metrics: Annotated[tuple[RankProgress, ...], Meta(max_length=100_000)] = ()
    samples: Annotated[tuple[RankUsage, ...], Meta(max_length=100_000)] = ()
    saving: Saving | None = None
    hang: Hang | None = None


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs on a node."""

    jobs: Annotated[tuple[NodeJob, ...], Meta(max_length=100_000)]


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """A node's used slots and ports. `jobs` maps each job to the nodes on which it blocks other jobs."""

    used: Annotated[tuple[Annotated[int, Meta(ge=0, lt=64)], ...], Meta(max_length=1000)]
    taken: Annotated[tuple[Annotated[int, Meta(ge=0, lt=65536)], ...], Meta(max_length=1000)]
    jobs: Annotated[
        dict[_Name, Annotated[tuple[NodeNumber, ...], Meta(max_length=10_000)]], Meta(max_length=100_000)
    ]


class _Records(msgspec.Struct, frozen=True, kw_only=True):
    records: Annotated[tuple[tuple[_Size, ShortText, ShortText, bool], ...], Meta(max_length=1000)]
    age: Seconds


class _Process(msgspec.Struct, frozen=True, kw_only=True):
    pid: _Pid
    parent: _Pid
    rank: RankNumber
    joined: bool
    state: Annotated[str, Meta(pattern=r"^[A-Za-z]\Z")]
    stacks: Text
    records: Annotated[dict[ShortText, _Records], Meta(max_length=10_000)]


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a job's processes, for agent/diagnosis/hang.py."""

    workdir: Text
    silent_s: Seconds
    processes: Annotated[tuple[_Process, ...], Meta(max_length=10_000)]
    sources: Annotated[dict[Text, ShortText], Meta(max_length=1000)] = {}


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU: `errors` counts uncorrectable memory errors, and `faults` describes why the GPU is unfit."""

    name: ShortText
    memory_mib: _Size
    errors: _Size
    faults: Annotated[tuple[ShortText, ...], Meta(max_length=100)]


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node's resources (in bytes; `time` is a Unix time).

    `shutdown` says why the node is about to shut down ("spot", "expires"), or is "" if it is not.
    `smi` and the fields after it are present only in a full probe.
    """

    ports: Annotated[tuple[_Port, ...], Meta(min_length=1, max_length=10)]
    gpus: Annotated[int, Meta(ge=0, le=1024)] | None
    disk_free: _Size
    memory_free: _Size
    memory_size: _Size
    cpus: Annotated[float, Meta(ge=0, le=100_000)]
    time: Seconds
    shutdown: ShortText = ""
    kernel: ShortText = ""
    smi: Annotated[tuple[Gpu, ...], Meta(max_length=1024)] | None = None
    links_down: _Size = 0
    xids: Annotated[tuple[_Size, ...], Meta(max_length=1000)] = ()


class DialResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of attempts to connect: each has a node, a port, and the error ("": connected)."""

    dials: Annotated[tuple[tuple[NodeNumber, _Port, ShortText], ...], Meta(max_length=100_000)]


class ClaimResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a claim for the right to start a job. `claimed` is True if the client got the right, and
    `free_s` is the time for which no client had the right."""

    claimed: bool
    free_s: Seconds


class ReportReceived(msgspec.Struct, frozen=True, kw_only=True):
    """`heard` is True if an agent received the report."""

    heard: bool


class LaunchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The started job."""

    job: _Name


class EventCause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause in an event."""

    kind: ShortText
    explanation: ShortText
    node: NodeNumber | None = None
    rank: RankNumber | None = None


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a job (agent/notify/events.py)."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    time: ShortText
    event: Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")]
    cluster: ShortText
    job: _Name
    cause: EventCause | None
    text: Text


class TakenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that this client now sends, or None. `left` is how many events the node has not sent yet."""

    event: JobEvent | None
    left: _Size


class NameClaimResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a claim for a job's name in S3 (agent/s3/claim.py). `code` is "" if the claim succeeded.

    `what` is the missing permission, or the bucket's region. `names` are the taken names with the same
    prefix. The code is "throttled" for all temporary errors, and "unreachable" if there was no connection.
    """

    code: Literal[
        "", "taken", "right", "bucket", "region", "role", "boto3", "throttled", "unreachable", "other"
    ]
    what: ShortText = ""
    said: Text = ""
    names: Annotated[tuple[_Name, ...], Meta(max_length=100_000)] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node refused a request."""

    message: Text
    why: Text
    kind: Literal["usage", "taken", "busy", "notfound", "node", "job"]


class FailureResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response that a node sends instead of an answer after an error."""

    error: Failure


class InspectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that templates/prepare.py finds on a node."""

    home: _PrintablePath
    python: _PrintablePath | None
    nic: Annotated[str, Meta(pattern=r"^[\w.:@-]{1,32}\Z")] | None
    gpus: Annotated[int, Meta(ge=0, le=1024)]
    host_key: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9@.-]* [A-Za-z0-9+/]+={0,2}\Z", max_length=5000)]
    torch: _Version
    cuda: _Version
    driver: _Version
    rehearsed: bool
    rsync: bool
    rsync_said: Text
    watched: bool
    complaint: Text
    gpus_said: Text = ""


def read_answer(output: bytes, kind: type[_Kind], *, node: int, paths: bool = False) -> _Kind:
    """Return an answer converted to the type `kind`. With `paths`, texts can be file names that are not
    Unicode.

    Raises NodeError.
    """
    with naming_node(node):
        return convert_answer(parse_answer(output), kind, paths=paths)


def convert_answer(answer: object, kind: type[_Kind], *, paths: bool = False) -> _Kind:
    """Return a parsed answer converted to the type `kind`. Raises ValueError."""
    _check_text(answer, paths=paths)
    return msgspec.convert(answer, kind)


def read_node_job(payload: bytes, *, node: int, job: str | None = None, ranks: Mapping[int, int]) -> NodeJob:
    """Return a job's document from a node's stream. `ranks` maps each rank to its node. Raises NodeError."""
    with naming_node(node):
        document = convert_answer(parse_answer(payload), NodeJob)
        check_job(document, node, job)
        if {rank.rank: rank.node for rank in document.ranks} != dict(ranks):
            raise ValueError("its ranks do not match the job")
        return document


class RankStep(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's step `at` in `doctor`'s process group, its bus bandwidth, and the reason `why` it failed."""

    rank: RankNumber
    at: Literal["", "started", "arrived", "joined", "reduced", "failed"] = ""
    gbyte_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    why: Text = ""


def read_rank_step(line: bytes, *, node: int, ranks: Collection[int]) -> RankStep | None:
    """Return a line that train/probe.py printed, or None for lines from other programs. Raises NodeError."""
    if not line.startswith(b"{"):
        return None
    step = read_answer(line, RankStep, node=node)
    if step.rank not in ranks:
        raise make_malformed_error(node, "answer is for the wrong rank")
    return step


def append_output(output: bytearray, data: bytes, *, node: int) -> None:
    """Append `data` to a node's output. Raises NodeError if the output exceeds MAX_BYTES."""
    output += data
    if len(output) > MAX_BYTES:
        raise make_malformed_error(node, f"the answer has more than {MAX_BYTES >> 20} MB")


def make_malformed_error(node: int, why: str) -> NodeError:
    """Return the error for a malformed answer."""
    return NodeError(
        f"node{node} gave a malformed answer",
        why[:2000],
        "awsddp down --discard && awsddp up   # if this happens again: do not trust the node",
    )


@contextlib.contextmanager
def naming_node(node: int) -> Iterator[None]:
    """Turn validation errors in the context into a NodeError for the node, whose answer is invalid."""
    try:
        yield
    except (ValueError, RecursionError, OverflowError, msgspec.ValidationError) as error:
        raise make_malformed_error(node, str(error)) from error


def parse_answer(output: bytes) -> dict[str, Any]:
    """Return the JSON object in an answer, unchecked. Raises ValueError."""
    if len(output) > MAX_BYTES:
        raise ValueError(f"the answer has more than {MAX_BYTES >> 20} MB")
    answer = json.loads(output.decode("utf-8"), parse_constant=_refuse_constant)
    if not isinstance(answer, dict):
        raise ValueError("not a JSON object")
    return answer


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _check_text(answer: Any, *, paths: bool = False) -> None:
    """Raise ValueError if an answer has a text that is not Unicode, or a text or a list that is too long.

    With `paths`, texts can be file names that are not Unicode.
    """
    pending, count = [answer], 0
    while pending:
        value = pending.pop()
        count += 1
        if isinstance(value, str):
            if len(value) > _MAX_TEXT:
                raise ValueError(
                    f"a text has {len(value):,} characters, but at most {_MAX_TEXT:,} are allowed"
                )
            value.encode("utf-8", "surrogateescape" if paths else "strict")
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            if len(value) > _MAX_ITEMS:
                raise ValueError(f"a list has {len(value):,} items, but at most {_MAX_ITEMS:,} are allowed")
            pending += value


def check_job(document: NodeJob, node: int, job: str | None) -> None:
    """Raise ValueError if a document is for another job or node, or has metrics of another node's ranks."""
    if document.node != node:
        raise ValueError(f"answer is for node{document.node}, expected node{node}")
    if job is not None and document.job != job:
        raise ValueError(f"answer is for job {document.job!r}, expected {job!r}")
    if len({rank.rank for rank in document.ranks}) != len(document.ranks):
        raise ValueError("duplicate rank")
    own_ranks = {rank.rank for rank in document.ranks if rank.node == node}
    for name, rows in (("metrics", document.metrics), ("samples", document.samples)):
        if not {row.rank for row in rows} <= own_ranks:
            raise ValueError(f"{name} of a rank that does not run there")


def check_manifest(manifest: Manifest, node: int, ranks: Collection[int]) -> None:
    """Raise ValueError if a listed path is outside the folders of a node on which `ranks` run."""
    logs = {f"logs/rank{rank}.log" for rank in ranks}
    own_logs = (f"supervisor{node}.log", f"launcher{node}.log", f"samples{node}.json")
    logs |= {f"{PRIVATE_FOLDER}{name}" for name in own_logs}
    for file in manifest.files:
        _check_path(file.path[1:])
        if file.target is not None or file.home not in logs:
            _check_path(file.home, top=f"node{node}/")
        if file.target is not None and file.target not in (f"node{node}", *logs):
            _check_path(file.target, top=f"node{node}/")


def _check_path(path: str, *, top: str = "") -> None:
    """Raise ValueError for a path that is invalid or may lead out of `top`."""
    parts = path.split("/")
    if "\0" in path or any(
        part in ("", ".", "..") or len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts
    ):
        raise ValueError(f"invalid result path {path!r}")
    if not path.startswith(top):
        raise ValueError(f"{path!r} lies outside of {top}")
