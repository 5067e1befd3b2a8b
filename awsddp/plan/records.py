"""The records of a plan: the facts read from AWS, the requests, the steps."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from operator import attrgetter
from typing import Any, Literal

import msgspec

from awsddp.compat.releases import image_facts
from awsddp.compat.types import EGRESS_USD_PER_GB, PRICE_REGION, GpuType, Market
from awsddp.model.billing import Budget
from awsddp.model.records import Choice, TargetName
from awsddp.util.format import counted, node_name


@dataclass(frozen=True, kw_only=True)
class ImageDocument:
    """A machine image; `torch`, `cuda` and `driver` where its name tells them."""

    id: str
    name: str
    created: str
    owner: str
    deprecated: str | None
    torch: str | None
    cuda: str | None
    driver: int | None


WayOut = Literal["internet", "private", "none"]


@dataclass(frozen=True, kw_only=True)
class Image:
    """A machine image, as EC2 describes it. `root_gb` is the size of the disk it was made from.

    `owner` is an alias such as "amazon" or an account, `deprecated` the time of its deprecation. `platform`
    is EC2's name of the operating system. `ssh_user` is "" where the name does not tell it. `newer` names a
    Deep Learning AMI with a newer PyTorch, one that this program does not know.
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
    newer: str = ""
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
    def shown(self) -> ImageDocument:
        """What `plan --json` tells of it."""
        told = {key: getattr(self, key) for key in ("id", "name", "created", "owner", "deprecated")}
        name = image_facts(self.name)
        return ImageDocument(**told, torch=name.torch or None, cuda=name.cuda or None, driver=name.driver)

    @property
    def has_internet(self) -> bool:
        """Whether its instances reach the internet (the tag `awsddp:internet`)."""
        return self.tags.get("awsddp:internet") != "none"

    @property
    def has_hosts(self) -> bool:
        """Whether its instances boot (the tag `awsddp:hosts`)."""
        return self.tags.get("awsddp:hosts") != "none"


class Subnet(msgspec.Struct, frozen=True, kw_only=True):
    """A subnet that instances may be launched into. `route` is where its way out leads, None: not known.

    `table` is its route table; `reaches_s3` is False only where S3 was looked for and not found.
    """

    id: str = msgspec.field(name="SubnetId")
    zone: str = msgspec.field(name="AvailabilityZone")
    vpc: str = msgspec.field(name="VpcId")
    free_addresses: int = msgspec.field(name="AvailableIpAddressCount", default=0)
    route: WayOut | None = None
    table: str = ""
    reaches_s3: bool = True


