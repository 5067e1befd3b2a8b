"""What a node may answer. Every answer is validated here, against its request and its types, before use.

A node is not trusted: a rank runs the user's downloads, and may replace whatever answers for it.
"""

import contextlib
import json
import os
import posixpath
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from awsddp.errors import NodeError

MOST_BYTES = 64 << 20
"""How long one answer may be, what the node says on stderr included."""
_MOST_TEXT = 1 << 20
_MOST_ITEMS = 1_000_000

_Rank = Annotated[int, Meta(ge=0, lt=100_000)]
_Node = Annotated[int, Meta(ge=0, lt=10_000)]
_Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Exit = Annotated[int, Meta(ge=-255, le=255)]
_Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]
_Amount = Annotated[float, Meta(ge=0, le=1e18)]
_Measure = Annotated[float, Meta(ge=-1e300, le=1e300)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
_Path = Annotated[str, Meta(min_length=1, max_length=4096)]
_Remote = Annotated[str, Meta(pattern=r"^/", max_length=4096)]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(max_length=100_000)]
_Word = Annotated[str, Meta(max_length=200)]
_Version = Annotated[str, Meta(pattern=r"^[\w.+ -]{0,100}\Z")] | None


class ResultFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file to fetch: `path` is absolute on the node, `home` relative to runs/JOB, `size` in bytes.

    `limited`: it counts against job.results_limit. `sha256` is None until the node was asked for it; `data`
    holds what came with the list; `ephemeral` tells that it lies on instance store, `sparse` that it has
    holes, `writing` that it was read in the middle of a write.
    """

    path: _Remote
    home: _Path
    size: _Size
    limited: bool = False
    modified: _Seconds = 0.0
    ephemeral: bool = False
    sparse: bool = False
    writing: bool = False
    sha256: _Sha256 | None = None
    data: bytes | None = None


class ResultLink(msgspec.Struct, frozen=True, kw_only=True):
    """A symbolic link: `target` is relative to the link's own folder, and lies in runs/JOB."""

    path: _Remote
    home: _Path
    target: _Path


class SkippedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What stays on the node, and why. `owed`: the job made it, so that the node must be kept."""

    path: _Path
    size: _Size
    why: _Text
    owed: bool = False


class Excluded(msgspec.Struct, frozen=True, kw_only=True):
    """What job.exclude matches: files, and their bytes."""

    files: _Size = 0
    size: _Size = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a job on one node."""

    files: tuple[ResultFile, ...]
    skipped: tuple[SkippedFile, ...]
    links: tuple[ResultLink, ...] = ()
    excluded: Excluded = Excluded()


class FileHash(msgspec.Struct, frozen=True, kw_only=True):
    """Size and hash of a file, or `why` there are none; `writing` as for `ResultFile`."""

    size: _Size = 0
    sha256: _Sha256 | None = None
    writing: bool = False
    why: _Text = ""


class _Hashes(msgspec.Struct, frozen=True, kw_only=True):
    hashes: tuple[FileHash, ...]


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """What packages of a node must fit: its Python and libc, and the `packages` that its image has."""

    version: Annotated[str, Meta(pattern=r"^3\.\d{1,3}\.\d{1,3}\w{0,8}\Z")]
    machine: Annotated[str, Meta(pattern=r"^\w{1,32}\Z")]
    libc: Annotated[str, Meta(pattern=r"^[\d.]{0,16}\Z")]
    packages: dict[_Name, Annotated[str, Meta(pattern=r"^[\w.+!-]{1,64}\Z")]]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """A node's environment: the `python` of its ranks and what it has, or `failed`, the step that failed."""

    ready: bool = False
    python: _Remote | None = None
    facts: dict[_Word, str | int | None] = msgspec.field(default_factory=dict)
    platform: Platform | None = None
    failed: _Text = ""
    said: _Text = ""


class _RankLine(msgspec.Struct, frozen=True, kw_only=True):
    rank: _Rank
    local_rank: _Rank
    node: _Node
    exit_code: _Exit | None
    seconds: _Seconds
    started: _Seconds | None = None


class _Cause(msgspec.Struct, frozen=True, kw_only=True):
    rank: _Rank | None
    node: _Node | None
    kind: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}\Z")] = "unknown"
    retryable: bool = False
    values: Annotated[dict[_Word, _Text], Meta(max_length=100)] = msgspec.field(default_factory=dict)
    next: _Text = ""
    tail: Annotated[tuple[_Text, ...], Meta(max_length=1000)] = ()
    explanation: _Text = ""
    instance_id: _Word | None = None
    exit_code: _Exit | None = None
    signal: _Exit | None = None


