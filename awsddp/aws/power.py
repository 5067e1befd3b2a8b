"""Power: machines stopped, their disks kept, and started again with a new expiry.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Stop_Start.html
"""

from collections.abc import Sequence
from datetime import datetime

from awsddp.aws.clusters import describe, tag, unlisted
from awsddp.aws.poweroff import poweroff
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.aws.waits import deadline_s, patiently, poll
from awsddp.cluster import ENDED, Node
from awsddp.errors import NodeError
from awsddp.plan.records import utc
from awsddp.report import Event, OnEvent, node_name


def _on_its_way(refusal: Refused) -> bool:
    """Whether a node is still stopping, or AWS does not list it everywhere yet."""
    return unlisted(refusal) or refusal.code in ("IncorrectInstanceState", "IncorrectState")


def stop(aws: Aws, nodes: Sequence[Node], *, on_event: OnEvent) -> None:
    """Stop on-demand nodes and wait until AWS says so. From now on a poweroff stops them, too.

    Raises CloudError, and NodeError for one that does not stop.
    """
    names = {node.instance_id: node_name(node.node) for node in nodes}
    keys = list(names)
    poweroff(aws, keys, "stop")
    patiently(lambda: aws.call("StopInstances", {"InstanceIds": keys}), passes=_on_its_way)
    seen: dict[str, str] = {}

    def look() -> bool | None:
        for item in describe(aws, [{"Name": "instance-id", "Values": keys}]):
            state = item["State"]["Name"]
            if seen.get(item["InstanceId"]) != state:
                seen[item["InstanceId"]] = state
                on_event(Event(f"{item['InstanceId']} {state}", names[item["InstanceId"]]))
        return True if len(seen) == len(keys) and set(seen.values()) <= {"stopped", *ENDED} else None

    if poll(look, deadline_s=deadline_s(node.instance_type for node in nodes)) is None:
        slow = ", ".join(f"{key} ({state})" for key, state in seen.items() if state != "stopped")
        raise NodeError("not all nodes stopped", f"still waiting for: {slow}", "awsddp stop   # again")


def start(aws: Aws, nodes: Sequence[Node]) -> None:
    """Ask for the start of stopped nodes; one that is still stopping is waited for.

    Raises CloudError, CapacityError where AWS has no such machines now: a stopped one holds no place.
    """
    patiently(
        lambda: aws.call("StartInstances", {"InstanceIds": [node.instance_id for node in nodes]}),
        passes=_on_its_way,
    )


def tag_expiry(aws: Aws, nodes: Sequence[Node], expires: datetime) -> None:
    """Write a new expiry to the nodes' tag; the watchdogs get it separately. Raises CloudError."""
    tag(aws, [node.instance_id for node in nodes], "awsddp:expires", utc(expires))
