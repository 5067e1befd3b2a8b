"""Make a LaunchPlan, pure data, from a spec and facts read from AWS.

A plan can be printed, priced, tested and refused before it costs anything. The plan's requests are the ones
that are sent, but with placeholders for ids, secrets and times that do not exist yet: {"$ref": ...},
{"$secret": ...} and {"$now": seconds}. `RequestValues` replaces the placeholders with values.
"""

import math
import shlex
from collections.abc import Iterable
from dataclasses import replace

from awsddp.compat import types
from awsddp.compat.releases import PARTS_IMAGE, find_image_problem, find_unknown_torch, is_family_unlisted
from awsddp.compat.types import GpuType, Market
from awsddp.errors import AwsddpError, ConfigError
from awsddp.model.billing import Budget, Rate
from awsddp.plan import network
from awsddp.plan.records import LIST_PRICE, Data, Facts, LaunchPlan, Price, Subnet
from awsddp.plan.requests import build_requests
from awsddp.plan.save_checks import check_saving
from awsddp.plan.selection import (
    choose_subnets,
    choose_type,
    describe_quota,
    list_attempts,
    list_similar_offers,
)
from awsddp.settings import ec2_limits
from awsddp.settings.spec import ClusterSpec
from awsddp.settings.values import MIN_EXPIRY, parse_duration
from awsddp.util.formatting import duration

SPARE_DISK_GB = 100
LEAST_DISK_GB = 200
_USER = "ubuntu"
"""The login user that is assumed for an unknown image, since most images are built from the default image."""
_HIGHEST = "the highest spot price of the last 7 days"
_UNKNOWN = "the on-demand price: the spot prices of the last 7 days are unknown"


def make_plan(
    spec: ClusterSpec,
    facts: Facts,
    *,
    numbers: Iterable[int] | None = None,
    zone: str | None = None,
    spent_usd: float = 0.0,
) -> LaunchPlan:
    """Return the plan that launches the cluster in `spec`.

    `numbers` are the node numbers to launch (None: all). `zone` is the only zone to try, so that lost nodes
    are replaced in the other nodes' zone; `spent_usd` is the part of the budget that is already spent. The
    plan's `alternatives` are the other types and markets that the spec lists. Raises ConfigError for an
    invalid spec, or CloudError if AWS does not offer or allow what it requests.
    """
    ec2_limits.check_user_tags(spec.tags)
    if zone is not None:
        spec = replace(spec, capacity=replace(spec.capacity, zones=(zone,)))
    filled = tuple(range(spec.cluster.nodes)) if numbers is None else tuple(sorted(numbers))
    plans: list[LaunchPlan] = []
    refusals: list[AwsddpError] = []
    for attempt in list_attempts(spec, facts):
        try:
            plans.append(_plan(spec, facts, attempt, filled, spent_usd))
        except AwsddpError as refusal:
            refusals.append(refusal)
    if not plans:
        raise refusals[0]
    first, *others = plans
    skipped = [f"skipped: {refusal.message}" for refusal in refusals]
    return replace(first, warnings=(*first.warnings, *skipped), alternatives=tuple(others))


def check_untried_features(plan: LaunchPlan) -> None:
    """Raise ConfigError if the plan or an alternative has a feature that was never launched on AWS.

    `capacity.experimental` allows such features.
    """
    plans = (plan, *plan.alternatives)
    untried = dict.fromkeys(feature for candidate in plans for feature in candidate.untried)
    if untried and not plan.experimental:
        raise ConfigError(
            f"never launched on AWS with awsddp: {' and '.join(untried)}",
            "the requests are built and checked, but were never sent to AWS",
            "-o capacity.experimental=true allows it",
        )


