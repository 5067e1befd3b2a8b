"""Send requests to the agents on nodes, and parse the responses. The requests are in agent/messages.py."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from awsddp.agent import messages
from awsddp.agent.log_stream import MAGIC
from awsddp.agent.messages import Answer, Request
from awsddp.agent_client.program import agent_program, encode_part, pack
from awsddp.errors import AwsddpError, InUse, JobError, NodeError, NotFoundError, UsageError
from awsddp.model import node_answers
from awsddp.util.parallel import results_or_raise

ANSWER_S = 60.0
"""Timeout of a request."""
EVENTS_REQUEST_BYTES = 16 << 20
"""How many bytes of a node's event files each request fetches while a job is followed."""


class NameTaken(UsageError):
    """The error if a job with this name exists on a node, in S3 or in the results folder."""


_ERRORS = {
    "usage": UsageError,
    "taken": NameTaken,
    "busy": InUse,
    "notfound": NotFoundError,
    "node": NodeError,
    "job": JobError,
}


def encode_request(request: Request[Any]) -> bytes:
    """Return `request` encoded for the agent."""
    extra = {"modules": base64.b64encode(pack(request.extra)).decode()} if request.extra else {}
    return encode_part(json.dumps({**request.to_json(), **extra}).encode())


def is_response_complete(output: bytes | bytearray, *, count: int = 1) -> bool:
    """Return True if a node's output has complete responses to `count` requests other than `Follow`."""
    return output.endswith(b"\n") and not output.endswith(MAGIC) and output.count(MAGIC) >= count


def parse_response(stdout: bytes, *, request: Request[Answer], node: int, stderr: bytes = b"") -> Answer:
    """Return the validated response to `request` in `node`'s output (model/node_answers.py).

    Raises the error that the node reports, or NodeError for a missing or invalid response.
    """
    _, magic, payload = stdout.partition(MAGIC)
    if not magic or not payload.strip():
        why = (stderr or stdout)[-2000:].decode("utf-8", "replace").strip()
        raise NodeError(f"node{node} gave no answer", why, "awsddp doctor")
    with node_answers.naming_node(node):
        document = node_answers.parse_answer(payload)
        if "error" not in document:
            has_paths = isinstance(request, messages.Manifest)
            response = node_answers.convert_answer(document, _response_type(type(request)), paths=has_paths)
            _check_response(response, request, node)
            return response
        failure = msgspec.convert(document, node_answers.FailureResponse).error
    raise _ERRORS[failure.kind](f"node{node}: {failure.message}", failure.why)


def _response_type(kind: type[Request[Answer]]) -> type[Answer]:
    """Return the class (from awsddp/model/node_answers.py) that a request's type argument names."""
    (name,) = kind.__orig_bases__[0].__args__  # type: ignore[attr-defined]
    response: type[Answer] = getattr(node_answers, name.__forward_arg__.rpartition(".")[2])
    return response


def _check_response(response: Any, request: Request[Any], node: int) -> None:
    """Raise ValueError if a response does not match its request."""
    if isinstance(response, node_answers.Jobs):
        for job in response.jobs:
            node_answers.check_job(job, node, None)
        if len({job.job for job in response.jobs}) != len(response.jobs):
            raise ValueError("duplicate job")
    if isinstance(request, messages.Cancel):
        node_answers.check_job(response, node, request.job)
    if isinstance(request, messages.Launch) and response.job != request.job:
        raise ValueError(f"answer is for job {response.job!r}, expected {request.job!r}")
    if isinstance(request, messages.TakeEvent) and response.event and response.event.job != request.job:
        raise ValueError(f"event of job {response.event.job!r}, expected {request.job!r}")
    if isinstance(request, messages.Dial):
        targets = sorted((number, port) for number, _, port in request.peers)
        if sorted(dial[:2] for dial in response.dials) != targets:
            raise ValueError("it did not dial the requested addresses")
    if isinstance(request, messages.Manifest):
        ranks = [rank for rank, number in request.ranks if number == node]
        node_answers.check_manifest(response, node, ranks)


class ProgramOutput(Protocol):
    """The output of a program that has ended on a node."""

    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...


class RequestTransport(Protocol):
    """Transports requests to nodes; implemented in nodes/fleet.py."""

    def request(
        self,
        program: tuple[Sequence[str], bytes],
        messages: Mapping[int, bytes],
        on_data: Callable[[int, bytes], bool],
        *,
        timeout_s: float | None = None,
    ) -> Mapping[int, ProgramOutput | NodeError]: ...

    def run_each(
        self, requests: Mapping[int, tuple[Sequence[str], bytes]], *, timeout_s: float
    ) -> Mapping[int, ProgramOutput | NodeError]: ...


def call_nodes(
    fleet: RequestTransport, requests: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer]:
    """Send each node its request, and return the responses.

    Raises NodeError, or the error that a node reports.
    """
    outcomes: dict[int, Answer | AwsddpError] = call_each_node(fleet, requests, timeout_s=timeout_s)
    return results_or_raise(outcomes)


def call_each_node(
    fleet: RequestTransport, requests: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer | AwsddpError]:
    """Send each node its request, and return each node's response or error."""
    sequences = {node: [request] for node, request in requests.items()}
    outcomes = call_nodes_in_sequence(fleet, sequences, timeout_s=timeout_s)
    return {node: outcome for node, (outcome,) in outcomes.items()}


def call_nodes_in_sequence(
    fleet: RequestTransport, requests: Mapping[int, Sequence[Request[Any]]], *, timeout_s: float = ANSWER_S
) -> dict[int, list[Any]]:
    """Send each node a sequence of requests in one round trip.

    Returns a dict that maps each node to each request's response or error. If a request fails, the requests
    after it are still served.
    """
    output = {node: bytearray() for node in requests}

    def on_data(node: int, data: bytes) -> bool:
        node_answers.append_output(output[node], data, node=node)
        return is_response_complete(output[node], count=len(requests[node]))

    payloads = {node: b"".join(map(encode_request, sequence)) for node, sequence in requests.items()}
    ends = fleet.request(agent_program(), payloads, on_data, timeout_s=timeout_s)
    return {node: _outcomes(node, requests[node], bytes(output[node]), end) for node, end in ends.items()}


def call_nodes_separately(
    fleet: RequestTransport, requests: Mapping[int, Request[Answer]], *, timeout_s: float
) -> dict[int, Answer | AwsddpError]:
    """Send each node its request through a separate agent process, and return each node's response or error.

    Use this function while other threads use the persistent agent processes.
    """
    argv, source = agent_program()
    commands = {node: (argv, source + encode_request(request)) for node, request in requests.items()}
    ends = fleet.run_each(commands, timeout_s=timeout_s)
    return {
        node: end if isinstance(end, NodeError) else _outcome(node, requests[node], end.stdout, end)
        for node, end in ends.items()
    }


def _outcomes(
    node: int, requests: Sequence[Request[Any]], output: bytes, end: ProgramOutput | NodeError
) -> list[Any]:
    """Return the responses or errors in a node's output, in the same order as `requests`."""
    _, *payloads = output.split(MAGIC, len(requests))
    unparsed = b"" if payloads else output  # an error's text
    outputs = [MAGIC + payload for payload in payloads] + [unparsed] * (len(requests) - len(payloads))
    return [_outcome(node, request, text, end) for request, text in zip(requests, outputs, strict=True)]


def _outcome(node: int, request: Request[Any], output: bytes, end: ProgramOutput | NodeError) -> Any:
    if isinstance(end, NodeError):
        return end
    try:
        return parse_response(output, request=request, node=node, stderr=end.stderr)
    except AwsddpError as error:
        return error
