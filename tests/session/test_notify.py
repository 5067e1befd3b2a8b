"""This machine's own events: sent once per key, also by later commands, and a failure is reported."""

from dataclasses import replace
from typing import Any

import pytest

from awsddp.session import notify
from awsddp.session.context import Session
from awsddp.session.notify import CAPACITY, GIVEN_UP, RECOVERED, notify_event
from awsddp.settings.spec import NotifySection
from tests.support.folder_nodes import World
from tests.support.webhook import serve_webhook


def notifying(world: World, url: str | None, form: Any = "json") -> Session:
    session = world.session()
    return session.with_settings(
        job_spec=replace(session.job_spec, notify=NotifySection(url=url, format=form))
    )


def test_events_of_this_machine_arrive_in_order_and_once_per_key(world: World) -> None:
    with serve_webhook() as hook:
        session = notifying(world, hook.url)
        notify_event(session, CAPACITY, job=None, key="launch", text="has its nodes")
        for life in (1, 1, 2):
            notify_event(session, RECOVERED, job="train-1", key=str(life), text="goes on")
        notify_event(notifying(world, hook.url), GIVEN_UP, job="train-1", key="2", text="ends")
        notify_event(notifying(world, hook.url), GIVEN_UP, job="train-1", key="2", text="ends")
        assert hook.events == ["capacity", "recovered", "recovered", "given_up"]
        assert len({body["id"] for body in hook.bodies}) == 4
        assert hook.bodies[1]["job"] == "train-1" and hook.bodies[0]["job"] is None


def test_text_names_the_job_and_the_cluster(world: World) -> None:
    with serve_webhook() as hook:
        notify_event(notifying(world, hook.url, "text"), RECOVERED, job="train-1", key="1", text="goes on")
        assert hook.bodies[0]["text"].startswith("awsddp: job train-1 on cluster default goes on [")


def test_failure_is_reported_without_the_url_and_sent_with_the_next_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_PAUSES_S", (0.0,))
    with serve_webhook("refused") as dead:
        notify_event(notifying(world, dead.url), GIVEN_UP, job="train-1", key="1", text="ends")
        assert [text for text in world.events if "s3cret" in text] == []
        assert "the event given_up was not delivered to 127.0.0.1: [Errno 111]" in world.events[-1]
        with serve_webhook(port=dead.port) as hook:
            notify_event(notifying(world, hook.url), CAPACITY, job=None, key="1", text="has its nodes")
            assert hook.events == ["given_up", "capacity"]


def test_server_error_is_answered_with_one_more_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_PAUSES_S", (0.0, 0.0))
    with serve_webhook("500") as hook:
        notify_event(notifying(world, hook.url), GIVEN_UP, job="train-1", key="1", text="ends")
        assert len(hook.bodies) == 2 and hook.bodies[0] == hook.bodies[1]


def test_nothing_is_sent_without_a_url(world: World) -> None:
    notify_event(notifying(world, None), GIVEN_UP, job="train-1", key="1", text="ends")
    assert world.events == [] and not (world.folder.path / "events.json").exists()
