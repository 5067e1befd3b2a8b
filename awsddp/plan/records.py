"""The records of a plan: the facts read from AWS, the requests, the steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from awsddp.compat.types import GpuType, Market
from awsddp.errors import ConfigError
from awsddp.records import TargetName
from awsddp.report import duration, node_name

LEAST_TERM_S = 300.0
"""The shortest time that a budget must last: booting and preparing the nodes takes most of it."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """A machine image, as EC2 describes it. `root_gb` is the size of the disk it was made from.

    `owner` is an alias such as "amazon" or an account, `deprecated` the time of its deprecation. `platform`
    is EC2's name of the operating system.
    """

    id: str
    name: str
    created: str
    architecture: str
    root_device: str
    root_gb: int
    ssh_user: str
    owner: str = ""
    deprecated: str | None = None
    platform: str = "Linux/UNIX"
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def pretends(self) -> bool:
        """Whether the GPUs of its instances are simulated (the tag `awsddp:gpus`)."""
        return self.rehearses or self.tags.get("awsddp:gpus") == "pretended"

    @property
    def rehearses(self) -> bool:
        """Whether its torch answers CUDA calls with the CPU and nccl with gloo."""
        return self.tags.get("awsddp:gpus") == "rehearsed"

    def as_requested(self, *, rehearse: bool) -> "Image":
        """Return the image as it is used: where it rehearses GPUs, its instances may do without."""
        if rehearse or not self.rehearses:
            return self
        return replace(self, tags={**self.tags, "awsddp:gpus": "pretended"})

    @property
    def has_internet(self) -> bool:
        """Whether its instances reach the internet (the tag `awsddp:internet`)."""
        return self.tags.get("awsddp:internet") != "none"

    @property
    def has_hosts(self) -> bool:
        """Whether its instances boot (the tag `awsddp:hosts`)."""
        return self.tags.get("awsddp:hosts") != "none"


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

    `offers` maps an instance type to the zones that offer it; `described` holds requested types that compat
    lacks, `refusals` what EC2 said of a type that it does not know. `quotas` maps a quota's code to
    its vCPUs, None where it cannot be read. `callers` are this machine's addresses as the nodes see them, as
    CIDRs; `public_key` is the public half of the user's own key pair, "" where it is not told. `prices` are
    on-demand prices of a machine per hour as the Pricing API told them on `price_date`, `spot_prices` those
    of a zone now, `highest_spot_prices` their highest of the last 7 days, where spot and a budget are
    requested. `host` is the machine that asks, `credentials_s` the seconds that its login lasts (None: no
    end).
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
    highest_spot_prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
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
    """An alternative instance type. The price is of one instance on demand, per hour."""

    instance_type: str
    gpu: str
    gpus_per_node: int
    price_usd_per_hour: float | None
    zones: tuple[str, ...]
    fits_quota: bool | None


@dataclass(frozen=True, kw_only=True)
class PriceParts:
    """What all nodes together cost per hour in US dollars, by part. `machines` None: no price is known."""

    machines: float | None
    disks: float
    addresses: float


@dataclass(frozen=True, kw_only=True)
class Price(PriceParts):
    """The parts, and where they come from."""

    date: str
    source: str

    @property
    def total(self) -> float | None:
        """All parts together, US dollars per hour."""
        return None if self.machines is None else round(self.machines + self.disks + self.addresses, 4)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What a budget assumes that all nodes cost per hour (None: unknown), in US dollars.

    `source` tells which price that is; "" is the price of the plan, which does not change.
    """

    usd_per_hour: float | None = None
    source: str = ""

    def __str__(self) -> str:
        cost = "an unknown amount" if self.usd_per_hour is None else f"${self.usd_per_hour:,.2f}"
        return f"up to {cost} per hour, {self.source}" if self.source else f"{cost} per hour"


