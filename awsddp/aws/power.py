"""Power: machines stopped, their disks kept, and started again with a new expiry.

And what a poweroff from inside does: it ends a node, or stops it while results are neither home nor in S3.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Stop_Start.html
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial

from awsddp.aws.api_errors import Refused, unless_refused
from awsddp.aws.client import Aws
from awsddp.aws.clusters import by_id, describe, tag, unlisted
from awsddp.aws.waits import deadline_s, patiently, poll
from awsddp.errors import CapacityError, NodeError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import ENDED, MORE, Node
from awsddp.settings.ec2_limits import TAG_VALUE
from awsddp.util.format import node_name, utc
from awsddp.util.parallel import each

TAG = "awsddp:unfetched"


def _on_its_way(refusal: Refused) -> bool:
    """Whether a node is still stopping or gone, or AWS does not list it everywhere yet."""
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
        for node in describe(aws, by_id(*keys)):
            if seen.get(key := node.instance_id) != node.state:
                seen[key] = node.state
                on_event(Event(f"{key} {node.state}", names[key]))
        return True if len(seen) == len(keys) and set(seen.values()) <= {"stopped", *ENDED} else None

    if poll(look, deadline_s=deadline_s(node.instance_type for node in nodes)) is None:
        slow = ", ".join(f"{key} ({state})" for key, state in seen.items() if state != "stopped")
        raise NodeError("not all nodes stopped", f"still waiting for: {slow}", "awsddp stop   # again")


def start(aws: Aws, nodes: Sequence[Node], *, keeps_group: bool, on_event: OnEvent) -> None:
    """Ask for the start of stopped nodes; one that is still stopping is waited for.

    Where their placement group has no room they leave it, unless `keeps_group`:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ModifyInstancePlacement.html
    Raises CloudError, CapacityError where AWS has no such machines now: a stopped one holds no place.
    """
    keys = [node.instance_id for node in nodes]
    grouped = [node.instance_id for node in nodes if any(kind == "PlacementGroups" for kind, *_ in node.uses)]

    def begin() -> None:
        patiently(lambda: aws.call("StartInstances", {"InstanceIds": keys}), passes=_on_its_way)

    def leave(instance_id: str) -> None:
        request = {"InstanceId": instance_id, "GroupName": ""}
        unless_refused(lambda: aws.call("ModifyInstancePlacement", request), _on_its_way)

    try:
        begin()
    except CapacityError:
        if keeps_group or not grouped:
            raise
        on_event(Event("no room in the placement group, starting the nodes without it"))
        each(leave, grouped)
        begin()


def tag_expiry(aws: Aws, nodes: Sequence[Node], expires: datetime) -> None:
    """Write a new expiry to the nodes' tag; the watchdogs get it separately. Raises CloudError."""
    tag(aws, [node.instance_id for node in nodes], "awsddp:expires", utc(expires))


def keep_on_poweroff(aws: Aws, nodes: Sequence[Node], job: str) -> None:
    """Before a job: have a poweroff stop the on-demand nodes, and tag all with the job as not yet fetched.

    A spot node cannot be stopped, so it is only tagged. Both are done at once: each is safe without the
    other, as there are no results yet. Raises CloudError; the job must not start then.
    """

    def add() -> None:
        unfetched = {node.instance_id: list(node.unfetched) for node in nodes} | unfetched_of(aws, nodes)
        for key, jobs in unfetched.items():
            unfetched[key] = [*jobs, job] if job not in jobs else jobs
        _write(aws, unfetched)

    works: list[Callable[[], None]] = [add]
    for node in nodes:
        if not node.spot:
            act = partial(_on_poweroff, aws, node.instance_id, "stop")
            works.append(partial(patiently, act, passes=unlisted))
    each(lambda work: work(), works)


def release(
    aws: Aws,
    nodes: Sequence[Node],
    job: str,
    *,
    tagged: Mapping[str, Sequence[str]] | None = None,
    older: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """After a job's results are home or in S3: untag the nodes; the last job lets a poweroff end them again.

    `tagged` is what `unfetched_of` has returned just now, `older` what MORE stands for on a node, by its id;
    without it MORE stays. Nodes that are gone need nothing. A poweroff ends them before the tag goes: a node
    that is interrupted between the two is still known by it. Raises CloudError.
    """
    known = unfetched_of(aws, nodes) if tagged is None else tagged
    named = {key: _resolved(jobs, (older or {}).get(key, (MORE,))) for key, jobs in known.items()}
    unfetched = {key: [other for other in jobs if other != job] for key, jobs in named.items()}
    spot = {node.instance_id for node in nodes if node.spot}
    freed = [key for key, jobs in unfetched.items() if not jobs and key not in spot]
    poweroff(aws, freed, "terminate")
    _write(aws, unfetched)


def poweroff(aws: Aws, instance_ids: Iterable[str], behaviour: str) -> None:
    """Have a poweroff from inside "stop" or "terminate" on-demand nodes. Those that are gone need nothing."""
    each(lambda key: unless_refused(partial(_on_poweroff, aws, key, behaviour), _on_its_way), instance_ids)


def unfetched_of(aws: Aws, nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return the jobs that each living node is tagged with now, which may be more than were read before.

    MORE among them stands for older ones.
    """
    found = describe(aws, by_id(*(node.instance_id for node in nodes)))
    return {node.instance_id: list(node.unfetched) for node in found if node.state not in ENDED}


def _on_poweroff(aws: Aws, instance_id: str, behaviour: str) -> None:
    changed = {"Attribute": "instanceInitiatedShutdownBehavior", "Value": behaviour}
    aws.call("ModifyInstanceAttribute", {"InstanceId": instance_id, **changed})


def _write(aws: Aws, unfetched: dict[str, list[str]]) -> None:
    """Write each list of jobs to the tag of its nodes, one call for those that share it."""
    texts = {key: _text(jobs) for key, jobs in unfetched.items()}
    for text in sorted(set(texts.values())):
        tag(aws, [key for key in texts if texts[key] == text], TAG, text)


def _text(jobs: Sequence[str]) -> str:
    """Return jobs, the oldest first, as the tag holds them: MORE and the newest where not all fit."""
    named, more = [job for job in jobs if job != MORE], MORE in jobs
    while len(text := " ".join([MORE, *named] if more else named)) > TAG_VALUE:
        named, more = named[1:], True
    return text


def _resolved(jobs: Sequence[str], older: Sequence[str]) -> list[str]:
    """Return jobs with `older` in place of MORE."""
    if MORE not in jobs:
        return list(jobs)
    named = [job for job in jobs if job != MORE]
    return [*(job for job in older if job not in named), *named]
