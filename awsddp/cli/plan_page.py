"""The pages before a launch: the plan, the settings, the offers and quota."""

import json
from typing import TYPE_CHECKING, Any

from awsddp.cli.render import line, table
from awsddp.report import duration, money

if TYPE_CHECKING:
    from awsddp.plan.records import LaunchPlan


def plan_page(plan: "LaunchPlan", *, stderr: bool = False) -> None:
    """Show a plan: instances, image, zones, resources, price, fallbacks, other choices, warnings."""
    from awsddp.plan.document import document

    facts = document(plan)
    unchanged = ["none: the cluster is as requested, nothing would change"] if plan.exists else []
    closed = "nowhere: no port is open"
    if not plan.asks("CreateSecurityGroup"):
        closed = "what your security group allows"
    rows = [
        ("cluster", f"{facts['cluster']} on {facts['target']}, {facts['region']}"),
        ("nodes", f"{facts['nodes']} x {facts['instance_type']}, {facts['market']} ({facts['why']})"),
        ("per node", _node_line(facts)),
        ("image", _image_line(facts["image"])),
        ("zones", ", then ".join(facts["zones"])),
        ("fallbacks", "; ".join(map(_next_line, facts["alternatives"]))),
        (
            "address",
            f"{plan.address}{f', through {plan.jump}' if plan.jump else ''}; "
            f"SSH from {', '.join(facts['ssh_cidrs']) or closed}",
        ),
        ("EFA", f"{plan.efa.count}/{plan.efa.most} interfaces: {plan.efa.why}"),
        ("placement", plan.placement_why),
        ("quota", facts["quota"]),
        *(("" if index else "steps", str(step)) for index, step in enumerate(plan.steps or unchanged)),
        ("creates", ", ".join(facts["makes"])),
        ("uses", ", ".join(f"{what} {name}" for what, name in facts["uses"].items())),
        ("price", _price_line(facts, plan.expires_s)),
        ("budget", str(plan.budget or "")),
        ("expires", f"after {duration(plan.expires_s)}, by itself"),
    ]
    table(("", ""), [row for row in rows if row[1]], stderr=stderr)
    if facts["choices"]:
        line("other choices:", stderr=stderr)
        _choices(facts["choices"], plan.region, stderr=stderr)
    for warning in facts["warnings"]:
        line(f"warning: {warning}", stderr=stderr)


def _node_line(facts: dict[str, Any]) -> str:
    gpus = f"{facts['gpus_per_node']} x {facts['gpu']} ({facts['gpu_memory_gb']:g} GiB)"
    if not facts["gpus_per_node"]:
        gpus = "no GPU"
    elif facts["rehearsed"]:
        gpus += " (rehearsed: CUDA on the CPU, nccl as gloo)"
    elif facts["pretended"]:
        gpus += " (off: gloo on the CPU)"
    network = f", {facts['network_gbit']} Gbit/s" if facts["network_gbit"] else ""
    return f"{gpus}, {facts['vcpus']} vCPUs, {facts['memory_gb']:g} GiB{network}, {facts['disk_gb']} GB disk"


def _image_line(image: dict[str, Any]) -> str:
    versions = [
        f"{what} {image[key]}"
        for key, what in (("torch", "torch"), ("cuda", "CUDA"), ("driver", "driver"))
        if image[key]
    ]
    owner = f", of {image['owner']}" if image["owner"] else ""
    suffix = f"; {', '.join(versions)}" if versions else ""
    return f"{image['name']} ({image['id']}, {str(image['created'])[:10]}{owner}){suffix}"


def _next_line(other: dict[str, Any]) -> str:
    return (
        f"{other['instance_type']} {other['market']} in {other['region']} "
        f"at {money(other['price_usd_per_hour'])} per hour"
    )


def _price_line(facts: dict[str, Any], expires_s: int) -> str:
    parts = ", ".join(f"{part} {money(usd)}" for part, usd in facts["price_parts"].items() if usd != 0)
    source = f"{facts['price_source']} {facts['price_date']}".strip()
    return (
        f"{money(facts['price_usd_per_hour'])} per hour ({parts}), "
        f"{money(facts['price_until_expiry_usd'])} until it expires ({source}); "
        f"data transfer out {money(facts['egress_usd_per_gb'])} per GB"
    )


def _choices(choices: list[dict[str, Any]], region: str, *, stderr: bool = False) -> None:
    """Show instance types, their spot prices too where some are known."""
    spot = ["spot"] if any(one.get("spot_usd_per_hour") is not None for one in choices) else []
    rows = [
        (
            one["instance_type"],
            f"{one['gpus_per_node']} x {one['gpu']}",
            money(one["price_usd_per_hour"]),
            {True: "sufficient", False: "too small", None: "unknown"}[one["fits_quota"]],
            ", ".join(zone.removeprefix(region) for zone in one["zones"]),
            *(money(one["spot_usd_per_hour"]) for _ in spot),
        )
        for one in choices
    ]
    table(("type", "gpus", "per node-hour", "quota", f"zones of {region}", *spot), rows, stderr=stderr)


def settings_page(settings: list[tuple[str, Any, str]]) -> None:
    """Show each setting, its value and where it comes from."""
    rows = [(key, json.dumps(value, ensure_ascii=False), source) for key, value, source in settings]
    table(("setting", "value", "from"), rows)


def offers_page(found: dict[str, Any]) -> None:
    """Show every GPU type offered in the region."""
    nodes = found["nodes"]
    line(f"{found['region']}, prices of {found['price_date']}; quota for {nodes} node{'s' * (nodes != 1)}:")
    _choices(found["offers"], found["region"])


def quota_page(reply: dict[str, Any]) -> None:
    """Show the quota request, or that none is needed."""
    what = f"{reply['name']} ({reply['quota']}) in {reply['region']}"
    if reply["request"] is None:
        line(f"No request needed: {what} allows {reply['have']:g} vCPUs, and {reply['need']} are needed.")
        return
    line(f"Requested {reply['need']} vCPUs of {what}: request {reply['request']}. AWS answers by email.")
