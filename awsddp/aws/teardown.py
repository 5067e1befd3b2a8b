"""Ends everything that carries a cluster's id tag, and waits until AWS itself says that it is gone.

Order: https://docs.aws.amazon.com/vpc/latest/userguide/deleting-security-groups.html (a group goes only after
every network interface that is in it).
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from awsddp.aws.clusters import LEFT, by_id, describe, id_of, tag, tagged, tags_of, unlisted
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.aws.waits import deadline_s, poll
from awsddp.errors import LeftoverError
from awsddp.parallel import each
from awsddp.plan.records import names
from awsddp.records import ENDED, Listed, Node
from awsddp.report import Event, OnEvent

# How long a group may be held by interfaces of instances that are already terminated.
RELEASED_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Teardown:
    """What was ended. `leftovers` tells each thing that could not be ended, and what holds it."""

    terminated: tuple[str, ...]
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of resource beside the instances: what EC2 calls several, how one is named and deleted."""

    key: str
    id: str
    by: str


KINDS = (
    Kind("NetworkInterfaces", "NetworkInterfaceId", "NetworkInterfaceId"),
    Kind("Volumes", "VolumeId", "VolumeId"),
    Kind("SecurityGroups", "GroupId", "GroupId"),
    Kind("PlacementGroups", "GroupId", "GroupName"),
    Kind("KeyPairs", "KeyPairId", "KeyName"),
)
_OF_NODES = frozenset({"SecurityGroups", "PlacementGroups", "KeyPairs"})
# What goes away by itself, and what is gone already.
_HELD = frozenset({"DependencyViolation", "VolumeInUse", "InvalidPlacementGroup.InUse"})
_GONE = (".NotFound", ".Unknown")


def teardown(aws: Aws, cluster: Listed, *, on_event: OnEvent) -> Teardown:
    """End the cluster: its instances, then what is left beside them, and list again to prove it.

    Only what carries this cluster's `awsddp:id` and its owner is touched, and its nodes, whatever their tags
    are; what is gone already is ended.
    Raises CloudError where AWS cannot be asked at all.
    """
    name = names(cluster.name, cluster.id)["name"]
    filters = [*tagged("awsddp:id", cluster.id), *tagged("awsddp:owner", cluster.owner)]
    ours = frozenset(node.instance_id for node in cluster.live)
    ending = _Ending(aws=aws, filters=filters, on_event=on_event, name=name, ours=ours)
    term_s = deadline_s(node.instance_type for node in cluster.nodes)
    if poll(ending.instances, deadline_s=term_s, first_s=0.2):
        # What holds a group goes away by itself, unless it is an instance that may not be ended.
        poll(ending.proven, deadline_s=0 if ending.refused else RELEASED_S, first_s=0.5)
    left = ending.leftovers() if ending.left is None else ending.left
    return Teardown(
        terminated=tuple(key for key, state in ending.states.items() if state == "terminated"),
        leftovers=tuple(left.values()),
    )


def end_nodes(aws: Aws, nodes: Sequence[Node], *, on_event: OnEvent) -> None:
    """End some nodes of a cluster that goes on, and wait until AWS says that they are terminated.

    Raises LeftoverError where one could not be ended, CloudError where AWS cannot be asked.
    """
    keys = [node.instance_id for node in nodes]
    ending = _Ending(aws=aws, filters=by_id(*keys), on_event=on_event)
    term_s = deadline_s(node.instance_type for node in nodes)
    poll(ending.instances, deadline_s=term_s, first_s=0.2)
    left = [
        f"{key}: {ending.refused.get(key, state)}"
        for key, state in ending.states.items()
        if state != "terminated"
    ]
    if left:
        raise LeftoverError(
            "some nodes could not be terminated",
            f"left: {', '.join(left)}",
            "awsddp up   # again; what is left may still cost money",
        )


