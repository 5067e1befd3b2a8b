"""The requests to the agent and the parts of a launch, as classes that the client and the agent use.

The type in brackets after `Request` is the response's type, a class from model/node_answers.py. The agent
writes the response as JSON, and the client validates it. On the wire and in job.json, a request is a JSON
object with the class's name in lower case and the class's fields: {"do": "cancel", "job": ...}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from typing import Self, dataclass_transform

    from awsddp.model import node_answers  # noqa: F401 (types in brackets)

    Read = Callable[[Any], object]  # converts JSON to a field's value
    Fact = str | float | Sequence[str] | Mapping[str, Any] | None  # a value of Launch.facts
else:

    def dataclass_transform(**_):  # in typing since Python 3.11; used only by type checkers
        return lambda cls: cls


Answer = TypeVar("Answer")
_Named = TypeVar("_Named")
_ROWS: set[type] = set()
NOTHING: Mapping[str, str] = {}
MAX_SHUTDOWN_GRACE = 110.0
"""The longest grace (s) at a node's shutdown, which awsddp-jobs.service delays by at most 120 s."""


@dataclass_transform(kw_only_default=True)
class Fields:
    """Base of classes with annotated fields. Replaces dataclasses, whose import takes 14 ms per request.

    `parts` maps the name of each field that is not plain JSON to the function that reads it.
    """

    parts: ClassVar[Mapping[str, Read]] = {}

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the object that `to_json` encoded.

        Fields that an older version of awsddp omitted get their defaults.
        """
        return make_reader(cls, **cls.parts)(document)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: to_json_value(getattr(self, name)) for name in self.__annotations__}

    def update(self, other: Fields) -> None:
        """Copy the fields that are set in `other`."""
        vars(self).update(vars(other))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class OmitsUnset(Fields):
    """Base of classes whose JSON omits the fields that were not set."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON values."""
        return {name: to_json_value(value) for name, value in vars(self).items()}


class Response(OmitsUnset):
    """A response as the agent writes it. Its type is defined in model/node_answers.py or model/records.py."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def to_json_value(value: Any) -> Any:
    """Return a value as JSON: Fields and NamedTuples become objects (lists if they have @as_json_list)."""
    if isinstance(value, Fields):
        return value.to_json()
    if hasattr(value, "_asdict") and type(value) not in _ROWS:
        value = value._asdict()
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    return value


def as_json_list(kind: type[_Named]) -> type[_Named]:
    """Class decorator: encode a NamedTuple as a list in JSON, not as an object."""
    _ROWS.add(kind)
    return kind


def make_reader(kind: type[_Named], **parts: Read) -> Callable[[Any], _Named]:
    """Return a function that converts a JSON object from `to_json_value` to an object of the class `kind`.

    Missing fields get their defaults. `parts` maps the name of each field that is not plain JSON to its
    reader.
    """

    def read(document: Any) -> _Named:
        values = {name: document[name] for name in kind.__annotations__ if name in document}
        for name in values.keys() & parts.keys():
            values[name] = values[name] and parts[name](values[name])
        return kind(**values)

    return read


def list_reader(part: Read) -> Read:
    """Return a function that reads a list, using `part` for each item."""
    return lambda items: [part(item) for item in items]


class Request(Fields, Generic[Answer]):
    """A request to the agent on one node.

    `module` holds the function that serves the request; the function has the request's name. `extra` holds
    modules that are sent only with this request, so that the rest of the agent fits into the first TCP window
    of a connection.
    """

    module: ClassVar[str] = "main"
    extra: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        return {"do": type(self).__name__.lower(), **super().to_json()}


class Claim(Request["node_answers.ClaimResult"]):
    """Claim the right to start a job. A launch uses up the claim. `owner` is shown to other clients.

    A client can disappear, so its claim ends after `lease_s` seconds.
    """

    module = "launch"
    owner: str
    wait_s: float
    lease_s: int = 1800


class Unclaim(Request["node_answers.ClaimResult"]):
    """Release the claim."""

    module = "launch"


class Slots(Request["node_answers.Slots"]):
    """Get the node's jobs, the slots in use, and the `ports` that are taken.

    With `gpus`, a job that uses only other GPUs of the node does not count as running.
    """

    module = "launch"
    ports: Sequence[int] = ()
    gpus: Sequence[int] = ()


class State(Request["node_answers.Jobs"]):
    """Get the documents of all jobs on the node."""


class Follow(Request["None"]):
    """Stream the logs of the node's ranks as frames (log_stream.py).

    `offsets` maps each rank to the offset in bytes at which the stream of the rank's log begins. Without
    `to_the_end`, the stream ends at the logs' current end. With `tail`, only the last `tail` lines of a log
    at offset 0 are sent.
    """

    job: str
    offsets: Mapping[int, int]
    to_the_end: bool = True
    tail: int | None = None


class Cancel(Request["node_answers.NodeJob"]):
    """End `job` and get its final document. If `grace` (s) is None, the launch's grace applies.

    With `launch`, the id of a launch request, end the job only if that request started it.
    """

    module = "cancel"
    job: str
    grace: float | None = None
    launch: str | None = None


class Lost(Request["node_answers.ReportReceived"]):
    """Report that the job's node `node` is gone.

    `why` is the reason, and `kind` is the kind of the cause.
    """

    module = "cancel"
    job: str
    node: int
    why: str
    kind: str


class Stacks(Request["node_answers.Stacks"]):
    """Get the stacks of a job's processes."""

    module, extra = "diagnosis.stacks", ("diagnosis.stacks",)
    job: str


