"""Whatever carries our tags, in every region: clusters, others' and ours, and orphans."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from awsddp.aws.clusters import cluster_of, describe, exists, tags_of
from awsddp.aws.prices import spot
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.aws.teardown import KINDS
from awsddp.compat.types import ADDRESS_USD_PER_HOUR, GPU_TYPES, disk_usd_per_hour
from awsddp.parallel import all_of, each
from awsddp.records import ENDED, Listed

SpotPrices = Mapping[str, Mapping[str, float]]
"""US dollars per hour of one machine, by type and zone."""
_OURS = [{"Name": "tag-key", "Values": ["awsddp:id"]}]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A cluster, or what is left of one. `mine`: of the caller. `orphan`: mine, and nobody needs it any more.

    `price_usd_per_hour` is what its running machines and its disks cost; None where it is unknown.
    """

    cluster: Listed
    mine: bool
    orphan: bool
    price_usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """What was found. `unread` tells of each region that could not be asked why it could not."""

    holdings: tuple[Holding, ...]
    unread: tuple[str, ...]


def find_everywhere(
    gateway: Callable[[str], Aws], regions: Iterable[str], *, owner: str, now: datetime
) -> Everywhere:
    """Return every resource with awsddp's tags in these regions, searched in parallel.

    `gateway` makes the gateway to a region; `owner` is the caller. A region that refuses is reported,
    and does not hide the others.
    """

    def look(region: str) -> tuple[Holding, ...] | str:
        try:
            return find_in(gateway(region), owner=owner, now=now)
        except Refused as refusal:
            return f"{region}: {refusal.message}"

    found = each(look, regions)
    return Everywhere(
        holdings=tuple(one for part in found if not isinstance(part, str) for one in part),
        unread=tuple(part for part in found if isinstance(part, str)),
    )


def find_in(aws: Aws, *, owner: str, now: datetime) -> tuple[Holding, ...]:
    """Return whatever carries our tags in one region, by owner and name. Raises CloudError."""
    works = [partial(aws.pages, f"Describe{kind.key}", {"Filters": _OURS}) for kind in KINDS]
    described = [item for items in all_of([partial(describe, aws, _OURS), *works]) for item in items]
    spot_types = {item["InstanceType"] for item in described if item.get("InstanceLifecycle") == "spot"}
    spot_prices = spot(aws, spot_types)
    parts: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for item in described:
        tags = tags_of(item)
        # An id alone may be a copy: the console's "launch more like this" copies tags.
        id, name, whose = (tags.get(f"awsddp:{tag}", "") for tag in ("id", "cluster", "owner"))
        parts[id, name, whose].append(item)
    found = []
    for (id, name, whose), items in parts.items():
        # What an instance uses goes with it.
        apart = [item for item in items if "in-use" not in (item.get("State"), item.get("Status"))]
        cluster = cluster_of(name, whose, aws.region, id, apart)
        if id and exists(cluster):
            mine, late = whose == owner, cluster.expires is not None and cluster.expires < now
            is_orphan, price = mine and (not cluster.live or late), _price(cluster, items, spot_prices)
            found.append(Holding(cluster=cluster, mine=mine, orphan=is_orphan, price_usd_per_hour=price))
    return tuple(sorted(found, key=lambda one: (not one.mine, one.cluster.name, one.cluster.id)))


def _price(cluster: Listed, items: list[dict[str, Any]], spot_prices: SpotPrices) -> float | None:
    """Return what running machines cost per hour, and disks, which also cost while they stop.

    A spot machine costs what the market asks in its zone now, where AWS tells it, else the list price.
    """
    machines = 0.0
    for node in cluster.nodes:
        if node.state in (*ENDED, "stopped", "stopping"):
            continue
        kind = GPU_TYPES.get(node.instance_type)
        price = kind.price_usd_per_hour if kind is not None else None
        if node.spot:
            price = spot_prices.get(node.instance_type, {}).get(node.zone, price)
        if price is None:
            return None
        machines += price + (ADDRESS_USD_PER_HOUR if node.public_ip else 0.0)
    disks = sum(disk_usd_per_hour(int(item["Size"])) for item in items if "VolumeId" in item)
    return round(machines + disks, 4)
