"""Instances: launched zone by zone, an interrupted launch finished, waited for."""

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from functools import partial
from uuid import uuid4

from awsddp.aws.api_errors import Refused, unless_refused
from awsddp.aws.client import Aws, Reply, Shape
from awsddp.aws.clusters import LEFT, by_id, describe, end_of, nodes_of, tag, tagged, tags_of, unlisted
from awsddp.aws.launch_resources import not_yet
from awsddp.aws.waits import CLOCK, VISIBLE_S, patiently, poll
from awsddp.errors import AwsddpError, CapacityError, CloudError, NodeError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import ENDED, Intent, Node, read_numbers
from awsddp.plan.records import LaunchPlan, Request, Subnet
from awsddp.plan.requests import Values
from awsddp.util.format import node_name
from awsddp.util.parallel import each

# A token is honoured for at least an hour; a replay later could launch again.
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
REPLAY_S = 3600
_LOOK_S = 2.0  # a node that runs is paid for
_ON = ("pending", "running")
_AGAIN = "awsddp up   # again\nawsddp down   # or end it"
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_BY_USER = "Client.UserInitiatedShutdown"
OVER_QUOTA = frozenset({"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"})
NEXT_ZONE = frozenset({"Unsupported", "InsufficientFreeAddressesInSubnet"})