@dataclass(frozen=True, kw_only=True)
class Budget(Rate):
    """A budget in US dollars, what of it is spent, and the rate that it assumes."""

    usd: float
    spent_usd: float = 0.0

    def __str__(self) -> str:
        spent = f" (${self.spent_usd:,.2f} spent)" if self.spent_usd else ""
        return f"${self.usd:,.2f}{spent} at {super().__str__()}"

    @property
    def lasts_s(self) -> float:
        """How long what is left of it lasts (s); for no time where no price is known.

        Raises ConfigError where that is too short.
        """
        if self.usd_per_hour == 0:
            return float("inf")
        left_usd = max(0.0, self.usd - self.spent_usd)
        term_s = left_usd / self.usd_per_hour * 3600 if self.usd_per_hour is not None else 0.0
        if term_s < LEAST_TERM_S:
            raise ConfigError(
                f"cluster.budget_usd: ${self.usd:,.2f} is spent, or does not last {duration(LEAST_TERM_S)}",
                f"the budget is {self}",
                "a larger --budget, fewer --nodes, or another --instance-type",
            )
        return term_s


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
        what = f"{self.do} {who.strip()}"
        if self.do == "open":
            what = f"open port 22 for {self.value or 'nobody'}"
        elif self.do == "expire":
            what = f"move the expiry to {self.value}"
        return what + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a plan and its JSON document share; prices are of all `nodes` together.

    `why` tells how the type was chosen. `placement` is the placement group that is created for the nodes,
    {"$ref": "name"}, None for none. SSH goes through the host `jump` and is allowed from `ssh_cidrs`, blocks
    and groups. `steps` reconcile a cluster that `exists`; where there are none nothing changes. `budget` is
    `cluster.budget_usd` with the rate that it assumes.
    """

    cluster: str
    target: TargetName
    region: str
    market: Market
    why: str
    nodes: int
    pretended: bool
    ssh_user: str
    disk_gb: int
    address: Literal["public", "private"]
    jump: str | None
    ssh_cidrs: tuple[str, ...]
    efa: Efa
    placement: dict[str, str] | None
    placement_why: str
    choices: tuple[Choice, ...]
    quota: str
    budget: Budget | None
    requests: tuple[Request, ...]
    warnings: tuple[str, ...]
    exists: bool
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Planned):
    """What `up` will do. `numbers` are the nodes this launch fills, `uses` the resources that exist already.

    `untried` names what was never launched on AWS, which `experimental` allows. `alternatives` are tried
    next, in order, when AWS has no capacity for this plan.
    """

    owner: str
    kind: GpuType
    numbers: tuple[int, ...]
    image: Image
    subnets: tuple[Zone, ...]
    uses: dict[str, str]
    price: Price
    expires_s: int
    untried: tuple[str, ...] = ()
    experimental: bool = False
    alternatives: tuple["LaunchPlan", ...] = ()

    @property
    def instance_type(self) -> str:
        """The name of the instance type: "g6.48xlarge"."""
        return self.kind.name

    @property
    def job_gpus(self) -> int:
        """How many GPUs the ranks of a node find; 0 where they are only simulated."""
        return 0 if self.pretended and not self.image.rehearses else self.kind.gpus

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones to try, in order."""
        return tuple(zone.name for zone in self.subnets)

    @property
    def price_usd_per_hour(self) -> float | None:
        """Instances, disks and addresses of all nodes; None where no price is known."""
        return self.price.total

    @property
    def makes(self) -> list[str]:
        """The resources that the requests create, in words; those of a cluster that exists are kept."""
        words = {
            "ImportKeyPair": "key pair",
            "CreateSecurityGroup": "security group",
            "CreatePlacementGroup": "placement group",
        }
        found = [word for operation, word in words.items() if self.asks(operation) and not self.exists]
        if not self.numbers:
            return found
        count, nics = len(self.numbers), self.request("RunInstances").parameters["NetworkInterfaces"]
        found += [_several(count, "instance"), f"{_several(count, 'disk')} of {self.disk_gb} GB"]
        found.append(_several(count * len(nics), "network interface"))
        return found + ([_several(count, "public address", "es")] if self.address == "public" else [])

    def asks(self, operation: str) -> bool:
        """Whether the plan has a request of this operation."""
        return any(request.operation == operation for request in self.requests)

    def request(self, operation: str) -> Request:
        """Return the plan's request of this operation."""
        return next(request for request in self.requests if request.operation == operation)


def _several(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{ending * (count != 1)}"


def names(cluster: str, cluster_id: str) -> dict[str, str]:
    """Return the ids known before anything exists: the cluster's id, and its group's and key's name."""
    return {"cluster_id": cluster_id, "name": f"awsddp-{cluster}-{cluster_id}"}


def utc(moment: datetime) -> str:
    """Return a moment as tags and documents write it: "2026-11-21T08:45:00Z"."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
