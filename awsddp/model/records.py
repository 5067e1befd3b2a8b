"""Records about clusters, nodes and jobs, and the node numbers in tags. This module does no I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from msgspec import Meta

TargetName = Literal["aws", "local"]
ClusterState = Literal["absent", "launching", "preparing", "ready", "partial", "stopped", "ending"]
JobState = Literal["waiting", "running", "succeeded", "failed", "cancelled", "interrupted"]
ACTIVE = ("waiting", "running")
"""The states that a job can have before it has ended."""

# The limits apply to values that nodes report. Patterns end with $(?!\n), because JSON Schema has no \Z.
RankNumber = Annotated[int, Meta(ge=0, lt=100_000)]
NodeNumber = Annotated[int, Meta(ge=0, lt=10_000)]
ExitCode = Annotated[int, Meta(ge=-255, le=255)]
Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]
Measure = Annotated[float, Meta(ge=-1e300, le=1e300)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Text = Annotated[str, Meta(max_length=100_000)]
ShortText = Annotated[str, Meta(max_length=200)]
RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
Count = Annotated[int, Meta(ge=0, lt=1 << 60)]
MAX_LINES = 1000
"""The maximum number of lines in a log tail."""

_Kind = TypeVar("_Kind")

ENDED_STATES = ("shutting-down", "terminated")
"""EC2's states for an instance that has terminated or is terminating."""
UPLOADER_SILENT_S = 60.0
"""The time (s) without a heartbeat after which an uploader counts as dead. A working uploader sends a
heartbeat every few seconds.
"""
OLDER_JOBS = "..."
"""Stands for the older unfetched jobs in a node's tag if the tag has no room for their names. It is not a
valid job name.
"""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Base class for records: subclasses become frozen, keyword-only dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Keyed:
    """A record whose fields are also items, as in its JSON: `record["state"]` is `record.state`."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


class Target(Frozen):
    """The endpoint and credentials for EC2 calls, and the way to connect to nodes.

    The name decides where clusters are searched for and how costs are reported. The nodes' properties come
    from the tags of their image. `endpoint` is None for AWS's own endpoints. `access_key_id` and
    `secret_access_key` are None if boto3 searches for the credentials. `caller_address` is this machine's
    address as seen by the nodes (if it is None and the nodes have public addresses, awsddp queries the
    address). `daemon_home` is a local cloud's folder, and `node_s3` is the S3 endpoint for the local cloud's
    nodes.
    """

    name: TargetName = "aws"
    region: str | None = None
    profile: str | None = None
    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    ssh_port: int = 22
    caller_address: str | None = None
    daemon_home: str | None = None
    node_s3: str | None = None

    @property
    def location(self) -> str:
        """A description of the location for messages."""
        return "the local cloud" if self.name == "local" else (self.region or "the configured region")


class Node(Frozen):
    """One instance of a cluster, as EC2 describes it, with its node number from the tag `awsddp:nodes`.

    `state` is EC2's state (pending, running, shutting-down, terminated, stopping, stopped). `launched` is the
    launch time in UTC, and `expires` is the expiry in its tag. `node` is -1 for an instance that no longer
    belongs to the cluster. `changed` is the time when the instance began to stop or terminate, if EC2 reports
    that. `profile` is the ARN of the instance profile. `reason` has EC2's code and text for why the instance
    stopped or ended. `uses` has the kind (as in DescribeKeyPairs), name and id of each security group and key
    that it uses. `is_renumbered` is True if `node` differs from the number that the tag and the launch index
    give, because another node has that number.
    """

    node: int
    instance_id: str
    state: str
    instance_type: str
    zone: str
    image_id: str
    private_ip: str | None = None
    public_ip: str | None = None
    launched: datetime | None = None
    expires: datetime | None = None
    spot: bool = False
    unfetched: tuple[str, ...] = ()
    changed: datetime | None = None
    profile: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    reason: tuple[str, str] = field(default=("", ""), compare=False, repr=False)
    uses: tuple[tuple[str, str, str], ...] = field(default=(), compare=False, repr=False)
    is_renumbered: bool = field(default=False, compare=False, repr=False)

    @property
    def address(self) -> str | None:
        """The address that this machine connects to: the public one if it exists."""
        return self.public_ip or self.private_ip


class ClusterListing(Frozen):
    """A cluster that awsddp finds on AWS by its name and owner. `nodes` is sorted by node number.

    `leftovers` are the ids of the cluster's other resources (security groups, keys). `group` is its own
    security group, `ssh_cidrs` are the addresses to which port 22 is open, and `host` is the machine that
    created the cluster.
    """

    name: str
    id: str
    owner: str
    region: str
    nodes: tuple[Node, ...]
    created: datetime | None = None
    expires: datetime | None = None
    leftovers: tuple[str, ...] = ()
    group: str | None = None
    ssh_cidrs: tuple[str, ...] | None = None
    host: str = ""

    @property
    def live(self) -> tuple[Node, ...]:
        """The nodes that are neither terminated nor terminating."""
        return tuple(node for node in self.nodes if node.state not in ENDED_STATES)

    @property
    def unfetched(self) -> list[str]:
        """The unfetched jobs in the tags of the live nodes."""
        return list_unfetched_jobs(self.live)


class RecordedCluster(Frozen):
    """A cluster's `awsddp:id` and the node number for each instance id, from this machine's record.

    The id and the numbers stay valid even if the tags change.
    """

    id: str
    numbers: Mapping[str, int]


class LaunchIntent(Frozen):
    """The request for a launch, recorded before it is sent so that it can be repeated identically.

    `host_key` is the public part of the temporary host key of the launched nodes.
    """

    cluster_id: str
    zone: str
    written: datetime
    parameters: dict[str, Any] = field(repr=False)
    host_key: str = ""


class PreparedNode(Frozen):
    """A prepared node's properties (nodes/provision.py), recorded in the cluster folder.

    `python` is the image's interpreter, and `environment` is the interpreter in a built environment (None: no
    environment was built). `nic` is the interface with the private address. `gpus` is the number of GPUs that
    torch finds, including rehearsed GPUs.
    """

    node: int
    instance_id: str
    home: str
    python: str
    nic: str
    gpus: int = 0
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    environment: str | None = None

    @property
    def ranks_python(self) -> str:
        """The interpreter that ranks, `exec` and `ssh` use."""
        return self.environment or self.python


class Cause(Frozen):
    """Why a job did not succeed: the first rank that failed, with the end of its log, or the event that ended
    the job.

    `kind` is one that docs/why.md lists ("unknown": an older awsddp wrote the record). `retryable` is True if
    the same command may succeed without a change. `values` are the variables in the explanation, such as
    `module` for import_error. `next` is the next step, or "" if no next step is known.
    """

    rank: RankNumber | None
    node: NodeNumber | None
    kind: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}$(?!\n)")] = "unknown"
    retryable: bool = False
    values: Annotated[dict[ShortText, Text], Meta(max_length=100)] = field(default_factory=dict, hash=False)
    instance_id: ShortText | None = None
    exit_code: ExitCode | None = None
    signal: ExitCode | None = None
    tail: Annotated[tuple[Text, ...], Meta(max_length=MAX_LINES)] = ()
    explanation: Text = ""
    next: Text = ""


class RankResult(Frozen):
    """One rank's result. `exit_code` is None while the rank runs, or -N for signal N. `seconds` is its run
    time.

    `rank` is the number in the name of the rank's log. Under torchrun, the variable RANK differs from this
    number after a node is lost.
    """

    rank: RankNumber
    local_rank: RankNumber
    node: NodeNumber
    exit_code: ExitCode | None
    seconds: Seconds


class RankProgress(Frozen):
    """A rank's progress, from its metrics (docs/results.md); a value is None if the metrics lack it."""

    rank: RankNumber
    step: Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | None = None
    loss: Measure | None = None
    steps_per_second: Measure | None = None
    fraction: Annotated[float, Meta(ge=0, le=1)] | None = None