def _plan(
    spec: ClusterSpec,
    facts: Facts,
    attempt: tuple[str | None, Market],
    numbers: tuple[int, ...],
    spent_usd: float,
) -> LaunchPlan:
    image, market = facts.image, attempt[1]
    kind, why = choose_type(spec, facts, *attempt)
    quota, unread = describe_quota(kind, spec.cluster.nodes, facts, market)
    _check_image(spec, facts, kind)
    _check_reservation(facts, len(numbers))
    disk_gb = _disk_gb(spec, facts, kind)
    tried = choose_subnets(spec, facts, kind, market, len(numbers))
    routes = [
        text
        for subnet in sorted(tried, key=lambda subnet: subnet.id)
        for text in network.check_route(spec, subnet, region=facts.region)
    ]
    network.check_session(spec)
    saves = check_saving(spec, facts) if numbers else []
    interfaces = network.choose_efa(spec, kind)
    group, placement_why = network.choose_placement(spec, facts, kind)
    plan = LaunchPlan(
        cluster=spec.name,
        target=facts.target,
        region=facts.region,
        owner=facts.owner,
        kind=kind,
        market=market,
        why=why,
        nodes=spec.cluster.nodes,
        numbers=numbers,
        pretended=image.pretends,
        ssh_user=spec.access.user or image.ssh_user or _USER,
        image=image,
        disk_gb=disk_gb,
        subnets=tried,
        uses=_uses(spec, facts, tried) if numbers else {},
        address=spec.network.address,
        jump=spec.network.jump or None,
        ssh_cidrs=() if facts.group else network.ssh_cidrs(spec, facts.callers),
        efa=interfaces,
        placement=group,
        placement_why=placement_why,
        choices=list_similar_offers(facts, kind, spec.cluster.nodes, market),
        price=_price(spec, facts, kind, market, {subnet.zone for subnet in tried}),
        quota=quota,
        expires_s=int(parse_duration(spec.cluster.expires)),
        untried=(
            *(("capacity blocks",) if market == "capacity-block" else ()),
            *(("EFA on several network cards",) if interfaces.count > 1 else ()),
        ),
        experimental=spec.capacity.experimental,
        data=facts.data,
    )
    _check_term(plan)
    _check_price(spec, plan)
    plan = _within_budget(spec, facts, plan, spent_usd)
    own_group = network.check_group(facts)
    warnings = (*unread, *plan.warnings, *_warnings(spec, facts, plan), *routes, *saves, *own_group)
    calls = build_requests(plan, spec, facts)
    ec2_limits.check_tag_specifications((call.operation, call.parameters) for call in calls)
    return replace(plan, requests=calls, warnings=warnings)


def _price(spec: ClusterSpec, facts: Facts, kind: GpuType, market: Market, zones: set[str]) -> Price:
    """Return the hourly cost of all nodes; for spot, it is the cost in the most expensive zone to try."""
    nodes = spec.cluster.nodes
    each, date, source = kind.price_usd_per_hour, kind.price_date, LIST_PRICE
    if market == "spot":
        spot = facts.spot_prices.get(kind.name, {})
        each = max(spot[zone] for zone in zones) if spot.keys() >= zones else None
        date, source = "now", "spot market, as of"
    elif market == "capacity-block":
        each, date, source = 0.0, "", "the block is prepaid"
    elif kind.name in facts.prices:
        each, date, source = facts.prices[kind.name], facts.price_date, "AWS Pricing API"
    addresses = types.ADDRESS_USD_PER_HOUR * nodes if spec.network.address == "public" else 0.0
    return Price(
        machines=None if each is None else each * nodes,
        disks=types.disk_usd_per_hour(_disk_gb(spec, facts, kind)) * nodes,
        addresses=addresses,
        date=date,
        source=source,
    )


def _check_term(plan: LaunchPlan) -> None:
    """Raise ConfigError if the plan launches nodes into a cluster that is about to expire."""
    if plan.numbers and plan.expires_s < parse_duration(MIN_EXPIRY):
        raise ConfigError(
            f"cluster.expires: the cluster ends in {duration(plan.expires_s)}, "
            "which is too soon for more nodes",
            "EC2 bills each node for at least a minute",
            "awsddp up --expires 24h   # a longer term",
        )


def _check_price(spec: ClusterSpec, plan: LaunchPlan) -> None:
    """Raise ConfigError if the plan's price per hour is over the limit."""
    limit, price = spec.cluster.max_price_usd, plan.price_usd_per_hour
    if limit is not None and (price is None or price > limit):
        cost = f"${price:,.2f}" if price is not None else "an unknown amount"
        raise ConfigError(
            f"cluster.max_price_usd: {plan.nodes} x {plan.instance_type} cost {cost} per hour, "
            f"but only ${limit:,.2f} is allowed",
            f"price: {plan.price.source} {plan.price.date}".strip(),
            "try fewer --nodes, or another --instance-type",
        )


