"""Spot prices: what share of the on-demand price the market asks, another each day.

The share is an assumption of the usual size, not a recorded price: g and p types are at 30 to 60 %.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime, timedelta
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from awsddp.compat.types import GPU_TYPES
from awsddp.local.requests import Request

KEPT = timedelta(days=90)
# Relative prices of seven days, repeated: a budget that assumes the price of today is spent before its time.
DAYS = (1.0, 1.04, 0.97, 1.1, 0.93, 1.02, 0.95)
PRODUCT = "Linux/UNIX"
SHARE = 0.42
# On-demand price of types without a listed one, from c5.large, m5.large and r5.large in us-east-1.
USD_PER_VCPU, USD_PER_GIB = 0.0348, 0.0033


def price_usd_per_hour(instance_type: str, zone: str, day: date) -> float:
    """Return the spot price of a type in a zone on a day in UTC. Zones differ by up to 10 % either way."""
    number = int(hashlib.sha256(f"{instance_type} {zone}".encode()).hexdigest()[:4], 16)
    share = SHARE * (0.9 + 0.2 * number / 0xFFFF)
    return _on_demand(instance_type) * share * DAYS[(day.toordinal() + number) % len(DAYS)]


def _on_demand(instance_type: str) -> float:
    listed = GPU_TYPES.get(instance_type)
    if listed is not None and listed.price_usd_per_hour is not None:
        return listed.price_usd_per_hour
    facts = INSTANCE_TYPES[instance_type]
    gib = facts["MemoryInfo"]["SizeInMiB"] / 1024
    gpus = sum(gpu["Count"] for gpu in facts.get("GpuInfo", {}).get("Gpus", []))
    return float(facts["VCpuInfo"]["DefaultVCpus"] * USD_PER_VCPU + gib * USD_PER_GIB + gpus)


def history(request: Request, backend: Any) -> dict[str, Any]:
    """Answer DescribeSpotPriceHistory: the prices since a time, and those in force then, the newest first."""
    now = datetime.now(UTC)
    first = max(min(request.asked.get("StartTime", now - KEPT), now), now - KEPT).date()
    days = [now.date() - timedelta(days=back) for back in range((now.date() - first).days + 1)]
    names = request.asked.get("InstanceTypes", INSTANCE_TYPES)
    entries = [
        {
            "InstanceType": offer["InstanceType"],
            "ProductDescription": PRODUCT,
            "SpotPrice": f"{price_usd_per_hour(offer['InstanceType'], offer['Location'], day):.6f}",
            "Timestamp": datetime(day.year, day.month, day.day, tzinfo=UTC),
            "AvailabilityZone": offer["Location"],
        }
        for offer in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(request.region, [])
        if offer["InstanceType"] in names
        for day in days
    ]
    return {"SpotPriceHistory": entries}
