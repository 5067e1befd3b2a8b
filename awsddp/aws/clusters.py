"""Find clusters by the tags on their instances and other resources: by name and owner, or in every region."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypedDict

from awsddp.aws.api_errors import AwsRefused
from awsddp.aws.client import AwsClient, Reply, Shape
from awsddp.aws.login import SESSION
from awsddp.aws.waits import retry_while_transient
from awsddp.compat.types import ADDRESS_USD_PER_HOUR, GPU_TYPES, disk_usd_per_hour
from awsddp.model.records import ENDED_STATES, ClusterListing, Node, RecordedCluster, parse_node_numbers
from awsddp.settings.ec2_limits import MAX_FILTER_VALUES
from awsddp.util.parallel import run_both, run_each

NUMBER_GIVEN_UP = "none"
"""The value of the tag `awsddp:nodes` on an instance that no longer belongs to the cluster's nodes."""
SpotPrices = Mapping[str, Mapping[str, float]]
"""A dict that maps a type and a zone to one instance's price in US dollars per hour."""
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
_ONE_LAUNCH = timedelta(minutes=1)
_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_KINDS = {
    "Server.ScheduledStop": "instance_retired",
    "Server.SpotInstanceShutdown": "spot_interruption",
    "Server.SpotInstanceTermination": "spot_interruption",
}


class Filter(TypedDict):
    """A condition in a describe call."""

    Name: str
    Values: list[str]


Filters = list[Filter]


class _Range(Shape):
    cidr_ip: str = ""
    cidr_ipv6: str = ""
    group_id: str = ""


class Permission(Shape):
    """A security group's rule."""

    ip_protocol: str
    from_port: int | None = None
    to_port: int | None = None
    ip_ranges: tuple[_Range, ...] = ()
    ipv6_ranges: tuple[_Range, ...] = ()
    user_id_group_pairs: tuple[_Range, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The address blocks and the security groups that the rule allows."""
        ranges = (*self.ip_ranges, *self.ipv6_ranges, *self.user_id_group_pairs)
        return tuple(source.cidr_ip or source.cidr_ipv6 or source.group_id for source in ranges)


class SecurityGroup(Shape):
    """A security group and its rules."""

    group_id: str
    vpc_id: str = ""
    ip_permissions: tuple[Permission, ...] = ()
    ip_permissions_egress: tuple[Permission, ...] = ()

    @property
    def ssh_cidrs(self) -> tuple[str, ...]:
        """The address blocks and the security groups to which port 22 is open."""
        of_ssh = [permission for permission in self.ip_permissions if permission.from_port == 22]
        return tuple(source for permission in of_ssh for source in permission.sources)


@dataclass(frozen=True)
class ResourceKind:
    """A kind of resource other than instances.

    `key` is EC2's plural noun, `id` is the field with a resource's id, and `by` is the parameter that names
    the resource in a delete call.
    """

    key: str
    id: str
    by: str


GROUPS = ResourceKind("SecurityGroups", "GroupId", "GroupId")
KEYS = ResourceKind("KeyPairs", "KeyPairId", "KeyName")
PLACEMENTS = ResourceKind("PlacementGroups", "GroupId", "GroupName")
INTERFACES = ResourceKind("NetworkInterfaces", "NetworkInterfaceId", "NetworkInterfaceId")
KINDS = (INTERFACES, ResourceKind("Volumes", "VolumeId", "VolumeId"), GROUPS, PLACEMENTS, KEYS)
"""All kinds, in the order in which they can be deleted."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A resource that belongs to a cluster and is not an instance.

    `by` is the id or the name that its delete call takes. `instance` is the instance that an interface or a
    volume is attached to, or "" if there is no such instance; `ssh_cidrs` is None for anything but a security
    group.
    """

    kind: ResourceKind
    id: str
    by: str
    tags: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    in_use: bool = False
    instance: str = ""
    size_gb: int = 0
    ssh_cidrs: tuple[str, ...] | None = None


def tagged(name: str, *values: str) -> Filters:
    """Return the filter that selects one tag in a describe call."""
    return [{"Name": f"tag:{name}", "Values": list(values)}]


def by_id(*instance_ids: str) -> Filters:
    """Return the filter that selects instances in a describe call; a missing instance is not an error."""
    return [{"Name": "instance-id", "Values": sorted(instance_ids)}]


def describe(aws: AwsClient, filters: Filters) -> list[Node]:
    """Return the matching instances from all pages. Raises CloudError.

    The first filter can have any number of values.
    """
    filter_sets = [filters]
    if filters and len(values := filters[0]["Values"]) > MAX_FILTER_VALUES:
        parts = [
            values[start : start + MAX_FILTER_VALUES] for start in range(0, len(values), MAX_FILTER_VALUES)
        ]
        filter_sets = [[{"Name": filters[0]["Name"], "Values": part}, *filters[1:]] for part in parts]
    reservations = [
        reservation
        for filter_set in filter_sets
        for reservation in aws.paginate("DescribeInstances", {"Filters": filter_set}, "Reservations")
    ]
    return nodes_of(instance for reservation in reservations for instance in reservation["Instances"])


def list_resources(aws: AwsClient, filters: Filters, kinds: Iterable[ResourceKind] = KINDS) -> list[Resource]:
    """Return the matching resources from all pages, sorted as in `kinds`. Raises CloudError."""

    def read(kind: ResourceKind) -> list[Resource]:
        return [_resource(kind, item) for item in aws.paginate(f"Describe{kind.key}", {"Filters": filters})]

    return [resource for matches in run_each(read, kinds) for resource in matches]


def _resource(kind: ResourceKind, described: Reply) -> Resource:
    attached = (described.get("Attachments") or [described.get("Attachment", {})])[0]
    status = described.get("Status", "")
    group = SecurityGroup.from_reply(described) if kind is GROUPS else None
    return Resource(
        kind=kind,
        id=described[kind.id],
        by=described[kind.by],
        tags=tags_of(described),
        status=status,
        in_use="in-use" in (status, described.get("State")),
        instance=attached.get("InstanceId", ""),
        size_gb=described.get("Size", 0),
        ssh_cidrs=group.ssh_cidrs if group else None,
    )


def tags_of(described: Reply) -> dict[str, str]:
    """Return the tags on any resource that EC2 described; an interface has them under the key TagSet."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags") or described.get("TagSet", [])}


