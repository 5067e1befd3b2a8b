"""What exists, as its tags tell it: instances, and the cluster that they, a group and a key make up.

Of one name and owner, or whatever carries our tags in every region.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypedDict

from awsddp.aws.api_errors import Refused
from awsddp.aws.client import Aws, Reply, Shape
from awsddp.aws.login import SESSION
from awsddp.aws.waits import patiently
from awsddp.compat.types import ADDRESS_USD_PER_HOUR, GPU_TYPES, disk_usd_per_hour
from awsddp.model.records import ENDED, Listed, Node, Remembered, read_numbers
from awsddp.settings.ec2_limits import FILTER_VALUES
from awsddp.util.parallel import both, each

LEFT = "none"
"""The tag `awsddp:nodes` of an instance that the cluster gave up when it became smaller."""
SpotPrices = Mapping[str, Mapping[str, float]]
"""US dollars per hour of one machine, by type and zone."""
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
    """A condition of a describe call."""

    Name: str
    Values: list[str]


Filters = list[Filter]


class _Range(Shape):
    cidr_ip: str = ""
    cidr_ipv6: str = ""
    group_id: str = ""


class Permission(Shape):
    """A rule of a security group."""

    ip_protocol: str
    from_port: int | None = None
    to_port: int | None = None
    ip_ranges: tuple[_Range, ...] = ()
    ipv6_ranges: tuple[_Range, ...] = ()
    user_id_group_pairs: tuple[_Range, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Whom it lets in: blocks of addresses, and groups."""
        ranges = (*self.ip_ranges, *self.ipv6_ranges, *self.user_id_group_pairs)
        return tuple(one.cidr_ip or one.cidr_ipv6 or one.group_id for one in ranges)


class SecurityGroup(Shape):
    """A security group and its rules."""

    group_id: str
    vpc_id: str = ""
    ip_permissions: tuple[Permission, ...] = ()
    ip_permissions_egress: tuple[Permission, ...] = ()

    @property
    def ssh_cidrs(self) -> tuple[str, ...]:
        """Whom port 22 is open for."""
        return tuple(source for one in self.ip_permissions if one.from_port == 22 for source in one.sources)


@dataclass(frozen=True)
class Kind:
    """A kind of resource beside the instances: what EC2 calls several, how one is named and deleted."""

    key: str
    id: str
    by: str


GROUPS = Kind("SecurityGroups", "GroupId", "GroupId")
KEYS = Kind("KeyPairs", "KeyPairId", "KeyName")
PLACEMENTS = Kind("PlacementGroups", "GroupId", "GroupName")
INTERFACES = Kind("NetworkInterfaces", "NetworkInterfaceId", "NetworkInterfaceId")
KINDS = (INTERFACES, Kind("Volumes", "VolumeId", "VolumeId"), GROUPS, PLACEMENTS, KEYS)
"""In the order in which they can be deleted."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """What belongs to a cluster beside its instances.

    It is deleted `by` its id or its name. `instance` is what an interface or a volume is attached to, "" for
    none, `group` the rules of a security group.
    """

    kind: Kind
    id: str
    by: str
    tags: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    in_use: bool = False
    instance: str = ""
    size_gb: int = 0
    ssh_cidrs: tuple[str, ...] | None = None


def tagged(name: str, *values: str) -> Filters:
    """Return the filter of a describe call for one tag."""
    return [{"Name": f"tag:{name}", "Values": list(values)}]


def by_id(*instance_ids: str) -> Filters:
    """Return the filter of a describe call for some instances; one that does not exist is no error."""
    return [{"Name": "instance-id", "Values": sorted(instance_ids)}]


def describe(aws: Aws, filters: Filters) -> list[Node]:
    """Return the instances that match, of all pages. Raises CloudError.

    The first filter may have any number of values.
    """
    asked = [filters]
    if filters and len(values := filters[0]["Values"]) > FILTER_VALUES:
        parts = [values[start : start + FILTER_VALUES] for start in range(0, len(values), FILTER_VALUES)]
        asked = [[{"Name": filters[0]["Name"], "Values": part}, *filters[1:]] for part in parts]
    found = [aws.pages("DescribeInstances", {"Filters": one}, "Reservations") for one in asked]
    return nodes_of(one for pages in found for reservation in pages for one in reservation["Instances"])


def resources(aws: Aws, filters: Filters, kinds: Iterable[Kind] = KINDS) -> list[Resource]:
    """Return what matches beside the instances, of all pages, its kinds in order. Raises CloudError."""

    def read(kind: Kind) -> list[Resource]:
        return [_resource(kind, item) for item in aws.pages(f"Describe{kind.key}", {"Filters": filters})]

    return [resource for found in each(read, kinds) for resource in found]


def _resource(kind: Kind, described: Reply) -> Resource:
    attached = (described.get("Attachments") or [described.get("Attachment", {})])[0]
    status = described.get("Status", "")
    group = SecurityGroup.of(described) if kind is GROUPS else None
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
    """Return the tags of anything that EC2 described; an interface calls them otherwise."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags") or described.get("TagSet", [])}


