"""Selection of the instance type, market and zones, and of the alternatives."""

import difflib
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

from awsddp.compat.releases import misfit, unlisted
from awsddp.compat.types import GPU_TYPES, RETIRED, GpuType, Market, nearest, quota_of
from awsddp.errors import CloudError, ConfigError
from awsddp.model.records import Choice
from awsddp.plan.network import answers
from awsddp.plan.records import Facts, Subnet
from awsddp.settings.spec import ClusterSpec

DEFAULT_GPUS = 8
_LEAST_CAPABILITY = 8.0
"""No type is chosen whose GPUs have less, unless it is named: they know no bfloat16."""
_GPUS = re.compile(r"([A-Za-z][A-Za-z0-9 -]*?)(?:-(\d+)GB)?(?::(\d+))?")


def tries(spec: ClusterSpec, facts: Facts) -> tuple[tuple[str | None, Market], ...]:
    """Return the types and markets to try, in order; None is the cheapest type.

    Raises ConfigError for what the reservation is not.
    """
    cluster, held = spec.cluster, facts.reservation
    if held is None:
        return tuple((name, market) for market in cluster.markets for name in cluster.types or (None,))
    if cluster.spot:
        raise ConfigError(
            f"capacity.reservation: {held.id} cannot be used by spot instances",
            "a reservation holds on-demand machines",
            "omit --spot, or the reservation",
        )
    if cluster.types not in ((), (held.instance_type,)):
        raise ConfigError(
            f"capacity.reservation: {held.id} is of {held.instance_type}, not of {cluster.instance_type}",
            "a reservation holds machines of one type",
            f"--instance-type {held.instance_type}, or another reservation",
        )
    is_block = held.reservation_type == "capacity-block"
    return ((held.instance_type, "capacity-block" if is_block else "on-demand"),)