class _JobNode(msgspec.Struct, frozen=True, kw_only=True):
    node: _Node
    instance_id: _Word


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes keep of a job's launch."""

    script: _Text | None = None
    args: Annotated[tuple[_Text, ...], Meta(max_length=100_000)] = ()
    commit: _Word | None = None
    dirty: bool | None = None
    launcher: _Word = "ssh"
    options: Annotated[tuple[_Text, ...], Meta(max_length=1000)] = ()
    resumed: _Word | None = None
    instance_type: _Word | None = None
    price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None


class _Metrics(msgspec.Struct, frozen=True, kw_only=True):
    rank: _Rank
    step: Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | None
    loss: _Measure | None
    steps_per_second: _Measure | None
    fraction: Annotated[float, Meta(ge=0, le=1)] | None


class _Sample(msgspec.Struct, frozen=True, kw_only=True):
    rank: _Rank
    cpu_percent: _Amount | None = None
    gpu_percent: _Amount | None = None
    gpu_memory_bytes: _Amount | None = None
    network_bytes_per_second: _Amount | None = None


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    job: _Name
    node: _Node
    state: Literal["waiting", "running", "succeeded", "failed", "cancelled", "interrupted"]
    cause: _Cause | None
    complete: bool
    created: datetime
    ranks: Annotated[tuple[_RankLine, ...], Meta(min_length=1, max_length=100_000)]
    nodes: Annotated[tuple[_JobNode, ...], Meta(max_length=10_000)] = ()
    facts: Facts = Facts()
    restarts: Annotated[tuple[_Text, ...], Meta(max_length=100_000)] = ()
    metrics: Annotated[tuple[_Metrics, ...], Meta(max_length=100_000)] = ()
    samples: Annotated[tuple[_Sample, ...], Meta(max_length=100_000)] = ()


class _State(msgspec.Struct, frozen=True, kw_only=True):
    jobs: Annotated[tuple[_Document, ...], Meta(max_length=100_000)]


class _Slots(msgspec.Struct, frozen=True, kw_only=True):
    used: Annotated[tuple[Annotated[int, Meta(ge=0, lt=64)], ...], Meta(max_length=1000)]
    taken: Annotated[tuple[Annotated[int, Meta(ge=0, lt=65536)], ...], Meta(max_length=1000)]
    jobs: Annotated[
        dict[_Name, Annotated[tuple[_Node, ...], Meta(max_length=10_000)]], Meta(max_length=100_000)
    ]


_Record = tuple[_Size, _Word, _Word, bool]
_Pid = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Records(msgspec.Struct, frozen=True, kw_only=True):
    records: Annotated[tuple[_Record, ...], Meta(max_length=1000)]
    age: _Seconds


class _Process(msgspec.Struct, frozen=True, kw_only=True):
    pid: _Pid
    parent: _Pid
    rank: _Rank
    joined: bool
    state: Annotated[str, Meta(pattern=r"^[A-Za-z]\Z")]
    stacks: _Text
    records: Annotated[dict[_Word, _Records], Meta(max_length=10_000)]


class _Stacks(msgspec.Struct, frozen=True, kw_only=True):
    workdir: _Text
    silent_s: _Seconds
    processes: Annotated[tuple[_Process, ...], Meta(max_length=10_000)]


class _Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: _Word
    memory_mib: _Size
    errors: _Size
    faults: Annotated[tuple[_Word, ...], Meta(max_length=100)]


_Port = Annotated[int, Meta(ge=0, lt=65536)]


class _Probe(msgspec.Struct, frozen=True, kw_only=True):
    ports: Annotated[tuple[_Port, ...], Meta(min_length=1, max_length=10)]
    gpus: Annotated[int, Meta(ge=0, le=1024)] | None
    disk_free: _Size
    memory_free: _Size
    memory_size: _Size
    cpus: Annotated[float, Meta(ge=0, le=100_000)]
    time: _Seconds
    kernel: _Word = ""
    smi: Annotated[tuple[_Gpu, ...], Meta(max_length=1024)] = ()
    links_down: _Size = 0
    xids: Annotated[tuple[_Size, ...], Meta(max_length=1000)] = ()


class _Dials(msgspec.Struct, frozen=True, kw_only=True):
    dials: Annotated[tuple[tuple[_Node, _Port, _Word], ...], Meta(max_length=100_000)]


class _Claimed(msgspec.Struct, frozen=True, kw_only=True):
    claimed: bool
    free_s: _Seconds


