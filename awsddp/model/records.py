"""What exists: clusters, their nodes, their jobs. Records, and how tags number nodes; no I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from msgspec import Meta

TargetName = Literal["aws", "local"]
ClusterState = Literal["absent", "launching", "preparing", "ready", "partial", "stopped", "ending"]
JobState = Literal["waiting", "running", "succeeded", "failed", "cancelled", "interrupted"]
ACTIVE = ("waiting", "running")
"""States of a job that has not ended."""

# What may come from a node stands at the type. The end of a text is written so that it is JSON Schema's, too.
RankNumber = Annotated[int, Meta(ge=0, lt=100_000)]
NodeNumber = Annotated[int, Meta(ge=0, lt=10_000)]
ExitCode = Annotated[int, Meta(ge=-255, le=255)]
Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]
Measure = Annotated[float, Meta(ge=-1e300, le=1e300)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Text = Annotated[str, Meta(max_length=100_000)]
Word = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, lt=1 << 60)]
MOST_LINES = 1000
"""How many lines the tail of a log may have."""

_Kind = TypeVar("_Kind")

ENDED = ("shutting-down", "terminated")
"""EC2's states of an instance that is gone, or on its way there."""
SAVER_SILENT_S = 60.0
"""After how long without a sign of life a saver is said to be gone; it gives one every few seconds."""
MORE = "..."
"""Among a node's unfetched jobs: older ones than those named, for which its tag has no room. Never a name."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Frozen:
    """A record: a dataclass whose fields are named when it is made, and do not change."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Keyed:
    """A record that scripts also read as the JSON that it is: `record["state"]` is `record.state`."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


class Target(Frozen):
    """Where the EC2 calls go and how a node is reached.

    Its name decides where a cluster is looked for and how its cost is told; what differs in a node is read
    from the tags of its image. `endpoint` is None for AWS's own endpoints. `access_key_id` and
    `secret_access_key` are None where boto3 finds credentials by itself. `caller_address` is this machine as
    the nodes see it (None: ask, when public addresses are used). `daemon_home` is the home of a local cloud,
    `node_s3` where its nodes reach S3.
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
    def place(self) -> str:
        """Where that is, in words."""
        return "the local cloud" if self.name == "local" else (self.region or "the configured region")


class Node(Frozen):
    """One instance of a cluster, as EC2 describes it, with its node number from the tag `awsddp:nodes`.

    `state` is EC2's (pending, running, shutting-down, terminated, stopping, stopped). `launched` is UTC,
    `expires` the time that its tag names. `node` is -1 for one that no longer belongs to the cluster,
    `changed` the time when it began to stop or to end, where EC2 says it. `profile` is the ARN of its
    instance profile. `reason` are EC2's code and words of why it stopped or ended, `uses` the kind (as
    DescribeKeyPairs names it), the name and the id of each group and key that it uses. `is_renumbered`: the
    number is not what the tag and the launch index say, as they say the same of another node.
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
        """The address that this machine connects to: the public one where there is one."""
        return self.public_ip or self.private_ip


class Listed(Frozen):
    """A cluster as its tags tell it: one name of one owner. `nodes` is sorted by node number.

    `leftovers` are ids of resources of ours that exist beside the instances (groups, keys), `group` is the
    cluster's own security group and `ssh_cidrs` the addresses for which its port 22 is open. `host` is the
    machine that made it.
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
        """The nodes that are not terminated and not on their way there."""
        return tuple(node for node in self.nodes if node.state not in ENDED)

    @property
    def unfetched(self) -> list[str]:
        """The jobs whose results are not fetched, by the tags of the nodes that live."""
        return unfetched_jobs(self.live)


class Remembered(Frozen):
    """A cluster's `awsddp:id` and the number of each of its instances, by the record of the machine that made
    it. They hold whatever becomes of the tags.
    """

    id: str
    numbers: Mapping[str, int]


class Intent(Frozen):
    """What a launch is about to ask for, kept so that the very bytes can be sent again.

    `host_key` is the public half of the temporary host key that its nodes have.
    """

    cluster_id: str
    zone: str
    written: datetime
    parameters: dict[str, Any] = field(repr=False)
    host_key: str = ""


