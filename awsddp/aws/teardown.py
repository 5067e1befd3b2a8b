"""Ends everything that carries a cluster's id tag, and waits until AWS itself says that it is gone.

Order: https://docs.aws.amazon.com/vpc/latest/userguide/deleting-security-groups.html (a group goes only after
every network interface that is in it).
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from awsddp.aws import clusters
from awsddp.aws.api_errors import Refused
from awsddp.aws.client import Aws
from awsddp.aws.waits import deadline_s, poll
from awsddp.errors import LeftoverError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import ENDED, Listed, Node
from awsddp.plan.records import names
from awsddp.util.format import node_name

# How long a group may be held by interfaces of instances that are already terminated.
RELEASED_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Teardown:
    """What was ended. `leftovers` tells each thing that could not be ended, and what holds it."""

    terminated: tuple[str, ...]
    leftovers: tuple[str, ...]


_OF_NODES = (clusters.GROUPS, clusters.PLACEMENTS, clusters.KEYS)
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
    filters = [*clusters.tagged("awsddp:id", cluster.id), *clusters.tagged("awsddp:owner", cluster.owner)]
    ours = frozenset(node.instance_id for node in cluster.live)
    ending = _Ending(aws=aws, filters=filters, on_event=on_event, name=name, ours=ours)
    term_s = deadline_s(node.instance_type for node in cluster.nodes)
    if poll(ending.instances, deadline_s=term_s, first_s=0.2):
        on_event(Event("deleting what the nodes used", ""))
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
    ending = _Ending(aws=aws, filters=clusters.by_id(*keys), on_event=on_event)
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
    clusters.tag(aws, [node.instance_id for node in nodes], "awsddp:nodes", clusters.LEFT)


@dataclass(kw_only=True)
class _Ending:
    """One teardown: the states of the instances that it ends, and what AWS refused to end.

    `name` is that of the key and the groups that are the cluster's own, `ours` are instances of the
    cluster that need not have its tags.
    """

    aws: Aws
    filters: clusters.Filters
    on_event: OnEvent
    name: str = ""
    ours: frozenset[str] = frozenset()
    states: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] | None = None
    _untagged: set[str] = field(default_factory=set)
    _used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _gone: set[tuple[clusters.Kind, str]] = field(default_factory=set)
    _held: dict[str, str] = field(default_factory=dict)

    def instances(self) -> bool | None:
        """Ask for the end of what lives; True once each is terminated, or its end is refused."""
        found = self._instances()
        for node in found:
            key, gone = node.instance_id, node.state == "terminated"
            who = node_name(node.node) if node.node >= 0 else ""
            if not gone and self.states.get(key) != node.state:
                self.on_event(Event(f"ending {key} ({node.state})", who))
            elif gone and self.states.get(key, node.state) != node.state:
                self.on_event(Event(f"terminated {key}", who, fraction=1.0))
            if not gone or key in self.states:
                self.states[key] = node.state
            # Keep by what to delete whatever of ours it uses: that may not be listed itself yet.
            for kind, name, id in node.uses:
                if name == self.name:
                    self._used[kind].add(id)
        waiting = [
            node for node in found if node.state != "terminated" and node.instance_id not in self.refused
        ]
        living = [node.instance_id for node in waiting if node.state not in ENDED]
        tagged = [key for key in living if key not in self._untagged]
        for keys in ([tagged] if tagged else []) + [[key] for key in living if key in self._untagged]:
            self._terminate(keys)
        return None if any(node.instance_id not in self.refused for node in waiting) else True

    def _instances(self) -> list[Node]:
        """Return the instances that the filters name, and those that are ours by their ids."""
        listed = clusters.describe(self.aws, self.filters)
        missing = self.ours - {node.instance_id for node in listed}
        found = clusters.describe(self.aws, clusters.by_id(*missing)) if missing else []
        self._untagged |= {node.instance_id for node in found}
        return [*listed, *found]

    def _terminate(self, keys: list[str]) -> None:
        try:
            self.aws.call("TerminateInstances", {"InstanceIds": keys})
        except Refused as refusal:
            # NotFound this soon is no proof of an end: the next look decides.
            if not refusal.retryable and not clusters.unlisted(refusal):
                lacks = "; it has lost its tags awsddp:id and awsddp:owner" * (keys[0] in self._untagged)
                self.refused.update(dict.fromkeys(keys, f"{refusal.why}{lacks}"))

    def proven(self) -> bool | None:
        """End the rest and list again; True once AWS shows only what it refused to end, which is `left`.

        A launch that shows late, while its group is held, is ended here too. A list may be a little old, and
        so may the answer that something is gone.
        """
        self.left = None
        if not self.instances():
            return None
        held = [one for one in self._left() if one.id not in self.refused and not self._delete(one)]
        if held and not self._strangers(held):
            return None
        self.refused |= {one.id: self._held.get(one.id, "") for one in held}
        self.left = self.leftovers()
        return True if self.left.keys() <= self.refused.keys() else None

    def _delete(self, resource: clusters.Resource) -> bool:
        """Delete one thing; return whether it is gone. What an instance holds goes with it.

        What the nodes need stays while one of them may not be ended: it must be reached to save its results.
        """
        kind, key = resource.kind, resource.id
        living = [one for one, state in self.states.items() if one in self.refused and state not in ENDED]
        if living and kind in _OF_NODES:
            self._held[key] = "nodes that could not be terminated use it"
            return False
        if resource.in_use:
            return False
        try:
            self.aws.call(f"Delete{kind.key.removesuffix('s')}", {kind.by: resource.by})
        except Refused as refusal:
            if not refusal.code.endswith(_GONE):
                if not refusal.retryable and refusal.code not in _HELD:
                    self.refused[key] = refusal.why
                self._held[key] = refusal.why
                return False
        else:
            if resource.tags:  # what was not listed may have been gone before: EC2 deletes a key pair twice
                self.on_event(Event(f"deleted {key}", ""))
        self._gone.add((kind, resource.by))
        return True

    def _left(self) -> list[clusters.Resource]:
        """Return what is listed beside the instances, and what they use and is not listed yet."""
        listed = clusters.resources(self.aws, self.filters)
        known = {(one.kind, one.by) for one in listed} | self._gone
        used = [(kind, key) for kind in clusters.KINDS for key in sorted(self._used[kind.key])]
        found = [
            *listed,
            *(clusters.Resource(kind=kind, id=key, by=key) for kind, key in used if (kind, key) not in known),
        ]
        return sorted(found, key=lambda one: clusters.KINDS.index(one.kind))

    def leftovers(self) -> dict[str, str]:
        """List again; return each resource that still exists, with the reason."""
        told = {
            node.instance_id: self._told(node.instance_id, node.state)
            for node in self._instances()
            if node.state != "terminated"
        }
        left = self._left()
        strangers = self._strangers(left)
        for one in left:
            users = [f"{one.status} {_of(one, strangers)}".strip()]
            users += [f"held by {user.id} {_of(user, strangers)}".strip() for user in self._interfaces(one)]
            told[one.id] = self._told(one.id, ", ".join(filter(None, users)))
        return told

    def _told(self, key: str, state: str) -> str:
        reasons = [part for part in (state, self.refused.get(key) or self._held.get(key, "")) if part]
        return f"{key}: {'; '.join(reasons)}" if reasons else key

    def _strangers(self, held: Sequence[clusters.Resource]) -> set[str]:
        """Return the living instances that hold something and are not the cluster's: none of them goes away.

        One that AWS does not list yet may be the cluster's.
        """
        users = [*held, *(user for one in held for user in self._interfaces(one))]
        unknown = {one.instance for one in users} - {""} - self.states.keys()
        found = clusters.describe(self.aws, clusters.by_id(*unknown)) if unknown else []
        late = {node.instance_id for node in clusters.describe(self.aws, self.filters)} if found else set()
        return {node.instance_id for node in found if node.state not in ENDED} - late

    def _interfaces(self, group: clusters.Resource) -> list[clusters.Resource]:
        """Return the interfaces that a security group is of; none of another resource."""
        if group.kind is not clusters.GROUPS:
            return []
        filters: clusters.Filters = [{"Name": "group-id", "Values": [group.id]}]
        return clusters.resources(self.aws, filters, (clusters.INTERFACES,))


def _of(resource: clusters.Resource, strangers: Collection[str]) -> str:
    instance = resource.instance
    lacks = ", which lacks the cluster's tags: terminate it, then awsddp down" * (instance in strangers)
    return f"of {instance}{lacks}" if instance else ""
