"""The records of a plan: what was read, what will be asked of EC2, and how numbers and times are written."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from awsddp.cluster import TargetName
from awsddp.compat import GpuType

PRETENDED = ("pretended", "rehearsed")


@dataclass(frozen=True, kw_only=True)
class Image:
    """A machine image, as EC2 describes it. `root_gb` is the size of the disk it was made from."""

    id: str
    name: str
    created: str
    architecture: str
    root_device: str
    root_gb: int
    ssh_user: str
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def pretends(self) -> bool:
        """Whether the GPUs of its machines are pretended (the tag `awsddp:gpus`)."""
        return self.tags.get("awsddp:gpus") in PRETENDED


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """A subnet that instances may be launched into."""

    id: str
    zone: str
    vpc: str
    free_addresses: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything read from AWS that a plan needs.

    `offers` maps an instance type to the zones that offer it; `described` holds the asked type where the
    table of compat.py lacks it, `refusal` what EC2 said when it does not know it. `quotas` maps a quota's
    code to its vCPUs, None where it cannot be read. `callers` are this machine's addresses as the nodes see
    them, as CIDRs.
    """

    region: str
    target: TargetName
    owner: str
    offers: Mapping[str, tuple[str, ...]]
    image: Image
    subnets: tuple[Subnet, ...]
    quotas: Mapping[str, float | None] = field(default_factory=dict)
    callers: tuple[str, ...] = ()
    described: GpuType | None = None
    refusal: str = ""


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
    """An instance type that could be had instead. The price is of one instance, an hour."""

    instance_type: str
    gpu: str
    gpus_per_node: int
    price_usd_per_hour: float | None
    zones: tuple[str, ...]
    fits_quota: bool | None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What `up` will do. `numbers` are the nodes this launch fills; prices are of all `nodes` together.

    `price_usd_per_hour` counts machines, disks and addresses; None where no price is known.
    """

    cluster: str
    target: TargetName
    region: str
    owner: str
    instance_type: str
    nodes: int
    numbers: tuple[int, ...]
    gpus_per_node: int
    gpu: str
    pretended: bool
    ssh_user: str
    image: Image
    disk_gb: int
    zones: tuple[Zone, ...]
    ssh_cidrs: tuple[str, ...]
    requests: tuple[Request, ...]
    choices: tuple[Choice, ...]
    price_usd_per_hour: float | None
    price_date: str
    expires_s: int
    warnings: tuple[str, ...] = ()

    def request(self, operation: str) -> Request:
        """Return the plan's request of this operation."""
        return next(request for request in self.requests if request.operation == operation)


def names(cluster: str, cluster_id: str) -> dict[str, str]:
    """Return the ids known before anything exists: the cluster's id, and its group's and key's name."""
    return {"cluster_id": cluster_id, "name": f"awsddp-{cluster}-{cluster_id}"}


def utc(moment: datetime) -> str:
    """Return a moment as tags and documents write it: "2026-11-21T08:45:00Z"."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
