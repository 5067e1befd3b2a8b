"""Several requests in one round trip: each gets its answer, or an error."""

import pytest

from awsddp.agent import messages
from awsddp.agent_client import calls
from awsddp.agent_client.calls import call_each_node, call_nodes_in_sequence
from awsddp.errors import NodeError, UsageError
from awsddp.model.node_answers import Slots
from tests.support.folder_nodes import World


class Unknown(messages.Request["answers.Jobs"]):
    """A request that no node knows."""


def test_failed_request_does_not_prevent_the_next_one(world: World) -> None:
    line = world.open_connections()
    line.cut = {1}
    requests = [Unknown(), messages.State(), messages.Slots()]
    answers = call_nodes_in_sequence(line, dict.fromkeys((0, 1), requests))
    unknown, state, slots = answers[0]
    assert isinstance(unknown, UsageError)
    assert state.jobs == ()
    assert isinstance(slots, Slots)
    assert [isinstance(answer, NodeError) for answer in answers[1]] == [True] * 3
    assert len(line.requests) == 1


def test_requests_after_the_end_of_the_agent_get_errors(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = calls.encode_request
    monkeypatch.setattr(
        calls, "encode_request", lambda call: b"no length\n" if isinstance(call, Unknown) else encode(call)
    )
    requests = [messages.State(), Unknown(), messages.State()]
    first, *others = call_nodes_in_sequence(world.open_connections(), {0: requests})[0]
    assert first.jobs == ()
    for error in (*others, call_each_node(world.open_connections(), {0: Unknown()})[0]):
        assert isinstance(error, NodeError)
        assert "ValueError" in error.why


@pytest.mark.parametrize(
    ("output", "count", "is_complete"),
    [
        (b"", 1, False),
        (b"hello\n", 1, False),
        (b"hello\n\0awsddp\n", 1, False),
        (b"\0awsddp\n{}", 1, False),
        (b"\0awsddp\n{}\n", 1, True),
        (b"\0awsddp\n{}\n", 2, False),
        (b"\0awsddp\n{}\n\0awsddp\n", 2, False),
        (b"\0awsddp\n{}\n\0awsddp\n{}\n", 2, True),
    ],
)
def test_responses_are_complete_once_the_last_has_ended(output: bytes, count: int, is_complete: bool) -> None:
    assert calls.is_response_complete(output, count=count) is is_complete
