"""What a poweroff from inside does to a node: it ends it, or stops it while results are not fetched yet."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from awsddp.aws.clusters import describe, tags_of
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.aws.tags import tag, unlisted
from awsddp.aws.waits import CLOCK, Clock, patiently
from awsddp.cluster import Node
from awsddp.parallel import all_of

TAG = "awsddp:unfetched"
_GONE = frozenset({"InvalidInstanceID.NotFound", "IncorrectInstanceState", "IncorrectState"})


def keep_on_poweroff(aws: Aws, nodes: Sequence[Node], job: str, *, clock: Clock = CLOCK) -> None:
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
            works.append(partial(patiently, act, passes=unlisted, clock=clock))
    all_of(works)


def release(
    aws: Aws, nodes: Sequence[Node], job: str, *, tagged: Mapping[str, Sequence[str]] | None = None
) -> None:
    """After a job's results are home: untag the nodes; the last job lets a poweroff end them again.

    `tagged` is what `unfetched_of` has returned just now. Nodes that are gone need nothing. A poweroff ends
    them before the tag goes: a node that is interrupted between the two is still known by it. Raises
    CloudError.
    """
    known = unfetched_of(aws, nodes) if tagged is None else tagged
    unfetched = {key: [other for other in jobs if other != job] for key, jobs in known.items()}
    spot = {node.instance_id for node in nodes if node.spot}
    freed = [key for key, jobs in unfetched.items() if not jobs and key not in spot]
    all_of([partial(_forgiving, partial(_on_poweroff, aws, key, "terminate")) for key in freed])
    _write(aws, unfetched)


def poweroff(aws: Aws, nodes: Sequence[Node], behaviour: str) -> None:
    """Have a poweroff from inside "stop" or "terminate" on-demand nodes. Those that are gone need nothing."""
    for node in nodes:
        _forgiving(partial(_on_poweroff, aws, node.instance_id, behaviour))


def unfetched_of(aws: Aws, nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return the jobs that each living node is tagged with now, which may be more than were read before."""
    filters = [{"Name": "instance-id", "Values": [node.instance_id for node in nodes]}]
    return {
        item["InstanceId"]: tags_of(item).get(TAG, "").split()
        for item in describe(aws, filters)
        if item["State"]["Name"] not in ("shutting-down", "terminated")
    }


def _on_poweroff(aws: Aws, instance_id: str, behaviour: str) -> None:
    aws.call(
        "ModifyInstanceAttribute",
        {
            "InstanceId": instance_id,
            "Attribute": "instanceInitiatedShutdownBehavior",
            "Value": behaviour,
        },
    )


def _write(aws: Aws, unfetched: dict[str, list[str]]) -> None:
    """Write each list of jobs to the tag of its nodes, one call for those that share it."""
    for text in sorted({" ".join(jobs) for jobs in unfetched.values()}):
        keys = [key for key, jobs in unfetched.items() if " ".join(jobs) == text]
        tag(aws, keys, TAG, text)


def _forgiving(act: Callable[[], None]) -> None:
    try:
        act()
    except Refused as refusal:
        if refusal.code not in _GONE:
            raise
