"""Select the instance type, the market, the zones and the alternatives."""

import difflib
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

from awsddp.compat.releases import find_image_problem, is_family_unlisted
from awsddp.compat.types import GPU_TYPES, RETIRED, GpuType, Market, find_nearest_types, find_quota
from awsddp.errors import CloudError, ConfigError
from awsddp.model.records import Choice
from awsddp.plan.network import is_reachable
from awsddp.plan.records import Facts, Subnet
from awsddp.settings.spec import ClusterSpec

DEFAULT_GPUS = 8
_LEAST_CAPABILITY = 8.0
"""GPUs with a lower capability have no bfloat16, and their types are chosen only if requested by name."""
_GPUS = re.compile(r"([A-Za-z][A-Za-z0-9 -]*?)(?:-(\d+)GB)?(?::(\d+))?")


def list_attempts(spec: ClusterSpec, facts: Facts) -> tuple[tuple[str | None, Market], ...]:
    """Return the types and markets to try, in order; None as the type means the cheapest one.

    Raises ConfigError if the settings conflict with the reservation.
    """
    cluster, reservation = spec.cluster, facts.reservation
    if reservation is None:
        return tuple((name, market) for market in cluster.markets for name in cluster.types or (None,))
    if cluster.spot:
        raise ConfigError(
            f"capacity.reservation: {reservation.id} cannot be used by spot instances",
            "a reservation holds on-demand machines",
            "omit --spot, or the reservation",
        )
    if cluster.types not in ((), (reservation.instance_type,)):
        raise ConfigError(
            f"capacity.reservation: {reservation.id} is for {reservation.instance_type}, "
            f"not for {cluster.instance_type}",
            "a reservation holds machines of one type",
            f"--instance-type {reservation.instance_type}, or another reservation",
        )
    is_block = reservation.reservation_type == "capacity-block"
    return ((reservation.instance_type, "capacity-block" if is_block else "on-demand"),)


def choose_type(spec: ClusterSpec, facts: Facts, name: str | None, market: Market) -> tuple[GpuType, str]:
    """Return the instance type for an attempt (`name` and `market`), and the reason for the choice.

    Raises CloudError or ConfigError if no type fits.
    """
    gpus = parse_gpus(spec)
    if name is None:
        return _cheapest(spec, gpus, facts, market)
    kind = _offered_type(name, facts)
    if gpus is not None and not gpus.matches(kind):
        raise ConfigError(
            f"cluster.gpus: {spec.cluster.gpus} is not what {name} has ({kind.gpus} x {kind.gpu})",
            "cluster.instance_type names the type already",
            f"omit one of --gpus and --instance-type, or --gpus {kind.gpu}:{kind.gpus}",
        )
    if facts.reservation is not None:
        return kind, f"the type of {facts.reservation.id}"
    if allowed_by_quota(kind, spec.cluster.nodes, facts, market) is False:
        raise _over_quota((kind,), spec, facts, market)
    return kind, "requested"


@dataclass(frozen=True)
class GpuRequest:
    """The GPUs requested for a node.

    If `count` is None, any number matches; if `memory_gb` is None, any amount of memory does.
    """

    name: str
    memory_gb: int | None
    count: int | None

    @property
    def model(self) -> str:
        """The name, with the memory if it is requested: "L4-3GB"."""
        return f"{self.name}-{self.memory_gb}GB" if self.memory_gb else self.name

    def __str__(self) -> str:
        return f"{self.count} x {self.model}" if self.count else self.model

    def matches(self, kind: GpuType) -> bool:
        """Return True if a type has these GPUs.

        Advertised sizes of memory are compared: an A10G's 22.4 GiB count as 24 GB. A fraction of a GPU
        matches only if the request specifies the memory: "L4-3GB" is an eighth of an L4.
        """
        return (
            kind.gpu.lower() == self.name.lower()
            and (kind.share == 1 or self.memory_gb is not None)
            and self.count in (None, kind.gpus)
            and (self.memory_gb is None or abs(kind.memory_gb * 1.074 - self.memory_gb) < self.memory_gb / 8)
        )