def node_of(described: Reply) -> Node:
    """Return an instance as a node: the tag `awsddp:nodes` lists the node numbers of its launch."""
    tags, index = tags_of(described), described.get("AmiLaunchIndex", 0)
    default = -1 if tags.get("awsddp:nodes") == NUMBER_GIVEN_UP else index
    number = dict(enumerate(_launch_numbers(tags))).get(index, default)
    reason, placement = described.get("StateReason", {}), described.get("Placement", {})
    key, placement_group = described.get("KeyName", ""), placement.get("GroupName", "")
    groups = described.get("SecurityGroups", ())
    uses = [
        *(("SecurityGroups", group["GroupName"], group["GroupId"]) for group in groups),
        ("KeyPairs", key, key),
        ("PlacementGroups", placement_group, placement_group),
    ]
    return Node(
        node=number,
        instance_id=described["InstanceId"],
        state=described["State"]["Name"],
        instance_type=described["InstanceType"],
        zone=placement.get("AvailabilityZone", ""),
        image_id=described.get("ImageId", ""),
        private_ip=described.get("PrivateIpAddress") or None,
        public_ip=described.get("PublicIpAddress") or None,
        launched=described.get("LaunchTime"),
        expires=_parse_time(tags, "awsddp:expires"),
        spot=described.get("InstanceLifecycle") == "spot",
        unfetched=tuple(tags.get("awsddp:unfetched", "").split()),
        changed=_parse_changed(described.get("StateTransitionReason") or ""),
        profile=described.get("IamInstanceProfile", {}).get("Arn"),
        tags=tags,
        reason=(reason.get("Code", ""), reason.get("Message", "")),
        uses=tuple(use for use in uses if use[1]),
    )