def choose(spec: ClusterSpec, facts: Facts, name: str | None, market: Market) -> tuple[GpuType, str]:
    """Return the type of one of `tries`, and why it is it. Raises CloudError or ConfigError for none."""
    gpus = wanted_gpus(spec)
    if name is None:
        return _cheapest(spec, gpus, facts, market)
    kind = _offered_type(name, facts)
    if gpus is not None and not gpus.of(kind):
        raise ConfigError(
            f"cluster.gpus: {spec.cluster.gpus} is not what {name} has ({kind.gpus} x {kind.gpu})",
            "cluster.instance_type names the type already",
            f"omit one of --gpus and --instance-type, or --gpus {kind.gpu}:{kind.gpus}",
        )
    if facts.reservation is not None:
        return kind, f"the type of {facts.reservation.id}"
    if fits(kind, spec.cluster.nodes, facts, market) is False:
        raise _over_quota((kind,), spec, facts, market)
    return kind, "requested"


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a node must have: `count` None is any number, `memory_gb` None any memory."""

    name: str
    memory_gb: int | None
    count: int | None

    @property
    def model(self) -> str:
        """The name with the memory, where that is given: "L4-3GB"."""
        return f"{self.name}-{self.memory_gb}GB" if self.memory_gb else self.name

    def __str__(self) -> str:
        return f"{self.count} x {self.model}" if self.count else self.model

    def of(self, kind: GpuType) -> bool:
        """Whether a type has them. Memory is compared as it is sold: an A10G's 22.4 GiB are 24 GB.

        A part of a GPU is meant only by its memory: "L4-3GB" is an eighth.
        """
        return (
            kind.gpu.lower() == self.name.lower()
            and (kind.share == 1 or self.memory_gb is not None)
            and self.count in (None, kind.gpus)
            and (self.memory_gb is None or abs(kind.memory_gb * 1.074 - self.memory_gb) < self.memory_gb / 8)
        )


def wanted_gpus(spec: ClusterSpec) -> Gpus | None:
    """Return the parsed `cluster.gpus`. Raises ConfigError for an invalid value."""
    text = spec.cluster.gpus
    if text is None:
        return None
    match = _GPUS.fullmatch(text.strip())
    known = {kind.gpu.lower(): kind.gpu for kind in GPU_TYPES.values()}
    retired = {old.gpu.lower(): old.gpu for old in RETIRED.values()}
    if match is None or match[1].lower() not in known | retired or match[3] == "0":
        raise ConfigError(
            f"cluster.gpus: {text!r} is not a GPU that AWS offers",
            "",
            f"use A100:8 or A100-80GB:8; GPUs are {', '.join(sorted(set(known.values())))}",
        )
    count = int(match[3]) if match[3] else None
    return Gpus((known | retired)[match[1].lower()], int(match[2]) if match[2] else None, count)


def _offered_type(name: str, facts: Facts) -> GpuType:
    kind = GPU_TYPES.get(name) or facts.described.get(name, "")
    if isinstance(kind, GpuType) and facts.offers.get(name):
        return kind
    refusal = kind if isinstance(kind, str) else ""
    if (retired := RETIRED.get(name)) is not None:
        why = f"{name} ({retired.gpus} x {retired.gpu}) has been offered in no region since {retired.since}"
        why += f"; EC2 says: {refusal}" if refusal else ""
        advice = _instead(nearest(min(retired.gpus, 8), _usable(facts)))
    elif isinstance(kind, GpuType):
        why, advice = "no zone of this region has it", _instead(_like(kind, facts)) + ", or another --region"
    else:
        near = difflib.get_close_matches(name.lower(), [*GPU_TYPES, *RETIRED], n=1)
        raise ConfigError(
            f"cluster.instance_type: no instance type {name!r} in {facts.region}",
            refusal,
            f"did you mean {near[0]!r}?" if near else "awsddp plan --offers   # lists what is offered",
        )
    raise CloudError(f"AWS does not offer {name} in {facts.region}", why, advice)


def _offered(facts: Facts) -> tuple[GpuType, ...]:
    """Return the types of the table that some zone of the region offers."""
    return tuple(GPU_TYPES[name] for name, zones in facts.offers.items() if zones and name in GPU_TYPES)


def _usable(facts: Facts) -> tuple[GpuType, ...]:
    """Return the offered types that may be advised: with whole GPUs, and of the image's architecture."""
    cpu = facts.image.architecture
    return tuple(kind for kind in _offered(facts) if kind.share == 1 and kind.cpu == cpu)


def _like(kind: GpuType, facts: Facts) -> tuple[GpuType, ...]:
    price = kind.price_usd_per_hour or 0.0
    return nearest(kind.gpus, _usable(facts), price=price, but=kind.name)


def _instead(kinds: Iterable[GpuType]) -> str:
    options = [
        f"{kind.name} ({kind.gpus} x {kind.gpu}, ${kind.price_usd_per_hour:.2f} per hour)" for kind in kinds
    ]
    return (
        f"alternatives: {', '.join(options)}; try: --instance-type {options[0].split()[0]}" if options else ""
    )


def _cheapest(spec: ClusterSpec, gpus: Gpus | None, facts: Facts, market: Market) -> tuple[GpuType, str]:
    """Return the cheapest type that is offered here, fits the image and the quota, and why it is it."""
    needed = spec.gpus_needed or (DEFAULT_GPUS if gpus is None else 1)
    what = f"{needed} GPU{'s' * (needed != 1)} per node"
    if gpus is not None:
        what = str(gpus if gpus.count or needed == 1 else replace(gpus, count=needed))
    having = [
        kind
        for kind in (_usable(facts) if gpus is None else filter(gpus.of, _offered(facts)))
        if (gpus is not None or float(kind.capability) >= _LEAST_CAPABILITY)
        and not kind.bare_metal
        and _rank(kind, facts, market) is not None
        and (gpus is not None or not unlisted(kind, facts.image.name))
    ]
    # Where the image drives none of them, it is the image that the plan refuses, with its reason.
    fitting = [kind for kind in having if not misfit(kind, facts.image.name)] or having
    offered = [kind for kind in fitting if kind.gpus >= needed]
    if not offered:
        raise _not_offered(what, needed, gpus, fitting, spec, facts)
    offered.sort(key=lambda kind: (_rank(kind, facts, market) or 0, kind.name))
    for kind in offered:
        if fits(kind, spec.cluster.nodes, facts, market) is not False:
            return kind, f"the cheapest with {what} in {facts.region} that fits the image and the quota"
    raise _over_quota(offered, spec, facts, market)


