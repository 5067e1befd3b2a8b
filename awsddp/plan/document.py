"""The document of `plan --json`: its type, filled from the plan's attributes of the same names."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from awsddp.cluster import TargetName
from awsddp.compat import Market
from awsddp.plan.records import Budget, Choice, Efa, LaunchPlan, Request, Step

__all__ = ["PlanDocument", "document"]


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


@dataclass(frozen=True, kw_only=True)
class PriceParts:
    """The parts of the price per hour, in US dollars."""

    machines: float | None
    disks: float
    addresses: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that is tried next."""

    region: str
    instance_type: str
    market: Market
    zones: list[str]
    price_usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class PlanDocument:
    """What `up` would do. Ids, secrets and times that do not exist yet are placeholders."""

    cluster: str
    target: TargetName
    region: str
    instance_type: str
    why: str
    market: Market
    nodes: int
    gpus_per_node: int
    gpu: str
    gpu_memory_gb: float
    vcpus: int
    memory_gb: float
    network_gbit: str
    efa: Efa
    placement: str | dict[str, str] | None
    placement_why: str
    pretended: bool
    rehearsed: bool
    image: ImageDocument
    ssh_user: str
    disk_gb: int
    address: Literal["public", "private"]
    jump: str | None
    ssh_cidrs: list[str]
    zones: list[str]
    exists: bool
    steps: list[Step]
    makes: list[str]
    uses: dict[str, str]
    requests: list[Request]
    choices: list[Choice]
    quota: str
    price_usd_per_hour: float | None
    price_parts: PriceParts
    price_date: str
    price_source: str
    price_until_expiry_usd: float | None
    budget: Budget | None
    egress_usd_per_gb: float
    expires: dict[str, int]
    warnings: list[str]
    alternatives: list[Alternative]


def document(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as its JSON document. It holds no secret."""
    made: dict[str, Any] = msgspec.to_builtins(msgspec.convert(plan, PlanDocument, from_attributes=True))
    return made
