"""The document of `plan --json`: its type, and how a plan becomes one."""

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from awsddp.compat.images import image_facts
from awsddp.compat.types import EGRESS_USD_PER_GB, Market
from awsddp.plan.records import LaunchPlan, Planned, PriceParts


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
class Alternative:
    """A plan that is tried next."""

    region: str
    instance_type: str
    market: Market
    zones: list[str]
    price_usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class PlanDocument(Planned):
    """What `up` would do. Ids, secrets and times that do not exist yet are placeholders."""

    instance_type: str
    gpus_per_node: int
    gpu: str
    gpu_memory_gb: float
    vcpus: int
    memory_gb: float
    network_gbit: str
    rehearsed: bool
    image: ImageDocument
    zones: tuple[str, ...]
    makes: list[str]
    uses: dict[str, str]
    price_usd_per_hour: float | None
    price_parts: PriceParts
    price_date: str
    price_source: str
    price_until_expiry_usd: float | None
    egress_usd_per_gb: float
    expires: dict[str, int]
    alternatives: list[Alternative]


def document(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as its JSON document. It holds no secret."""
    kind, price, image = plan.kind, plan.price, plan.image
    tells = image_facts(image.name)
    made: dict[str, Any] = msgspec.to_builtins(
        PlanDocument(
            **{field.name: getattr(plan, field.name) for field in fields(Planned)},
            instance_type=kind.name,
            gpus_per_node=kind.gpus,
            gpu=kind.gpu,
            gpu_memory_gb=kind.memory_gb,
            vcpus=kind.vcpus,
            memory_gb=kind.ram_gb,
            network_gbit=kind.network,
            rehearsed=image.rehearses,
            image=ImageDocument(
                **{key: getattr(image, key) for key in ("id", "name", "created", "owner", "deprecated")},
                torch=tells.torch or None,
                cuda=tells.cuda or None,
                driver=tells.driver,
            ),
            zones=plan.zones,
            makes=plan.makes,
            uses=plan.uses,
            price_usd_per_hour=price.total,
            price_parts=msgspec.convert(price, PriceParts, from_attributes=True),
            price_date=price.date,
            price_source=price.source,
            price_until_expiry_usd=None
            if price.total is None
            else round(price.total * plan.expires_s / 3600, 2),
            egress_usd_per_gb=EGRESS_USD_PER_GB,
            expires={"$now": plan.expires_s},
            alternatives=msgspec.convert(plan.alternatives, list[Alternative], from_attributes=True),
        )
    )
    return made