def _not_offered(
    what: str, needed: int, gpus: Gpus | None, fitting: list[GpuType], spec: ClusterSpec, facts: Facts
) -> CloudError:
    """Return the refusal of GPUs that no type of the region has, with the counts that there are."""
    why, advice = _gone(gpus), []
    if gpus is not None and (wanted := gpus.count) is not None:
        like = [kind for kind in _usable(facts) if replace(gpus, count=None).of(kind) and not kind.bare_metal]
        counts = sorted({kind.gpus for kind in like})
        if counts:
            *few, last = map(str, counts)
            why = f"a node has {', '.join(few)}{' or ' * bool(few)}{last} x {gpus.model}"
            near = min(counts, key=lambda count: (count < wanted, abs(count - wanted)))
            nodes = max(-(-wanted * spec.cluster.nodes // near), 1)
            advice = [f"try: --gpus {shlex.quote(f'{gpus.model}:{near}')} --nodes {nodes}"]
    if most := max((kind.gpus for kind in fitting), default=0):
        advice.append(f"try: --nodes {-(-needed * spec.cluster.nodes // most)}")
    rest = "name a type with --instance-type, or another --region; awsddp plan --offers lists them"
    return CloudError(f"AWS offers no type with {what} in {facts.region}", why, "; or ".join([*advice, rest]))


def _gone(gpus: Gpus | None) -> str:
    old = [retired for retired in RETIRED.values() if gpus and retired.gpu == gpus.name]
    return f"the last one, {old[0].name.split('.')[0]}, went on {old[0].since}" if old else ""


def _rank(kind: GpuType, facts: Facts, market: Market) -> float | None:
    """Return what types are compared by: the price of their best zone, else of the list."""
    spot = facts.spot_prices.get(kind.name)
    if market == "spot" and spot:
        return min(spot.values())
    return on_demand(kind, facts)


def on_demand(kind: GpuType, facts: Facts) -> float | None:
    """Return the on-demand price of one machine, per hour: as the Pricing API tells it, else the table's."""
    return facts.prices.get(kind.name, kind.price_usd_per_hour)


def fits(kind: GpuType, nodes: int, facts: Facts, market: Market = "on-demand") -> bool | None:
    """Return whether the quota allows so many nodes; None: it could not be read."""
    free = _free_vcpus(kind, facts, market)
    return None if free is None else nodes * kind.vcpus <= free


def _free_vcpus(kind: GpuType, facts: Facts, market: Market) -> float | None:
    """Return what a quota leaves beside what runs; None: it could not be read."""
    quota = quota_of(kind.name, market)
    allowed = facts.quotas.get(quota[0]) if quota else None
    return None if quota is None or allowed is None else allowed - facts.used_vcpus.get(quota[0], 0)


def _in_use(code: str, facts: Facts) -> str:
    used = facts.used_vcpus.get(code, 0)
    return f", of which {used} are in use" if used else ""


def quota_line(kind: GpuType, nodes: int, facts: Facts, market: Market) -> tuple[str, tuple[str, ...]]:
    """Return need against quota as text, and a warning where it could not be read."""
    quota, need = quota_of(kind.name, market), nodes * kind.vcpus
    if facts.reservation is not None:
        return f"{need} vCPUs, reserved", ()
    if quota is None:
        unknown = f"{need} vCPUs; unknown quota for {market} {kind.family}"
        return unknown, (unknown,)
    if (allowed := facts.quotas.get(quota[0])) is not None:
        return f"{need} of {allowed:g} vCPUs{_in_use(quota[0], facts)} ({quota[1]}, {quota[0]})", ()
    return f"{need} vCPUs ({quota[1]}, {quota[0]}: unreadable)", (
        f"quota unreadable: {quota[1]} ({quota[0]}) must allow {need} vCPUs",
    )


def _over_quota(kinds: Iterable[GpuType], spec: ClusterSpec, facts: Facts, market: Market) -> CloudError:
    kinds, nodes = tuple(kinds), spec.cluster.nodes
    needs: dict[str, list[str]] = {}
    for kind in kinds:
        code, name = quota_of(kind.name, market) or ("", "")
        quota = f"{name} ({code}) allows {facts.quotas[code]:g} vCPUs in {facts.region}{_in_use(code, facts)}"
        needs.setdefault(quota, []).append(f"{nodes} x {kind.name} need {nodes * kind.vcpus}")
    return CloudError(
        f"the vCPU quota of this account is too small for {nodes} nodes",
        "; ".join(f"{quota}: {', '.join(some)}" for quota, some in needs.items()),
        f"{_largest(kinds, spec, facts, market)}\nawsddp doctor --request-quota   # request more from AWS",
        kind="quota",
    )


def _largest(kinds: tuple[GpuType, ...], spec: ClusterSpec, facts: Facts, market: Market) -> str:
    """Return the command for the most GPUs that the quota allows, with its price.

    No more nodes than requested; of equals a requested type, then more nodes, then the lower price.
    """
    gpus = wanted_gpus(spec)
    found: list[tuple[tuple[float, ...], GpuType, int]] = []
    for kind in dict.fromkeys((*kinds, *_usable(facts))):
        price, free = _rank(kind, facts, market), max(0, _free_vcpus(kind, facts, market) or 0)
        nodes = min(spec.cluster.nodes, int(free // kind.vcpus))
        usable = not kind.bare_metal and not misfit(kind, facts.image.name)
        if nodes and price is not None and usable and (gpus is None or gpus.name == kind.gpu):
            found.append(((nodes * kind.gpus, kind in kinds, nodes, -price), kind, nodes))
    if not found:
        return "awsddp --local run   # rehearse meanwhile: no type that fits is small enough for the quota"
    (*_, price), kind, nodes = max(found, key=lambda one: one[0])
    choice = f"--instance-type {kind.name}"
    if gpus is not None:
        choice = f"--gpus {shlex.quote(f'{kind.gpu}:{kind.gpus}')}"
    per_node = f"{kind.gpus} x {kind.gpu} per node" if kind.gpus else "no GPU"
    return (
        f"awsddp up --nodes {nodes} {choice}{' --spot' * (market == 'spot')}   "
        f"# {per_node}, ${-price * nodes:,.2f} per hour for the instances"
    )


def zones(spec: ClusterSpec, facts: Facts, kind: GpuType, market: Market, nodes: int) -> tuple[Subnet, ...]:
    """Return a subnet of each zone to try: as listed, else the cheapest spot market first, else by name."""
    offered = facts.offers.get(kind.name, ())
    if facts.reservation is not None:
        offered = (facts.reservation.zone,)
    allowed = _allowed(spec, facts, kind, offered)
    found = [subnet for subnet in facts.subnets if subnet.zone in allowed]
    found = [subnet for subnet in found if answers(spec, subnet)] or found  # where none does, that is said
    roomy = [subnet for subnet in found if subnet.free_addresses >= nodes]
    if roomy:
        by_zone = {
            subnet.zone: subnet for subnet in sorted(roomy, key=lambda subnet: subnet.id, reverse=True)
        }
        spot = facts.spot_prices.get(kind.name, {}) if market == "spot" else {}
        listed = spec.capacity.zones
        order = {zone: index for index, zone in enumerate(listed)}
        names = sorted(by_zone, key=lambda zone: (order.get(zone, 0), spot.get(zone, float("inf")), zone))
        return tuple(by_zone[zone] for zone in names)
    if found:
        raise CloudError(
            f"no subnet has {nodes} free addresses",
            ", ".join(f"{subnet.id} has {subnet.free_addresses}" for subnet in found),
            "try fewer --nodes",
        )
    raise _no_subnet(spec, facts, kind, allowed)


def _allowed(spec: ClusterSpec, facts: Facts, kind: GpuType, offered: tuple[str, ...]) -> tuple[str, ...]:
    """Return the offered zones that the spec allows. Raises ConfigError where a listed zone is none."""
    listed = spec.capacity.zones
    if not listed:
        return offered
    there = sorted({*(zone for zones in facts.offers.values() for zone in zones), *offered})
    strange = [zone for zone in listed if zone not in there]
    if strange:
        zone = strange[0]
        region = re.match(r"[a-z]{2,}(-[a-z]+)+-\d+", zone)
        elsewhere = region[0] if region and region[0] != facts.region else None
        raise ConfigError(
            f"capacity.zones: {zone!r} is not a zone of {facts.region} with GPUs",
            f"it is a zone of {elsewhere}" if elsewhere else "",
            (f"--region {elsewhere}, or " if elsewhere else "")
            + f"-o 'capacity.zones=[...]' with one of: {', '.join(there)}",
        )
    allowed = tuple(zone for zone in listed if zone in offered)
    if not allowed:
        where = f"{facts.reservation.id} is in" if facts.reservation else f"{kind.name} is offered in"
        raise ConfigError(
            f"capacity.zones: {kind.name} is not offered in {', '.join(listed)}",
            f"{where} {', '.join(offered)}",
            f"-o capacity.zones={offered[0]}" if offered else "another --region",
        )
    return allowed


def _no_subnet(
    spec: ClusterSpec, facts: Facts, kind: GpuType, allowed: tuple[str, ...]
) -> CloudError | ConfigError:
    have = ", ".join(sorted({subnet.zone for subnet in facts.subnets})) or "no zone"
    if spec.network.subnet:
        return ConfigError(
            f"network.subnet: {spec.network.subnet} is in {have}, where {kind.name} is not offered",
            f"it is offered in {', '.join(allowed)}",
            "name a subnet there, or omit network.subnet",
        )
    return CloudError(
        f"no subnet for {kind.name}",
        f"it is offered in {', '.join(allowed)}; the default VPC of {facts.region} has subnets in {have}",
        "make a default VPC: aws ec2 create-default-vpc; or name a subnet: -o network.subnet=subnet-...",
    )


def choices(facts: Facts, kind: GpuType, nodes: int, market: Market) -> tuple[Choice, ...]:
    """Return the three nearest other types that are offered here."""
    return tuple(_choice(other, facts, nodes, market) for other in _like(kind, facts))


def offers(facts: Facts, spec: ClusterSpec) -> tuple[Choice, ...]:
    """Return the types that are offered here, the cheapest first; those without a price last.

    GPUs on the command line choose among them; those of awsddp.toml, for which this may be the search for
    others, do not. Raises ConfigError for invalid GPUs, CloudError where no type has them.
    """
    gpus = wanted_gpus(spec) if "cluster.gpus" in spec.from_cli else None
    kinds = [kind for kind in _offered(facts) if gpus is None or gpus.of(kind)]
    if gpus is not None and not kinds:
        raise CloudError(
            f"AWS offers no type with {gpus} in {facts.region}", _gone(gpus), "omit --gpus: all types"
        )
    found = [_choice(kind, facts, spec.cluster.nodes, "on-demand") for kind in kinds]
    return tuple(sorted(found, key=lambda one: (one.price_usd_per_hour or math.inf, one.instance_type)))


def _choice(kind: GpuType, facts: Facts, nodes: int, market: Market) -> Choice:
    return Choice(
        instance_type=kind.name,
        gpu=kind.gpu_shown,
        gpus_per_node=kind.gpus,
        price_usd_per_hour=on_demand(kind, facts),
        zones=facts.offers[kind.name],
        fits_quota=fits(kind, nodes, facts, market),
    )
