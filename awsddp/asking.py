"""Requests to the programs on the nodes, over their connections, and the checked answers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from awsddp.answers import take
from awsddp.errors import AwsddpError, NodeError
from awsddp.jobs import protocol
from awsddp.jobs.supervisor.follow import MAGIC
from awsddp.jobs.supervisor.requests import Answer, Request
from awsddp.nodes.failures import split
from awsddp.records import JobRecord

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet, Result

ANSWER_S = 60.0

_T = TypeVar("_T")


def ask(
    fleet: "Fleet", requests: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer]:
    """Send each node its request and return the answers. Raises NodeError, or the error a node reports."""
    found: dict[int, Answer | AwsddpError] = answers_of(fleet, requests, timeout_s=timeout_s)
    return whole(found)


def whole(answers: Mapping[int, _T | AwsddpError]) -> dict[int, _T]:
    """Return answers that are all there. Raises the first error among them, NodesFailed for several."""
    return split(answers)


def answers_of(
    fleet: "Fleet", requests: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer | AwsddpError]:
    """Send each node its request and return its answer, or the error that came instead."""
    turns = {node: [request] for node, request in requests.items()}
    return {node: one for node, (one,) in answers_in_turn(fleet, turns, timeout_s=timeout_s).items()}


def answers_in_turn(
    fleet: "Fleet", requests: Mapping[int, Sequence[Request[Any]]], *, timeout_s: float = ANSWER_S
) -> dict[int, list[Any]]:
    """Send each node its requests, which it serves one after the other, in one round trip.

    What comes of each is its answer, or the error that came instead. A request that fails does not keep a
    node from serving the next one.
    """
    output = {node: bytearray() for node in requests}

    def on_data(node: int, data: bytes) -> bool:
        take(output[node], data, node=node)
        return protocol.is_whole(output[node], count=len(requests[node]))

    messages = {node: b"".join(map(protocol.message, several)) for node, several in requests.items()}
    ends = fleet.request(protocol.program(), messages, on_data, timeout_s=timeout_s)
    return {node: _answers(node, requests[node], bytes(output[node]), end) for node, end in ends.items()}


def answers_beside(
    fleet: "Fleet", requests: Mapping[int, Request[Answer]], *, timeout_s: float
) -> dict[int, Answer | AwsddpError]:
    """Return the same from another thread, while the nodes' programs answer requests: by other programs."""
    argv, program = protocol.program()
    commands = {node: (argv, program + protocol.message(request)) for node, request in requests.items()}
    ends = fleet.run_each(commands, timeout_s=timeout_s)
    return {
        node: end if isinstance(end, NodeError) else _answer(node, requests[node], end.stdout, end)
        for node, end in ends.items()
    }


def _answers(
    node: int, requests: Sequence[Request[Any]], output: bytes, end: "Result | NodeError"
) -> list[Any]:
    """Return the answers in a node's output, in the order of `requests`."""
    _, *parts = output.split(MAGIC, len(requests))
    rest = b"" if parts else output
    parts = [MAGIC + part for part in parts] + [rest] * (len(requests) - len(parts))
    return [_answer(node, one, part, end) for one, part in zip(requests, parts, strict=True)]


def _answer(node: int, request: Request[Any], output: bytes, end: "Result | NodeError") -> Any:
    if isinstance(end, NodeError):
        return end
    try:
        return protocol.answer(output, request=request, node=node, stderr=end.stderr)
    except AwsddpError as error:
        return error


def answering(fleet: "Fleet") -> list[int]:
    """Return the nodes that are connected and have not failed to answer."""
    return [node for node in fleet.nodes if node not in fleet.failures]


def holders(fleet: "Fleet", job: JobRecord) -> list[int]:
    """Return the numbers of the nodes that answer and are the instances on which the job ran."""
    ran_on = {one.instance_id for one in job.nodes}
    return [node for node in answering(fleet) if fleet.endpoints[node].instance_id in ran_on]
