"""Several requests in one round trip: each has its own answer, or its own error."""

import pytest

from awsddp.agent import messages
from awsddp.agent_client import calls
from awsddp.agent_client.calls import call_each_node, call_nodes_in_sequence
from awsddp.errors import NodeError, UsageError
from awsddp.model.node_answers import Slots
from tests.support.folder_nodes import World


class Nothing(messages.Request["answers.Jobs"]):
    """A request that no node knows."""


def test_request_that_fails_does_not_keep_a_node_from_the_next_one(world: World) -> None:
    line = world.line()
    line.cut = {1}
    turns = [Nothing(), messages.State(), messages.Slots()]
    answers = call_nodes_in_sequence(line, dict.fromkeys((0, 1), turns))
    unknown, state, slots = answers[0]
    assert isinstance(unknown, UsageError)
    assert state.jobs == ()
    assert isinstance(slots, Slots)
    assert [isinstance(one, NodeError) for one in answers[1]] == [True] * 3
    assert len(line.asked) == 1


def test_program_that_ends_between_two_requests_leaves_the_later_ones_without_an_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = calls.encode_request
    monkeypatch.setattr(
        calls, "encode_request", lambda one: b"no length\n" if isinstance(one, Nothing) else message(one)
    )
    turns = [messages.State(), Nothing(), messages.State()]
    first, *others = call_nodes_in_sequence(world.line(), {0: turns})[0]
    assert first.jobs == ()
    for one in (*others, call_each_node(world.line(), {0: Nothing()})[0]):
        assert isinstance(one, NodeError)
        assert "ValueError" in one.why


@pytest.mark.parametrize(
    ("said", "count", "whole"),
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
def test_answers_are_whole_once_the_last_one_has_ended(said: bytes, count: int, whole: bool) -> None:
    assert calls.is_response_complete(said, count=count) is whole
