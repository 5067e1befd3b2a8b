"""Plan the steps that reconcile a cluster with its spec, as pure data."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from typing import Literal

from awsddp.compat.types import GPU_TYPES
from awsddp.model.billing import Budget, Rate
from awsddp.model.records import ClusterListing, Node
from awsddp.plan.network import check_profiles, check_session, is_within, ssh_cidrs
from awsddp.plan.records import Step
from awsddp.plan.selection import parse_gpus
from awsddp.settings.spec import ClusterSpec
from awsddp.settings.values import parse_duration
from awsddp.util.formatting import node_name, utc

TYPE_KEYS = ("cluster.instance_type", "cluster.gpus")
NODE_KEYS = (*TYPE_KEYS, "cluster.image", "cluster.spot", "local.gpus")
"""The settings of a node; a node whose values differ from the requested ones is replaced."""
_LAST = datetime.max.replace(tzinfo=UTC)
# Expiries within a minute of each other count as equal.
_SAME_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ExistingCluster:
    """The existing cluster according to its tags, and the settings that this machine last requested.

    `image` is the image as requested, and `gpus` is the nodes' `local.gpus`. `spent_usd` is the cost so far
    (None: unknown), and `rate` is the hourly cost that a budget assumes for all `nodes`. `impaired` are the
    instances that fail AWS's status checks, and `others` are clusters with the same name and owner that
    another machine created.
    """

    cluster: ClusterListing
    nodes: int
    instance_type: str
    expires: datetime
    image: str | None = None
    gpus: str = "on"
    spent_usd: float | None = 0.0
    rate: Rate = field(default_factory=Rate)
    impaired: frozenset[str] = frozenset()
    others: tuple[ClusterListing, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """The steps, in order. `spec` is the spec for the launch; if `zone` is not None, the launch uses only
    that zone.

    `nodes` are the existing nodes that stay; `expires` is the time when all nodes expire; `spent_usd` is the
    cost so far.
    """

    spec: ClusterSpec
    steps: tuple[Step, ...]
    nodes: tuple[Node, ...]
    zone: str | None
    expires: datetime
    spent_usd: float = 0.0

    def steps_of(self, do: str) -> tuple[Step, ...]:
        """Return the steps whose kind is `do`."""
        return tuple(step for step in self.steps if step.do == do)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The node numbers to launch."""
        return tuple(number for step in self.steps_of("launch") for number in step.numbers)

    @property
    def needs_consent(self) -> bool:
        """True if instances are launched, started or terminated, which costs money or interrupts work."""
        return any(step.do in ("end", "start", "launch") for step in self.steps)


def plan_reconciliation(
    spec: ClusterSpec, existing: ExistingCluster, *, image_id: str, callers: tuple[str, ...], now: datetime
) -> Reconciliation:
    """Return the steps that reconcile the cluster with `spec`; a setting that `spec` does not set stays as it
    is.

    `image_id` is the current id of the spec's image, and `callers` are this machine's addresses as CIDRs.
    Raises ConfigError if `network.ssh_cidr` or `cluster.gpus` is invalid, if Systems Manager could not
    connect to a node, or if the budget is spent.
    """
    requested = spec.cluster.nodes if "cluster.nodes" in spec.explicit else existing.nodes
    kept_nodes: dict[int, Node] = {}
    ends = []
    for node in sorted(existing.cluster.live, key=_precedence):
        why = _why_terminated(spec, existing, node, image_id, requested)
        if not why and node.node in kept_nodes:
            why = f"{kept_nodes[node.node].instance_id} is {node_name(node.node)} already"
        if why:
            ends.append(_step("end", [node], why=why))
        else:
            kept_nodes[node.node] = node
    for other in existing.others:
        why = f"of a second cluster {other.name} ({other.id}), created at the same time on another machine"
        ends.append(_step("end", other.live, value=other.id, why=why))
    nodes = tuple(kept_nodes.values())
    starts = [node for node in nodes if node.state in ("stopped", "stopping")]
    missing = tuple(sorted(set(range(requested)) - set(kept_nodes)))
    check_profiles(spec, nodes, region=existing.cluster.region)
    if missing:
        check_session(spec)
    full_term = _expiry(spec, existing, now, is_restart=bool(starts) or not nodes)
    expires, why = _within_budget(spec, existing, now, requested if nodes else 0, full_term)
    outdated = tuple(node.instance_id for node in nodes if node.expires != expires)
    cidrs = _cidrs(spec, existing.cluster.ssh_cidrs, callers)
    steps = [
        *_open_steps(cidrs, existing.cluster.ssh_cidrs),
        *ends,
        *([_step("start", starts)] if starts else ()),
        *([_launch_step(existing, missing, ends)] if missing else ()),
        *([Step(do="expire", instances=outdated, value=utc(expires), why=why)] if outdated else ()),
    ]
    return Reconciliation(
        spec=_launch_spec(spec, existing, nodes, requested, cidrs, int((expires - now).total_seconds())),
        steps=tuple(steps),
        nodes=nodes,
        zone=nodes[0].zone if nodes else None,
        expires=expires,
        spent_usd=_spent_usd(existing, now),
    )