def _within_budget(spec: ClusterSpec, facts: Facts, plan: LaunchPlan, spent_usd: float) -> LaunchPlan:
    """Return the plan with its budget. If the budget ends before the expiry, the nodes expire at that time,
    and the plan has a warning.

    Raises ConfigError if the budget is spent, or if no price is known.
    """
    if spec.cluster.budget_usd is None:
        return plan
    rate = Rate(usd_per_hour=plan.price_usd_per_hour)
    if plan.market == "spot":
        fixed_usd = plan.price.disks + plan.price.addresses
        rate = highest_spot_rate(fixed_usd, plan.nodes, plan.instance_type, plan.zones, facts)
    budget = Budget(
        usd=spec.cluster.budget_usd, spent_usd=spent_usd, usd_per_hour=rate.usd_per_hour, source=rate.source
    )
    plan, term_s = replace(plan, budget=budget), budget.lasts_s
    if term_s >= plan.expires_s:
        return plan
    text = f"the budget of ${budget.usd:,.2f} lasts {duration(term_s)}; then the nodes terminate"
    return replace(plan, expires_s=int(term_s), warnings=(text,))


def highest_spot_rate(
    fixed_usd: float, nodes: int, instance_type: str, zones: Iterable[str], facts: Facts
) -> Rate:
    """Return the highest rate for spot nodes in the zones; `fixed_usd` is the hourly price of disks and
    addresses.

    A spot price may rise until the nodes terminate, so the highest price in the last few days is assumed.
    """
    highest, kind = facts.highest_spot_prices.get(instance_type, {}), types.GPU_TYPES.get(instance_type)
    each = facts.prices.get(instance_type, kind.price_usd_per_hour if kind else None)
    source, zones = _UNKNOWN, set(zones)
    if zones and zones <= highest.keys():
        each, source = max(highest[zone] for zone in zones), _HIGHEST
    usd_per_hour = None if each is None else round(each * nodes + fixed_usd, 4)
    return Rate(usd_per_hour=usd_per_hour, source=source)


def _uses(spec: ClusterSpec, facts: Facts, tried: tuple[Subnet, ...]) -> dict[str, str]:
    """Return {kind: id or name} for the existing resources that the launch uses."""
    existing = {
        "subnet": tried[0].id if len(tried) == 1 else None,
        "key pair": spec.access.key,
        "security group": spec.network.security_group,
        "instance profile": spec.access.instance_profile,
        "KMS key": spec.access.kms_key,
        "place for results": facts.saving and facts.saving.uri,
        "reservation": spec.capacity.reservation,
        "tags": ", ".join(f"{key}={value}" for key, value in sorted(spec.tags.items())),
    }
    return {kind: name for kind, name in existing.items() if name}


def _check_image(spec: ClusterSpec, facts: Facts, kind: GpuType) -> None:
    image = facts.image
    reason = find_image_problem(kind, image.name)
    next_step = (
        "name an image with --image that has the type's architecture and a suitable driver, or name another "
        "--instance-type"
    )
    if reason and kind.share < 1:
        next_step = f"--gpus {kind.gpu}   # whole GPUs" if spec.cluster.gpus else "another --instance-type"
        if facts.target == "aws":
            next_step += f"\n--image {shlex.quote(PARTS_IMAGE)}   # or an image with that driver"
    if image.architecture != kind.cpu:
        reason = f"the image is for {image.architecture}, but the type is {kind.cpu}"
    if reason:
        raise ConfigError(
            f"cluster.image: {image.name} ({image.id}) does not fit {kind.name}",
            reason,
            next_step,
        )


def _check_reservation(facts: Facts, nodes: int) -> None:
    reservation, image = facts.reservation, facts.image
    next_step = "name another reservation, or omit capacity.reservation"
    if reservation is None:
        return
    if reservation.state != "active":
        fault, why = f"is {reservation.state}", "only an active reservation can be used"
    elif (reservation.platform, reservation.tenancy) != (image.platform, "default"):
        fault = f"is for {reservation.platform} with {reservation.tenancy} tenancy"
        why = f"the image {image.name} ({image.id}) is {image.platform} and is launched with default tenancy"
    elif reservation.free < nodes:
        fault, why = f"has {reservation.free} free machines, and {nodes} are requested", ""
        next_step = (
            f"try --nodes {reservation.free}"
            if reservation.free
            else "name another reservation, or terminate its instances"
        )
    else:
        return
    raise ConfigError(f"capacity.reservation: {reservation.id} {fault}", why, next_step)


