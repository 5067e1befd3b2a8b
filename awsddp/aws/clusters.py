"""What exists, as its tags tell it: instances, and the cluster that they, a group and a key make up."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from awsddp.aws.credentials import SESSION
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.aws.waits import patiently
from awsddp.limits import FILTER_VALUES
from awsddp.parallel import all_of
from awsddp.records import ENDED, Listed, Node, Remembered, read_numbers

LEFT = "none"
"""The tag `awsddp:nodes` of an instance that the cluster gave up when it became smaller."""
SOURCES = (("IpRanges", "CidrIp"), ("Ipv6Ranges", "CidrIpv6"), ("UserIdGroupPairs", "GroupId"))
"""Whom a rule of a security group lets in: the lists of a permission, and what names an entry of each."""
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
_LAST = datetime.max.replace(tzinfo=UTC)
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_KINDS = {
    "Server.ScheduledStop": "instance_retired",
    "Server.SpotInstanceShutdown": "spot_interruption",
    "Server.SpotInstanceTermination": "spot_interruption",
}


def tagged(name: str, *values: str) -> list[dict[str, Any]]:
    """Return the filter of a describe call for one tag."""
    return [{"Name": f"tag:{name}", "Values": list(values)}]


def describe(aws: Aws, filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the instances that match, as EC2 describes them, of all pages. Raises CloudError.

    The first filter may have any number of values.
    """
    asked = [filters]
    if filters and len(values := filters[0]["Values"]) > FILTER_VALUES:
        parts = [values[start : start + FILTER_VALUES] for start in range(0, len(values), FILTER_VALUES)]
        asked = [[{"Name": filters[0]["Name"], "Values": part}, *filters[1:]] for part in parts]
    found = [aws.pages("DescribeInstances", {"Filters": one}, "Reservations") for one in asked]
    return [instance for pages in found for reservation in pages for instance in reservation["Instances"]]


def by_id(*instance_ids: str) -> list[dict[str, Any]]:
    """Return the filter of a describe call for some instances; one that does not exist is no error."""
    return [{"Name": "instance-id", "Values": sorted(instance_ids)}]


def tags_of(described: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of anything that EC2 described; an interface calls them otherwise."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags") or described.get("TagSet", [])}


def node_of(described: Mapping[str, Any]) -> Node:
    """Return the node that an instance is: the tag `awsddp:nodes` lists the numbers of its launch."""
    tags = tags_of(described)
    try:
        number = read_numbers(tags["awsddp:nodes"])[described.get("AmiLaunchIndex", 0)]
    except (KeyError, ValueError, IndexError):
        number = described.get("AmiLaunchIndex", 0) if tags.get("awsddp:nodes") != LEFT else -1
    return Node(
        node=number,
        instance_id=described["InstanceId"],
        state=described["State"]["Name"],
        instance_type=described["InstanceType"],
        zone=described.get("Placement", {}).get("AvailabilityZone", ""),
        image_id=described.get("ImageId", ""),
        private_ip=described.get("PrivateIpAddress") or None,
        public_ip=described.get("PublicIpAddress") or None,
        launched=described.get("LaunchTime"),
        expires=_moment(described, "awsddp:expires"),
        spot=described.get("InstanceLifecycle") == "spot",
        unfetched=tuple(tags.get("awsddp:unfetched", "").split()),
        changed=_changed(described.get("StateTransitionReason") or ""),
        profile=described.get("IamInstanceProfile", {}).get("Arn"),
    )


def end_of(described: Mapping[str, Any]) -> tuple[str, str]:
    """Return why an instance stopped or terminated: the kind of a job's cause, and EC2's own words."""
    reason = described.get("StateReason", {})
    return _KINDS.get(reason.get("Code", ""), "node_lost"), reason.get("Message", "no reason was given")


def _changed(reason: str) -> datetime | None:
    """Return the time in a reason such as "User initiated (2026-11-22 09:24:31 GMT)"."""
    match = _WHEN.search(reason)
    return datetime.fromisoformat(match[1]).replace(tzinfo=UTC) if match else None


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
    aws: Aws, name: str, owner: str, *, remembered: Remembered | None = None
) -> tuple[Listed, ...]:
    """Return whatever exists by this name and owner, one record for each `awsddp:id`.

    An instance that is `remembered` belongs to its cluster whatever its tags are.

    Usually there is one. There are more where an id was lost before its cluster was ended; the first is the
    one that has running nodes. Terminated instances are named only beside something that exists.
    """
    filters = _filters(name, owner)
    kinds = ("SecurityGroups", "KeyPairs", "PlacementGroups")
    works = [partial(aws.pages, f"Describe{kind}", {"Filters": filters}) for kind in kinds]
    described = all_of([partial(describe, aws, filters), *works])
    listed = [item for items in described for item in items]
    found = _clusters(aws, name, owner, [*listed, *_untagged(aws, listed, remembered)])
    return tuple(sorted(filter(exists, found), key=lambda one: (not one.live, one.created or _LAST, one.id)))