def parse_gpus(spec: ClusterSpec) -> GpuRequest | None:
    """Return `cluster.gpus` parsed. Raises ConfigError for an invalid value."""
    text = spec.cluster.gpus
    if text is None:
        return None
    match = _GPUS.fullmatch(text.strip())
    gpu_names = {kind.gpu.lower(): kind.gpu for kind in GPU_TYPES.values()}
    retired = {old.gpu.lower(): old.gpu for old in RETIRED.values()}
    if match is None or match[1].lower() not in gpu_names | retired or match[3] == "0":
        raise ConfigError(
            f"cluster.gpus: {text!r} is not a GPU that AWS offers",
            "",
            f"use A100:8 or A100-80GB:8; GPUs are {', '.join(sorted(set(gpu_names.values())))}",
        )
    count = int(match[3]) if match[3] else None
    return GpuRequest((gpu_names | retired)[match[1].lower()], int(match[2]) if match[2] else None, count)


def _offered_type(name: str, facts: Facts) -> GpuType:
    kind = GPU_TYPES.get(name) or facts.described.get(name, "")
    if isinstance(kind, GpuType) and facts.offers.get(name):
        return kind
    refusal = kind if isinstance(kind, str) else ""
    if (retired := RETIRED.get(name)) is not None:
        why = f"{name} ({retired.gpus} x {retired.gpu}) has been offered in no region since {retired.since}"
        why += f"; EC2 says: {refusal}" if refusal else ""
        advice = _suggest(find_nearest_types(min(retired.gpus, 8), _usable_types(facts)))
    elif isinstance(kind, GpuType):
        why, advice = (
            "no zone in this region offers it",
            _suggest(_similar_types(kind, facts)) + ", or another --region",
        )
    else:
        matches = difflib.get_close_matches(name.lower(), [*GPU_TYPES, *RETIRED], n=1)
        raise ConfigError(
            f"cluster.instance_type: no instance type {name!r} in {facts.region}",
            refusal,
            f"did you mean {matches[0]!r}?" if matches else "awsddp plan --offers   # lists what is offered",
        )
    raise CloudError(f"AWS does not offer {name} in {facts.region}", why, advice)


def _offered_types(facts: Facts) -> tuple[GpuType, ...]:
    """Return the types in the table that at least one of the region's zones offers."""
    return tuple(GPU_TYPES[name] for name, zones in facts.offers.items() if zones and name in GPU_TYPES)


def _usable_types(facts: Facts) -> tuple[GpuType, ...]:
    """Return the offered types to recommend: those that have whole GPUs and the image's architecture."""
    cpu = facts.image.architecture
    return tuple(kind for kind in _offered_types(facts) if kind.share == 1 and kind.cpu == cpu)


def _similar_types(kind: GpuType, facts: Facts) -> tuple[GpuType, ...]:
    price = kind.price_usd_per_hour or 0.0
    return find_nearest_types(kind.gpus, _usable_types(facts), price=price, excluded=kind.name)


def _suggest(kinds: Iterable[GpuType]) -> str:
    options = [
        f"{kind.name} ({kind.gpus} x {kind.gpu}, ${kind.price_usd_per_hour:.2f} per hour)" for kind in kinds
    ]
    return (
        f"alternatives: {', '.join(options)}; try: --instance-type {options[0].split()[0]}" if options else ""
    )