class Prepared(Frozen):
    """What was found on a node as it was made ready (nodes/provision.py), kept in the cluster folder.

    `python` is the image's interpreter, `environment` the one of ranks where another was made (None: the
    image's), `nic` the interface that carries the private address, `gpus` the count of GPUs that torch finds
    there, on a node that rehearses them too.
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
        """The interpreter of the ranks, `exec` and `ssh`."""
        return self.environment or self.python


class Cause(Frozen):
    """Why a job did not succeed: the first rank that failed, and the end of its log; or what ended it.

    `kind` is one of docs/why.md ("unknown": an older awsddp wrote it); `retryable`: the same
    command may succeed without a change; `values` are what the explanation names, such as `module` of
    import_error; `next` is what to do, "" for nothing that is known.
    """

    rank: RankNumber | None
    node: NodeNumber | None
    kind: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}$(?!\n)")] = "unknown"
    retryable: bool = False
    values: Annotated[dict[Word, Text], Meta(max_length=100)] = field(default_factory=dict, hash=False)
    instance_id: Word | None = None
    exit_code: ExitCode | None = None
    signal: ExitCode | None = None
    tail: Annotated[tuple[Text, ...], Meta(max_length=MOST_LINES)] = ()
    explanation: Text = ""
    next: Text = ""


class RankResult(Frozen):
    """How one rank ended. `exit_code` is None while it runs, -N for signal N; `seconds` is its run time.

    `rank` is the number of its log; under torchrun its RANK differs from it once a node was lost.
    """

    rank: RankNumber
    local_rank: RankNumber
    node: NodeNumber
    exit_code: ExitCode | None
    seconds: Seconds


class RankProgress(Frozen):
    """How far a rank is, from the rows that it wrote (docs/results.md); None: its rows do not tell."""

    rank: RankNumber
    step: Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | None = None
    loss: Measure | None = None
    steps_per_second: Measure | None = None
    fraction: Annotated[float, Meta(ge=0, le=1)] | None = None


class RankUsage(Frozen):
    """What a rank used in the last 10 s; None: not known. The network is that of its whole node.

    `cpu_percent` is of one core: 400 are four.
    """

    rank: RankNumber
    cpu_percent: Amount | None = None
    gpu_percent: Amount | None = None
    gpu_memory_bytes: Amount | None = None
    network_bytes_per_second: Amount | None = None


class Saving(Frozen):
    """How far results are in S3: what is saved, what is not yet, and what keeps it ("": nothing).

    `ended`: all that there was is saved, or given up for the `error`. `silent_s` is how long ago the saver of
    a node gave its last sign of life, by that node's clock; `unasked` are nodes that did not answer, and of
    which nothing is counted.
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
    def is_whole(self) -> bool:
        """Tell whether all that there was is saved."""
        return self.ended and not self.error and not self.unasked

    @property
    def is_silent(self) -> bool:
        """Tell whether nothing is saved any more, as the saver of a node has died or hangs."""
        return not self.ended and self.silent_s > SAVER_SILENT_S


class JobNode(Frozen):
    """A machine on which a job runs or ran, and the number that it had then."""

    node: NodeNumber
    instance_id: Word


class JobRecord(Frozen, Keyed):
    """A job as its nodes tell it. `home` is its folder of results, relative to the synced folder.

    `missing` are the nodes whose part of the results is not there. `commit` is that of the synced folder,
    `dirty` whether its files differed (None: no repository); `options` are its settings that were not
    defaults, as words of a command line; `resumed` is the job whose checkpoint it got; `started` and `ended`
    are when its first rank started and its last one ended, as 2026-11-22T12:00:00Z; `price_usd_per_hour` is
    of its nodes. `restarts` are torchrun's: "1 of 3: rank 3 @ node1: ValueError". `progress` holds the ranks
    that write metrics, while the job runs; `slowest_rank` is more than 10 % behind the best; `usage` is what
    the nodes sampled. `save_to` is where its results are saved, `saving` how far that is.
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


class Choice(Frozen):
    """An alternative instance type. The price is of one instance on demand, per hour."""

    instance_type: str
    gpu: str
    gpus_per_node: int
    price_usd_per_hour: float | None
    zones: tuple[str, ...]
    fits_quota: bool | None


class Check(Frozen):
    """A check of `doctor`, of one node if it has a number. `ok` None: unknown, or only a warning."""

    name: str
    ok: bool | None
    value: str = ""
    expected: str = ""
    hint: str = ""
    node: int | None = None


class Collective(Frozen, Keyed):
    """A collective operation that is not over, and its number in its process group."""

    group: str
    number: int
    operation: str


class ProcessStack(Frozen, Keyed):
    """A process: `where` is its innermost line of the synced folder, `source` what that line says.

    `stack` has its frames, oldest first.
    """

    pid: int
    state: Literal["running", "stopped", "silent"]
    where: str | None
    stack: tuple[str, ...]
    source: str | None = None


class RankStack(Frozen, Keyed):
    """What a rank does. "silent": it runs and gives no stack; "missing": it has no process any more."""

    rank: int
    node: int
    pid: int | None
    state: Literal["running", "stopped", "silent", "ended", "missing", "unreachable"]
    where: str | None
    stack: tuple[str, ...]
    collective: Collective | None
    workers: tuple[ProcessStack, ...]
    source: str | None = None


def widened(kind: type[_Kind], *records: object, **more: Any) -> _Kind:
    """Return a record whose fields are those of `more`, else of the last of `records` that has them."""
    names = getattr(kind, "__struct_fields__", None) or [one.name for one in fields(kind)]  # type: ignore[arg-type]
    known = {name: getattr(one, name) for one in records for name in names if hasattr(one, name)}
    return kind(**known | more)


def unfetched_jobs(nodes: Iterable[Node]) -> list[str]:
    """Return the jobs whose results are not fetched, by the nodes' tags: the oldest first, `MORE` last."""
    jobs = dict.fromkeys(job for node in nodes for job in node.unfetched)
    return sorted(jobs, key=MORE.__eq__)


def write_numbers(numbers: Iterable[int]) -> str:
    """Return node numbers as the tag `awsddp:nodes` holds them: "0,1", from three in a row on "0-63"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def read_numbers(text: str) -> tuple[int, ...]:
    """Return the node numbers of a tag `awsddp:nodes`, in its order. Raises ValueError where it is none."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