class RankUsage(Frozen):
    """A rank's usage in the last 10 s; None means unknown. The network usage is that of the whole node.

    `cpu_percent` is a percentage of one core: 400 means four cores.
    """

    rank: RankNumber
    cpu_percent: Amount | None = None
    gpu_percent: Amount | None = None
    gpu_memory_bytes: Amount | None = None
    network_bytes_per_second: Amount | None = None


class Saving(Frozen):
    """The progress of uploads to S3: files saved, files pending, and the error that prevents uploads (or "").

    `ended` is True if all files were saved, or were abandoned because of the `error`. `silent_s` is the time
    since an uploader's last heartbeat, according to the node's clock. `unasked` are nodes that did not
    answer; their files are not counted.
    """

    files: Count = 0
    bytes: Count = 0
    pending_files: Count = 0
    pending_bytes: Count = 0
    error: Text = ""
    ended: bool = False
    silent_s: Amount = 0.0
    unasked: Annotated[tuple[NodeNumber, ...], Meta(max_length=10_000)] = ()

    @property
    def is_complete(self) -> bool:
        """Return True if all results are saved."""
        return self.ended and not self.error and not self.unasked

    @property
    def is_silent(self) -> bool:
        """Return True if uploads have stopped because a node's uploader has died or hangs."""
        return not self.ended and self.silent_s > UPLOADER_SILENT_S


class Hang(Frozen):
    """What the nodes found about a job that is silent: it is "hung", "alive" or "unknown" (docs/why.md).

    `since` is when a rank last wrote a line (Unix time). For a job that is hung, `place` is the line and the
    collective at which the rank that is behind (`rank`, if it is one) or most ranks wait. `text` is a
    sentence.
    """

    state: Literal["hung", "alive", "unknown"]
    since: Seconds
    text: Text
    place: ShortText = ""
    rank: RankNumber | None = None


class JobNode(Frozen):
    """An instance on which a job runs or ran, and its node number at that time."""

    node: NodeNumber
    instance_id: ShortText


