"""The requests to a node's program, a class each for both ends of the connection, and the parts of a launch.

In brackets is the type of the answer, a class of model/node_answers.py: a node writes plain JSON, its client
checks it. On the wire and in job.json a request is {"do": "cancel", "job": ...}: its class in lower case and
its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from typing import Self, dataclass_transform

    from awsddp.model import node_answers  # noqa: F401 (in the brackets)

    Read = Callable[[Any], object]  # makes of JSON what a field holds
    Fact = str | float | Sequence[str] | None  # of a launch, as a client tells it
else:

    def dataclass_transform(**_):  # of Python 3.11, for type checkers alone
        return lambda cls: cls


Answer = TypeVar("Answer")
_Named = TypeVar("_Named")
_ROWS: set[type] = set()
NOTHING: Mapping[str, str] = {}


@dataclass_transform(kw_only_default=True)
class Fields:
    """A class with the fields that it annotates. The module dataclasses costs a node 14 ms a request.

    `parts` reads those of its fields that are more than JSON has, by name.
    """

    parts: ClassVar[Mapping[str, Read]] = {}

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the object that `to_json` wrote; fields that an older awsddp did not write have defaults."""
        return reader(cls, **cls.parts)(document)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {name: plain(getattr(self, name)) for name in self.__annotations__}

    def take(self, other: Fields) -> None:
        """Take over the fields that `other` has set."""
        vars(self).update(vars(other))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Sparse(Fields):
    """Fields of which JSON has those that are set."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set as JSON has them."""
        return {name: plain(value) for name, value in vars(self).items()}


class Told(Sparse):
    """What a node tells and never reads: its type is one of model/node_answers.py or model/records.py."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: Fields and NamedTuples are objects, but for a `row`."""
    if isinstance(value, Fields):
        return value.to_json()
    if hasattr(value, "_asdict") and type(value) not in _ROWS:
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def row(kind: type[_Named]) -> type[_Named]:
    """Decorate a NamedTuple that is a list in JSON, not an object."""
    _ROWS.add(kind)
    return kind


def reader(kind: type[_Named], **parts: Read) -> Callable[[Any], _Named]:
    """Return what makes one of `kind` again of the object that `plain` made of it.

    Fields that it does not have have defaults; `parts` read those that are more than JSON has, by name.
    """

    def read(document: Any) -> _Named:
        values = {name: document[name] for name in kind.__annotations__ if name in document}
        for name in values.keys() & parts.keys():
            values[name] = values[name] and parts[name](values[name])
        return kind(**values)

    return read


def each(part: Read) -> Read:
    """Return what reads a list of such parts."""
    return lambda parts: [part(one) for one in parts]


class Request(Fields, Generic[Answer]):
    """What a client asks of one node.

    `module` is the one of the node's program whose function of the request's name answers; `extra` are
    modules that travel with the request: the program alone fits the first window of a connection.
    """

    module: ClassVar[str] = "main"
    extra: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        return {"do": type(self).__name__.lower(), **super().to_json()}


class Claim(Request["node_answers.Claimed"]):
    """The right to start a job, which a launch uses up; `owner` is shown to another client.

    `lease_s` is how long a client that vanished without a goodbye keeps others from it.
    """

    module = "launch"
    owner: str
    wait_s: float
    lease_s: int = 1800


class Unclaim(Request["node_answers.Claimed"]):
    """Give that right back."""

    module = "launch"


class Slots(Request["node_answers.Slots"]):
    """Which jobs and slots the node has, and which of `ports` are taken.

    With `gpus` a job that runs on other GPUs of the node is not told to run.
    """

    module = "launch"
    ports: Sequence[int] = ()
    gpus: Sequence[int] = ()


class State(Request["node_answers.Jobs"]):
    """What the node knows of each of its jobs."""


class Follow(Request["None"]):
    """What the node's ranks say, from `offsets` (bytes, by rank) on; the answer is frames (log_stream.py).

    Without `to_the_end` only what they have said so far. With `tail`, for a rank at offset 0, only so many of
    its lines so far.
    """

    job: str
    offsets: Mapping[int, int]
    to_the_end: bool = True
    tail: int | None = None


