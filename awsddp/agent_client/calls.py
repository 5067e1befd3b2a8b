"""The protocol with a node: how requests are sent to the program there, and how its answers are read.

The requests themselves: agent/messages.py.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from awsddp.agent import messages
from awsddp.agent.log_stream import MAGIC
from awsddp.agent.messages import Answer, Request
from awsddp.agent_client.program import pack, part, program
from awsddp.errors import AwsddpError, InUse, JobError, NodeError, NotFoundError, UsageError
from awsddp.model import node_answers
from awsddp.util.parallel import split

if TYPE_CHECKING:
    pass

ANSWER_S = 60.0
"""How long a node may take to answer."""
EVENTS_AT_ONCE_BYTES = 16 << 20
"""How much of a node's event files is fetched at once while its job is followed."""


class NameTaken(UsageError):
    """A node has a job of this name."""


_ERRORS = {
    "usage": UsageError,
    "taken": NameTaken,
    "busy": InUse,
    "notfound": NotFoundError,
    "node": NodeError,
    "job": JobError,
}


def message(request: Request[Any]) -> bytes:
    """Return `request` as the program reads it."""
    extra = {"modules": base64.b64encode(pack(request.extra)).decode()} if request.extra else {}
    return part(json.dumps({**request.to_json(), **extra}).encode())


def is_whole(said: bytes | bytearray, *, count: int = 1) -> bool:
    """Tell whether the output of a node so far holds complete answers to `count` requests (but follow)."""
    return said.endswith(b"\n") and not said.endswith(MAGIC) and said.count(MAGIC) >= count


def answer(stdout: bytes, *, request: Request[Answer], node: int, stderr: bytes = b"") -> Answer:
    """Return the answer to `request` in the output of `node`, checked (model/node_answers.py).

    Raises the error that it names; NodeError for no answer and for what no such answer may be.
    """
    _, mark, said = stdout.partition(MAGIC)
    if not mark or not said.strip():
        why = (stderr or stdout)[-2000:].decode("utf-8", "replace").strip()
        raise NodeError(f"node{node} gave no answer", why, "awsddp doctor")
    with node_answers.refused(node):
        document = node_answers.parsed(said)
        if "error" not in document:
            paths = isinstance(request, messages.Manifest)
            found = node_answers.converted(document, _answer_type(type(request)), paths=paths)
            _check_against(found, request, node)
            return found
        failure = msgspec.convert(document, node_answers.Failed).error
    raise _ERRORS[failure.kind](f"node{node}: {failure.message}", failure.why)


def _answer_type(kind: type[Request[Answer]]) -> type[Answer]:
    """Return the class of awsddp/model/node_answers.py that a request names in its brackets."""
    (name,) = kind.__orig_bases__[0].__args__  # type: ignore[attr-defined]
    found: type[Answer] = getattr(node_answers, name.__forward_arg__.rpartition(".")[2])
    return found


def _check_against(found: Any, request: Request[Any], node: int) -> None:
    """Raise ValueError where an answer speaks of something else than its request."""
    if isinstance(found, node_answers.Jobs):
        for job in found.jobs:
            node_answers.check_job(job, node, None)
        if len({job.job for job in found.jobs}) != len(found.jobs):
            raise ValueError("one job twice")
    if isinstance(request, messages.Cancel):
        node_answers.check_job(found, node, request.job)
    if isinstance(request, messages.Launch) and found.job != request.job:
        raise ValueError(f"it speaks of job {found.job!r}, not of {request.job!r}")
    if isinstance(request, messages.Dial) and sorted(one[:2] for one in found.dials) != sorted(
        (node, port) for node, _, port in request.peers
    ):
        raise ValueError("it dialed other addresses than requested")
    if isinstance(request, messages.Manifest):
        node_answers.check_manifest(found, node, [rank for rank, at in request.ranks if at == node])


class Ended(Protocol):
    """How a program on a node ended, and what it said."""

    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...


class Carrier(Protocol):
    """What takes requests to nodes: the connections of nodes/fleet.py."""

    def request(
        self,
        program: tuple[Sequence[str], bytes],
        messages: Mapping[int, bytes],
        on_data: Callable[[int, bytes], bool],
        *,
        timeout_s: float | None = None,
    ) -> Mapping[int, Ended | NodeError]: ...

    def run_each(
        self, requests: Mapping[int, tuple[Sequence[str], bytes]], *, timeout_s: float
    ) -> Mapping[int, Ended | NodeError]: ...


def ask(
    fleet: Carrier, asked: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer]:
    """Send each node its request and return the answers. Raises NodeError, or the error a node reports."""
    found: dict[int, Answer | AwsddpError] = answers_of(fleet, asked, timeout_s=timeout_s)
    return split(found)


def answers_of(
    fleet: Carrier, asked: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer | AwsddpError]:
    """Send each node its request and return its answer, or the error that came instead."""
    turns = {node: [request] for node, request in asked.items()}
    return {node: one for node, (one,) in answers_in_turn(fleet, turns, timeout_s=timeout_s).items()}


def answers_in_turn(
    fleet: Carrier, asked: Mapping[int, Sequence[Request[Any]]], *, timeout_s: float = ANSWER_S
) -> dict[int, list[Any]]:
    """Send each node its requests, which it serves one after the other, in one round trip.

    What comes of each is its answer, or the error that came instead. A request that fails does not keep a
    node from serving the next one.
    """
    output = {node: bytearray() for node in asked}

    def on_data(node: int, data: bytes) -> bool:
        node_answers.take(output[node], data, node=node)
        return is_whole(output[node], count=len(asked[node]))

    sent = {node: b"".join(map(message, several)) for node, several in asked.items()}
    ends = fleet.request(program(), sent, on_data, timeout_s=timeout_s)
    return {node: _answers(node, asked[node], bytes(output[node]), end) for node, end in ends.items()}


def answers_beside(
    fleet: Carrier, asked: Mapping[int, Request[Answer]], *, timeout_s: float
) -> dict[int, Answer | AwsddpError]:
    """Return the same from another thread, while the nodes' programs answer requests: by other programs."""
    argv, source = program()
    commands = {node: (argv, source + message(request)) for node, request in asked.items()}
    ends = fleet.run_each(commands, timeout_s=timeout_s)
    return {
        node: end if isinstance(end, NodeError) else _answer(node, asked[node], end.stdout, end)
        for node, end in ends.items()
    }


def _answers(node: int, asked: Sequence[Request[Any]], output: bytes, end: Ended | NodeError) -> list[Any]:
    """Return the answers in a node's output, in the order of `requests`."""
    _, *parts = output.split(MAGIC, len(asked))
    rest = b"" if parts else output
    parts = [MAGIC + part for part in parts] + [rest] * (len(asked) - len(parts))
    return [_answer(node, one, part, end) for one, part in zip(asked, parts, strict=True)]


def _answer(node: int, request: Request[Any], output: bytes, end: Ended | NodeError) -> Any:
    if isinstance(end, NodeError):
        return end
    try:
        return answer(output, request=request, node=node, stderr=end.stderr)
    except AwsddpError as error:
        return error
