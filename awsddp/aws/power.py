"""Stop and start nodes, and set what a poweroff from inside a node does.

A poweroff normally terminates a node. While the node has results that are neither fetched nor in S3, a
poweroff only stops it.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Stop_Start.html
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial

from awsddp.aws.api_errors import AwsRefused, none_if_refused
from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import by_id, describe, is_instance_unknown, tag
from awsddp.aws.waits import deadline_s, poll, retry_while_transient
from awsddp.errors import CapacityError, NodeError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import ENDED_STATES, OLDER_JOBS, Node
from awsddp.settings.ec2_limits import MAX_TAG_VALUE
from awsddp.util.formatting import node_name, utc
from awsddp.util.parallel import run_each

TAG = "awsddp:unfetched"


def _is_changing(refusal: AwsRefused) -> bool:
    """Return True if a node is still stopping, is gone, or is not yet listed everywhere in AWS."""
    return is_instance_unknown(refusal) or refusal.code in ("IncorrectInstanceState", "IncorrectState")


def stop(aws: AwsClient, nodes: Sequence[Node], *, on_event: OnEvent) -> None:
    """Stop on-demand nodes and wait until they are stopped. Afterwards, a poweroff inside one of these nodes
    stops the node and does not terminate it.

    Raises CloudError, or NodeError if a node does not stop.
    """
    names = {node.instance_id: node_name(node.node) for node in nodes}
    keys = list(names)
    poweroff(aws, keys, "stop")
    retry_while_transient(lambda: aws.call("StopInstances", {"InstanceIds": keys}), is_transient=_is_changing)
    states: dict[str, str] = {}

    def all_stopped() -> bool | None:
        for node in describe(aws, by_id(*keys)):
            if states.get(key := node.instance_id) != node.state:
                states[key] = node.state
                on_event(Event(f"{key} {node.state}", names[key]))
        return (
            True if len(states) == len(keys) and set(states.values()) <= {"stopped", *ENDED_STATES} else None
        )

    if poll(all_stopped, deadline_s=deadline_s(node.instance_type for node in nodes)) is None:
        slow = ", ".join(f"{key} ({state})" for key, state in states.items() if state != "stopped")
        raise NodeError("not all nodes stopped", f"still waiting for: {slow}", "awsddp stop   # again")


def start(aws: AwsClient, nodes: Sequence[Node], *, keeps_group: bool, on_event: OnEvent) -> None:
    """Request the start of stopped nodes; wait for a node that is still stopping.

    Unless `keeps_group`, the nodes leave a placement group that has no room:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ModifyInstancePlacement.html

    Raises CloudError, or CapacityError if AWS has no capacity for the nodes now, since a stopped node does
    not reserve capacity.
    """
    keys = [node.instance_id for node in nodes]
    grouped = [node.instance_id for node in nodes if any(kind == "PlacementGroups" for kind, *_ in node.uses)]

    def request_start() -> None:
        retry_while_transient(
            lambda: aws.call("StartInstances", {"InstanceIds": keys}), is_transient=_is_changing
        )

    def leave_group(instance_id: str) -> None:
        request = {"InstanceId": instance_id, "GroupName": ""}
        none_if_refused(lambda: aws.call("ModifyInstancePlacement", request), _is_changing)

    try:
        request_start()
    except CapacityError:
        if keeps_group or not grouped:
            raise
        on_event(Event("no room in the placement group, starting the nodes without it"))
        run_each(leave_group, grouped)
        request_start()


def tag_expiry(aws: AwsClient, nodes: Sequence[Node], expires: datetime) -> None:
    """Write a new expiry to the nodes' tags; their watchdogs are updated separately. Raises CloudError."""
    tag(aws, [node.instance_id for node in nodes], "awsddp:expires", utc(expires))