def nodes_of(described: Iterable[Reply]) -> list[Node]:
    """Return instances as nodes.

    Instances that share a launch and an index (AmiLaunchIndex) are numbered by the order of their ids,
    because no documentation says that EC2 counts the instances in a spot launch.
    """
    nodes = [node_of(instance) for instance in described]
    launches: dict[tuple[str | None, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        if len(_launch_numbers(node.tags)) > 1:
            launches[_launch_of(node)].append(node)
    numbers = {
        key: number for launch in launches.values() for key, number in _numbers_by_id(launch, nodes).items()
    }
    return [
        node
        if numbers.get(node.instance_id, node.node) == node.node
        else replace(node, node=numbers[node.instance_id], is_renumbered=True)
        for node in nodes
    ]


def _launch_of(node: Node) -> tuple[str | None, ...]:
    return tuple(node.tags.get(f"awsddp:{tag}") for tag in ("id", "owner", "created"))


def _numbers_by_id(launch: Sequence[Node], nodes: Sequence[Node]) -> dict[str, int]:
    """Return {instance id: new number} for the nodes of one launch if they all have the same number, else {}.

    A number that is already in a node's own tag is not given to another node of the launch. An instance that
    a user later copies in the console, including its tags, is not part of the launch.
    """
    first, times = launch[0], [node.launched for node in launch if node.launched]
    if len({node.node for node in launch}) > 1 or (times and max(times) - min(times) > _ONE_LAUNCH):
        return {}
    same = [node for node in nodes if _launch_of(node) == _launch_of(first)]
    taken = {node.node for node in same if len(_launch_numbers(node.tags)) == 1}
    free = sorted({number for node in launch for number in _launch_numbers(node.tags)} - taken)
    ids = sorted(node.instance_id for node in launch)
    return dict(zip(ids, free, strict=False)) if 1 < len(ids) <= len(free) else {}


def _launch_numbers(tags: Mapping[str, str]) -> tuple[int, ...]:
    """Return the node numbers of an instance's launch, or () if the tag is missing or has no numbers."""
    try:
        return parse_node_numbers(tags["awsddp:nodes"])
    except (KeyError, ValueError):
        return ()


def find_end_cause(node: Node) -> tuple[str, str]:
    """Return the reason why an instance stopped or terminated: the kind of cause, and EC2's text."""
    code, text = node.reason
    return _KINDS.get(code, "node_lost"), text or "no reason was given"


def _parse_changed(reason: str) -> datetime | None:
    """Return the time in a reason such as "User initiated (2026-11-22 09:24:31 GMT)"."""
    match = _WHEN.search(reason)
    return datetime.fromisoformat(match[1]).replace(tzinfo=UTC) if match else None


def _parse_time(tags: Mapping[str, str], name: str) -> datetime | None:
    try:
        return datetime.fromisoformat(tags[name])
    except (KeyError, ValueError):
        return None


def is_instance_unknown(refusal: AwsRefused) -> bool:
    """Return True if AWS does not find an instance, which may be because it was launched a moment ago."""
    return refusal.code == "InvalidInstanceID.NotFound"


def tag(aws: AwsClient, instance_ids: Sequence[str], name: str, value: str) -> None:
    """Set a tag on instances, or remove it if `value` is empty. Raises CloudError."""
    operation, pair = "CreateTags", {"Key": name, "Value": value}
    if not value:
        operation, pair = "DeleteTags", {"Key": name}
    request = {"Resources": list(instance_ids), "Tags": [pair]}
    retry_while_transient(lambda: aws.call(operation, request), is_transient=is_instance_unknown)


def find_clusters(
    aws: AwsClient,
    name: str,
    owner: str,
    *,
    remembered: RecordedCluster | None = None,
    kinds: Iterable[ResourceKind] = (GROUPS, KEYS, PLACEMENTS),
) -> tuple[ClusterListing, ...]:
    """Return the clusters with this name and owner, one for each `awsddp:id`; usually there is one.

    Besides instances, the resources in `kinds` are listed. A `remembered` instance belongs to its cluster
    even if its tags have changed. There are several clusters if an id was lost before its cluster was
    terminated; clusters with live nodes come first. A cluster that has only terminated instances is left
    out. Raises CloudError.
    """
    filters = _filters(name, owner)
    nodes, other_resources = run_both(
        partial(describe, aws, filters), partial(list_resources, aws, filters, kinds)
    )
    untagged = _find_untagged(aws, nodes, remembered, name, owner)
    clusters = [cluster for cluster, _ in _clusters(aws.region, [*nodes, *other_resources, *untagged])]
    clusters.sort(key=lambda cluster: (not cluster.live, cluster.created or _LAST, cluster.id))
    return tuple(filter(exists, clusters))


def exists(cluster: ClusterListing) -> bool:
    """Return True if a resource exists. Terminated instances, which are listed for an hour, do not count."""
    return bool(cluster.leftovers) or any(node.state != "terminated" for node in cluster.nodes)


def find_clusters_of_other_sessions(aws: AwsClient, name: str, owner: str) -> tuple[ClusterListing, ...]:
    """Return the live clusters with this name that other sessions of the owner's role own.

    Only sessions that awsddp named are searched. A session's name contains the host's name, so a user who
    works on two hosts counts as two owners. Returns () for an owner that is not a role. Raises CloudError.
    """
    role, is_role, _ = owner.partition(":")
    nodes = describe(aws, _filters(name, f"{role}:{SESSION}*")) if is_role else ()
    clusters = _clusters(aws.region, nodes)
    return tuple(cluster for cluster, _ in clusters if cluster.live and cluster.owner != owner)


def _filters(name: str, owner: str) -> Filters:
    return [*tagged("awsddp:cluster", name), *tagged("awsddp:owner", owner)]


def _find_untagged(
    aws: AwsClient, listed: Iterable[Node], remembered: RecordedCluster | None, name: str, owner: str
) -> list[Node]:
    """Return the remembered instances that a listing by tags lacks, with their missing tags filled in."""
    if remembered is None:
        return []
    shown = {node.instance_id for node in listed if node.tags.get("awsddp:id") == remembered.id}
    missing = remembered.numbers.keys() - shown
    lacks = {"awsddp:id": remembered.id, "awsddp:cluster": name, "awsddp:owner": owner}
    return [
        replace(
            node,
            node=node.node if "awsddp:nodes" in node.tags else remembered.numbers[node.instance_id],
            tags={**node.tags, **lacks},
        )
        for node in (describe(aws, by_id(*missing)) if missing else ())
    ]


def _clusters(
    region: str, resources: Iterable[Node | Resource]
) -> list[tuple[ClusterListing, list[Node | Resource]]]:
    """Return the clusters that have an id, each with all the resources that have its tags."""
    members: dict[tuple[str, str, str], list[Node | Resource]] = defaultdict(list)
    for resource in resources:
        # An id is not enough to identify a cluster, since it may be a copy: the console's "launch more like
        # this" copies tags.
        name, owner, cluster_id = (
            resource.tags.get(f"awsddp:{tag}", "") for tag in ("cluster", "owner", "id")
        )
        members[name, owner, cluster_id].append(resource)
    return [(_cluster(region, *key, group), group) for key, group in members.items() if key[-1]]


def _cluster(
    region: str, name: str, owner: str, cluster_id: str, resources: Sequence[Node | Resource]
) -> ClusterListing:
    instances = [resource for resource in resources if isinstance(resource, Node)]
    # A resource that an instance uses is deleted with the instance.
    standalone = [
        resource for resource in resources if isinstance(resource, Resource) and not resource.in_use
    ]
    lost_first = sorted(instances, key=lambda node: (node.node, node.state not in ENDED_STATES))
    replaced = {-1, *(node.node for node in lost_first if node.state not in ENDED_STATES)}
    nodes = [node for node in lost_first if node.state not in ENDED_STATES or node.node not in replaced]
    newest = max(instances, key=lambda node: node.launched or _FIRST, default=None)
    group = next((resource for resource in standalone if resource.ssh_cidrs is not None), None)
    created = [_parse_time(resource.tags, "awsddp:created") for resource in resources]
    return ClusterListing(
        name=name,
        id=cluster_id,
        owner=owner,
        region=region,
        nodes=tuple(nodes),
        created=min(filter(None, created), default=None),
        expires=newest.expires if newest else None,
        leftovers=tuple(resource.id for resource in standalone),
        group=group.id if group else None,
        ssh_cidrs=group.ssh_cidrs if group else None,
        host=next(filter(None, (resource.tags.get("awsddp:host", "") for resource in resources)), ""),
    )


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A cluster, or its leftovers. `mine` is True if the caller's AWS identity owns the cluster.

    `orphan` is True if, in addition, the cluster is expired or has no nodes. `price_usd_per_hour` is the
    current price of its running instances and its disks (None: unknown).
    """

    cluster: ClusterListing
    mine: bool
    orphan: bool
    price_usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class RegionSearch:
    """The result of a search in all regions. `unread` has an error for each region that could not be read."""

    holdings: tuple[Holding, ...]
    unread: tuple[str, ...]


def find_everywhere(
    gateway: Callable[[str], AwsClient], regions: Iterable[str], *, owner: str, now: datetime
) -> RegionSearch:
    """Return every resource with awsddp's tags in these regions, searched in parallel.

    `gateway` makes a region's client; `owner` is the caller's AWS identity. If a region refuses the calls,
    its error is in `unread`.
    """

    def search(region: str) -> tuple[Holding, ...] | str:
        try:
            return find_in_region(gateway(region), owner=owner, now=now)
        except AwsRefused as refusal:
            return f"{region}: {refusal.message}"

    results = run_each(search, regions)
    return RegionSearch(
        holdings=tuple(holding for result in results if not isinstance(result, str) for holding in result),
        unread=tuple(result for result in results if isinstance(result, str)),
    )


def find_in_region(aws: AwsClient, *, owner: str, now: datetime) -> tuple[Holding, ...]:
    """Return every cluster in one region that has awsddp's tags, the owner's first. Raises CloudError."""
    from awsddp.aws.prices import read_spot_prices

    filters: Filters = [{"Name": "tag-key", "Values": ["awsddp:id"]}]
    nodes, other_resources = run_both(partial(describe, aws, filters), partial(list_resources, aws, filters))
    spot_prices = read_spot_prices(aws, {node.instance_type for node in nodes if node.spot})
    holdings = []
    for cluster, members in _clusters(aws.region, [*nodes, *other_resources]):
        if exists(cluster):
            is_mine = cluster.owner == owner
            is_expired = cluster.expires is not None and cluster.expires < now
            is_orphan = is_mine and (not cluster.live or is_expired)
            price = _price(cluster, members, spot_prices)
            holding = Holding(cluster=cluster, mine=is_mine, orphan=is_orphan, price_usd_per_hour=price)
            holdings.append(holding)
    holdings.sort(key=lambda holding: (not holding.mine, holding.cluster.name, holding.cluster.id))
    return tuple(holdings)


def _price(
    cluster: ClusterListing, members: Iterable[Node | Resource], spot_prices: SpotPrices
) -> float | None:
    """Return the price per hour of the running instances and all disks; None if a price is unknown.

    A spot instance has the current spot price in its zone, or the list price if AWS returns no spot price.
    """
    instances_usd = 0.0
    for node in cluster.nodes:
        if node.state in (*ENDED_STATES, "stopped", "stopping"):
            continue
        kind = GPU_TYPES.get(node.instance_type)
        price = kind.price_usd_per_hour if kind is not None else None
        if node.spot:
            price = spot_prices.get(node.instance_type, {}).get(node.zone, price)
        if price is None:
            return None
        instances_usd += price + (ADDRESS_USD_PER_HOUR if node.public_ip else 0.0)
    sizes_gb = [member.size_gb for member in members if isinstance(member, Resource)]
    return round(instances_usd + sum(map(disk_usd_per_hour, sizes_gb)), 4)
