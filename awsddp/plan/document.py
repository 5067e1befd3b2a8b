"""The `plan` document (docs/commands.md, "JSON")."""

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
        "makes": makes(plan),
        "uses": uses(plan),
        "requests": [asdict(request) for request in plan.requests],
        "choices": [choice_document(choice) for choice in plan.choices],
        "quota": plan.quota,
        "price_usd_per_hour": price.total,
        "price_parts": {"machines": price.machines, "disks": price.disks, "addresses": price.addresses},
        "price_date": price.date,
        "price_source": price.source,
        "price_until_expiry_usd": plan.price_until_expiry_usd,
        "egress_usd_per_gb": compat.EGRESS_USD_PER_GB,
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


def makes(plan: LaunchPlan) -> list[str]:
    """Return every resource that the plan's requests make, in words; what a cluster has already it keeps."""
    words = {
        "ImportKeyPair": "key pair",
        "CreateSecurityGroup": "security group",
        "CreatePlacementGroup": "placement group",
    }
    found = [word for operation, word in words.items() if plan.asks(operation) and not plan.steps]
    if not plan.numbers:
        return found
    count, nics = len(plan.numbers), plan.request("RunInstances").parameters["NetworkInterfaces"]
    found += [
        _several(count, "instance"),
        f"{_several(count, 'disk')} of {plan.disk_gb} GB",
        _several(count * len(nics), "network interface"),
    ]
    return found + ([_several(count, "public address", "es")] if plan.address == "public" else [])


def _several(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{ending * (count != 1)}"


def uses(plan: LaunchPlan) -> dict[str, str]:
    """Return what is the user's own, or was there already, and is used: by what it is, its id or name."""
    if not plan.numbers:
        return {}
    run = plan.request("RunInstances").parameters
    [disk], [instance, *_] = run["BlockDeviceMappings"], run["TagSpecifications"]
    own = [tag for tag in instance["Tags"] if tag["Key"] != "Name" and not tag["Key"].startswith("awsddp:")]
    held = run.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    found = {
        "subnet": plan.zones[0].subnet if len(plan.zones) == 1 else None,
        "key pair": run["KeyName"],
        "security group": run["NetworkInterfaces"][0]["Groups"][0],
        "placement group": run.get("Placement", {}).get("GroupName"),
        "instance profile": next(iter(run.get("IamInstanceProfile", {}).values()), None),
        "KMS key": disk["Ebs"].get("KmsKeyId"),
        "reservation": held.get("CapacityReservationId"),
        "tags": ", ".join(f"{tag['Key']}={tag['Value']}" for tag in own),
    }
    return {what: name for what, name in found.items() if isinstance(name, str) and name}