def keep_on_poweroff(aws: AwsClient, nodes: Sequence[Node], job: str) -> None:
    """Before a job, let a poweroff stop the on-demand nodes, and tag all nodes with the job as unfetched.

    A spot node cannot be stopped, so it is only tagged. The two changes run in parallel: if one of them
    fails, no results are lost, since there are none yet. Raises CloudError; in that case the job must not
    start.
    """

    def add() -> None:
        unfetched = {node.instance_id: list(node.unfetched) for node in nodes} | unfetched_of(aws, nodes)
        for key, jobs in unfetched.items():
            unfetched[key] = [*jobs, job] if job not in jobs else jobs
        _write_tags(aws, unfetched)

    calls: list[Callable[[], None]] = [add]
    for node in nodes:
        if not node.spot:
            act = partial(_on_poweroff, aws, node.instance_id, "stop")
            calls.append(partial(retry_while_transient, act, is_transient=is_instance_unknown))
    run_each(lambda call: call(), calls)


def release(
    aws: AwsClient,
    nodes: Sequence[Node],
    job: str,
    *,
    tagged: Mapping[str, Sequence[str]] | None = None,
    older: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Remove a job from the nodes' tags when its results are fetched or in S3.

    Once a node's tag has no job, a poweroff terminates the node again. The node's poweroff is set before its
    tag is removed, so that the node still has the tag if the command is interrupted between the two calls.
    `tagged` is the current result of `unfetched_of`, which is called if `tagged` is None. `older` maps each
    instance id to the jobs that OLDER_JOBS represents; without `older`, OLDER_JOBS stays in the tag. Nodes
    that no longer exist are skipped. Raises CloudError.
    """
    jobs_by_node = unfetched_of(aws, nodes) if tagged is None else tagged
    named = {
        key: _replace_more(jobs, (older or {}).get(key, (OLDER_JOBS,))) for key, jobs in jobs_by_node.items()
    }
    unfetched = {key: [other for other in jobs if other != job] for key, jobs in named.items()}
    spot = {node.instance_id for node in nodes if node.spot}
    freed = [key for key, jobs in unfetched.items() if not jobs and key not in spot]
    poweroff(aws, freed, "terminate")
    _write_tags(aws, unfetched)


def poweroff(aws: AwsClient, instance_ids: Iterable[str], behaviour: str) -> None:
    """Set whether a poweroff inside an on-demand node will "stop" or "terminate" it; skip missing nodes."""
    run_each(
        lambda key: none_if_refused(partial(_on_poweroff, aws, key, behaviour), _is_changing), instance_ids
    )


def unfetched_of(aws: AwsClient, nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return {instance id: unfetched jobs in its tag} for the live nodes; OLDER_JOBS represents older jobs.

    The tags are read again because other commands may have added jobs since `nodes` were read.
    """
    listed = describe(aws, by_id(*(node.instance_id for node in nodes)))
    return {node.instance_id: list(node.unfetched) for node in listed if node.state not in ENDED_STATES}


def _on_poweroff(aws: AwsClient, instance_id: str, behaviour: str) -> None:
    changed = {"Attribute": "instanceInitiatedShutdownBehavior", "Value": behaviour}
    aws.call("ModifyInstanceAttribute", {"InstanceId": instance_id, **changed})


def _write_tags(aws: AwsClient, unfetched: dict[str, list[str]]) -> None:
    """Write each node's list of jobs to its tag, in one call for all nodes with the same list."""
    texts = {key: _tag_value(jobs) for key, jobs in unfetched.items()}
    for text in sorted(set(texts.values())):
        tag(aws, [key for key in texts if texts[key] == text], TAG, text)


def _tag_value(jobs: Sequence[str]) -> str:
    """Return the tag's value for `jobs`, the oldest first; if not all fit, OLDER_JOBS replaces the oldest."""
    named, has_older = [job for job in jobs if job != OLDER_JOBS], OLDER_JOBS in jobs
    while len(text := " ".join([OLDER_JOBS, *named] if has_older else named)) > MAX_TAG_VALUE:
        named, has_older = named[1:], True
    return text


def _replace_more(jobs: Sequence[str], older: Sequence[str]) -> list[str]:
    """Return `jobs` with OLDER_JOBS replaced by `older`."""
    if OLDER_JOBS not in jobs:
        return list(jobs)
    named = [job for job in jobs if job != OLDER_JOBS]
    return [*(job for job in older if job not in named), *named]
