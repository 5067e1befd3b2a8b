"""A request to a dead, slow or lying URL ends in time, is sent at most once, and hides the URL."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from awsddp.agent.notify.post import Outcome, encode_body, post
from tests.support.servers import make_certificate, serve_folder
from tests.support.webhook import LYING, serve_webhook

EVENT = {
    "id": "0a",
    "time": "now",
    "event": "ended",
    "cluster": "c",
    "job": "j",
    "cause": None,
    "text": "ends",
}
BODY = encode_body(EVENT, "text")
STATES = {"refused": "unsent", "blackhole": "unsent", "redirect": "refused", "404": "refused"}
"""The outcomes that are not "unknown"."""


def test_text_is_what_chats_take_and_json_has_the_event_without_the_text() -> None:
    assert json.loads(BODY) == {"text": "awsddp: ends [0a]"}
    assert json.loads(encode_body(EVENT, "json")) == {key: EVENT[key] for key in EVENT if key != "text"}


def test_event_is_delivered_once_as_json_to_the_path_of_the_url() -> None:
    with serve_webhook() as hook:
        assert post(hook.url, BODY) == Outcome("delivered")
        assert (hook.bodies, hook.paths) == ([{"text": "awsddp: ends [0a]"}], ["/services/s3cret"])


@pytest.mark.parametrize("kind", LYING)
def test_bad_server_costs_at_most_the_timeout_and_gets_at_most_one_request(kind: str) -> None:
    with serve_webhook(kind) as hook:
        began = time.monotonic()
        outcome = post(hook.url, BODY, timeout_s=0.5)
        assert time.monotonic() - began < 1.5
        expected = "delivered" if kind == "endless" else STATES.get(kind, "unknown")
        assert outcome.state == expected, outcome
        assert len(hook.bodies) == (0 if expected == "unsent" else 1)
        assert "s3cret" not in outcome.why and bool(outcome.why) == (expected != "delivered")


def test_nothing_is_sent_if_the_event_may_not_be_sent() -> None:
    with serve_webhook() as hook:
        assert post(hook.url, BODY, may_send=lambda: False).state == "unsent"
        assert hook.bodies == []


def test_a_connection_that_opens_after_the_timeout_sends_nothing() -> None:
    opened = threading.Event()

    def may_send() -> bool:
        opened.set()
        return True

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()[:2]
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        url = f"http://{address[0]}:{address[1]}/"
        assert post(url, BODY, may_send=may_send, timeout_s=0.3).state == "unsent"
        assert not opened.is_set()
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/s3\ncret", "http://[::bad/s3cret", "x://s3cret/"])
def test_failure_of_an_invalid_url_does_not_have_the_url(url: str) -> None:
    outcome = post(url, BODY)
    assert outcome.state == "unsent" and "cret" not in outcome.why


def test_certificate_of_a_server_is_verified(tmp_path: Path) -> None:
    with serve_folder(tmp_path, tls=make_certificate(tmp_path)) as served:
        outcome = post(f"https://127.0.0.1:{served.port}/", BODY)
        assert outcome.state == "unsent" and "certificate verify failed" in outcome.why
        assert served.requests == []


def test_head_of_an_answer_is_read_up_to_a_limit() -> None:
    with serve_webhook("continue") as hook:
        assert post(hook.url, BODY, timeout_s=20) == Outcome("unknown", "AnswerTooLongError")
