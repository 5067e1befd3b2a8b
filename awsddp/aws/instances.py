"""Launch instances zone by zone, resume an interrupted launch, and wait until instances run."""

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from functools import partial
from uuid import uuid4

from awsddp.aws.api_errors import AwsRefused, none_if_refused
from awsddp.aws.client import AwsClient, Reply, Shape
from awsddp.aws.clusters import (
    NUMBER_GIVEN_UP,
    by_id,
    describe,
    find_end_cause,
    is_instance_unknown,
    nodes_of,
    tag,
    tagged,
    tags_of,
)
from awsddp.aws.launch_resources import is_group_unknown
from awsddp.aws.waits import CLOCK, VISIBLE_S, poll, retry_while_transient
from awsddp.errors import AwsddpError, CapacityError, CloudError, NodeError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import ENDED_STATES, LaunchIntent, Node, parse_node_numbers
from awsddp.plan.records import LaunchPlan, Request, Subnet
from awsddp.plan.requests import RequestValues
from awsddp.util.formatting import node_name
from awsddp.util.parallel import run_each

# EC2 honours a client token for at least an hour; a request that is repeated later could launch again.
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
REPLAY_S = 3600
_POLL_S = 2.0  # short, because the nodes that already run cost money during the wait
_ON = ("pending", "running")
_AGAIN = "awsddp up   # again\nawsddp down   # or end it"
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_BY_USER = "Client.UserInitiatedShutdown"
OVER_QUOTA = frozenset({"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"})
NEXT_ZONE = frozenset({"Unsupported", "InsufficientFreeAddressesInSubnet"})


def launch(
    aws: AwsClient,
    plan: LaunchPlan,
    values: RequestValues,
    *,
    write_intent: Callable[[LaunchIntent], None],
    on_event: OnEvent,
) -> tuple[Node, ...]:
    """Launch all of the plan's nodes in one zone, or no nodes at all; the plan's zones are tried in order.

    A zone where the placement group has no room is tried again without the group, except for nodes with EFA.
    `values` has the ids `name`, `cluster_id` and `security_group`. Each attempt has its own client token, and
    `write_intent` is called with the whole request before the request is sent. If no zone has the instances,
    raises CapacityError with the reason for each zone. Raises CloudError if AWS refuses the launch.
    """
    attempts: list[tuple[str, AwsddpError]] = []

    def attempt(subnet: Subnet, requested: Request) -> tuple[Node, ...]:
        token = f"{values.ids['cluster_id']}-{uuid4().hex}"
        request = values.resolve(requested, subnet=subnet.id, client_token=token)
        intent = LaunchIntent(
            cluster_id=values.ids["cluster_id"],
            zone=subnet.zone,
            written=CLOCK.now().replace(microsecond=0),
            parameters=request.parameters,
        )
        write_intent(intent)
        return _run(aws, request.parameters, on_event=on_event)

    def launch_in(subnet: Subnet) -> tuple[Node, ...]:
        request = plan.request("RunInstances")
        try:
            return attempt(subnet, request)
        except CapacityError:
            if not plan.is_placement_optional:
                raise
        on_event(Event(f"{subnet.zone}: no room in the placement group, asking without it"))
        alone = {name: value for name, value in request.parameters.items() if name != "Placement"}
        return attempt(subnet, replace(request, parameters=alone))

    for subnet in plan.subnets:
        on_event(Event(f"asking for {len(plan.numbers)} x {plan.instance_type} in {subnet.zone}", ""))
        try:
            return launch_in(subnet)
        except (CapacityError, AwsRefused) as refusal:
            if isinstance(refusal, AwsRefused) and refusal.code not in NEXT_ZONE:
                raise
            attempts.append((subnet.zone, refusal))
        on_event(Event(f"{subnet.zone}: {attempts[-1][1].why}"))
    if all(isinstance(error, AwsRefused) for _, error in attempts):
        raise attempts[-1][1]
    location = plan.zones[0] if len(plan.zones) == 1 else f"any zone of {plan.region}"
    raise CapacityError(
        f"AWS has no {len(plan.numbers)} x {plan.instance_type} now in {location}",
        "; ".join(f"{zone}: {error.why}" for zone, error in attempts),
        "try again later, or one of: "
        + ", ".join(f"--instance-type {c.instance_type}" for c in plan.choices)
        + (
            ", -o capacity.placement_group=false" if plan.placement and not plan.is_placement_optional else ""
        ),
    )


