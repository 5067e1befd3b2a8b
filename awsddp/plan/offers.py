"""Which type is launched, in which zones, and what could be had instead."""

import difflib
from collections.abc import Iterable

from awsddp import compat
from awsddp.compat import GpuType
from awsddp.errors import CloudError, ConfigError
from awsddp.plan.records import Choice, Facts, Zone
from awsddp.spec import ClusterSpec

DEFAULT_GPUS = 8


def choose(spec: ClusterSpec, facts: Facts) -> tuple[GpuType, tuple[str, ...]]:
    """Return the type to launch and what is to be said about its quota."""
    nodes = spec.cluster.nodes
    if spec.cluster.instance_type:
        kind = _asked(spec.cluster.instance_type, facts)
        if _fits(kind, nodes, facts) is False:
            raise _over_quota((kind,), nodes, facts)
    else:
        kind = _cheapest(nodes, facts)
    code, name = compat.quota_of(kind.name)
    if facts.quotas.get(code) is not None:
        return kind, ()
    return kind, (f"quota not readable: {name} ({code}) must allow {nodes * kind.vcpus} vCPUs",)


def _asked(name: str, facts: Facts) -> GpuType:
    kind = compat.GPU_TYPES.get(name) or facts.described
    if kind is not None and facts.offers.get(name):
        return kind
    offered = [known for known, zones in facts.offers.items() if zones]
    retired = compat.RETIRED.get(name)
    if retired is not None:
        others = compat.replacements(retired, offered)
        raise CloudError(
            f"AWS does not offer {name} in {facts.region}",
            f"{name} ({retired.gpus} x {retired.gpu}) has been offered in no region since {retired.since}"
            + (f"; EC2 says: {facts.refusal}" if facts.refusal else ""),
            _instead(others),
        )
    if kind is not None:
        raise CloudError(
            f"AWS does not offer {name} in {facts.region}",
            "no zone of this region has it",
            _instead(compat.nearest(kind, _known(offered))) + ", or another --region",
        )
    near = difflib.get_close_matches(name, [*compat.GPU_TYPES, *compat.RETIRED], n=1)
    raise ConfigError(
        f"cluster.instance_type: no instance type {name!r} in {facts.region}",
        facts.refusal,
        f"did you mean {near[0]!r}?" if near else "try: awsddp plan, which shows what could be had",
    )


def _known(names: Iterable[str]) -> tuple[GpuType, ...]:
    return tuple(compat.GPU_TYPES[name] for name in names if name in compat.GPU_TYPES)


def _instead(kinds: Iterable[GpuType]) -> str:
    told = [
        f"{kind.name} ({kind.gpus} x {kind.gpu}, ${kind.price_usd_per_hour:.2f} an hour)" for kind in kinds
    ]
    return f"in its place: {', '.join(told)}; try: --instance-type {told[0].split()[0]}" if told else ""


def _cheapest(nodes: int, facts: Facts) -> GpuType:
    offered = [
        kind
        for kind in _known(name for name, zones in facts.offers.items() if zones)
        if kind.gpus == DEFAULT_GPUS
        and not kind.bare_metal
        and kind.price_usd_per_hour is not None
        and not compat.misfit(kind, facts.image.name)
        and not compat.unlisted(kind, facts.image.name)
    ]
    if not offered:
        raise CloudError(
            f"AWS offers no type with {DEFAULT_GPUS} GPUs in {facts.region}",
            "",
            "name a type with --instance-type, or another --region",
        )
    offered.sort(key=lambda kind: kind.price_usd_per_hour or 0)
    for kind in offered:
        if _fits(kind, nodes, facts) is not False:
            return kind
    raise _over_quota(offered, nodes, facts)


def _fits(kind: GpuType, nodes: int, facts: Facts) -> bool | None:
    """Return whether the quota allows so many nodes; None: it could not be read."""
    allowed = facts.quotas.get(compat.quota_of(kind.name)[0])
    return None if allowed is None else nodes * kind.vcpus <= allowed


def _over_quota(kinds: Iterable[GpuType], nodes: int, facts: Facts) -> CloudError:
    told = []
    for kind in kinds:
        code, name = compat.quota_of(kind.name)
        told.append(
            f"{nodes} x {kind.name} need {nodes * kind.vcpus} vCPUs, "
            f"and {name} ({code}) allows {facts.quotas[code]:g} in {facts.region}"
        )
    return CloudError(
        f"the vCPU quota of this account is too small for {nodes} nodes",
        "; ".join(told),
        "ask for more at https://console.aws.amazon.com/servicequotas/, or try fewer --nodes "
        "or a smaller --instance-type",
    )


def zones(facts: Facts, kind: GpuType, nodes: int) -> tuple[Zone, ...]:
    offered = facts.offers.get(kind.name, ())
    found = [subnet for subnet in facts.subnets if subnet.zone in offered]
    roomy = [subnet for subnet in found if subnet.free_addresses >= nodes]
    if roomy:
        by_zone = {
            subnet.zone: subnet for subnet in sorted(roomy, key=lambda subnet: subnet.id, reverse=True)
        }
        return tuple(Zone(name=zone, subnet=by_zone[zone].id) for zone in sorted(by_zone))
    if found:
        raise CloudError(
            f"no subnet has {nodes} free addresses",
            ", ".join(f"{subnet.id} has {subnet.free_addresses}" for subnet in found),
            "try fewer --nodes",
        )
    raise CloudError(
        f"there is no subnet to launch {kind.name} into",
        f"it is offered in {', '.join(offered)}; the default VPC of {facts.region} has subnets in "
        f"{', '.join(sorted(subnet.zone for subnet in facts.subnets)) or 'no zone'}",
        "make a default VPC: aws ec2 create-default-vpc",
    )


def choices(facts: Facts, kind: GpuType, nodes: int) -> tuple[Choice, ...]:
    offered = _known(name for name, zones in facts.offers.items() if zones)
    return tuple(
        Choice(
            instance_type=other.name,
            gpu=other.gpu,
            gpus_per_node=other.gpus,
            price_usd_per_hour=other.price_usd_per_hour,
            zones=facts.offers[other.name],
            fits_quota=_fits(other, nodes, facts),
        )
        for other in compat.nearest(kind, offered)
    )