def _precedence(node: Node) -> tuple[int, datetime, str]:
    """Return a sort key that makes every client keep the same node if two nodes have the same number."""
    return node.node, node.launched or _LAST, node.instance_id


def _step(do: Literal["end", "start"], nodes: Sequence[Node], *, value: str = "", why: str = "") -> Step:
    numbers, instances = (node.node for node in nodes), (node.instance_id for node in nodes)
    return Step(do=do, numbers=tuple(numbers), instances=tuple(instances), value=value, why=why)


def _launch_step(existing: ExistingCluster, missing: tuple[int, ...], ends: list[Step]) -> Step:
    replaced = {number for step in ends for number in step.numbers}
    lost = [number for number in missing if number < existing.nodes and number not in replaced]
    why = f"{', '.join(map(node_name, lost))} ended" if lost else ""
    return Step(do="launch", numbers=missing, why=why)


def _why_terminated(
    spec: ClusterSpec, existing: ExistingCluster, node: Node, image_id: str, nodes: int
) -> str:
    """Return the reason why a live node must terminate, or "" if it stays; `nodes` nodes are requested."""
    if not 0 <= node.node < nodes:
        return f"{nodes} node{'s' * (nodes != 1)} requested"
    if node.instance_id in spec.cluster.replace:
        return "its replacement is requested; the node is lost even if AWS has no other machine"
    if node.instance_id in existing.impaired:
        return "AWS's status checks report it impaired"
    if not is_of_type(spec, node.instance_type):
        requested = spec.cluster.instance_type or spec.cluster.gpus
        return f"it is a {node.instance_type}, but {requested} is requested: it is rebuilt"
    market, market_text = ("spot", "a spot") if node.spot else ("on-demand", "an on-demand")
    if "cluster.spot" in spec.explicit and market not in spec.cluster.markets:
        return f"it is {market_text} machine, but the other market is requested"
    if spec.cluster.image not in (None, existing.image) and node.image_id != image_id:
        return f"its image is {node.image_id}, but {image_id} is requested: it is rebuilt"
    if spec.local.gpus != existing.gpus:
        return f"local.gpus is {existing.gpus}, but {spec.local.gpus} is requested: it is rebuilt"
    return ""


def is_of_type(spec: ClusterSpec, name: str) -> bool:
    """Return True if `spec` accepts nodes of this instance type. Raises ConfigError for invalid GPUs."""
    if spec.cluster.types:
        return name in spec.cluster.types
    gpus, kind = parse_gpus(spec), GPU_TYPES.get(name)
    return gpus is None or (kind is not None and gpus.matches(kind))