def launch(
    aws: Aws,
    plan: LaunchPlan,
    values: Values,
    *,
    write_intent: Callable[[Intent], None],
    on_event: OnEvent,
) -> tuple[Node, ...]:
    """Launch the plan's nodes, all in one zone, all or none, trying its zones in order.

    A zone without room for them in the placement group is tried once more without it, but for nodes with EFA.
    `values` has the ids name, cluster_id and security_group. Each attempt has a token of its own, and
    `write_intent` gets the whole request before it is sent. Raises CapacityError, naming each zone, where
    no zone has the machines, CloudError where AWS refuses.
    """
    attempts: list[tuple[str, AwsddpError]] = []

    def attempt(subnet: Subnet, requested: Request) -> tuple[Node, ...]:
        token = f"{values.ids['cluster_id']}-{uuid4().hex}"
        request = values.resolve(requested, subnet=subnet.id, client_token=token)
        intent = Intent(
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
            if not plan.placement_yields:
                raise
        on_event(Event(f"{subnet.zone}: no room in the placement group, asking without it"))
        alone = {name: value for name, value in request.parameters.items() if name != "Placement"}
        return attempt(subnet, replace(request, parameters=alone))

    for subnet in plan.subnets:
        on_event(Event(f"asking for {len(plan.numbers)} x {plan.instance_type} in {subnet.zone}", ""))
        try:
            return launch_in(subnet)
        except (CapacityError, Refused) as refusal:
            if isinstance(refusal, Refused) and refusal.code not in NEXT_ZONE:
                raise
            attempts.append((subnet.zone, refusal))
        on_event(Event(f"{subnet.zone}: {attempts[-1][1].why}"))
    if all(isinstance(error, Refused) for _, error in attempts):
        raise attempts[-1][1]
    where = plan.zones[0] if len(plan.zones) == 1 else f"any zone of {plan.region}"
    raise CapacityError(
        f"AWS has no {len(plan.numbers)} x {plan.instance_type} now in {where}",
        "; ".join(f"{zone}: {error.why}" for zone, error in attempts),
        "try again later, or one of: "
        + ", ".join(f"--instance-type {c.instance_type}" for c in plan.choices)
        + (", -o capacity.placement_group=false" if plan.placement and not plan.placement_yields else ""),
    )


def _run(aws: Aws, parameters: Reply, *, on_event: OnEvent) -> tuple[Node, ...]:
    """Send RunInstances, the same bytes again while its outcome is unknown or its parts not yet visible."""
    reply = patiently(lambda: aws.call("RunInstances", parameters), passes=_not_yet, on_event=on_event)
    return _numbered(aws, nodes_of(reply["Instances"]))


def _numbered(aws: Aws, nodes: Collection[Node]) -> tuple[Node, ...]:
    """Return the nodes of a launch by number, once each that was renumbered has a tag of its own.

    Its number would change with the end of another node of the launch. Raises Refused of the kind
    `unavailable`, without AWS's code: it is no refusal of the launch, whose nodes run.
    """
    try:
        each(
            lambda node: tag(aws, [node.instance_id], "awsddp:nodes", str(node.node)),
            [node for node in nodes if node.is_renumbered],
        )
    except CloudError as error:
        raise Refused(
            f"the nodes are launched, but their numbers could not be written: {error.message}",
            error.why,
            "\n".join(filter(None, (error.next, _AGAIN))),
            code="",
            kind="unavailable",
            needs_login=error.needs_login,
        ) from error
    return tuple(sorted(nodes, key=lambda node: node.node))


def _not_yet(refusal: Refused) -> bool:
    """Whether AWS does not know a part of the request yet: the group, the key, or a new instance profile."""
    if refusal.code == "InvalidParameterValue":
        return "iaminstanceprofile" in refusal.why.lower().replace(" ", "")
    return not_yet(refusal) or refusal.code in ("InvalidKeyPair.NotFound", "InvalidPlacementGroup.Unknown")


def resume(aws: Aws, intent: Intent, *, on_event: OnEvent) -> tuple[Node, ...] | None:
    """Return the nodes that an interrupted launch made or now makes; None: nothing came of it.

    `intent` is what `write_intent` got; its very bytes are sent again while it is under an hour old. Later
    instances are looked for by tag for two minutes. Raises CloudError.
    """
    if CLOCK.now() - intent.written < timedelta(seconds=REPLAY_S):
        on_event(Event("finishing the launch that was interrupted"))
        try:
            return _run(aws, intent.parameters, on_event=on_event)
        except CapacityError:
            return None
        except Refused as refusal:
            if refusal.code in {"IdempotentInstanceTerminated"} | NEXT_ZONE or _not_yet(refusal):
                return None
            if refusal.code != "IdempotentParameterMismatch":
                raise
    return appear(aws, intent, on_event=on_event)


def filled_by(intent: Intent) -> frozenset[int]:
    """Return the node numbers that a launch was to fill, by its intent."""
    return frozenset(read_numbers(_asked(intent)["awsddp:nodes"]))


def _asked(intent: Intent) -> dict[str, str]:
    """Return the tags that the request of an intent puts on its instances."""
    specifications = intent.parameters["TagSpecifications"]
    return next(tags_of(one) for one in specifications if one["ResourceType"] == "instance")


def appear(aws: Aws, intent: Intent, *, on_event: OnEvent) -> tuple[Node, ...] | None:
    """Return the nodes alive of a launch, looking for two minutes, as tags may show late; None: none came.

    A launch that shows in part is waited for.
    """
    on_event(Event(f"looking for instances of {intent.cluster_id}", ""))
    asked, keys = _asked(intent), ("awsddp:id", "awsddp:created", "awsddp:owner")
    filters = [one for key in keys for one in tagged(key, asked[key])]
    seen: list[Node] = []

    def look() -> bool | None:
        seen[:] = describe(aws, filters)
        return True if len(seen) >= len(filled_by(intent)) else None

    poll(look, deadline_s=VISIBLE_S)
    alive = [n for n in seen if n.state not in ENDED and n.tags.get("awsddp:nodes") != LEFT]
    return _numbered(aws, alive) or None


def wait_running(
    aws: Aws, awaited: Collection[Node], *, on_event: OnEvent, deadline_s: float = 600
) -> tuple[Node, ...]:
    """Wait until these nodes, as they were seen last, run and have an address; return them by number.

    One describe asks for all; instances that are not visible yet count as coming. Raises CapacityError,
    CloudError or NodeError where a node ended or was stopped instead, NodeError at the deadline.
    """
    keys = [node.instance_id for node in awaited]
    seen: dict[str, str] = {}
    begun = {node.instance_id for node in awaited if node.state in _ON}

    def look() -> tuple[Node, ...] | None:
        found = describe(aws, by_id(*keys))
        for node in found:
            _refuse_off(node, begun)
        begun.update(node.instance_id for node in found if node.state in _ON)
        nodes = sorted(found, key=lambda node: node.node)
        for node in nodes:
            if seen.get(node.instance_id) != node.state:
                seen[node.instance_id] = node.state
                on_event(Event(f"{node.instance_id} {node.state}", node_name(node.node)))
        up = tuple(node for node in nodes if node.state == "running" and node.address)
        return up if len(up) == len(keys) else None

    running = poll(look, deadline_s=deadline_s, first_s=0.05, most_s=_LOOK_S)
    if running is None:
        slow = ", ".join(f"{key} ({state})" for key, state in seen.items() if state != "running")
        raise NodeError(
            f"not all {len(keys)} nodes run after {deadline_s:.0f} s",
            f"still waiting for: {slow}" if slow else "AWS does not show them",
            _AGAIN,
        )
    return running


def refuse_off(aws: Aws, nodes: Collection[Node]) -> None:
    """Look once whether nodes that ran still do, as far as AWS answers. Raises as `wait_running` does."""
    keys = {node.instance_id for node in nodes}
    for node in unless_refused(lambda: describe(aws, by_id(*keys)), lambda refusal: refusal.retryable) or ():
        _refuse_off(node, keys)


def _refuse_off(node: Node, begun: Collection[str]) -> None:
    """Raise for a node that ended, or that was stopped after it had `begun` to run, by instance id.

    One that was just started may still be listed as stopped.
    """
    ended = node.state in ENDED
    if not ended and (node.state in _ON or node.instance_id not in begun):
        return
    (code, _), (_, text) = node.reason, end_of(node)
    if code == _BY_USER:
        by = "another command, here or elsewhere, or the EC2 console"
        text += f"\n{by} {'ended' if ended else 'stopped'} it"
    what = f"node{node.node} ({node.instance_id})"
    if not ended:
        what += f" is {node.state}, while it was started"
        raise NodeError(what, text, "awsddp up   # starts it again")
    kind: type[AwsddpError] = NodeError
    if "InsufficientInstanceCapacity" in code:
        kind = CapacityError
    elif any(word in code for word in ("Limit", "Volume", "Client.InternalError")):
        kind = CloudError
    raise kind(f"{what} ended while it was started", text, _AGAIN)


class _Health(Shape):
    status: str


class _Status(Shape):
    instance_id: str
    instance_status: _Health
    system_status: _Health


def impaired(aws: Aws, nodes: Collection[Node]) -> frozenset[str]:
    """Return the instances, of those that run, which fail the checks that AWS makes of itself.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-system-instance-status-check.html
    Raises CloudError.
    """
    running = [node.instance_id for node in nodes if node.state == "running"]
    if not running:
        return frozenset()
    read = partial(aws.read, _Status, "DescribeInstanceStatus", {"InstanceIds": running}, "InstanceStatuses")
    return frozenset(
        one.instance_id
        for one in unless_refused(read, unlisted) or ()
        if "impaired" in (one.instance_status.status, one.system_status.status)
    )
