"""The types in a plan: facts read from AWS, requests, prices, steps, the LaunchPlan and its JSON document."""

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
from awsddp.util.formatting import counted, node_name


@dataclass(frozen=True, kw_only=True)
class ImageDocument:
    """A machine image; `torch`, `cuda` and `driver` are None if its name does not contain them."""

    id: str
    name: str
    created: str
    owner: str
    deprecated: str | None
    torch: str | None
    cuda: str | None
    driver: int | None


InternetRoute = Literal["internet", "private", "none"]


@dataclass(frozen=True, kw_only=True)
class Image:
    """A machine image, as EC2 describes it. `root_gb` is the size of its root disk.

    `owner` is an alias such as "amazon" or an account, and `deprecated` is when the image was deprecated.
    `platform` is EC2's name for the operating system. `ssh_user` is "" if it is unknown. `newer` is the name
    of a Deep Learning AMI with a newer PyTorch that is not in the table.
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
        """True if the GPUs of the image's instances are simulated (the tag `awsddp:gpus`)."""
        return self.rehearses or self.tags.get("awsddp:gpus") == "pretended"

    @property
    def rehearses(self) -> bool:
        """True if the image's torch runs CUDA calls on the CPU, and uses gloo instead of nccl."""
        return self.tags.get("awsddp:gpus") == "rehearsed"

    def as_requested(self, *, rehearse: bool) -> "Image":
        """Return the image; if `rehearse` is False, an image that rehearses GPUs is changed to only simulate
        them.
        """
        if rehearse or not self.rehearses:
            return self
        return replace(self, tags={**self.tags, "awsddp:gpus": "pretended"})

    @property
    def shown(self) -> ImageDocument:
        """The image in the form that `plan --json` prints."""
        values = {key: getattr(self, key) for key in ("id", "name", "created", "owner", "deprecated")}
        name = image_facts(self.name)
        return ImageDocument(**values, torch=name.torch or None, cuda=name.cuda or None, driver=name.driver)

    @property
    def has_internet(self) -> bool:
        """True if the image's instances have internet access (the tag `awsddp:internet`)."""
        return self.tags.get("awsddp:internet") != "none"

    @property
    def has_hosts(self) -> bool:
        """True if the image's instances boot as hosts (the tag `awsddp:hosts`)."""
        return self.tags.get("awsddp:hosts") != "none"


class Subnet(msgspec.Struct, frozen=True, kw_only=True):
    """A subnet that instances may be launched into. `route` is its default route's kind (None: unknown).

    `table` is the id of its route table. `reaches_s3` is False only if a check showed that the subnet has no
    route to S3.
    """

    id: str = msgspec.field(name="SubnetId")
    zone: str = msgspec.field(name="AvailabilityZone")
    vpc: str = msgspec.field(name="VpcId")
    free_addresses: int = msgspec.field(name="AvailableIpAddressCount", default=0)
    route: InternetRoute | None = None
    table: str = ""
    reaches_s3: bool = True