def give_up(aws: Aws, nodes: Sequence[Node]) -> None:
    """Tag nodes as no longer of their cluster: their end is then no loss. Raises CloudError."""
    tag(aws, [node.instance_id for node in nodes], "awsddp:nodes", LEFT)


@dataclass(kw_only=True)
class _Ending:
    """One teardown: the states of the instances that it ends, and what AWS refused to end.

    `name` is that of the key and the groups that are the cluster's own, `ours` are instances of the
    cluster that need not have its tags.
    """

    aws: Aws
    filters: list[dict[str, Any]]
    on_event: OnEvent
    name: str = ""
    ours: frozenset[str] = frozenset()
    states: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] | None = None
    _untagged: set[str] = field(default_factory=set)
    _used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _gone: set[str] = field(default_factory=set)
    _held: dict[str, str] = field(default_factory=dict)

    def instances(self) -> bool | None:
        """Ask for the end of what lives; True once each is terminated, or its end is refused."""
        found = {}
        for item in self._instances():
            found[item["InstanceId"]] = item["State"]["Name"]
            self._note(item)
        for key, state in found.items():
            if state != "terminated" and key not in self.states:
                self.on_event(Event(f"ending {key} ({state})"))
            if state != "terminated" or key in self.states:
                self.states[key] = state
        living = [key for key, state in found.items() if state not in ENDED and key not in self.refused]
        tagged = [key for key in living if key not in self._untagged]
        for keys in ([tagged] if tagged else []) + [[key] for key in living if key in self._untagged]:
            self._terminate(keys)
        waiting = [key for key, state in found.items() if state != "terminated" and key not in self.refused]
        return None if waiting else True

    def _instances(self) -> list[dict[str, Any]]:
        """Return the instances that the filters name, and those that are ours by their ids."""
        listed = describe(self.aws, self.filters)
        missing = self.ours - {item["InstanceId"] for item in listed}
        found = describe(self.aws, by_id(*missing)) if missing else []
        self._untagged |= {item["InstanceId"] for item in found}
        return [*listed, *found]

    def _note(self, instance: dict[str, Any]) -> None:
        """Keep by what to delete whatever of ours an instance uses: it may not be listed itself yet."""
        groups = [group for group in instance.get("SecurityGroups", []) if group["GroupName"] == self.name]
        self._used["SecurityGroups"].update(group["GroupId"] for group in groups)
        named = {
            "KeyPairs": instance.get("KeyName"),
            "PlacementGroups": instance.get("Placement", {}).get("GroupName"),
        }
        for key, name in named.items():
            if name == self.name:
                self._used[key].add(name)

    def _terminate(self, keys: list[str]) -> None:
        try:
            self.aws.call("TerminateInstances", {"InstanceIds": keys})
        except Refused as refusal:
            # NotFound this soon is no proof of an end: the next look decides.
            if not refusal.retryable and not unlisted(refusal):
                lacks = "; it has lost its tags awsddp:id and awsddp:owner" * (keys[0] in self._untagged)
                self.refused.update(dict.fromkeys(keys, f"{refusal.why}{lacks}"))

    def proven(self) -> bool | None:
        """End the rest and list again; True once AWS shows only what it refused to end, which is `left`.

        A list may be a little old, and so may the answer that something is gone.
        """
        self.left = self.leftovers() if self.rest() else None
        return True if self.left is not None and self.left.keys() <= self.refused.keys() else None

    def rest(self) -> bool | None:
        """Delete what is left beside the instances; True once nothing is, or its end is refused.

        A launch that shows late, while its group is held, is ended here too.
        """
        if not self.instances():
            return None
        held = [
            item
            for kind, found in self._left()
            for item in found
            if item[kind.id] not in self.refused and not self._delete(kind, item)
        ]
        if held and self._strangers(held):
            self.refused |= {id_of(item): self._held.get(id_of(item), "") for item in held}
            return True
        return None if held else True

    def _delete(self, kind: Kind, item: dict[str, Any]) -> bool:
        """Delete one thing; return whether it is gone. What an instance holds goes with it.

        What the nodes need stays while one of them may not be ended: it must be reached to save its results.
        """
        key = item[kind.id]
        living = [one for one, state in self.states.items() if one in self.refused and state not in ENDED]
        if living and kind.key in _OF_NODES:
            self._held[key] = "nodes that could not be terminated use it"
            return False
        if "in-use" in (item.get("Status"), item.get("State")):
            return False
        try:
            self.aws.call(f"Delete{kind.key.removesuffix('s')}", {kind.by: item[kind.by]})
        except Refused as refusal:
            if refusal.code.endswith(_GONE):
                self._gone.add(item[kind.by])
                return True
            if not refusal.retryable and refusal.code not in _HELD:
                self.refused[key] = refusal.why
            self._held[key] = refusal.why
            return False
        self._gone.add(item[kind.by])
        if tags_of(item):  # what was not listed may have been gone before: EC2 deletes a key pair twice
            self.on_event(Event(f"deleted {key}"))
        return True

    def _left(self) -> list[tuple[Kind, list[dict[str, Any]]]]:
        found = each(lambda kind: self.aws.pages(f"Describe{kind.key}", {"Filters": self.filters}), KINDS)
        return [
            (kind, [*items, *self._unlisted(kind, items)]) for kind, items in zip(KINDS, found, strict=True)
        ]

    def _unlisted(self, kind: Kind, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        known = {item[kind.by] for item in listed} | self._gone
        return [{kind.id: key, kind.by: key} for key in sorted(self._used[kind.key] - known)]

    def leftovers(self) -> dict[str, str]:
        """List again; return each resource that still exists, with the reason."""
        told = {
            item["InstanceId"]: self._told(item["InstanceId"], item["State"]["Name"])
            for item in self._instances()
            if item["State"]["Name"] != "terminated"
        }
        items = [item for _, found in self._left() for item in found]
        strangers = self._strangers(items)
        for item in items:
            holders = self._interfaces(id_of(item)) if id_of(item).startswith("sg-") else ()
            users = [f"{item.get('Status', '')} {_of(item, strangers)}".strip()]
            users += [f"held by {id_of(one)} {_of(one, strangers)}".strip() for one in holders]
            told[id_of(item)] = self._told(id_of(item), ", ".join(filter(None, users)))
        return told

    def _told(self, key: str, state: str) -> str:
        reasons = [part for part in (state, self.refused.get(key) or self._held.get(key, "")) if part]
        return f"{key}: {'; '.join(reasons)}" if reasons else key

    def _strangers(self, held: Sequence[dict[str, Any]]) -> set[str]:
        """Return the living instances that hold something and are not the cluster's: none of them goes away.

        One that AWS does not list yet may be the cluster's.
        """
        groups = [id_of(item) for item in held if id_of(item).startswith("sg-")]
        interfaces = [item for group in groups for item in self._interfaces(group)]
        unknown = {_instance(item) for item in (*held, *interfaces)} - {""} - self.states.keys()
        found = describe(self.aws, by_id(*unknown)) if unknown else []
        late = {item["InstanceId"] for item in describe(self.aws, self.filters)} if found else set()
        return {item["InstanceId"] for item in found if item["State"]["Name"] not in ENDED} - late

    def _interfaces(self, group: str) -> list[dict[str, Any]]:
        filters = [{"Name": "group-id", "Values": [group]}]
        return self.aws.pages("DescribeNetworkInterfaces", {"Filters": filters})


def _instance(item: dict[str, Any]) -> str:
    """Return the instance that an interface or a volume is attached to."""
    attachments = item.get("Attachments") or [item.get("Attachment") or {}]
    return str(attachments[0].get("InstanceId", ""))


def _of(item: dict[str, Any], strangers: Collection[str]) -> str:
    instance = _instance(item)
    lacks = ", which lacks the cluster's tags: terminate it, then awsddp down" * (instance in strangers)
    return f"of {instance}{lacks}" if instance else ""