class Cancel(Request["node_answers.NodeJob"]):
    """End `job`; the answer is what is known of it at its end. `grace` (s): None as it was launched.

    With `launch`, the id in a launch request, only a job that this request has started ends.
    """

    module = "cancel"
    job: str
    grace: float | None = None
    launch: str | None = None


class Lost(Request["node_answers.Heard"]):
    """Another node of the job, `node`, is gone: `why`, and the `kind` of cause."""

    module = "cancel"
    job: str
    node: int
    why: str
    kind: str


class Stacks(Request["node_answers.Stacks"]):
    """What the processes of a job do at this moment."""

    module, extra = "diagnosis.stacks", ("diagnosis.stacks",)
    job: str


class Manifest(Request["node_answers.Manifest"]):
    """The results of a job on the node (manifest.py); small ones come with the list, `at_once` bytes in all.

    With 0 none is read: the list says what there is.

    `ranks` are those of the job, each with its node: a node may name the logs of its own. `outputs` are paths
    beside those of the launch, `exclude` the patterns of `excludes.exclude_patterns`. With `events` (sizes at
    home by place) only TensorBoard's event files of another size, whole.
    """

    module = "manifest"
    job: str
    ranks: Sequence[Sequence[int]] = ()
    outputs: Sequence[str] = ()
    exclude: Sequence[Sequence[Any]] = ()
    at_once: int = 256 << 10
    events: Mapping[str, int] | None = None


class Probe(Request["node_answers.Probed"]):
    """What the node has; it listens on `ports` of `address`, and one more, until another request comes.

    `thorough` asks for more, which takes some seconds with GPUs.
    """

    module, extra = "probe", ("diagnosis.evidence", "probe")
    address: str
    ports: Sequence[int] = ()
    thorough: bool = False


class Dial(Request["node_answers.Dialed"]):
    """Connect to ports of other nodes, (node, address, port), after all have answered `Probe`."""

    module = "probe"
    peers: Sequence[tuple[int, str, int]]
    seconds: float


class Machine(Fields):
    """A node of a job."""

    node: int
    private_ip: str
    instance_id: str


@row
class Place(NamedTuple):
    """A rank and where it runs."""

    rank: int
    local_rank: int
    node: int


class Process(Fields):
    """A process that the supervisor of a node starts in the synced folder.

    `ranks` end when it ends, each with its exit code (-N: signal N). `log` is the file in logs/ that receives
    its output: rank3.log where it is rank 3; else launcher0.log on node 0, and its ranks write their own
    rank3.log. `environment` is added to the node's. `script` must exist on the node (None: do not check).
    `files` are written into the job's folder before, by name.
    """

    ranks: Sequence[int]
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: str
    script: str | None = None
    files: Mapping[str, str] = NOTHING


class Launch(Request["node_answers.Launched"]):
    """Start a node's part of `job` once the jobs `after` have ended there. It stays on the node as job.json.

    `launch` is the id of this launch on all nodes, `facts` what is told of the job later, `helper` the
    ranks' sitecustomize, `secret` the key of the supervisors' links; `secrets` names the variables whose
    values are not written down. `elastic` is what torch's agent may do on its own, None without one. Times
    are in seconds; `silent_s` is how long a supervisor may be silent, `join_s` how long the first node waits
    for the others. `saving` is what saves the results: the `argv` of s3/uploader.py and its `stdin` (base64).
    """

    module = "launch"
    extra = (
        "diagnosis.evidence",
        "diagnosis.causes",
        "diagnosis.stacks",
        "diagnosis.hang",
        "coordinator",
        "processes",
        "samples",
        "serve",
    )
    parts = {
        "nodes": each(Machine.from_json),
        "layout": each(lambda row: Place(*row)),
        "processes": each(Process.from_json),
    }
    job: str
    launch: str
    slot: int
    created: str
    node: int
    nodes: Sequence[Machine]
    layout: Sequence[Place]
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

    @property
    def first(self) -> Machine:
        """The node that coordinates the job."""
        return self.nodes[0]

    @property
    def own_ranks(self) -> list[int]:
        """The ranks of this node."""
        return [one.rank for one in self.layout if one.node == self.node]


KINDS = {kind.__name__.lower(): kind for kind in Request.__subclasses__()}