@dataclass(frozen=True, kw_only=True)
class OwnGroup:
    """The user's own security group. `lacks` describes needed traffic that its rules do not allow."""

    id: str
    vpc: str
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Data:
    """A source in `data.sources`, with its size in bytes and its number of files (None: unknown).

    `at_least` is True if the listing was stopped early, so that the size and the number are lower bounds.
    `region` is the bucket's region; `why` is the reason why the source could not be listed.
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
class SaveTarget:
    """The S3 URI that results are saved to, and its bucket's region (None: unknown, "": no such bucket).

    `lacks` has the permissions that saving needs but the nodes' role does not have; it is () if IAM could not
    be queried.
    """

    uri: str
    region: str | None = None
    lacks: tuple[str, ...] = ()


class Reservation(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """A capacity reservation, or a capacity block if `reservation_type` is "capacity-block".

    If `ends` is None, the reservation has no end. An instance can use the reservation only if it has the
    reservation's `tenancy` and its image has the reservation's `platform`.
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
    """The facts that a plan needs, read from AWS.

    `offers` maps an instance type to the zones that offer it; `described` has the requested types that are
    not in `compat`, or EC2's error text for them. `quotas` maps a quota's code to its vCPUs, or to None if it
    cannot be read; `used_vcpus` maps the code to the vCPUs that run outside the cluster. `callers` are this
    machine's addresses as the nodes see them, as CIDRs; `public_key` is the public key of the user's own key
    pair ("": unknown). Prices are for one instance, in US dollars per hour: `prices` are the Pricing API's
    on-demand prices on `price_date`, `spot_prices` are the current spot prices by zone, and
    `highest_spot_prices` are the highest in the last 7 days (if spot and a budget are requested). `host` is
    the client's host name, and `credentials_s` is the number of seconds until the AWS login ends (None: no
    end). `data` is the data for the nodes, and `saving` is the S3 URI for their results. `role` is the ARN of
    the nodes' role, "" for an instance profile without a role, or None if unknown.
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
    group: OwnGroup | None = None
    public_key: str = ""
    reservation: Reservation | None = None
    host: str = ""
    credentials_s: float | None = None
    data: tuple[Data, ...] = ()
    role: str | None = None
    saving: SaveTarget | None = None


LIST_PRICE = f"list price of {PRICE_REGION}"
"""The `source` of a price that the Pricing API did not return."""
Parameters = dict[str, Any]
"""An EC2 API call's parameters, or a part of them, in AWS's form."""


@dataclass(frozen=True)
class Request:
    """One EC2 API call."""

    operation: str
    parameters: Parameters


@dataclass(frozen=True, kw_only=True)
class PriceParts:
    """The price of all nodes in US dollars per hour, by part. If `machines` is None, no price is known."""

    machines: float | None
    disks: float
    addresses: float


@dataclass(frozen=True, kw_only=True)
class Price(PriceParts):
    """A price by part, with its date and source."""

    date: str
    source: str

    @property
    def parts(self) -> PriceParts:
        """The parts of the price, without its date and source."""
        return PriceParts(machines=self.machines, disks=self.disks, addresses=self.addresses)

    @property
    def total(self) -> float | None:
        """The sum of the price's parts, in US dollars per hour."""
        return None if self.machines is None else round(self.machines + self.disks + self.addresses, 4)