def exists(cluster: Listed) -> bool:
    """Whether anything of a cluster exists; terminated instances are listed for an hour."""
    return bool(cluster.leftovers) or any(node.state != "terminated" for node in cluster.nodes)


def glance(aws: Aws, name: str, owner: str, *, remembered: Remembered | None = None) -> tuple[Listed, ...]:
    """Return the clusters of this name and owner that have running nodes, by one call.

    What is `remembered` is asked for as `find_clusters` does; `leftovers` are not. Raises CloudError.
    """
    listed = describe(aws, _filters(name, owner))
    found = _clusters(aws, name, owner, [*listed, *_untagged(aws, listed, remembered)])
    return tuple(one for one in found if one.live)


def of_other_sessions(aws: Aws, name: str, owner: str) -> tuple[Listed, ...]:
    """Return the living clusters of this name by sessions of the owner's role that awsddp named (SESSION).

    Such a name holds its host's, so that the user's own cluster has another owner on another host. Nothing
    for an owner that is no role. Raises CloudError.
    """
    role, is_role, _ = owner.partition(":")
    by_owner: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for item in describe(aws, _filters(name, f"{role}:{SESSION}*")) if is_role else ():
        by_owner[tags_of(item)["awsddp:owner"]].append(item)
    by_owner.pop(owner, None)
    found = [one for whose, parts in by_owner.items() for one in _clusters(aws, name, whose, parts)]
    return tuple(one for one in found if one.live)


def _filters(name: str, owner: str) -> list[dict[str, Any]]:
    return [*tagged("awsddp:cluster", name), *tagged("awsddp:owner", owner)]


def _untagged(aws: Aws, listed: list[dict[str, Any]], remembered: Remembered | None) -> list[dict[str, Any]]:
    """Return the instances that are remembered and not listed by their tags, with the tags that they lack."""
    if remembered is None:
        return []
    shown = {item.get("InstanceId") for item in listed if tags_of(item).get("awsddp:id") == remembered.id}
    missing = remembered.numbers.keys() - shown
    return [_tagged_again(item, remembered) for item in describe(aws, by_id(*missing))] if missing else []


def _tagged_again(described: dict[str, Any], remembered: Remembered) -> dict[str, Any]:
    tags = tags_of(described)
    known = {"awsddp:id": remembered.id}
    if "awsddp:nodes" not in tags:
        known["awsddp:nodes"] = str(remembered.numbers[described["InstanceId"]])
        described = {**described, "AmiLaunchIndex": 0}
    return {**described, "Tags": [{"Key": key, "Value": value} for key, value in (tags | known).items()]}


def _clusters(aws: Aws, name: str, owner: str, described: list[dict[str, Any]]) -> list[Listed]:
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for item in described:
        parts[tags_of(item).get("awsddp:id", "")].append(item)
    return [cluster_of(name, owner, aws.region, key, items) for key, items in parts.items() if key]


def cluster_of(name: str, owner: str, region: str, cluster_id: str, parts: list[dict[str, Any]]) -> Listed:
    """Return the record of a cluster from all that carries its id, as EC2 describes it."""
    instances = [part for part in parts if "InstanceId" in part]
    lost_first = sorted(map(node_of, instances), key=lambda node: (node.node, node.state not in ENDED))
    replaced = {-1, *(node.node for node in lost_first if node.state not in ENDED)}
    nodes = [node for node in lost_first if node.state not in ENDED or node.node not in replaced]
    newest = max(instances, key=lambda part: part["LaunchTime"], default=None)
    group = next((part for part in parts if "IpPermissions" in part), None)
    return Listed(
        name=name,
        id=cluster_id,
        owner=owner,
        region=region,
        nodes=tuple(nodes),
        created=min(filter(None, (_moment(part, "awsddp:created") for part in parts)), default=None),
        expires=_moment(newest, "awsddp:expires") if newest else None,
        leftovers=tuple(id_of(part) for part in parts if "InstanceId" not in part),
        group=str(group["GroupId"]) if group else None,
        ssh_cidrs=_ssh_cidrs(group) if group else None,
        host=next(filter(None, (tags_of(part).get("awsddp:host", "") for part in parts)), ""),
    )


def id_of(described: Mapping[str, Any]) -> str:
    """Return the id of what belongs to a cluster beside its instances."""
    keys = ("GroupId", "KeyPairId", "VolumeId", "NetworkInterfaceId")
    return next(str(described[key]) for key in keys if key in described)


def _ssh_cidrs(group: Mapping[str, Any]) -> tuple[str, ...]:
    rules = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    return tuple(item[key] for kind, key in SOURCES for rule in rules for item in rule.get(kind, []))


def _moment(described: Mapping[str, Any], tag: str) -> datetime | None:
    try:
        return datetime.fromisoformat(tags_of(described)[tag])
    except (KeyError, ValueError):
        return None
