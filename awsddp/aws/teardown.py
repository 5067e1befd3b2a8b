"""Terminate and delete all resources with a cluster's id tag, and wait until AWS lists none of them.

A security group can be deleted only after every network interface in it:
https://docs.aws.amazon.com/vpc/latest/userguide/deleting-security-groups.html
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from awsddp.aws import clusters
from awsddp.aws.api_errors import AwsRefused
from awsddp.aws.client import AwsClient
from awsddp.aws.waits import deadline_s, poll
from awsddp.errors import LeftoverError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import ENDED_STATES, ClusterListing, Node
from awsddp.plan.records import resource_names
from awsddp.util.formatting import node_name

# how long a terminated instance's interface may still use a group
RELEASED_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Teardown:
    """The result of a teardown. `leftovers` has each resource that still exists, with the reason."""

    terminated: tuple[str, ...]
    leftovers: tuple[str, ...]


_OF_NODES = (clusters.GROUPS, clusters.PLACEMENTS, clusters.KEYS)
# Error codes for a resource that is temporarily still in use, and for a resource that no longer exists.
_HELD = frozenset({"DependencyViolation", "VolumeInUse", "InvalidPlacementGroup.InUse"})
_GONE = (".NotFound", ".Unknown")


def teardown(aws: AwsClient, cluster: ClusterListing, *, on_event: OnEvent) -> Teardown:
    """Terminate the cluster's instances, delete its other resources, and list them again to verify this.

    Changes only resources with this cluster's `awsddp:id` and owner, and the cluster's nodes even if their
    tags have changed. Resources that no longer exist count as deleted. Raises CloudError if AWS cannot be
    reached.
    """
    name = resource_names(cluster.name, cluster.id)["name"]
    filters = [*clusters.tagged("awsddp:id", cluster.id), *clusters.tagged("awsddp:owner", cluster.owner)]
    ours = frozenset(node.instance_id for node in cluster.live)
    run = _Run(aws=aws, filters=filters, on_event=on_event, name=name, ours=ours)
    term_s = deadline_s(node.instance_type for node in cluster.nodes)
    if poll(run.end_instances, deadline_s=term_s, first_s=0.2):
        on_event(Event("deleting what the nodes used", ""))
        # AWS soon deletes the interfaces that still use a group, unless it refused to terminate their
        # instances.
        poll(run.delete_all, deadline_s=0 if run.refused else RELEASED_S, first_s=0.5)
    leftovers = run.list_leftovers() if run.leftovers is None else run.leftovers
    return Teardown(
        terminated=tuple(key for key, state in run.states.items() if state == "terminated"),
        leftovers=tuple(leftovers.values()),
    )


def terminate_nodes(aws: AwsClient, nodes: Sequence[Node], *, on_event: OnEvent) -> None:
    """Terminate some of a cluster's nodes, and wait until they are terminated.

    Raises LeftoverError if a node could not be terminated, or CloudError if AWS cannot be reached.
    """
    keys = [node.instance_id for node in nodes]
    run = _Run(aws=aws, filters=clusters.by_id(*keys), on_event=on_event)
    term_s = deadline_s(node.instance_type for node in nodes)
    poll(run.end_instances, deadline_s=term_s, first_s=0.2)
    leftovers = [
        f"{key}: {run.refused.get(key, state)}" for key, state in run.states.items() if state != "terminated"
    ]
    if leftovers:
        raise LeftoverError(
            "some nodes could not be terminated",
            f"left: {', '.join(leftovers)}",
            "awsddp up   # again; what is left may still cost money",
        )


def give_up_nodes(aws: AwsClient, nodes: Sequence[Node]) -> None:
    """Tag nodes as no longer part of their cluster, so that they do not count as lost. Raises CloudError."""
    clusters.tag(aws, [node.instance_id for node in nodes], "awsddp:nodes", clusters.NUMBER_GIVEN_UP)


@dataclass(kw_only=True)
class _Run:
    """One teardown: the states of its instances, and the resources that AWS refused to terminate or delete.

    `name` is the name of the cluster's own key pair and groups. `ours` has the ids of the cluster's
    instances, including those that lack the cluster's tags.
    """

    aws: AwsClient
    filters: clusters.Filters
    on_event: OnEvent
    name: str = ""
    ours: frozenset[str] = frozenset()
    states: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    leftovers: dict[str, str] | None = None
    _untagged: set[str] = field(default_factory=set)
    _used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _deleted: set[tuple[clusters.ResourceKind, str]] = field(default_factory=set)
    _blocked: dict[str, str] = field(default_factory=dict)

    def end_instances(self) -> bool | None:
        """Terminate the live instances. Returns True once AWS has terminated, or refused to terminate, each
        of them, and None until then.
        """
        nodes = self._list_instances()
        for node in nodes:
            key, is_gone = node.instance_id, node.state == "terminated"
            node_text = node_name(node.node) if node.node >= 0 else ""
            if not is_gone and self.states.get(key) != node.state:
                self.on_event(Event(f"ending {key} ({node.state})", node_text))
            elif is_gone and self.states.get(key, node.state) != node.state:
                self.on_event(Event(f"terminated {key}", node_text, fraction=1.0))
            if not is_gone or key in self.states:
                self.states[key] = node.state
            # The cluster's resources that the instance uses may not be in AWS's listings yet.
            for kind, name, resource_id in node.uses:
                if name == self.name:
                    self._used[kind].add(resource_id)
        waiting = [
            node for node in nodes if node.state != "terminated" and node.instance_id not in self.refused
        ]
        living = [node.instance_id for node in waiting if node.state not in ENDED_STATES]
        tagged = [key for key in living if key not in self._untagged]
        for keys in ([tagged] if tagged else []) + [[key] for key in living if key in self._untagged]:
            self._terminate(keys)
        return None if any(node.instance_id not in self.refused for node in waiting) else True

    def _list_instances(self) -> list[Node]:
        """Return the instances that match the filters, and those in `ours` that do not."""
        listed = clusters.describe(self.aws, self.filters)
        missing = self.ours - {node.instance_id for node in listed}
        untagged = clusters.describe(self.aws, clusters.by_id(*missing)) if missing else []
        self._untagged |= {node.instance_id for node in untagged}
        return [*listed, *untagged]

    def _terminate(self, keys: list[str]) -> None:
        try:
            self.aws.call("TerminateInstances", {"InstanceIds": keys})
        except AwsRefused as refusal:
            # The error NotFound does not prove that an instance is terminated, because AWS may not know a new
            # instance yet. The instances are therefore listed again.
            if not refusal.retryable and not clusters.is_instance_unknown(refusal):
                lacks = "; it has lost its tags awsddp:id and awsddp:owner" * (keys[0] in self._untagged)
                self.refused.update(dict.fromkeys(keys, f"{refusal.why}{lacks}"))

    def delete_all(self) -> bool | None:
        """Delete the other resources and list them again. Returns True once AWS lists only those that it
        refused to delete, and None until then.

        Instances that AWS lists only now, while they use the group, are terminated as well. AWS's listings,
        and its replies that a resource does not exist, may be outdated.
        """
        self.leftovers = None
        if not self.end_instances():
            return None
        pending = [resource for resource in self._list_remaining() if resource.id not in self.refused]
        undeleted = [resource for resource in pending if not self._delete(resource)]
        if undeleted and not self._foreign_instances(undeleted):
            return None
        self.refused |= {resource.id: self._blocked.get(resource.id, "") for resource in undeleted}
        self.leftovers = self.list_leftovers()
        return True if self.leftovers.keys() <= self.refused.keys() else None

    def _delete(self, resource: clusters.Resource) -> bool:
        """Delete a resource; return True if it no longer exists.

        A resource in use is deleted with its instance. While AWS refuses to terminate a node, the resources
        that nodes need are kept, so that the node's results stay reachable.
        """
        kind, key = resource.kind, resource.id
        live = {instance_id for instance_id, state in self.states.items() if state not in ENDED_STATES}
        if kind in _OF_NODES and live & self.refused.keys():
            self._blocked[key] = "nodes that could not be terminated use it"
            return False
        if resource.in_use:
            return False
        try:
            self.aws.call(f"Delete{kind.key.removesuffix('s')}", {kind.by: resource.by})
        except AwsRefused as refusal:
            if not refusal.code.endswith(_GONE):
                if not refusal.retryable and refusal.code not in _HELD:
                    self.refused[key] = refusal.why
                self._blocked[key] = refusal.why
                return False
        else:
            if resource.tags:  # an unlisted key pair may not exist, and EC2 reports no error for it
                self.on_event(Event(f"deleted {key}", ""))
        self._deleted.add((kind, resource.by))
        return True

    def _list_remaining(self) -> list[clusters.Resource]:
        """Return the resources other than instances: those listed, and unlisted ones that instances use."""
        listed = clusters.list_resources(self.aws, self.filters)
        known_keys = {(resource.kind, resource.by) for resource in listed} | self._deleted
        used = [(kind, key) for kind in clusters.KINDS for key in sorted(self._used[kind.key])]
        unlisted = [
            clusters.Resource(kind=kind, id=key, by=key)
            for kind, key in used
            if (kind, key) not in known_keys
        ]
        return sorted([*listed, *unlisted], key=lambda resource: clusters.KINDS.index(resource.kind))

    def list_leftovers(self) -> dict[str, str]:
        """List the resources again; return {id: text} for those that still exist."""
        leftovers = {
            node.instance_id: self._describe(node.instance_id, node.state)
            for node in self._list_instances()
            if node.state != "terminated"
        }
        remaining = self._list_remaining()
        foreign = self._foreign_instances(remaining)
        for resource in remaining:
            users = [f"{resource.status} {_user(resource, foreign)}".strip()]
            for interface in self._interfaces(resource):
                users.append(f"held by {interface.id} {_user(interface, foreign)}".strip())
            leftovers[resource.id] = self._describe(resource.id, ", ".join(filter(None, users)))
        return leftovers

    def _describe(self, key: str, state: str) -> str:
        reasons = [text for text in (state, self.refused.get(key) or self._blocked.get(key, "")) if text]
        return f"{key}: {'; '.join(reasons)}" if reasons else key

    def _foreign_instances(self, resources: Sequence[clusters.Resource]) -> set[str]:
        """Return the ids of the live instances that use one of the resources but do not belong to the
        cluster. These instances are not terminated.

        An instance that AWS does not list yet is left out, because it may belong to the cluster.
        """
        users = [*resources, *(user for resource in resources for user in self._interfaces(resource))]
        unknown = {user.instance for user in users} - {""} - self.states.keys()
        listed = clusters.describe(self.aws, clusters.by_id(*unknown)) if unknown else []
        ours = {node.instance_id for node in clusters.describe(self.aws, self.filters)} if listed else set()
        return {node.instance_id for node in listed if node.state not in ENDED_STATES} - ours

    def _interfaces(self, group: clusters.Resource) -> list[clusters.Resource]:
        """Return the interfaces in a security group, or [] for any other resource."""
        if group.kind is not clusters.GROUPS:
            return []
        filters: clusters.Filters = [{"Name": "group-id", "Values": [group.id]}]
        return clusters.list_resources(self.aws, filters, (clusters.INTERFACES,))


def _user(resource: clusters.Resource, foreign: Collection[str]) -> str:
    instance = resource.instance
    lacks = ", which lacks the cluster's tags: terminate it, then awsddp down" * (instance in foreign)
    return f"of {instance}{lacks}" if instance else ""