@dataclass(frozen=True, kw_only=True)
class Efa:
    """How many EFA interfaces a node gets (the type supports at most `most`), and the reason."""

    count: int
    most: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: open port 22 for `value`, terminate, start or launch nodes, or set the expiry to `value`.

    `numbers` are node numbers, and `instances` are the ids of existing instances; a launch has no ids yet.
    """

    do: Literal["open", "end", "start", "launch", "expire"]
    numbers: tuple[int, ...] = ()
    instances: tuple[str, ...] = ()
    value: str = ""
    why: str = ""

    def __str__(self) -> str:
        instances = f" ({', '.join(self.instances)})" if self.instances else ""
        nodes = ", ".join(node_name(number) if number >= 0 else "a node" for number in self.numbers)
        text = f"{self.do} {(nodes + instances).strip()}"
        if self.do == "open":
            text = f"open port 22 for {self.value or 'nobody'}"
        elif self.do == "expire":
            text = f"move the expiry to {self.value}"
        return text + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that is tried next if AWS has no capacity."""

    region: str
    instance_type: str
    market: Market
    zones: list[str]
    price_usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The fields that a plan and its JSON document have in common; prices are for all `nodes` together.

    `why` is the reason why the type was chosen. `placement` has a placeholder, {"$ref": "name"}, for the name
    of the placement group that is created for the nodes (None: no group). SSH goes through the host `jump`,
    and is allowed from the blocks and groups in `ssh_cidrs`. `steps` reconcile a cluster that already
    `exists`; if there are no steps, such a cluster stays unchanged. `budget` is `cluster.budget_usd` with the
    rate that it assumes, and `data` is the data for each node.
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
    """The plan that `up` carries out.

    `numbers` are the nodes to launch, and `uses` are the existing resources that they use. `subnets` has one
    subnet for each zone to try, in order. `untried` lists features that were never launched on AWS, which
    `experimental` allows. `alternatives` are tried next, in order, if AWS has no capacity.
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
        """The number of GPUs that torch finds on a node; 0 if they are only simulated."""
        return 0 if self.pretended and not self.image.rehearses else self.kind.gpus

    @property
    def is_placement_optional(self) -> bool:
        """True if the nodes can be launched outside the placement group when the group has no room."""
        return self.placement is not None and not self.efa.count

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones to try, in order."""
        return tuple(subnet.zone for subnet in self.subnets)

    @property
    def has_list_price(self) -> bool:
        """True if the plan's price is from the table that awsddp ships."""
        return self.price.source == LIST_PRICE and self.price.machines is not None

    @property
    def price_usd_per_hour(self) -> float | None:
        """The price of all nodes' instances, disks and addresses per hour, or None if it is unknown."""
        return self.price.total

    @property
    def price_until_expiry_usd(self) -> float | None:
        """The price of all nodes until they expire, in US dollars, or None if unknown."""
        return None if self.price.total is None else round(self.price.total * self.expires_s / 3600, 2)

    @property
    def expires(self) -> dict[str, int]:
        """The nodes' expiry, as the placeholder that their requests contain."""
        return {"$now": self.expires_s}

    @property
    def next_plans(self) -> list[Alternative]:
        """The alternatives with their main fields."""
        return msgspec.convert(self.alternatives, list[Alternative], from_attributes=True)

    @property
    def makes(self) -> list[str]:
        """The resources that the requests create, as text; an existing cluster keeps its resources."""
        labels = {
            "ImportKeyPair": "key pair",
            "CreateSecurityGroup": "security group",
            "CreatePlacementGroup": "placement group",
        }
        resources = [
            label for operation, label in labels.items() if self.has_request(operation) and not self.exists
        ]
        if not self.numbers:
            return resources
        count, nics = len(self.numbers), self.request("RunInstances").parameters["NetworkInterfaces"]
        resources += [counted(count, "instance"), f"{counted(count, 'disk')} of {self.disk_gb} GB"]
        resources.append(counted(count * len(nics), "network interface"))
        return resources + ([counted(count, "public address", "es")] if self.address == "public" else [])

    def has_request(self, operation: str) -> bool:
        """Return True if the plan has a request for this operation."""
        return any(request.operation == operation for request in self.requests)

    def request(self, operation: str) -> Request:
        """Return the plan's request for this operation."""
        return next(request for request in self.requests if request.operation == operation)


_DOCUMENT_PATHS = {member.name: member.name for member in fields(Planned)} | {
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
    "alternatives": "next_plans",
}
"""Maps each key in `plan --json` to the path of its attribute in LaunchPlan."""


def plan_to_document(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as its JSON document (`PlanDocument`), without secrets."""
    return {key: msgspec.to_builtins(attrgetter(path)(plan)) for key, path in _DOCUMENT_PATHS.items()}


def _type_of(path: str) -> Any:
    """Return the type of the attribute (a field or a property) at a path in LaunchPlan."""
    kind: Any = LaunchPlan
    for name in path.split("."):
        member = getattr(kind, name, None)
        getter = member.fget if isinstance(member, property) else None
        kind = typing.get_type_hints(getter)["return"] if getter else typing.get_type_hints(kind)[name]
    return kind


PlanDocument = msgspec.defstruct(
    "PlanDocument",
    [(key, _type_of(path)) for key, path in _DOCUMENT_PATHS.items()],
    namespace={
        "__doc__": "What `up` would do. Ids, secrets and times that do not exist yet are placeholders."
    },
)
"""The type of the document that `plan --json` prints, for docs/schema.json."""


def resource_names(cluster: str, cluster_id: str) -> dict[str, str]:
    """Return the ids that are known before a launch: the cluster's id, and its group's and key's name."""
    return {"cluster_id": cluster_id, "name": f"awsddp-{cluster}-{cluster_id}"}