@dataclass(frozen=True, kw_only=True)
class Group:
    """The user's own security group. `lacks` tells what a cluster needs that its rules do not allow."""

    id: str
    vpc: str
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Data:
    """A source of `data.sources` as it was listed: its bytes and files (None: not known), and where it lies.

    A listing that was left off says `at_least`. `region` is its bucket's; `why` it could not be listed.
    """

    name: str
    source: str
    bytes: int | None = None
    files: int | None = None
    at_least: bool = False
    region: str | None = None
    requester_pays: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where results are saved: the region of its bucket (None: not known, "": there is no such bucket).

    `lacks` has the rights that the policies of the nodes' role do not give there, as far as IAM was asked.
    """

    place: str
    region: str | None = None
    lacks: tuple[str, ...] = ()


class Reservation(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """A capacity reservation, or a capacity block by its `reservation_type`. `ends` None: it has no end.

    Only instances of its own `platform` (of their image) and `tenancy` go in.
    """

    id: str = msgspec.field(name="CapacityReservationId")
    instance_type: str
    zone: str = msgspec.field(name="AvailabilityZone")
    free: int = msgspec.field(name="AvailableInstanceCount", default=0)
    state: str = ""
    platform: str = msgspec.field(name="InstancePlatform", default="Linux/UNIX")
    tenancy: str = "default"
    reservation_type: str = ""
    ends: datetime | None = msgspec.field(name="EndDate", default=None)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything read from AWS that a plan needs.

    `offers` maps an instance type to the zones that offer it; `described` holds requested types that compat
    lacks, or what EC2 said of one that it does not know. `quotas` maps a quota's code to its vCPUs, None
    where it cannot be read, `used_vcpus` to those of it that run beside the cluster. `callers` are this
    machine's addresses as the nodes see them, as CIDRs; `public_key` is the public half of the user's own
    key pair, "" where it is not told. `prices` are on-demand prices of a machine per hour as the Pricing
    API told them on `price_date`, `spot_prices` those of a zone now, `highest_spot_prices` their highest of
    the last 7 days, where spot and a budget are requested. `host` is the machine that asks, `credentials_s`
    the seconds that its login lasts (None: no end), `data` what the nodes are to get, `saving` where their
    results go. `role` is the ARN of their role, "" for an instance profile without one, None where it is
    not known.
    """

    region: str
    target: TargetName
    owner: str
    offers: Mapping[str, tuple[str, ...]]
    image: Image
    subnets: tuple[Subnet, ...]
    quotas: Mapping[str, float | None] = field(default_factory=dict)
    used_vcpus: Mapping[str, int] = field(default_factory=dict)
    callers: tuple[str, ...] = ()
    described: Mapping[str, GpuType | str] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    price_date: str = ""
    spot_prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    highest_spot_prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    group: Group | None = None
    public_key: str = ""
    reservation: Reservation | None = None
    host: str = ""
    credentials_s: float | None = None
    data: tuple[Data, ...] = ()
    role: str | None = None
    saving: Saving | None = None


LIST_PRICE = f"list price of {PRICE_REGION}"
"""The source of a price that the Pricing API did not return."""
Parameters = dict[str, Any]
"""Parameters of a call of the EC2 API, or a part of them, in AWS's shape."""


@dataclass(frozen=True)
class Request:
    """One call of the EC2 API."""

    operation: str
    parameters: Parameters


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
    def parts(self) -> PriceParts:
        """The parts alone."""
        return PriceParts(machines=self.machines, disks=self.disks, addresses=self.addresses)

    @property
    def total(self) -> float | None:
        """All parts together, US dollars per hour."""
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
        what = f"{self.do} {who.strip()}"
        if self.do == "open":
            what = f"open port 22 for {self.value or 'nobody'}"
        elif self.do == "expire":
            what = f"move the expiry to {self.value}"
        return what + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that is tried next."""

    region: str
    instance_type: str
    market: Market
    zones: list[str]
    price_usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What of a plan its JSON document has as it is; prices are of all `nodes` together.

    `why` tells how the type was chosen. `placement` is the placement group that is created for the nodes,
    {"$ref": "name"}, None for none. SSH goes through the host `jump` and is allowed from `ssh_cidrs`, blocks
    and groups. `steps` reconcile a cluster that `exists`; where there are none nothing changes. `budget` is
    `cluster.budget_usd` with the rate that it assumes, `data` what each node is to get.
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
    budget: Budget | None = None
    requests: tuple[Request, ...] = ()
    warnings: tuple[str, ...] = ()
    exists: bool = False
    steps: tuple[Step, ...] = ()
    data: tuple[Data, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Planned):
    """What `up` will do. `numbers` are the nodes this launch fills, `uses` the resources that exist already.

    `subnets` has one for each zone to try, in order. `untried` names what was never launched on AWS, which
    `experimental` allows. `alternatives` are tried next, in order, when AWS has no capacity for this plan.
    """

    owner: str
    kind: GpuType
    numbers: tuple[int, ...]
    image: Image
    subnets: tuple[Subnet, ...]
    uses: dict[str, str]
    price: Price
    expires_s: int
    untried: tuple[str, ...] = ()
    experimental: bool = False
    alternatives: tuple["LaunchPlan", ...] = ()
    egress_usd_per_gb: float = EGRESS_USD_PER_GB

    @property
    def instance_type(self) -> str:
        """The name of the instance type: "g6.48xlarge"."""
        return self.kind.name

    @property
    def job_gpus(self) -> int:
        """How many GPUs the ranks of a node find; 0 where they are only simulated."""
        return 0 if self.pretended and not self.image.rehearses else self.kind.gpus

    @property
    def placement_yields(self) -> bool:
        """Whether the nodes may be launched outside of the placement group, where it has no room."""
        return self.placement is not None and not self.efa.count

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones to try, in order."""
        return tuple(subnet.zone for subnet in self.subnets)

    @property
    def listed(self) -> bool:
        """Whether its price is of the table that awsddp ships."""
        return self.price.source == LIST_PRICE and self.price.machines is not None

    @property
    def price_usd_per_hour(self) -> float | None:
        """Instances, disks and addresses of all nodes; None where no price is known."""
        return self.price.total

    @property
    def price_until_expiry_usd(self) -> float | None:
        """What all nodes cost until they expire, in US dollars; None where no price is known."""
        return None if self.price.total is None else round(self.price.total * self.expires_s / 3600, 2)

    @property
    def expires(self) -> dict[str, int]:
        """When the nodes expire, as their requests have it."""
        return {"$now": self.expires_s}

    @property
    def next(self) -> list[Alternative]:
        """The alternatives in short."""
        return msgspec.convert(self.alternatives, list[Alternative], from_attributes=True)

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
        found += [counted(count, "instance"), f"{counted(count, 'disk')} of {self.disk_gb} GB"]
        found.append(counted(count * len(nics), "network interface"))
        return found + ([counted(count, "public address", "es")] if self.address == "public" else [])

    def asks(self, operation: str) -> bool:
        """Whether the plan has a request of this operation."""
        return any(request.operation == operation for request in self.requests)

    def request(self, operation: str) -> Request:
        """Return the plan's request of this operation."""
        return next(request for request in self.requests if request.operation == operation)


