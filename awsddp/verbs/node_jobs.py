"""What the nodes are asked about their jobs: requests over SSH, and the answers as jobs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.answers import MOST_BYTES, malformed
from awsddp.cluster import Job
from awsddp.errors import AwsddpError, NodeError, NotFoundError
from awsddp.jobs import protocol, results
from awsddp.nodes.failures import split
from awsddp.spec import seconds
from awsddp.verbs.context import Context

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet, Result

ANSWER_S = 60.0


def ask(
    fleet: "Fleet", requests: Mapping[int, Mapping[str, Any]], *, timeout_s: float = ANSWER_S
) -> dict[int, dict[str, Any]]:
    """Send each node its request and return the answers, checked. Raises NodeError or what a node says."""
    return _whole(_answers(fleet, requests, timeout_s))


def _whole(answers: Mapping[int, dict[str, Any] | AwsddpError]) -> dict[int, dict[str, Any]]:
    for answer in answers.values():
        if isinstance(answer, AwsddpError) and not isinstance(answer, NodeError):
            raise answer
    return split(answers)


def _answers(
    fleet: "Fleet", requests: Mapping[int, Mapping[str, Any]], timeout_s: float
) -> dict[int, dict[str, Any] | AwsddpError]:
    said = {node: bytearray() for node in requests}

    def on_data(node: int, data: bytes) -> bool:
        said[node] += data
        if len(said[node]) > MOST_BYTES:
            raise malformed(node, f"over {MOST_BYTES >> 20} MB")
        return protocol.is_whole(said[node])

    messages = {node: protocol.message(request) for node, request in requests.items()}
    ends = fleet.converse(protocol.program(), messages, on_data, timeout_s=timeout_s)
    return {node: _answer(node, requests[node], bytes(said[node]), end) for node, end in ends.items()}


def _answer(
    node: int, request: Mapping[str, Any], said: bytes, end: "Result | NodeError"
) -> dict[str, Any] | AwsddpError:
    if isinstance(end, NodeError):
        return end
    try:
        return protocol.answer(said, request=request, node=node, stderr=end.stderr)
    except AwsddpError as error:
        return error


def ask_all(fleet: "Fleet", request: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Send every connected node that answers the same request."""
    return ask(fleet, dict.fromkeys(answering(fleet), request))


def answering(fleet: "Fleet") -> list[int]:
    """Return the nodes that are connected and have not failed to answer."""
    return [node for node in fleet.nodes if node not in fleet.failures]


def cancel(
    ctx: Context, fleet: "Fleet", job: str, *, grace_s: float | None = None, launch: str | None = None
) -> None:
    """End a job on every node that knows it: TERM, the grace, KILL; return when it has ended.

    With `launch` only where the job is of that launch.
    """
    grace = seconds(ctx.job.job.grace) if grace_s is None else grace_s
    knows = {node for node, told in ask_all(fleet, protocol.state_request()).items() if _knows(told, job)}
    request = protocol.cancel_request(job, grace=grace, launch=launch)
    ask(fleet, dict.fromkeys(knows, request), timeout_s=grace + ANSWER_S)


def _knows(told: Mapping[str, Any], job: str) -> bool:
    return any(known["job"] == job for known in told["jobs"])


def jobs_on(ctx: Context, fleet: "Fleet", *, partial: bool = False) -> tuple[Job, ...]:
    """Return every job that the connected nodes know, oldest first.

    With `partial` a node that does not answer joins the fleet's failures, unless none does. A job that this
    machine does not remember is none of this cluster's where its name is taken at home: no node may choose a
    folder of the user's.
    """
    answers = _answers(fleet, dict.fromkeys(answering(fleet), protocol.state_request()), ANSWER_S)
    failed = {node: answer for node, answer in answers.items() if isinstance(answer, NodeError)}
    if partial and len(failed) < len(answers):
        fleet.failures.update(failed)
        answers = {node: answer for node, answer in answers.items() if node not in failed}
    told = {node: answer["jobs"] for node, answer in _whole(answers).items()}
    jobs = results.jobs(told, results=ctx.job.job.results)
    record = ctx.folder.read()
    known = {job.job for job in record.jobs} if record else set()
    folder = Path(ctx.job.sync.workdir) / ctx.job.job.results
    return tuple(job for job in jobs if job.job in known or not os.path.lexists(folder / job.job))


def choose_job(jobs: Sequence[Job], name: str | None) -> Job:
    """Return the job of this name, or the last one. Raises NotFoundError."""
    chosen = next((job for job in reversed(jobs) if name in (None, job.job)), None)
    if chosen is None:
        known = (
            f"known are: {', '.join(job.job for job in jobs)}" if jobs else "no job has run on this cluster"
        )
        raise NotFoundError(f"no job {name}" if name else "no job", known, "awsddp train")
    return chosen
