"""A plan as the JSON document of design.md."""

from dataclasses import asdict
from typing import Any

from awsddp import compat
from awsddp.plan.records import Choice, LaunchPlan


def document(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as its document. It holds nothing secret."""
    image, kind, price = plan.image, plan.kind, plan.price
    inside = compat.image_facts(image.name)
    return {
        "cluster": plan.cluster,
        "target": plan.target,
        "region": plan.region,
        "instance_type": kind.name,
        "why": plan.why,
        "market": plan.market,
        "nodes": plan.nodes,
        "gpus_per_node": kind.gpus,
        "gpu": kind.gpu,
        "gpu_memory_gb": kind.memory_gb,
        "vcpus": kind.vcpus,
        "memory_gb": kind.ram_gb,
        "network_gbit": kind.network,
        "efa": asdict(plan.efa),
        "placement": plan.placement,
        "pretended": plan.pretended,
        "rehearsed": image.rehearses,
        "image": {
            "id": image.id,
            "name": image.name,
            "created": image.created,
            "owner": image.owner,
            "deprecated": image.deprecated or None,
            "torch": inside.torch or None,
            "cuda": inside.cuda or None,
            "driver": inside.driver,
        },
        "ssh_user": plan.ssh_user,
        "disk_gb": plan.disk_gb,
        "address": plan.address,
        "jump": plan.jump or None,
        "ssh_cidrs": list(plan.ssh_cidrs),
        "zones": [zone.name for zone in plan.zones],
        "steps": [asdict(step) for step in plan.steps],
        "requests": [asdict(request) for request in plan.requests],
        "choices": [choice_document(choice) for choice in plan.choices],
        "quota": plan.quota,
        "price_usd_per_hour": price.total,
        "price_parts": {"machines": price.machines, "disks": price.disks, "addresses": price.addresses},
        "price_date": price.date,
        "price_source": price.source,
        "price_until_expiry_usd": plan.price_until_expiry_usd,
        "expires": {"$now": plan.expires_s},
        "warnings": list(plan.warnings),
        "alternatives": [_alternative(other) for other in plan.alternatives],
    }


def choice_document(choice: Choice) -> dict[str, Any]:
    """Return something that could be had instead as its document."""
    return asdict(choice)


def _alternative(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "region": plan.region,
        "instance_type": plan.instance_type,
        "market": plan.market,
        "zones": [zone.name for zone in plan.zones],
        "price_usd_per_hour": plan.price_usd_per_hour,
    }