_SHOWN = {one.name: one.name for one in fields(Planned)} | {
    "instance_type": "kind.name",
    "gpus_per_node": "kind.gpus",
    "gpu": "kind.gpu",
    "gpu_memory_gb": "kind.memory_gb",
    "vcpus": "kind.vcpus",
    "memory_gb": "kind.ram_gb",
    "network_gbit": "kind.network",
    "rehearsed": "image.rehearses",
    "image": "image.shown",
    "zones": "zones",
    "makes": "makes",
    "uses": "uses",
    "price_usd_per_hour": "price.total",
    "price_parts": "price.parts",
    "price_date": "price.date",
    "price_source": "price.source",
    "price_until_expiry_usd": "price_until_expiry_usd",
    "egress_usd_per_gb": "egress_usd_per_gb",
    "expires": "expires",
    "alternatives": "next",
}
"""The keys of `plan --json`, each with the attribute of LaunchPlan that is its value."""


def document(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as its JSON document, of the type `PlanDocument`. It holds no secret."""
    return {key: msgspec.to_builtins(attrgetter(path)(plan)) for key, path in _SHOWN.items()}


def _type_of(path: str) -> Any:
    """Return the type of an attribute of LaunchPlan, of a field or of what a property returns."""
    kind: Any = LaunchPlan
    for name in path.split("."):
        found = getattr(kind, name, None)
        getter = found.fget if isinstance(found, property) else None
        kind = typing.get_type_hints(getter)["return"] if getter else typing.get_type_hints(kind)[name]
    return kind


PlanDocument = msgspec.defstruct(
    "PlanDocument",
    [(key, _type_of(path)) for key, path in _SHOWN.items()],
    namespace={
        "__doc__": "What `up` would do. Ids, secrets and times that do not exist yet are placeholders."
    },
)
"""The type of `plan --json`, for docs/schema.json."""


def names(cluster: str, cluster_id: str) -> dict[str, str]:
    """Return the ids known before anything exists: the cluster's id, and its group's and key's name."""
    return {"cluster_id": cluster_id, "name": f"awsddp-{cluster}-{cluster_id}"}
