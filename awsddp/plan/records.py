"""The records of a plan: what was read, what will be asked of EC2, and how times are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from awsddp.cluster import TargetName
from awsddp.compat import GpuType, Market
from awsddp.report import node_name


@dataclass(frozen=True, kw_only=True)
class Image:
    """A machine image, as EC2 describes it. `root_gb` is the size of the disk it was made from.

    `owner` is an alias such as "amazon" or an account, `deprecated` the time from which it is, "" if never;
    `ena` tells whether it drives the network of today's instances, `platform` what EC2 bills it as.
    """

    id: str
    name: str
    created: str
    architecture: str
    root_device: str
    root_gb: int
    ssh_user: str
    owner: str = ""
    deprecated: str = ""
    ena: bool = True
    platform: str = "Linux/UNIX"
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def pretends(self) -> bool:
        """Whether the GPUs of its machines are pretended (the tag `awsddp:gpus`)."""
        return self.rehearses or self.tags.get("awsddp:gpus") == "pretended"

    @property
    def rehearses(self) -> bool:
        """Whether its torch answers CUDA calls with the CPU and nccl with gloo."""
        return self.tags.get("awsddp:gpus") == "rehearsed"


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """A subnet that instances may be launched into. `route` is where its way out leads, None: not known."""

    id: str
    zone: str
    vpc: str
    free_addresses: int
    route: Literal["internet", "private", "none"] | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The user's own security group. `lacks` tells what a cluster needs that its rules do not allow."""

    id: str
    vpc: str
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A capacity reservation, or a capacity block (`block`). `ends` is a time, "" where it has no end.

    Only instances of its own `platform` (of their image) and `tenancy` go in.
    """

    id: str
    instance_type: str
    zone: str
    free: int
    state: str
    platform: str = "Linux/UNIX"
    tenancy: str = "default"
    block: bool = False
    ends: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything read from AWS that a plan needs.

    `offers` maps an instance type to the zones that offer it; `described` holds asked types that the table of
    compat lacks, `refusals` what EC2 said of a type that it does not know. `quotas` maps a quota's code to
    its vCPUs, None where it cannot be read. `callers` are this machine's addresses as the nodes see them, as
    CIDRs; `public_key` is the public half of `access.key`, "" where it is not told. `prices` are on-demand
    prices of a machine an hour as the Pricing API told them on `price_date`, `spot_prices` those of a zone
    now. `host` is the machine that asks, `credentials_s` the seconds that its login lasts (None: no end).
    """

    region: str
    target: TargetName
    owner: str
    offers: Mapping[str, tuple[str, ...]]
    image: Image
    subnets: tuple[Subnet, ...]
    quotas: Mapping[str, float | None] = field(default_factory=dict)
    callers: tuple[str, ...] = ()
    described: tuple[GpuType, ...] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    price_date: str = ""
    spot_prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    group: Group | None = None
    public_key: str = ""
    reservation: Reservation | None = None
    host: str = ""
    credentials_s: float | None = None


@dataclass(frozen=True)
class Request:
    """One call of the EC2 API."""

    operation: str
    parameters: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Zone:
    """A zone to try, with the subnet to launch into there."""

    name: str
    subnet: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An instance type that could be had instead. The price is of one instance on demand, an hour."""

    instance_type: str
    gpu: str
    gpus_per_node: int
    price_usd_per_hour: float | None
    zones: tuple[str, ...]
    fits_quota: bool | None


@dataclass(frozen=True, kw_only=True)
class Price:
    """What all nodes together cost an hour, by part. `machines` None: no price is known."""

    machines: float | None
    disks: float
    addresses: float
    date: str
    source: str

    @property
    def total(self) -> float | None:
        """All parts together, US dollars an hour."""
        return None if self.machines is None else round(self.machines + self.disks + self.addresses, 4)


@dataclass(frozen=True, kw_only=True)
class Efa:
    """How many of the `most` EFA interfaces that the type takes a node gets, and why."""

    count: int
    most: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to do: open port 22 for `value`, end, start or launch nodes, set the expiry to `value`.

    `numbers` are node numbers, `instances` ids of instances that exist; a launch has none yet.
    """

    do: Literal["open", "end", "start", "launch", "expire"]
    numbers: tuple[int, ...] = ()
    instances: tuple[str, ...] = ()
    value: str = ""
    why: str = ""

    def __str__(self) -> str:
        instances = f" ({', '.join(self.instances)})" if self.instances else ""
        who = ", ".join(node_name(number) if number >= 0 else "a node" for number in self.numbers) + instances
        match self.do:
            case "open":
                return f"open port 22 for {self.value}: {self.why}"
            case "expire":
                return f"move the expiry to {self.value}"
        return f"{self.do} {who.strip()}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What `up` will do. `numbers` are the nodes this launch fills; prices are of all `nodes` together.

    `why` tells how the type was chosen. `placement` is the placement group that the nodes share: a name,
    {"$ref": "name"} where it is made with the cluster, None for none. SSH goes over `jump` ("": over
    nothing) and may come from `ssh_cidrs`, blocks and groups. `untried` names what nobody has tried on AWS
    yet, which `experimental` allows. `alternatives` are the plans tried next, in order, where AWS has no
    machines for this one. `steps` lead from a cluster that exists to what is asked for.
    """

    cluster: str
    target: TargetName
    region: str
    owner: str
    kind: GpuType
    market: Market
    why: str
    nodes: int
    numbers: tuple[int, ...]
    pretended: bool
    ssh_user: str
    image: Image
    disk_gb: int
    zones: tuple[Zone, ...]
    address: str
    jump: str
    ssh_cidrs: tuple[str, ...]
    efa: Efa
    placement: str | dict[str, str] | None
    placement_why: str
    choices: tuple[Choice, ...]
    price: Price
    quota: str
    expires_s: int
    requests: tuple[Request, ...] = ()
    warnings: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    experimental: bool = False
    alternatives: tuple["LaunchPlan", ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def instance_type(self) -> str:
        """The name of the type: "g6.48xlarge"."""
        return self.kind.name

    @property
    def gpus_per_node(self) -> int:
        """How many GPUs a node has."""
        return self.kind.gpus

    @property
    def gpu(self) -> str:
        """The GPU's name: "L4"."""
        return self.kind.gpu

    @property
    def price_usd_per_hour(self) -> float | None:
        """Machines, disks and addresses of all nodes; None where no price is known."""
        return self.price.total

    @property
    def price_until_expiry_usd(self) -> float | None:
        """What all nodes cost from the launch until they end themselves."""
        return None if self.price.total is None else round(self.price.total * self.expires_s / 3600, 2)

    def asks(self, operation: str) -> bool:
        """Whether the plan has a request of this operation."""
        return any(request.operation == operation for request in self.requests)

    def request(self, operation: str) -> Request:
        """Return the plan's request of this operation."""
        return next(request for request in self.requests if request.operation == operation)


def names(cluster: str, cluster_id: str) -> dict[str, str]:
    """Return the ids known before anything exists: the cluster's id, and its group's and key's name."""
    return {"cluster_id": cluster_id, "name": f"awsddp-{cluster}-{cluster_id}"}


def utc(moment: datetime) -> str:
    """Return a moment as tags and documents write it: "2026-11-21T08:45:00Z"."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
