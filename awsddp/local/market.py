"""Spot prices: a dated table of what share of the on-demand price the market asks.

The shares are assumptions of the usual size, not recorded prices: g and p types at 30 to 60 %.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from awsddp import compat
from awsddp.local.requests import Reply, Request, ec2_reply

DATE = "2026-07-20T00:00:00.000Z"
"""Of the on-demand prices (compat) and of the shares."""
PRODUCT = "Linux/UNIX"
SHARES = {
    "g4dn": 0.40,
    "g5": 0.45,
    "g6": 0.42,
    "g6e": 0.48,
    "g7e": 0.55,
    "p3dn": 0.35,
    "p4d": 0.45,
    "p4de": 0.50,
    "p5": 0.40,
    "p5e": 0.45,
    "p5en": 0.45,
    "p6-b200": 0.55,
    "p6-b300": 0.60,
}
OTHER_SHARE = 0.38
# On-demand price of types without a listed one, from c5.large, m5.large and r5.large in us-east-1.
USD_PER_VCPU, USD_PER_GIB = 0.0348, 0.0033


def price_usd_per_hour(instance_type: str, zone: str) -> float:
    """Return the spot price of a type in a zone. Zones differ by up to 10 % either way."""
    family = instance_type.partition(".")[0]
    number = int(hashlib.sha256(f"{instance_type} {zone}".encode()).hexdigest()[:4], 16) / 0xFFFF
    return _on_demand(instance_type) * SHARES.get(family, OTHER_SHARE) * (0.9 + 0.2 * number)


def _on_demand(instance_type: str) -> float:
    listed = compat.GPU_TYPES.get(instance_type)
    if listed is not None and listed.price_usd_per_hour is not None:
        return listed.price_usd_per_hour
    facts = INSTANCE_TYPES[instance_type]
    gib = facts["MemoryInfo"]["SizeInMiB"] / 1024
    gpus = sum(gpu["Count"] for gpu in facts.get("GpuInfo", {}).get("Gpus", []))
    return float(facts["VCpuInfo"]["DefaultVCpus"] * USD_PER_VCPU + gib * USD_PER_GIB + gpus)


def answer(request: Request, backend: Any) -> Reply:
    """Return DescribeSpotPriceHistory: one price for each type and zone, in force since DATE."""
    items = "".join(
        f"<item><instanceType>{kind}</instanceType><productDescription>{PRODUCT}</productDescription>"
        f"<spotPrice>{price_usd_per_hour(kind, zone):.6f}</spotPrice><timestamp>{DATE}</timestamp>"
        f"<availabilityZone>{zone}</availabilityZone></item>"
        for kind, zone in _wanted(request)
    )
    return ec2_reply(request, f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken/>")


def _wanted(request: Request) -> Iterator[tuple[str, str]]:
    names = set(request.listed("InstanceType"))
    zone = request.parameters.get("AvailabilityZone")
    products = request.listed("ProductDescription")
    if products and not {PRODUCT, f"{PRODUCT} (Amazon VPC)"} & set(products):
        return
    end = request.parameters.get("EndTime")
    if end and datetime.fromisoformat(end).replace(tzinfo=UTC) < datetime.fromisoformat(DATE):
        return
    for offer in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(request.region, []):
        kind, where = offer["InstanceType"], offer["Location"]
        if (not names or kind in names) and zone in (None, where) and kind in INSTANCE_TYPES:
            price = f"{price_usd_per_hour(kind, where):.6f}"
            have = {"availability_zone": where, "instance_type": kind, "product_description": PRODUCT}
            if request.picks({}, spot_price=price, timestamp=DATE, **have):
                yield kind, where