def node_of(described: Reply) -> Node:
    """Return the node that an instance is: the tag `awsddp:nodes` lists the numbers of its launch."""
    tags, index = tags_of(described), described.get("AmiLaunchIndex", 0)
    number = dict(enumerate(_numbers(tags))).get(index, index if tags.get("awsddp:nodes") != LEFT else -1)
    reason, placement = described.get("StateReason", {}), described.get("Placement", {})
    key, near = described.get("KeyName", ""), placement.get("GroupName", "")
    groups = [
        ("SecurityGroups", one["GroupName"], one["GroupId"]) for one in described.get("SecurityGroups", ())
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
        expires=_moment(tags, "awsddp:expires"),
        spot=described.get("InstanceLifecycle") == "spot",
        unfetched=tuple(tags.get("awsddp:unfetched", "").split()),
        changed=_changed(described.get("StateTransitionReason") or ""),
        profile=described.get("IamInstanceProfile", {}).get("Arn"),
        tags=tags,
        reason=(reason.get("Code", ""), reason.get("Message", "")),
        uses=tuple(
            one for one in (*groups, ("KeyPairs", key, key), ("PlacementGroups", near, near)) if one[1]
        ),
    )


def nodes_of(described: Iterable[Reply]) -> list[Node]:
    """Return the nodes that instances are; those of one launch that share an index are numbered by their ids.

    That EC2 counts the instances of a spot launch is documented nowhere.
    """
    nodes = [node_of(one) for one in described]
    launches: dict[tuple[str | None, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        if len(_numbers(node.tags)) > 1:
            launches[_launch_of(node)].append(node)
    numbers = {key: number for some in launches.values() for key, number in _by_id(some, nodes).items()}
    return [
        node
        if numbers.get(node.instance_id, node.node) == node.node
        else replace(node, node=numbers[node.instance_id], is_renumbered=True)
        for node in nodes
    ]


def _launch_of(node: Node) -> tuple[str | None, ...]:
    return tuple(node.tags.get(f"awsddp:{tag}") for tag in ("id", "owner", "created"))


def _by_id(launch: Sequence[Node], nodes: Sequence[Node]) -> dict[str, int]:
    """Return the numbers, by instance id, of nodes of one launch that all have the same; else nothing.

    Those that `nodes` of the launch have for themselves by their own tag are taken. A copy that somebody
    launches later from the console, with all tags, is none of the launch.
    """
    first, times = launch[0], [node.launched for node in launch if node.launched]
    if len({node.node for node in launch}) > 1 or (times and max(times) - min(times) > _ONE_LAUNCH):
        return {}
    same = [node for node in nodes if _launch_of(node) == _launch_of(first)]
    taken = {node.node for node in same if len(_numbers(node.tags)) == 1}
    free = sorted({number for node in launch for number in _numbers(node.tags)} - taken)
    ids = sorted(node.instance_id for node in launch)
    return dict(zip(ids, free, strict=False)) if 1 < len(ids) <= len(free) else {}


def _numbers(tags: Mapping[str, str]) -> tuple[int, ...]:
    """Return the node numbers of an instance's launch; none where the tag is not there or has none."""
    try:
        return read_numbers(tags["awsddp:nodes"])
    except (KeyError, ValueError):
        return ()


def end_of(node: Node) -> tuple[str, str]:
    """Return why an instance stopped or terminated: the kind of a job's cause, and EC2's own words."""
    code, text = node.reason
    return _KINDS.get(code, "node_lost"), text or "no reason was given"


def _changed(reason: str) -> datetime | None:
    """Return the time in a reason such as "User initiated (2026-11-22 09:24:31 GMT)"."""
    match = _WHEN.search(reason)
    return datetime.fromisoformat(match[1]).replace(tzinfo=UTC) if match else None


def _moment(tags: Mapping[str, str], name: str) -> datetime | None:
    try:
        return datetime.fromisoformat(tags[name])
    except (KeyError, ValueError):
        return None


def unlisted(refusal: Refused) -> bool:
    """Whether AWS does not find an instance, which may have been launched a moment ago."""
    return refusal.code == "InvalidInstanceID.NotFound"


def tag(aws: Aws, instance_ids: Sequence[str], name: str, value: str) -> None:
    """Write a tag of instances, or take it off where `value` is empty. Raises CloudError."""
    operation, pair = "CreateTags", {"Key": name, "Value": value}
    if not value:
        operation, pair = "DeleteTags", {"Key": name}
    request = {"Resources": list(instance_ids), "Tags": [pair]}
    patiently(lambda: aws.call(operation, request), passes=unlisted)


def find_clusters(
    aws: Aws,
    name: str,
    owner: str,
    *,
    remembered: Remembered | None = None,
    kinds: Iterable[Kind] = (GROUPS, KEYS, PLACEMENTS),
) -> tuple[Listed, ...]:
    """Return whatever exists by this name and owner, one record for each `awsddp:id`.

    Of what is beside the instances that is these `kinds`.

    An instance that is `remembered` belongs to its cluster whatever its tags are.

    Usually there is one. There are more where an id was lost before its cluster was ended; the first is the
    one that has running nodes. Terminated instances are named only beside something that exists.
    """
    filters = _filters(name, owner)
    nodes, others = both(partial(describe, aws, filters), partial(resources, aws, filters, kinds))
    late = _untagged(aws, nodes, remembered, name, owner)
    found = [cluster for cluster, _ in _clusters(aws.region, [*nodes, *others, *late])]
    return tuple(sorted(filter(exists, found), key=lambda one: (not one.live, one.created or _LAST, one.id)))


def exists(cluster: Listed) -> bool:
    """Whether anything of a cluster exists; terminated instances are listed for an hour."""
    return bool(cluster.leftovers) or any(node.state != "terminated" for node in cluster.nodes)


def of_other_sessions(aws: Aws, name: str, owner: str) -> tuple[Listed, ...]:
    """Return the living clusters of this name by sessions of the owner's role that awsddp named (SESSION).

    Such a name holds its host's, so that the user's own cluster has another owner on another host. Nothing
    for an owner that is no role. Raises CloudError.
    """
    role, is_role, _ = owner.partition(":")
    nodes = describe(aws, _filters(name, f"{role}:{SESSION}*")) if is_role else ()
    found = _clusters(aws.region, nodes)
    return tuple(one for one, _ in found if one.live and one.owner != owner)


def _filters(name: str, owner: str) -> Filters:
    return [*tagged("awsddp:cluster", name), *tagged("awsddp:owner", owner)]


def _untagged(
    aws: Aws, listed: Iterable[Node], remembered: Remembered | None, name: str, owner: str
) -> list[Node]:
    """Return the instances that are remembered and not listed by their tags, with the tags that they lack."""
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


def _clusters(region: str, parts: Iterable[Node | Resource]) -> list[tuple[Listed, list[Node | Resource]]]:
    """Return the clusters that carry an id, each with all that carries its tags."""
    found: dict[tuple[str, str, str], list[Node | Resource]] = defaultdict(list)
    for part in parts:
        # An id alone may be a copy: the console's "launch more like this" copies tags.
        name, owner, id = (part.tags.get(f"awsddp:{tag}", "") for tag in ("cluster", "owner", "id"))
        found[name, owner, id].append(part)
    return [(_cluster(region, *key, some), some) for key, some in found.items() if key[-1]]


def _cluster(region: str, name: str, owner: str, id: str, parts: Sequence[Node | Resource]) -> Listed:
    instances = [part for part in parts if isinstance(part, Node)]
    # What an instance uses goes with it.
    others = [part for part in parts if isinstance(part, Resource) and not part.in_use]
    lost_first = sorted(instances, key=lambda node: (node.node, node.state not in ENDED))
    replaced = {-1, *(node.node for node in lost_first if node.state not in ENDED)}
    nodes = [node for node in lost_first if node.state not in ENDED or node.node not in replaced]
    newest = max(instances, key=lambda node: node.launched or _FIRST, default=None)
    group = next((one for one in others if one.ssh_cidrs is not None), None)
    return Listed(
        name=name,
        id=id,
        owner=owner,
        region=region,
        nodes=tuple(nodes),
        created=min(filter(None, (_moment(part.tags, "awsddp:created") for part in parts)), default=None),
        expires=newest.expires if newest else None,
        leftovers=tuple(one.id for one in others),
        group=group.id if group else None,
        ssh_cidrs=group.ssh_cidrs if group else None,
        host=next(filter(None, (part.tags.get("awsddp:host", "") for part in parts)), ""),
    )


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A cluster, or what is left of one. `mine`: of the caller. `orphan`: mine, and nobody needs it any more.

    `price_usd_per_hour` is what its running machines and its disks cost; None where it is unknown.
    """

    cluster: Listed
    mine: bool
    orphan: bool
    price_usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """What was found. `unread` tells of each region that could not be asked why it could not."""

    holdings: tuple[Holding, ...]
    unread: tuple[str, ...]


def find_everywhere(
    gateway: Callable[[str], Aws], regions: Iterable[str], *, owner: str, now: datetime
) -> Everywhere:
    """Return every resource with awsddp's tags in these regions, searched in parallel.

    `gateway` makes the gateway to a region; `owner` is the caller. A region that refuses is reported,
    and does not hide the others.
    """

    def look(region: str) -> tuple[Holding, ...] | str:
        try:
            return find_in(gateway(region), owner=owner, now=now)
        except Refused as refusal:
            return f"{region}: {refusal.message}"

    found = each(look, regions)
    return Everywhere(
        holdings=tuple(one for part in found if not isinstance(part, str) for one in part),
        unread=tuple(part for part in found if isinstance(part, str)),
    )


def find_in(aws: Aws, *, owner: str, now: datetime) -> tuple[Holding, ...]:
    """Return whatever carries our tags in one region, by owner and name. Raises CloudError."""
    from awsddp.aws.prices import spot

    filters: Filters = [{"Name": "tag-key", "Values": ["awsddp:id"]}]
    nodes, others = both(partial(describe, aws, filters), partial(resources, aws, filters))
    spot_prices = spot(aws, {node.instance_type for node in nodes if node.spot})
    found = []
    for cluster, parts in _clusters(aws.region, [*nodes, *others]):
        if exists(cluster):
            mine, late = cluster.owner == owner, cluster.expires is not None and cluster.expires < now
            is_orphan, price = mine and (not cluster.live or late), _price(cluster, parts, spot_prices)
            found.append(Holding(cluster=cluster, mine=mine, orphan=is_orphan, price_usd_per_hour=price))
    return tuple(sorted(found, key=lambda one: (not one.mine, one.cluster.name, one.cluster.id)))


def _price(cluster: Listed, parts: Iterable[Node | Resource], spot_prices: SpotPrices) -> float | None:
    """Return what running machines cost per hour, and disks, which also cost while they stop.

    A spot machine costs what the market asks in its zone now, where AWS tells it, else the list price.
    """
    machines = 0.0
    for node in cluster.nodes:
        if node.state in (*ENDED, "stopped", "stopping"):
            continue
        kind = GPU_TYPES.get(node.instance_type)
        price = kind.price_usd_per_hour if kind is not None else None
        if node.spot:
            price = spot_prices.get(node.instance_type, {}).get(node.zone, price)
        if price is None:
            return None
        machines += price + (ADDRESS_USD_PER_HOUR if node.public_ip else 0.0)
    disks = sum(
        disk_usd_per_hour(part.size_gb) for part in parts if isinstance(part, Resource) and part.size_gb
    )
    return round(machines + disks, 4)
