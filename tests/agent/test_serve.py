"""The running agent: a pause of its process, and the shutdown of its node."""

import socket
from pathlib import Path

import pytest

from awsddp.agent import serve
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.serve import Agent, ending_of_shutdown
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


def test_shutdown_has_the_reason_that_the_node_recorded(tmp_path: Path) -> None:
    request = make_launch(1, grace=900.0)
    (tmp_path / "reason").write_text("expires\n")
    ending = ending_of_shutdown(request, tmp_path / "reason")
    assert (ending.state, ending.grace) == ("interrupted", 110.0)
    assert "it expired" in ending.cause.explanation
    assert "SIGTERM" in ending_of_shutdown(request, tmp_path / "none").cause.explanation


def test_spot_notice_is_the_cause_with_its_time(tmp_path: Path) -> None:
    request = make_launch(1)
    (tmp_path / "reason").write_text("spot 2026-11-23T20:30:00Z\n")
    cause = ending_of_shutdown(request, tmp_path / "reason").cause
    assert (cause.kind, cause.retryable) == ("spot_interruption", True)
    assert cause.values["time"] == "2026-11-23T20:30:00Z"
    assert "AWS reclaims the spot instance at 2026-11-23T20:30:00Z" in cause.explanation