class _Heard(msgspec.Struct, frozen=True, kw_only=True):
    heard: bool


class _Launched(msgspec.Struct, frozen=True, kw_only=True):
    job: _Name


class _Error(msgspec.Struct, frozen=True, kw_only=True):
    message: _Text
    why: _Text
    kind: Literal["usage", "busy", "notfound", "node", "job"]


class _Failed(msgspec.Struct, frozen=True, kw_only=True):
    error: _Error


class _Inspected(msgspec.Struct, frozen=True, kw_only=True):
    home: Annotated[str, Meta(pattern=r"^/[^\x00-\x1f\x7f]*\Z", max_length=4096)]
    python: Annotated[str, Meta(pattern=r"^/[^\x00-\x1f\x7f]*\Z", max_length=4096)] | None
    nic: Annotated[str, Meta(pattern=r"^[\w.:@-]{1,32}\Z")] | None
    gpus: Annotated[int, Meta(ge=0, le=1024)]
    host_key: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9@.-]* [A-Za-z0-9+/]+={0,2}\Z", max_length=5000)]
    torch: _Version
    cuda: _Version
    driver: _Version
    rehearsed: bool
    rsync: bool
    watched: bool
    complaint: _Text
    gpus_said: _Text = ""


_PREPARATION = ("inspect", "rekey")
_KINDS: dict[str, Any] = {
    "claim": _Claimed,
    "unclaim": _Claimed,
    "lost": _Heard,
    "launch": _Launched,
    "state": _State,
    "slots": _Slots,
    "stacks": _Stacks,
    "probe": _Probe,
    "dial": _Dials,
    "cancel": _Document,
    "manifest": Manifest,
    "hashes": _Hashes,
    "inspect": _Inspected,
    "rekey": dict[str, Any],
}


def check(said: bytes, *, request: Mapping[str, Any], node: int) -> dict[str, Any]:
    """Return the node's answer to `request`, which is JSON and what such an answer may be.

    Where a job is asked about it may be {"error": {"message", "why", "kind"}} instead. Raises NodeError,
    naming the node and what is wrong with the answer.
    """
    with _refused(node):
        answer = _loaded(said)
        kind = str(request["do"])
        if "error" in answer and kind not in _PREPARATION:
            msgspec.convert(answer, _Failed)
            return answer
        _check_text(answer, paths=kind == "manifest")
        msgspec.convert(answer, _KINDS[kind])
        _check_against(answer, request, node)
        return answer


