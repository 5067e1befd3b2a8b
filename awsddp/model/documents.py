"""The JSON documents that verbs return and `--json` prints; docs/schema.json is generated from these classes.

The generator is tests/support/schema.py. A document on stdout also has the key "schema". A key with a default
can be absent.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from awsddp.model.records import (
    Check,
    Choice,
    ClusterState,
    Hang,
    JobRecord,
    JobState,
    Keyed,
    RankStack,
    TargetName,
)


class Document(Struct, Keyed, kw_only=True):
    """A JSON document that a verb returns, or a part of such a document."""


class NodeState(Document):
    """A node, as EC2 reports it. `idle_left_s` is present only with `status -v` (null: the node did not
    answer).
    """

    node: int
    instance_id: str
    state: str
    public_ip: str | None
    private_ip: str | None
    nic: str | None
    gpus: int
    zone: str
    idle_left_s: int | UnsetType | None = UNSET


class SeenJob(JobRecord):
    """A job as last seen. `reported` is true if the job's nodes have just reported the job.

    `fetched` is true if all of the job's results were fetched to this machine after the job ended.
    """

    last_seen: str | None
    fetched: bool
    reported: bool = False


class _AnyCluster(Document):
    """The fields of every cluster."""

    cluster: str
    state: ClusterState
    target: TargetName
    instance_type: str | None
    nodes: tuple[NodeState, ...]
    price_usd_per_hour: float | None
    cost_usd: float | None
    expires: str | None


class ClusterDocument(_AnyCluster):
    """The JSON document that `up`, `status` and `stop` print."""

    region: str | None
    jobs: tuple[SeenJob, ...]
    budget_usd: float | None
    idle: str | None
    looked: tuple[str, ...]


class FoundCluster(_AnyCluster):
    """A cluster in the JSON that `status --all` prints. `jobs` are the unfetched jobs."""

    id: str
    region: str
    owner: str
    mine: bool
    orphan: bool
    jobs: tuple[str, ...]
    leftovers: tuple[str, ...]


class JobDocument(JobRecord):
    """The JSON document that `train`, `cancel` and `logs` print.

    `step` and `loss` are the last values from the job's first rank that reports them.
    """

    step: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    data: str | None = None
    fetched: bool = False
    checkpoint: str | None = None


class ListedJob(JobRecord):
    """A job on any of this machine's clusters, with its run time and its nodes' list price for that time.

    Jobs that ran on a node at the same time share the node's price. `reported` is true if the job's nodes
    have just reported the job; otherwise, the job is described as last seen. `step`, `loss` and `fraction`
    are the last values from the job's first rank that reports them.
    """

    step: int | None = None
    loss: float | None = None
    fraction: float | None = None
    cluster: str | None
    cluster_id: str | None
    seconds: float | None
    job_usd: float | None
    reported: bool


class CostedCluster(Document):
    """One of this machine's clusters; `ended` is null while it exists.

    `cost_usd` is its cost at list price, and `idle_usd` is the part spent while no job ran.
    """

    cluster: str
    id: str | None
    target: TargetName
    region: str | None
    instance_type: str
    nodes: int
    began: str
    ended: str | None
    price_usd_per_hour: float | None
    cost_usd: float | None
    idle_usd: float | None


class JobsDocument(Document):
    """The JSON document that `jobs` prints, with the oldest job first.

    `total_usd` is what the `clusters` on AWS cost, and `would_have_cost_usd` is what the `clusters` in the
    local cloud would have cost on AWS. With `since` (--since), these totals and the `cost_usd` of `clusters`
    count from that time on.
    """

    jobs: tuple[ListedJob, ...]
    clusters: tuple[CostedCluster, ...]
    total_usd: float
    would_have_cost_usd: float
    since: str | None = None


class JobReport(JobDocument, ListedJob):
    """The JSON document that `report` prints. `measures` has the job's last and best loss and accuracy.

    `again` has the commands that run the job again; `page` is the HTML file.
    """

    measures: dict[str, dict[str, float]]
    target: TargetName | None
    region: str | None
    again: tuple[str, ...]
    page: str


class NodeFiles(Document):
    """How many files (including links and empty folders) and bytes were sent to or fetched from a node."""

    node: int
    files: int
    bytes: int


class DownDocument(Document):
    """The JSON document that `down` prints."""

    cluster: str
    state: Literal["absent", "ending"]
    target: TargetName
    terminated: tuple[str, ...]
    leftovers: tuple[str, ...]
    removed: int
    cost_usd: float | None
    looked: tuple[str, ...]
    ended: str


class PathSize(Document):
    """A file or a folder at the top of the project folder."""

    path: str
    bytes: int


class Kept(Document):
    """Paths that are not sent: `by` is an ignore file, "sync.ignore", or "awsddp" (results, environments)."""

    by: str
    paths: tuple[str, ...]


class SyncDocument(Document):
    """The JSON document that `sync` prints.

    `kept` has the paths that are not sent, and the file or key that excludes them.
    """

    nodes: tuple[NodeFiles, ...]
    files: tuple[str, ...]
    largest: tuple[PathSize, ...]
    kept: tuple[Kept, ...]
    job: None = None
    home: None = None


class FetchDocument(Document):
    """The JSON document that `fetch` prints.

    `started` is true if a stopped cluster was started for the fetch; `down` describes the cluster's
    termination.
    """

    nodes: tuple[NodeFiles, ...]
    job: str
    home: str
    started: bool = False
    down: DownDocument | None = None


class Orphans(Document):
    """The JSON document that `down --orphans` prints."""

    clusters: tuple[str, ...]
    terminated: tuple[str, ...]
    leftovers: tuple[str, ...]
    looked: tuple[str, ...]
    unread: tuple[str, ...]


class RunDocument(Document):
    """The JSON document that `run` prints: its stages' documents (null if not reached) and durations."""

    up: ClusterDocument | None
    train: JobDocument | None
    down: DownDocument | None
    seconds: dict[str, float]