def _expiry(spec: ClusterSpec, existing: ExistingCluster, now: datetime, *, is_restart: bool) -> datetime:
    """Return when the nodes expire.

    A duration on the command line counts from now. If all nodes start or are new (`is_restart`), a duration
    in the configuration counts from now, too. Otherwise, it counts from the cluster's launch and never makes
    the nodes expire earlier.
    """
    term = timedelta(seconds=parse_duration(spec.cluster.expires))
    expires = existing.expires
    if is_restart or "cluster.expires" in spec.from_cli:
        expires = now + term
    elif "cluster.expires" in spec.explicit and existing.cluster.created is not None:
        expires = max(expires, existing.cluster.created + term)
    is_same = abs((expires - existing.expires).total_seconds()) <= _SAME_S
    return existing.expires if is_same else expires


def _within_budget(
    spec: ClusterSpec, existing: ExistingCluster, now: datetime, nodes: int, expires: datetime
) -> tuple[datetime, str]:
    """Return when the nodes expire, and the reason. If `nodes` nodes spend the budget before `expires`, the
    time when they do so is returned; otherwise, `expires` is returned, and the reason is "".

    If no node stays (`nodes` is 0), the launch plan applies the budget.
    """
    if spec.cluster.budget_usd is None or not nodes:
        return expires, ""
    all_usd = existing.rate.usd_per_hour
    budget = Budget(
        usd=spec.cluster.budget_usd,
        spent_usd=_spent_usd(existing, now),
        usd_per_hour=None if all_usd is None else all_usd / existing.nodes * nodes,
        source=existing.rate.source,
    )
    spent = now + timedelta(seconds=int(min(budget.lasts_s, 1e9)))
    if spent >= expires:
        return expires, ""
    is_same = abs((spent - existing.expires).total_seconds()) <= _SAME_S
    return existing.expires if is_same else spent, f"the budget of {budget}"


def _spent_usd(existing: ExistingCluster, now: datetime) -> float:
    """Return the cluster's cost so far, or an upper bound from the assumed rate if the cost is unknown."""
    if existing.spent_usd is not None:
        return existing.spent_usd
    hours = (now - (existing.cluster.created or now)).total_seconds() / 3600
    return hours * (existing.rate.usd_per_hour or 0.0)


def _cidrs(
    spec: ClusterSpec, opened: tuple[str, ...] | None, callers: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Return the blocks and groups to which SSH will be open; None means that the rules stay as they are.

    Without `network.ssh_cidr`, the result has this machine's current addresses, and those blocks and groups
    that are already open because a user configured them.
    """
    if spec.network.ssh_cidr or (spec.network.jump and opened is not None):
        return ssh_cidrs(spec, ())
    if opened is None or not callers:
        return opened
    blocks = [cidr for cidr in opened if cidr.startswith("sg-") or ip_network(cidr).num_addresses > 1]
    outside = [cidr for cidr in callers if not any(is_within(cidr, block) for block in blocks)]
    return (*blocks, *outside)


def _open_steps(cidrs: tuple[str, ...] | None, opened: tuple[str, ...] | None) -> list[Step]:
    if cidrs is None or opened is None or set(cidrs) == set(opened):
        return []
    new = ", ".join(cidr for cidr in cidrs if cidr not in opened)
    closed = ", ".join(cidr for cidr in opened if cidr not in cidrs)
    why = ", ".join(part for part in (new and f"{new} is new", closed and f"{closed} is closed") if part)
    return [Step(do="open", value=", ".join(cidrs), why=why)]


def _launch_spec(
    spec: ClusterSpec,
    existing: ExistingCluster,
    nodes: tuple[Node, ...],
    requested: int,
    cidrs: tuple[str, ...] | None,
    expires_s: int,
) -> ClusterSpec:
    """Return the spec for the launch, in the cluster's own region. New nodes get the instance type, image and
    market of an existing node.
    """
    cluster = replace(spec.cluster, nodes=requested, expires=f"{max(expires_s, 0)}s")
    capacity = replace(spec.capacity, regions=())
    network = replace(spec.network, ssh_cidr=cidrs or ())
    if nodes:
        first = nodes[0]
        cluster = replace(
            cluster, instance_type=first.instance_type, gpus=None, image=first.image_id, spot=first.spot
        )
    elif not (cluster.instance_type or cluster.gpus):
        cluster = replace(cluster, instance_type=existing.instance_type)
    return replace(spec, cluster=cluster, capacity=capacity, network=network)
