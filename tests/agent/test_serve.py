"""The running agent: a pause of its process, and the shutdown of its node."""

import calendar
import socket
from pathlib import Path

import pytest

from awsddp.agent import serve, shutdown
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import Launch
from awsddp.agent.serve import Agent, ending_of_shutdown
from awsddp.agent.shutdown import Shutdown
from tests.support.fleet import make_launch
from tests.support.one_process import REQUEST


def test_agent_that_was_paused_itself_reports_no_node_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(serve.time, "monotonic", lambda: now)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = Agent(REQUEST, JobFolder("job", tmp_path), listener)
        lost: list[tuple[int, str, str]] = []
        monkeypatch.setattr(agent._coordinator, "lose", lambda *loss: lost.append(loss))
        agent._peers._peers[1].joined = True
        now += 100
        agent._exchange(0)
        assert lost == []
        for _ in range(3):
            now += 3
            agent._exchange(0)
        assert lost == [(1, "no heartbeat for 5 s", "node_lost")]
        agent._selector.close()


def test_shutdown_has_the_reason_that_the_node_recorded() -> None:
    request = make_launch(1, grace=900.0)
    ending = ending_of_shutdown(request, Shutdown("expires", ""))
    assert (ending.state, ending.grace) == ("interrupted", 110.0)
    assert "it expired" in ending.cause.explanation
    assert "SIGTERM" in ending_of_shutdown(request, Shutdown("", "")).cause.explanation


def test_spot_notice_is_the_cause_with_its_time() -> None:
    cause = ending_of_shutdown(make_launch(1), Shutdown("spot", "2026-11-23T20:30:00Z")).cause
    assert (cause.kind, cause.retryable) == ("spot_interruption", True)
    assert cause.values["time"] == "2026-11-23T20:30:00Z"
    assert "AWS reclaims the spot instance at 2026-11-23T20:30:00Z" in cause.explanation


def test_first_of_repeated_spot_notices_sets_the_grace_and_an_uploader_gets_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = calendar.timegm((2026, 11, 23, 20, 30, 0))
    notice = Shutdown("spot", "2026-11-23T20:30:00Z")
    monkeypatch.setattr(serve, "read_shutdown", lambda: notice)
    monkeypatch.setattr(shutdown.time, "time", lambda: at - left_s)
    left_s = 115.0
    for saving, grace in ({"argv": []}, 115 - 5 - 28.75), ({}, 110.0):
        left_s = 115.0
        request = Launch.from_json({**REQUEST.to_json(), "saving": saving})
        agent = Agent(request, JobFolder("job", tmp_path), None)
        agent._on_term()
        first = agent._requested
        assert first is not None
        assert first.grace == grace
        left_s = 110.0
        agent._on_term()
        assert agent._requested is first, "each SIGTERM would be sent to the first node again"
        agent._selector.close()