class Recovery(Frozen):
    """How a job goes on after an earlier job of its run, which a machine's fault ended.

    `job` is the earlier job, `kind` and `why` are the kind and the explanation of its cause, and `cost_usd`
    is its list price. `checkpoint` is the checkpoint from which this job resumed (None: from the beginning).
    `steps_repeated` is how many steps the earlier job had done after that checkpoint, and `seconds_lost` is
    the time from its end until this job was started (None: unknown). `earlier_world_size` is its number of
    ranks.
    """

    job: ShortText
    kind: ShortText
    why: Text = ""
    checkpoint: Text | None = None
    steps_repeated: Count | None = None
    seconds_lost: Amount | None = None
    cost_usd: Amount | None = None
    earlier_world_size: Count = 0


class JobRecord(Frozen, Keyed):
    """A job as its nodes report it. `home` is its results folder, relative to the project folder.

    `missing` are the nodes whose part of the results is missing. `commit` is the project folder's commit, and
    `dirty` is True if the folder's files differed from the commit (None: no repository). `options` are its
    settings other than defaults, as command line arguments. `resumed` is the job from whose checkpoint this
    job resumed. `run_id` is the same for a job and all jobs that continue it (None: an older awsddp wrote the
    record). `started` is when its first rank started and
    `ended` when its last rank ended, as 2026-11-22T12:00:00Z. `price_usd_per_hour` is what its nodes cost.
    `restarts` are the restarts by torchrun, such as "1 of 3: rank 3 @ node1: ValueError". While the job runs,
    `progress` has the ranks that write metrics. `slowest_rank` is a rank that is more than 10 % slower than
    the best. `usage` has the nodes' samples. `save_to` is the S3 URI for its results, and `saving` is the
    progress of their upload. `hang` is what the nodes found about a job whose ranks have written no line for
    half an hour. `recoveries` are those of its run until this job's start, oldest first (--recover).
    """

    job: str
    state: JobState
    cause: Cause | None
    ranks: tuple[RankResult, ...]
    home: str
    nodes: tuple[JobNode, ...] = ()
    missing: tuple[int, ...] = ()
    script: str | None = None
    args: tuple[str, ...] = ()
    commit: str | None = None
    dirty: bool | None = None
    launcher: str = "ssh"
    options: tuple[str, ...] = ()
    resumed: str | None = None
    run_id: RunId | None = None
    world_size: int = 0
    instance_type: str | None = None
    price_usd_per_hour: float | None = None
    started: str | None = None
    ended: str | None = None
    restarts: tuple[str, ...] = ()
    progress: tuple[RankProgress, ...] = ()
    slowest_rank: int | None = None
    usage: tuple[RankUsage, ...] = ()
    save_to: str | None = None
    saving: Saving | None = None
    hang: Hang | None = None
    recoveries: Annotated[tuple[Recovery, ...], Meta(max_length=1000)] = ()


class Choice(Frozen):
    """An alternative instance type, with one instance's on-demand price per hour."""

    instance_type: str
    gpu: str
    gpus_per_node: int
    price_usd_per_hour: float | None
    zones: tuple[str, ...]
    fits_quota: bool | None


class Check(Frozen):
    """A check that `doctor` runs, on one node unless `node` is None.

    `ok` is None if the result is unknown or only a warning.
    """

    name: str
    ok: bool | None
    value: str = ""
    expected: str = ""
    hint: str = ""
    node: int | None = None


class Collective(Frozen, Keyed):
    """A collective operation in progress, and its number in its process group."""

    group: str
    number: int
    operation: str


class ProcessStack(Frozen, Keyed):
    """A process: `where` is its innermost line in the project folder, and `source` is that line's code.

    `stack` has its frames, oldest first.
    """

    pid: int
    state: Literal["running", "stopped", "silent"]
    where: str | None
    stack: tuple[str, ...]
    source: str | None = None


class RankStack(Frozen, Keyed):
    """What a rank does now. A "silent" rank runs but sends no stack; a "missing" rank's process has ended."""

    rank: int
    node: int
    pid: int | None
    state: Literal["running", "stopped", "silent", "ended", "missing", "unreachable"]
    where: str | None
    stack: tuple[str, ...]
    collective: Collective | None
    workers: tuple[ProcessStack, ...]
    source: str | None = None


def merge_records(kind: type[_Kind], *records: object, **more: Any) -> _Kind:
    """Return a merged record: each field comes from `more`, or else from the last record that has the
    field."""
    names = getattr(kind, "__struct_fields__", None) or [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    values = {name: getattr(record, name) for record in records for name in names if hasattr(record, name)}
    return kind(**values | more)


def list_unfetched_jobs(nodes: Iterable[Node]) -> list[str]:
    """Return the unfetched jobs in the nodes' tags, with the oldest first and `OLDER_JOBS` last."""
    jobs = dict.fromkeys(job for node in nodes for job in node.unfetched)
    return sorted(jobs, key=OLDER_JOBS.__eq__)


def format_node_numbers(numbers: Iterable[int]) -> str:
    """Return node numbers as in the tag `awsddp:nodes`: "0,1", or "0-63" for three or more consecutive
    numbers.
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def parse_node_numbers(text: str) -> tuple[int, ...]:
    """Return the node numbers in a tag `awsddp:nodes`, in the tag's order. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)