def _disk_gb(spec: ClusterSpec, facts: Facts, kind: GpuType) -> int:
    """Return the root disk's size in GB, with room for data if the instance store is too small for it."""
    requested, image = spec.cluster.disk_gb, facts.image
    if requested is None:
        data_gb = math.ceil(sum(source.bytes or 0 for source in facts.data) / 1e9)
        extra_gb = 0 if data_gb <= kind.store_gb else data_gb
        return max(image.root_gb + SPARE_DISK_GB + extra_gb, LEAST_DISK_GB)
    if requested < image.root_gb:
        raise ConfigError(
            f"cluster.disk_gb: {requested} GB is smaller than the image",
            f"{image.name} needs {image.root_gb} GB",
            f"at least --disk {image.root_gb}",
        )
    return requested


def _data_warnings(data: Data, region: str, nodes: int) -> list[str]:
    """Return the warnings about a data source."""
    warnings = []
    if data.why:
        warnings.append(f"the size of data {data.name} is not known: {data.why}")
    if data.region not in (None, region) and data.bytes is not None:
        usd = data.bytes * nodes / 1e9 * types.REGION_USD_PER_GB
        per_gb = f"{types.REGION_USD_PER_GB:.2f}"
        warnings.append(
            f"data {data.name} is in {data.region}: its transfer to {nodes} nodes in {region} costs about "
            f"${usd:,.2f} (${per_gb} per GB within the US, more elsewhere)"
        )
    if data.requester_pays:
        warnings.append(f"you pay for reading data {data.name} (data.requester_pays)")
    return warnings


def _warnings(spec: ClusterSpec, facts: Facts, plan: LaunchPlan) -> list[str]:
    kind, image = plan.kind, facts.image
    warnings = [text for source in facts.data for text in _data_warnings(source, facts.region, plan.nodes)]
    if plan.price.machines is None:
        warnings.append(f"unknown price for {kind.name}")
    elif plan.has_list_price and facts.target == "aws":
        differ = f"; prices in {facts.region} may differ" * (facts.region != types.PRICE_REGION)
        warnings.append(
            f"prices are list prices of {types.PRICE_REGION} of {plan.price.date}: AWS returned none{differ}"
        )
    if kind.gpus == 0:
        warnings.append(f"{kind.name} has no GPU")
    elif image.rehearses:
        warnings.append(
            f"GPUs are rehearsed: {kind.gpus} x {kind.gpu} per node run on the CPU, nccl as gloo; a job has "
            f"one rank per GPU, {kind.gpus * plan.nodes} in total, unless --world-size is smaller"
        )
    elif image.pretends:
        warnings.append(f"GPUs are off ({kind.gpus} x {kind.gpu} per node): jobs run gloo on the CPU")
    elif is_family_unlisted(kind, image.name):
        warnings.append(f"the release notes of {image.name} do not list {kind.family}")
    if unknown := find_unknown_torch(image.name):
        warnings.append(
            f"this version of awsddp does not know PyTorch {unknown}'s image: its driver, CUDA and GPUs are "
            "not checked"
        )
    if image.newer:
        warnings.append(f"a newer image is not known to this version of awsddp: {image.newer}")
    if not (spec.access.user or image.ssh_user):
        warnings.append(
            f"the login user of {image.name} is unknown, so {_USER} is assumed: -o access.user=NAME"
        )
    if image.deprecated:
        warnings.append(f"{image.id} has been deprecated since {image.deprecated[:10]}; AWS may remove it")
    if kind.bare_metal:
        warnings.append(f"{kind.name} is bare metal: it takes 10 to 20 minutes to boot")
    if facts.credentials_s is not None and facts.credentials_s < plan.expires_s:
        warnings.append(
            f"the AWS credentials end in {duration(max(facts.credentials_s, 0))}, before the nodes do: "
            "log in again by then, because fetch and down need it; the nodes expire in any case"
        )
    if plan.market == "spot" and facts.saving is None:
        warnings.append(
            "spot nodes cannot be stopped: AWS may reclaim them at two minutes' notice, and they terminate "
            "when they expire"
        )
    if facts.reservation is not None and facts.reservation.ends:
        warnings.append(
            f"{facts.reservation.id} ends at {facts.reservation.ends:%Y-%m-%d %H:%M} UTC; "
            "AWS terminates its instances before that time"
        )
    if plan.untried and not plan.experimental:
        warnings.append(
            f"never launched on AWS: {' and '.join(plan.untried)}; `up` needs -o capacity.experimental=true"
        )
    return warnings