def check_document(
    said: bytes, *, node: int, job: str | None = None, ranks: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """Return a job's document in a node's stream. `ranks` has the node of each rank. Raises NodeError."""
    with _refused(node):
        document = _loaded(said)
        _check_text(document)
        msgspec.convert(document, _Document)
        _check_job(document, node, job)
        if ranks is not None and {one["rank"]: one["node"] for one in document["ranks"]} != dict(ranks):
            raise ValueError("its ranks are not those of the job")
        return document


def manifest(answer: Mapping[str, Any], *, node: int, ranks: Collection[int]) -> Manifest:
    """Return a node's answer to "manifest", of which every place at home is the node's own.

    `ranks` are the ranks that run on the node. Raises NodeError.
    """
    with _refused(node):
        found = msgspec.convert(dict(answer), Manifest)
        logs = {f"logs/rank{rank}.log" for rank in ranks}
        logs |= {f"logs/supervisor{node}.log", f"logs/launcher{node}.log"}
        logs.add(f"logs/samples{node}.json")
        for file in found.files:
            _check_path(file.path[1:])
            if file.home not in logs:
                _check_home(file.home, node)
        for link in found.links:
            _check_home(link.home, node)
            _check_target(link, node)
        return found


def environment(said: bytes, *, node: int) -> Environment:
    """Return the last line of templates/environment.py. Raises NodeError."""
    with _refused(node):
        answer = _loaded(said)
        _check_text(answer)
        return msgspec.convert(answer, Environment)


class RankStep(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank of `doctor`'s process group is, its bus bandwidth there, or `why` it failed."""

    rank: _Rank
    at: Literal["", "started", "arrived", "joined", "reduced", "failed"] = ""
    gbyte_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    why: _Text = ""


def rank_step(said: bytes, *, node: int, ranks: Collection[int]) -> RankStep | None:
    """Return a line of train/probe.py, None for what others print there. Raises NodeError."""
    if not said.startswith(b"{"):
        return None
    with _refused(node):
        answer = _loaded(said)
        _check_text(answer)
        step = msgspec.convert(answer, RankStep)
        if step.rank not in ranks:
            raise ValueError("it speaks of another rank")
        return step


def hashes(answer: Mapping[str, Any]) -> tuple[FileHash, ...]:
    """Return the checked answer to "hashes", in the order of its request."""
    return msgspec.convert(dict(answer), _Hashes).hashes


def take(said: bytearray, data: bytes, *, node: int) -> None:
    """Add `data` to what `node` has said. Raises NodeError where that is more than one answer may be."""
    said += data
    if len(said) > MOST_BYTES:
        raise malformed(node, f"over {MOST_BYTES >> 20} MB")


def malformed(node: int, why: str) -> NodeError:
    """Return the error for an answer that no supervisor gives."""
    return NodeError(
        f"node{node} gave a malformed answer",
        why[:2000],
        "awsddp down --discard && awsddp up   # if this happens again: do not trust the node",
    )


@contextlib.contextmanager
def _refused(node: int) -> Iterator[None]:
    """Raise NodeError, naming the node, for what is wrong with its answer."""
    try:
        yield
    except (ValueError, RecursionError, OverflowError, msgspec.ValidationError) as error:
        raise malformed(node, str(error)) from error


def _loaded(said: bytes) -> dict[str, Any]:
    if len(said) > MOST_BYTES:
        raise ValueError(f"over {MOST_BYTES >> 20} MB")
    answer = json.loads(said.decode("utf-8"), parse_constant=_no_number)
    if not isinstance(answer, dict):
        raise ValueError("not a JSON object")
    return answer


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _check_text(answer: Any, *, paths: bool = False) -> None:
    """Refuse texts that are no Unicode (with `paths`: nor bytes of a file's name), too long, or too many."""
    pending, count = [answer], 0
    while pending:
        value = pending.pop()
        count += 1
        if isinstance(value, str):
            if len(value) > _MOST_TEXT:
                raise ValueError(f"a text of {len(value):,} characters")
            value.encode("utf-8", "surrogateescape" if paths else "strict")
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            if len(value) > _MOST_ITEMS:
                raise ValueError(f"a list of {len(value):,} items")
            pending += value


def _check_against(answer: dict[str, Any], request: Mapping[str, Any], node: int) -> None:
    """Raise ValueError where an answer speaks of something else than its request."""
    kind, job = request["do"], request.get("job")
    if kind == "state":
        for document in answer["jobs"]:
            _check_job(document, node, job)
        if len({document["job"] for document in answer["jobs"]}) != len(answer["jobs"]):
            raise ValueError("one job twice")
    if kind == "cancel":
        _check_job(answer, node, job)
    if kind == "launch" and answer["job"] != job:
        raise ValueError(f"it speaks of job {answer['job']!r}, not of {job!r}")
    if kind == "dial" and sorted(one[:2] for one in answer["dials"]) != sorted(
        [node, port] for node, _, port in request["peers"]
    ):
        raise ValueError("it dialed other addresses than requested")
    if kind == "hashes" and len(answer["hashes"]) != len(request["paths"]):
        raise ValueError(f"{len(answer['hashes'])} hashes of {len(request['paths'])} files")


def _check_job(document: dict[str, Any], node: int, job: str | None) -> None:
    if document["node"] != node:
        raise ValueError(f"it speaks for node{document['node']}")
    if job is not None and document["job"] != job:
        raise ValueError(f"it speaks of job {document['job']!r}, not of {job!r}")
    if len({rank["rank"] for rank in document["ranks"]}) != len(document["ranks"]):
        raise ValueError("one rank twice")
    own = {rank["rank"] for rank in document["ranks"] if rank["node"] == node}
    for key in ("metrics", "samples"):
        if not {row["rank"] for row in document.get(key, ())} <= own:
            raise ValueError(f"{key} of a rank that does not run there")


def _check_path(path: str) -> None:
    """Refuse a path that may lead elsewhere, or that no file can have."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 for part in parts):
        raise ValueError(f"invalid result path {path!r}")


def _check_home(home: str, node: int) -> None:
    _check_path(home)
    if not home.startswith(f"node{node}/"):
        raise ValueError(f"{home!r} lies outside of node{node}/")


def _check_target(link: ResultLink, node: int) -> None:
    place = posixpath.normpath(posixpath.join(posixpath.dirname(link.home), link.target))
    top = os.fsencode(place).partition(b"/")[0]
    if "\0" in link.target or link.target.startswith("/") or top not in (b"node%d" % node, b"logs"):
        raise ValueError(f"the link {link.home!r} leads out of node{node}/")