class NodeOutput(Document):
    """A command's output on one node."""

    node: int
    exit_code: int | None
    stdout: str
    stderr: str


class ExecDocument(Document):
    """The JSON document that `exec` prints."""

    nodes: tuple[NodeOutput, ...]


class SshDocument(Document):
    """The JSON document that `ssh` prints: the command that opens the shell."""

    command: tuple[str, ...]


class DoctorDocument(Document):
    """The JSON document that `doctor` prints."""

    checks: tuple[Check, ...]


class QuotaDocument(Document):
    """The JSON document that `doctor --request-quota` prints.

    `request` is the AWS request ID, or null if no request is needed.
    """

    quota: str
    name: str
    region: str
    need: int
    have: float | None
    request: str | None


class Offer(Choice):
    """An offered instance type."""

    gpu_memory_gb: float
    price_date: str
    spot_usd_per_hour: float | None


class OffersDocument(Document):
    """The JSON document that `plan --offers` prints."""

    region: str
    target: TargetName
    nodes: int
    price_date: str
    price_source: str
    offers: tuple[Offer, ...]


class InitDocument(Document):
    """The JSON document that `init` prints."""

    file: str


class KnownJob(Document):
    """A job's name and its last known state."""

    job: str
    state: JobState


class KnownCluster(Document):
    """A cluster with a record on this machine."""

    cluster: str
    target: TargetName
    region: str | None
    nodes: int
    instance_type: str
    price_usd_per_hour: float | None
    expires: str
    expired: bool
    jobs: tuple[KnownJob, ...]


class HomeDocument(Document):
    """The JSON document that `awsddp` prints without a verb."""

    clusters: tuple[KnownCluster, ...]
    local_cloud: bool
    ended: int = 0
    """How many of this machine's clusters have ended."""
    last_job: KnownJob | None = None
    """This machine's last job, if the machine has no clusters."""


class LocalInstance(Document):
    """An instance in the local cloud."""

    instance_id: str
    state: str
    instance_type: str
    region: str
    private_ip: str | None
    name: str | None
    cluster: str | None
    node: int | None
    reason: str | None


class Fault(Document):
    """A fault that `local fault` lists. `heals_at` is a Unix time."""

    id: int
    operation: str
    effect: str
    times: int | None
    seconds: float
    only: str
    heals_at: float | None


class LocalDocument(Document):
    """The JSON document that `local start` and `local status` print."""

    endpoint: str
    region: str
    access_key_id: str
    secret_access_key: str
    mode: Literal["nspawn", "loopback", "records"]
    why: str
    instances: tuple[LocalInstance, ...]
    faults: tuple[Fault, ...]


class StoppedDocument(Document):
    """The JSON document that `local stop` prints. `stopped` is true if a local cloud was running."""

    stopped: bool


class Failure(Document):
    """An error. `kind` is listed in docs/design.md.

    `retryable` is true if the same command may succeed later.
    """

    kind: str
    retryable: bool
    message: str
    why: str
    next: str
    exit_code: int


class ErrorDocument(Document):
    """The JSON document that a failed verb prints: the error, and the fields of its own document, if any."""

    error: Failure


class EventLine(Document):
    """A line on stderr with --json: `who` reports the progress `text`; `fraction` of `size` bytes is done."""

    schema: int
    time: str
    text: str
    who: str | None
    fraction: float | None
    size: int | None


class WhyDocument(Document):
    """The JSON document that `why` prints: the ranks `behind` the waiting ones, and what each rank does.

    `silent_s` is the time since a rank last wrote to its log. `moving` is true if a collective has just
    begun. `result` describes how the job ended, if it has ended. `hang` is what the nodes found about a job
    that has been silent for half an hour.
    """

    job: str
    state: JobState
    silent_s: float | None
    moving: bool
    behind: tuple[int, ...]
    explanation: str
    ranks: tuple[RankStack, ...]
    result: JobDocument | None = None
    hang: Hang | None = None


def sort_by_node(files: Mapping[int, NodeFiles]) -> tuple[NodeFiles, ...]:
    """Return the values of `files`, sorted by node number."""
    return tuple(node_files for _, node_files in sorted(files.items()))