def _run(aws: AwsClient, parameters: Reply, *, on_event: OnEvent) -> tuple[Node, ...]:
    """Send RunInstances and return the nodes. The unchanged request is repeated while the outcome is unknown
    or while AWS does not see the resources that the request names.
    """
    call = partial(aws.call, "RunInstances", parameters)
    reply = retry_while_transient(call, is_transient=_is_eventual_consistency, on_event=on_event)
    return _tag_numbers(aws, nodes_of(reply["Instances"]))


def _tag_numbers(aws: AwsClient, nodes: Collection[Node]) -> tuple[Node, ...]:
    """Write each renumbered node's number to its tag, and return the launch's nodes by number.

    Without the tag, the node's number would change when another node of the launch terminates. Raises
    AwsRefused if a tag cannot be written. The error's kind is `unavailable`, and its AWS error code is empty,
    because AWS did not refuse the launch and the nodes run.
    """
    try:
        run_each(
            lambda node: tag(aws, [node.instance_id], "awsddp:nodes", str(node.node)),
            [node for node in nodes if node.is_renumbered],
        )
    except CloudError as error:
        raise AwsRefused(
            f"the nodes are launched, but their numbers could not be written: {error.message}",
            error.why,
            "\n".join(filter(None, (error.next, _AGAIN))),
            code="",
            kind="unavailable",
            needs_login=error.needs_login,
        ) from error
    return tuple(sorted(nodes, key=lambda node: node.node))


def _is_eventual_consistency(refusal: AwsRefused) -> bool:
    """Return True if AWS does not yet find a group, key or new instance profile that the request names."""
    if refusal.code == "InvalidParameterValue":
        return "iaminstanceprofile" in refusal.why.lower().replace(" ", "")
    return is_group_unknown(refusal) or refusal.code in (
        "InvalidKeyPair.NotFound",
        "InvalidPlacementGroup.Unknown",
    )


def resume_launch(aws: AwsClient, intent: LaunchIntent, *, on_event: OnEvent) -> tuple[Node, ...] | None:
    """Return the nodes that an interrupted launch created or now creates, or None if there are no nodes.

    The request in `intent` is sent again unchanged while it is less than an hour old. After an hour, the
    instances are looked up by tag for up to two minutes. Raises CloudError.
    """
    if CLOCK.now() - intent.written < timedelta(seconds=REPLAY_S):
        on_event(Event("finishing the launch that was interrupted"))
        try:
            return _run(aws, intent.parameters, on_event=on_event)
        except CapacityError:
            return None
        except AwsRefused as refusal:
            if refusal.code in {"IdempotentInstanceTerminated"} | NEXT_ZONE:
                return None
            if _is_eventual_consistency(refusal):
                return None
            if refusal.code != "IdempotentParameterMismatch":
                raise
    return find_launched_nodes(aws, intent, on_event=on_event)


def launched_numbers(intent: LaunchIntent) -> frozenset[int]:
    """Return the node numbers that the launch in an intent creates."""
    return frozenset(parse_node_numbers(_requested_tags(intent)["awsddp:nodes"]))


def _requested_tags(intent: LaunchIntent) -> dict[str, str]:
    """Return the tags that the request in an intent puts on its instances."""
    tags = {item["ResourceType"]: tags_of(item) for item in intent.parameters["TagSpecifications"]}
    return tags["instance"]


def find_launched_nodes(
    aws: AwsClient, intent: LaunchIntent, *, on_event: OnEvent
) -> tuple[Node, ...] | None:
    """Return a launch's live nodes, or None if it has no live nodes.

    Polls for up to two minutes until all nodes are listed, since tags may become visible late.
    """
    on_event(Event(f"looking for instances of {intent.cluster_id}", ""))
    tags, keys = _requested_tags(intent), ("awsddp:id", "awsddp:created", "awsddp:owner")
    filters = [condition for key in keys for condition in tagged(key, tags[key])]
    nodes: list[Node] = []

    def all_listed() -> bool | None:
        nodes[:] = describe(aws, filters)
        return True if len(nodes) >= len(launched_numbers(intent)) else None

    poll(all_listed, deadline_s=VISIBLE_S)
    alive = [node for node in nodes if node.state not in ENDED_STATES]
    members = [node for node in alive if node.tags.get("awsddp:nodes") != NUMBER_GIVEN_UP]
    return _tag_numbers(aws, members) or None