def _cheapest(
    spec: ClusterSpec, gpus: GpuRequest | None, facts: Facts, market: Market
) -> tuple[GpuType, str]:
    """Return the cheapest type that is offered and fits the image and the quota, and the reason."""
    needed = spec.gpus_needed or (DEFAULT_GPUS if gpus is None else 1)
    requirement = f"{needed} GPU{'s' * (needed != 1)} per node"
    if gpus is not None:
        requirement = str(gpus if gpus.count or needed == 1 else replace(gpus, count=needed))
    candidates = [
        kind
        for kind in (_usable_types(facts) if gpus is None else filter(gpus.matches, _offered_types(facts)))
        if (gpus is not None or float(kind.capability) >= _LEAST_CAPABILITY)
        and not kind.bare_metal
        and _comparable_price(kind, facts, market) is not None
        and (gpus is not None or not is_family_unlisted(kind, facts.image.name))
    ]
    # If the image supports none of these types, all of them are kept, and the plan then raises the error
    # about the image.
    fitting = [kind for kind in candidates if not find_image_problem(kind, facts.image.name)] or candidates
    offered = [kind for kind in fitting if kind.gpus >= needed]
    if not offered:
        raise _not_offered(requirement, needed, gpus, fitting, spec, facts)
    offered.sort(key=lambda kind: (_comparable_price(kind, facts, market) or 0, kind.name))
    for kind in offered:
        if allowed_by_quota(kind, spec.cluster.nodes, facts, market) is not False:
            why = f"the cheapest with {requirement} in {facts.region} that fits the image and the quota"
            return kind, why
    raise _over_quota(offered, spec, facts, market)