class Manifest(Request["node_answers.Manifest"]):
    """List a job's results on the node (manifest.py).

    The list contains the data of small files, at most `at_once` bytes in total. If `at_once` is 0, no file is
    read. `ranks` are all ranks of the job, each with its node, because a node is allowed to list only its own
    ranks' logs. `outputs` are paths in addition to the launch's, and `exclude` has the patterns from
    `excludes.exclude_patterns`. With `events`, which maps results paths to the sizes of the client's files,
    the response has only the TensorBoard event files whose size differs, with all their data.
    """

    module = "manifest"
    job: str
    ranks: Sequence[Sequence[int]] = ()
    outputs: Sequence[str] = ()
    exclude: Sequence[Sequence[Any]] = ()
    at_once: int = 256 << 10
    events: Mapping[str, int] | None = None


class Probe(Request["node_answers.ProbeResult"]):
    """Get the node's hardware and load. The node listens at `address` on `ports` and on one more port.

    The ports stay open until the next request other than `Dial`. `thorough` adds checks that take some
    seconds on nodes with GPUs.
    """

    module, extra = "probe", ("diagnosis.evidence", "shutdown", "probe")
    address: str
    ports: Sequence[int] = ()
    thorough: bool = False


class Dial(Request["node_answers.DialResult"]):
    """Connect to `peers`, the (node, address, port) of other nodes, once all nodes have answered `Probe`."""

    module = "probe"
    peers: Sequence[tuple[int, str, int]]
    seconds: float


class TakeEvent(Request["node_answers.TakenEvent"]):
    """Take an event of `job` that the node cannot send itself, in order to send it.

    `settled` is how the client's last request ended: the event's id, the state and the reason
    (notify/post.py).
    """

    module = "notify.pending"
    extra = ("shutdown", "notify.events", "notify.outbox", "notify.pending")
    job: str
    settled: Sequence[str] | None = None


class LaunchNode(Fields):
    """One of a job's nodes."""

    node: int
    private_ip: str
    instance_id: str


@as_json_list
class LayoutRow(NamedTuple):
    """A row of the layout has a rank, its local rank, and its node."""

    rank: int
    local_rank: int
    node: int


class Process(Fields):
    """A process that a node's agent starts in the project folder.

    When the process ends, `ranks` end too, each with the process's exit code (-N: signal N). `log` is the
    file in logs/ that receives the output: rank3.log if the process is rank 3. The log of a process that
    starts ranks is launcher0.log (on node 0), and the ranks write their own logs (rank3.log). `environment`
    is added to the node's environment, and `defaults` are set where neither has them. `script` must exist on
    the node (None: do not check). `files` maps file names to texts that are written into the job's folder
    before the start.
    """

    ranks: Sequence[int]
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: str
    script: str | None = None
    files: Mapping[str, str] = NOTHING
    defaults: Mapping[str, str] = NOTHING


class Launch(Request["node_answers.LaunchResult"]):
    """Start a node's part of `job` once the jobs `after` have ended on the node.

    The node stores the request as job.json. `launch` is this launch's id on all nodes, and `facts` are
    returned in the job's documents. `helper` is the source of the ranks' sitecustomize. `secret` is the key
    for the agents' connections, and `secrets` names the variables whose values are not stored. `elastic` has
    the limits for torchrun's elastic agent, or is None if there is no elastic agent. Times are in seconds;
    `silent_s` is how long an agent may be silent, and `join_s` is how long the first node waits for the other
    nodes. `saving` has the `argv` and the `stdin` (base64) for s3/uploader.py. `looks` are the seconds of
    silence before the first look at the ranks, and between two looks; () means never. With `ends_when_hung`,
    the job ends if both looks show that it hangs. `notify` has the `argv` and the `stdin` for
    notify/notifier.py.
    """

    module = "launch"
    extra = (
        "diagnosis.evidence",
        "diagnosis.causes",
        "diagnosis.stacks",
        "diagnosis.hang",
        "diagnosis.hang_watch",
        "changes",
        "coordinator",
        "processes",
        "samples",
        "shutdown",
        "serve",
    )
    parts = {
        "nodes": list_reader(LaunchNode.from_json),
        "layout": list_reader(lambda row: LayoutRow(*row)),
        "processes": list_reader(Process.from_json),
    }
    job: str
    launch: str
    slot: int
    created: str
    node: int
    nodes: Sequence[LaunchNode]
    layout: Sequence[LayoutRow]
    folder: str
    workdir: str
    path: str
    processes: Sequence[Process]
    secret: str
    master_port: int
    link_port: int
    join_s: float
    silent_s: float
    timeout: float | None
    grace: float
    outputs: Sequence[str]
    defaults: Mapping[str, str]
    helper: str = ""
    gpus: Sequence[int] = ()
    after: Sequence[str] = ()
    secrets: Sequence[str] = ()
    facts: Mapping[str, Any] = NOTHING
    hang_after: float | None = None
    elastic: Mapping[str, int] | None = None
    saving: Mapping[str, Any] = NOTHING
    looks: Sequence[float] = ()
    ends_when_hung: bool = False
    notify: Mapping[str, Any] = NOTHING

    @property
    def first_node(self) -> LaunchNode:
        """The node that coordinates the job."""
        return self.nodes[0]

    @property
    def own_ranks(self) -> list[int]:
        """The ranks on this node."""
        return [row.rank for row in self.layout if row.node == self.node]


REQUEST_TYPES = {kind.__name__.lower(): kind for kind in Request.__subclasses__()}
