"""What `up` would do, as pure data: a spec and the facts that were read make a LaunchPlan.

A plan can be printed, priced, tested and refused before anything costs a cent. Its requests are the very
ones that are sent; ids, secrets and times that do not exist yet stand in them as {"$ref": ...},
{"$secret": ...} and {"$now": seconds}, and `resolve` puts them in.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from awsddp import compat
from awsddp.compat import GpuType
from awsddp.errors import ConfigError
from awsddp.plan.offers import choices, choose, zones
from awsddp.plan.records import (
    Choice,
    Facts,
    Image,
    LaunchPlan,
    Request,
    Subnet,
    Zone,
    names,
    read_numbers,
    utc,
    write_numbers,
)
from awsddp.plan.requests import requests, resolve, resolve_request
from awsddp.spec import ClusterSpec, seconds

__all__ = [
    "Choice",
    "Facts",
    "Image",
    "LaunchPlan",
    "Request",
    "Subnet",
    "Zone",
    "document",
    "make_plan",
    "names",
    "read_numbers",
    "resolve",
    "resolve_request",
    "ssh_cidrs",
    "utc",
    "write_numbers",
]

SPARE_DISK_GB = 100
LEAST_DISK_GB = 200


def make_plan(spec: ClusterSpec, facts: Facts, *, numbers: Iterable[int] | None = None) -> LaunchPlan:
    """Return the plan that launches what `spec` asks for, given what was read.

    `numbers` are the node numbers to fill (None: all), so that lost nodes can be replaced. Raises ConfigError
    where the spec cannot be meant, CloudError where AWS does not offer or allow it.
    """
    kind, quota_warnings = choose(spec, facts)
    fill = tuple(range(spec.cluster.nodes)) if numbers is None else tuple(sorted(numbers))
    _check_image(spec, facts.image, kind)
    disk_gb = _disk(spec, facts.image)
    tried = zones(facts, kind, len(fill))
    cidrs = ssh_cidrs(spec, facts.callers)
    price = compat.node_usd_per_hour(kind.name, disk_gb=disk_gb)
    plan = LaunchPlan(
        cluster=spec.name,
        target=facts.target,
        region=facts.region,
        owner=facts.owner,
        instance_type=kind.name,
        nodes=spec.cluster.nodes,
        numbers=fill,
        gpus_per_node=kind.gpus,
        gpu=kind.gpu,
        pretended=facts.image.pretends,
        ssh_user=facts.image.ssh_user,
        image=facts.image,
        disk_gb=disk_gb,
        zones=tried,
        ssh_cidrs=cidrs,
        requests=(),
        choices=choices(facts, kind, spec.cluster.nodes),
        price_usd_per_hour=None if price is None else round(price * spec.cluster.nodes, 4),
        price_date=compat.PRICE_DATE,
        expires_s=int(seconds(spec.cluster.expires, place="cluster.expires")),
        warnings=(*quota_warnings, *_warnings(facts, kind, price)),
    )
    return replace(plan, requests=requests(plan, vpc=facts.subnets[0].vpc, tags=_user_tags(spec)))


def document(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as the JSON document of design.md. It holds nothing secret."""
    price = plan.price_usd_per_hour
    return {
        "cluster": plan.cluster,
        "target": plan.target,
        "region": plan.region,
        "instance_type": plan.instance_type,
        "nodes": plan.nodes,
        "gpus_per_node": plan.gpus_per_node,
        "gpu": plan.gpu,
        "pretended": plan.pretended,
        "image": {"id": plan.image.id, "name": plan.image.name, "created": plan.image.created},
        "ssh_user": plan.ssh_user,
        "disk_gb": plan.disk_gb,
        "ssh_cidrs": list(plan.ssh_cidrs),
        "zones": [zone.name for zone in plan.zones],
        "requests": [asdict(request) for request in plan.requests],
        "choices": [asdict(choice) for choice in plan.choices],
        "price_usd_per_hour": price,
        "price_date": plan.price_date,
        "price_until_expiry_usd": None if price is None else round(price * plan.expires_s / 3600, 2),
        "expires": {"$now": plan.expires_s},
        "warnings": list(plan.warnings),
    }


def ssh_cidrs(spec: ClusterSpec, callers: Iterable[str]) -> tuple[str, ...]:
    """Return who may come in: `network.ssh_cidr` or else the caller's own addresses. Raises ConfigError."""
    asked = spec.network.ssh_cidr or tuple(callers)
    if not asked:
        raise ConfigError(
            "it is not known from which address SSH will come",
            "no source answered with this machine's public address",
            "say it: awsddp -o network.ssh_cidr=203.0.113.7/32 up",
        )
    found = []
    for text in asked:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise ConfigError(
                f"network.ssh_cidr: {text!r} is no address block", str(error), "write it as 203.0.113.0/24"
            ) from error
        if network.prefixlen == 0:
            raise ConfigError(
                f"network.ssh_cidr: {text} opens port 22 to the whole world",
                "who reaches a node's port can attack it",
                "name your own network, such as 203.0.113.0/24, or leave the key out",
            )
        found.append(str(network))
    return tuple(found)


def _check_image(spec: ClusterSpec, image: Image, kind: GpuType) -> None:
    if image.architecture != kind.cpu:
        raise ConfigError(
            f"cluster.image: {image.id} is for {image.architecture}, {kind.name} is {kind.cpu}",
            image.name,
            "name an image of the type's own architecture with --image",
        )
    reason = compat.misfit(kind, image.name)
    if reason:
        raise ConfigError(
            f"{image.name} ({image.id}) does not fit {kind.name}",
            reason,
            "name an image with a fitting driver with --image, or another --instance-type",
        )


def _disk(spec: ClusterSpec, image: Image) -> int:
    asked = spec.cluster.disk_gb
    if asked is None:
        return max(image.root_gb + SPARE_DISK_GB, LEAST_DISK_GB)
    if asked < image.root_gb:
        raise ConfigError(
            f"cluster.disk_gb: {asked} GB is smaller than the image",
            f"{image.name} needs {image.root_gb} GB",
            f"at least --disk {image.root_gb}",
        )
    return asked


def _warnings(facts: Facts, kind: GpuType, price: float | None) -> list[str]:
    told = []
    if price is None:
        told.append(f"the price of {kind.name} is not known")
    elif facts.region != compat.PRICE_REGION:
        told.append(f"prices are list prices of {compat.PRICE_REGION}; those of {facts.region} may differ")
    if facts.image.pretends:
        told.append(
            f"the image pretends its GPUs: {kind.gpus} x {kind.gpu} a node in name, gloo on CPU in fact"
        )
    elif compat.unlisted(kind, facts.image.name):
        told.append(f"the release notes of {facts.image.name} do not list {kind.family}")
    if kind.gpus == 0:
        told.append(f"{kind.name} has no GPU")
    if kind.bare_metal:
        told.append(f"{kind.name} is bare metal: it takes 10 to 20 minutes to boot")
    return told


def _user_tags(spec: ClusterSpec) -> dict[str, str]:
    for key, value in spec.tags.items():
        if (
            key.startswith(("awsddp:", "aws:"))
            or key == "Name"
            or not 1 <= len(key) <= 128
            or len(value) > 256
        ):
            raise ConfigError(
                f"tags.{key}: {value!r} cannot be put on a resource",
                "keys that begin with awsddp: or aws:, and Name, are taken; "
                "a key holds 128 characters, a value 256",
                "choose another key or a shorter value",
            )
    return dict(sorted(spec.tags.items()))