def _not_offered(
    requirement: str,
    needed: int,
    gpus: GpuRequest | None,
    fitting: list[GpuType],
    spec: ClusterSpec,
    facts: Facts,
) -> CloudError:
    """Return the error for GPUs that no type in the region has; it lists the GPU counts that are offered."""
    why, advice = _why_retired(gpus), []
    if gpus is not None and (wanted := gpus.count) is not None:
        any_count = replace(gpus, count=None)
        counts = sorted(
            {kind.gpus for kind in _usable_types(facts) if any_count.matches(kind) and not kind.bare_metal}
        )
        if counts:
            *smaller, last = map(str, counts)
            why = f"a node has {', '.join(smaller)}{' or ' * bool(smaller)}{last} x {gpus.model}"
            closest = min(counts, key=lambda count: (count < wanted, abs(count - wanted)))
            nodes = max(-(-wanted * spec.cluster.nodes // closest), 1)
            advice = [f"try: --gpus {shlex.quote(f'{gpus.model}:{closest}')} --nodes {nodes}"]
    if most := max((kind.gpus for kind in fitting), default=0):
        advice.append(f"try: --nodes {-(-needed * spec.cluster.nodes // most)}")
    general = "name a type with --instance-type, or another --region; awsddp plan --offers lists them"
    return CloudError(
        f"AWS offers no type with {requirement} in {facts.region}", why, "; or ".join([*advice, general])
    )


def _why_retired(gpus: GpuRequest | None) -> str:
    old = [retired for retired in RETIRED.values() if gpus and retired.gpu == gpus.name]
    return f"the last such family, {old[0].name.split('.')[0]}, was retired on {old[0].since}" if old else ""


def _comparable_price(kind: GpuType, facts: Facts, market: Market) -> float | None:
    """Return the price for comparing types: the spot price in the best zone, or else the on-demand price."""
    spot = facts.spot_prices.get(kind.name)
    if market == "spot" and spot:
        return min(spot.values())
    return on_demand_price(kind, facts)


def on_demand_price(kind: GpuType, facts: Facts) -> float | None:
    """Return one instance's on-demand price per hour, from the Pricing API or else from the table."""
    return facts.prices.get(kind.name, kind.price_usd_per_hour)


def allowed_by_quota(kind: GpuType, nodes: int, facts: Facts, market: Market = "on-demand") -> bool | None:
    """Return True if the quota allows this many nodes, or None if the quota could not be read."""
    free = _free_vcpus(kind, facts, market)
    return None if free is None else nodes * kind.vcpus <= free


def _free_vcpus(kind: GpuType, facts: Facts, market: Market) -> float | None:
    """Return how many of the quota's vCPUs are not in use, or None if the quota could not be read."""
    quota = find_quota(kind.name, market)
    allowed = facts.quotas.get(quota[0]) if quota else None
    return None if quota is None or allowed is None else allowed - facts.used_vcpus.get(quota[0], 0)


def _in_use(code: str, facts: Facts) -> str:
    used = facts.used_vcpus.get(code, 0)
    return f", of which {used} are in use" if used else ""


def describe_quota(kind: GpuType, nodes: int, facts: Facts, market: Market) -> tuple[str, tuple[str, ...]]:
    """Return a text with the needed vCPUs and the quota, and a warning if the quota could not be read."""
    quota, need = find_quota(kind.name, market), nodes * kind.vcpus
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
        code, name = find_quota(kind.name, market) or ("", "")
        quota = f"{name} ({code}) allows {facts.quotas[code]:g} vCPUs in {facts.region}{_in_use(code, facts)}"
        needs.setdefault(quota, []).append(f"{nodes} x {kind.name} need {nodes * kind.vcpus}")
    return CloudError(
        f"the vCPU quota of this account is too small for {nodes} nodes",
        "; ".join(f"{quota}: {', '.join(demands)}" for quota, demands in needs.items()),
        f"{_best_up(kinds, spec, facts, market)}\nawsddp doctor --request-quota   # request more from AWS",
        kind="quota",
    )


def _best_up(kinds: tuple[GpuType, ...], spec: ClusterSpec, facts: Facts, market: Market) -> str:
    """Return the command that launches the most GPUs that the quota allows, with the price as a comment.

    The command has at most the requested number of nodes. Among equal choices, a requested type is preferred,
    then more nodes, then the lower price.
    """
    gpus = parse_gpus(spec)
    options: list[tuple[tuple[float, ...], GpuType, int]] = []
    for kind in dict.fromkeys((*kinds, *_usable_types(facts))):
        price, free = _comparable_price(kind, facts, market), max(0, _free_vcpus(kind, facts, market) or 0)
        nodes = min(spec.cluster.nodes, int(free // kind.vcpus))
        usable = not kind.bare_metal and not find_image_problem(kind, facts.image.name)
        if nodes and price is not None and usable and (gpus is None or gpus.name == kind.gpu):
            options.append(((nodes * kind.gpus, kind in kinds, nodes, -price), kind, nodes))
    if not options:
        return "awsddp --local run   # a rehearsal: no suitable type is small enough for the quota"
    (*_, price), kind, nodes = max(options, key=lambda option: option[0])
    choice = f"--instance-type {kind.name}"
    if gpus is not None:
        choice = f"--gpus {shlex.quote(f'{kind.gpu}:{kind.gpus}')}"
    per_node = f"{kind.gpus} x {kind.gpu} per node" if kind.gpus else "no GPU"
    return (
        f"awsddp up --nodes {nodes} {choice}{' --spot' * (market == 'spot')}   "
        f"# {per_node}, ${-price * nodes:,.2f} per hour for the instances"
    )


def choose_subnets(
    spec: ClusterSpec, facts: Facts, kind: GpuType, market: Market, nodes: int
) -> tuple[Subnet, ...]:
    """Return one subnet for each zone to try. The zones have the spec's order, or else are sorted by spot
    price and then by name.
    """
    offered = facts.offers.get(kind.name, ())
    if facts.reservation is not None:
        offered = (facts.reservation.zone,)
    allowed = _allowed_zones(spec, facts, kind, offered)
    subnets = [subnet for subnet in facts.subnets if subnet.zone in allowed]
    # If no subnet is reachable, all of them are kept, and the plan then raises the error about the route.
    subnets = [subnet for subnet in subnets if is_reachable(spec, subnet)] or subnets
    with_room = [subnet for subnet in subnets if subnet.free_addresses >= nodes]
    if with_room:
        with_room.sort(key=lambda subnet: subnet.id, reverse=True)
        by_zone = {subnet.zone: subnet for subnet in with_room}
        spot = facts.spot_prices.get(kind.name, {}) if market == "spot" else {}
        listed = spec.capacity.zones
        order = {zone: index for index, zone in enumerate(listed)}
        names = sorted(by_zone, key=lambda zone: (order.get(zone, 0), spot.get(zone, float("inf")), zone))
        return tuple(by_zone[zone] for zone in names)
    if subnets:
        raise CloudError(
            f"no subnet has {nodes} free addresses",
            ", ".join(f"{subnet.id} has {subnet.free_addresses}" for subnet in subnets),
            "try fewer --nodes",
        )
    raise _no_subnet(spec, facts, kind, allowed)


def _allowed_zones(
    spec: ClusterSpec, facts: Facts, kind: GpuType, offered: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the offered zones that the spec allows.

    Raises ConfigError if a listed zone does not offer the type.
    """
    listed = spec.capacity.zones
    if not listed:
        return offered
    all_zones = sorted({*(zone for zones in facts.offers.values() for zone in zones), *offered})
    unknown = [zone for zone in listed if zone not in all_zones]
    if unknown:
        zone = unknown[0]
        region = re.match(r"[a-z]{2,}(-[a-z]+)+-\d+", zone)
        other_region = region[0] if region and region[0] != facts.region else None
        raise ConfigError(
            f"capacity.zones: {zone!r} is not a zone of {facts.region} with GPUs",
            f"it is a zone of {other_region}" if other_region else "",
            (f"--region {other_region}, or " if other_region else "")
            + f"-o 'capacity.zones=[...]' with one of: {', '.join(all_zones)}",
        )
    allowed = tuple(zone for zone in listed if zone in offered)
    if not allowed:
        subject = f"{facts.reservation.id} is in" if facts.reservation else f"{kind.name} is offered in"
        raise ConfigError(
            f"capacity.zones: {kind.name} is not offered in {', '.join(listed)}",
            f"{subject} {', '.join(offered)}",
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
            "name a subnet in one of these zones, or omit network.subnet",
        )
    return CloudError(
        f"no subnet for {kind.name}",
        f"it is offered in {', '.join(allowed)}; the default VPC of {facts.region} has subnets in {have}",
        "make a default VPC: aws ec2 create-default-vpc; or name a subnet: -o network.subnet=subnet-...",
    )


def list_similar_offers(facts: Facts, kind: GpuType, nodes: int, market: Market) -> tuple[Choice, ...]:
    """Return the three most similar other types that are offered."""
    return tuple(_choice(other, facts, nodes, market) for other in _similar_types(kind, facts))


def list_offers(facts: Facts, spec: ClusterSpec) -> tuple[Choice, ...]:
    """Return the types that are offered, with the cheapest first and types without a price last.

    GPUs on the command line filter the types; GPUs in awsddp.toml do not filter them, since the user may look
    for others. Raises ConfigError for invalid GPUs, or CloudError if no type has the requested GPUs.
    """
    gpus = parse_gpus(spec) if "cluster.gpus" in spec.from_cli else None
    kinds = [kind for kind in _offered_types(facts) if gpus is None or gpus.matches(kind)]
    if gpus is not None and not kinds:
        raise CloudError(
            f"AWS offers no type with {gpus} in {facts.region}", _why_retired(gpus), "omit --gpus: all types"
        )
    rows = [_choice(kind, facts, spec.cluster.nodes, "on-demand") for kind in kinds]
    return tuple(sorted(rows, key=lambda offer: (offer.price_usd_per_hour or math.inf, offer.instance_type)))


def _choice(kind: GpuType, facts: Facts, nodes: int, market: Market) -> Choice:
    return Choice(
        instance_type=kind.name,
        gpu=kind.gpu_shown,
        gpus_per_node=kind.gpus,
        price_usd_per_hour=on_demand_price(kind, facts),
        zones=facts.offers[kind.name],
        fits_quota=allowed_by_quota(kind, nodes, facts, market),
    )