def wait_running(
    aws: AwsClient, expected: Collection[Node], *, on_event: OnEvent, deadline_s: float = 600
) -> tuple[Node, ...]:
    """Wait until the `expected` nodes run and have an address; return them sorted by number.

    Instances that are not visible yet count as starting. Raises CapacityError, CloudError or NodeError if a
    node terminated or was stopped instead, and NodeError at the deadline.
    """
    keys = [node.instance_id for node in expected]
    states: dict[str, str] = {}
    begun = {node.instance_id for node in expected if node.state in _ON}

    def list_running() -> tuple[Node, ...] | None:
        listed = describe(aws, by_id(*keys))
        for node in listed:
            _refuse_off(node, begun)
        begun.update(node.instance_id for node in listed if node.state in _ON)
        nodes = sorted(listed, key=lambda node: node.node)
        for node in nodes:
            if states.get(node.instance_id) != node.state:
                states[node.instance_id] = node.state
                on_event(Event(f"{node.instance_id} {node.state}", node_name(node.node)))
        up = tuple(node for node in nodes if node.state == "running" and node.address)
        return up if len(up) == len(keys) else None

    running = poll(list_running, deadline_s=deadline_s, first_s=0.05, most_s=_POLL_S)
    if running is None:
        slow = ", ".join(f"{key} ({state})" for key, state in states.items() if state != "running")
        raise NodeError(
            f"not all {len(keys)} nodes run after {deadline_s:.0f} s",
            f"still waiting for: {slow}" if slow else "AWS does not list the nodes",
            _AGAIN,
        )
    return running


def check_still_running(aws: AwsClient, nodes: Collection[Node]) -> None:
    """Check once that nodes still run, if AWS responds. Raises the same errors as `wait_running`."""
    keys = {node.instance_id for node in nodes}
    for node in none_if_refused(lambda: describe(aws, by_id(*keys)), lambda refusal: refusal.retryable) or ():
        _refuse_off(node, keys)


def _refuse_off(node: Node, begun: Collection[str]) -> None:
    """Raise an error if a node terminated, or was stopped after it had begun to run (its instance id is in
    `begun`).

    EC2 may still list a node as stopped just after it was started.
    """
    ended = node.state in ENDED_STATES
    if not ended and (node.state in _ON or node.instance_id not in begun):
        return
    (code, _), (_, text) = node.reason, find_end_cause(node)
    if code == _BY_USER:
        by = "another command, here or elsewhere, or the EC2 console"
        text += f"\n{by} {'ended' if ended else 'stopped'} it"
    subject = f"node{node.node} ({node.instance_id})"
    if not ended:
        subject += f" is {node.state}, while it was started"
        raise NodeError(subject, text, "awsddp up   # starts it again")
    kind: type[AwsddpError] = NodeError
    if "InsufficientInstanceCapacity" in code:
        kind = CapacityError
    elif any(part in code for part in ("Limit", "Volume", "Client.InternalError")):
        kind = CloudError
    raise kind(f"{subject} ended while it was started", text, _AGAIN)


class _Health(Shape):
    status: str


class _Status(Shape):
    instance_id: str
    instance_status: _Health
    system_status: _Health


def list_impaired(aws: AwsClient, nodes: Collection[Node]) -> frozenset[str]:
    """Return the ids of the running instances that fail AWS's status checks.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-system-instance-status-check.html
    Raises CloudError.
    """
    running = [node.instance_id for node in nodes if node.state == "running"]
    if not running:
        return frozenset()
    read = partial(aws.read, _Status, "DescribeInstanceStatus", {"InstanceIds": running}, "InstanceStatuses")
    return frozenset(
        status.instance_id
        for status in none_if_refused(read, is_instance_unknown) or ()
        if "impaired" in (status.instance_status.status, status.system_status.status)
    )
