"""Events are sent at most twice, also by several processes, after a crash and on a full disk."""

import threading
from pathlib import Path

import pytest

from awsddp.agent.notify import outbox as module
from awsddp.agent.notify.outbox import Outbox

EVENT = {"id": "a", "event": "ended"}


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    made = Outbox(tmp_path / "events.json")
    made.add([EVENT])
    return made


def open_ids(outbox: Outbox) -> list[str]:
    return [row["id"] for row in outbox.open_events()]


def test_events_are_kept_in_order_and_added_once(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add([{"id": "b"}, EVENT])
    assert open_ids(outbox) == ["a", "b"]
    assert open_ids(Outbox(tmp_path / "events.json")) == ["a", "b"]
    assert (tmp_path / "events.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("outcome", ["delivered", "refused", "gave up"])
def test_event_with_a_final_outcome_is_never_sent_again(outbox: Outbox, outcome: str) -> None:
    assert outbox.claim("a")
    outbox.settle("a", outcome)
    assert open_ids(outbox) == [] and not outbox.claim("a")
    outbox.settle("a", "unsent")
    assert open_ids(outbox) == []


def test_event_without_an_answer_is_sent_once_more(outbox: Outbox) -> None:
    for _ in range(2):
        assert outbox.claim("a")
        outbox.settle("a", "unknown")
    assert not outbox.claim("a") and open_ids(outbox) == []


def test_event_that_was_never_sent_is_tried_without_a_limit(outbox: Outbox) -> None:
    for _ in range(5):
        outbox.settle("a", "unsent", "refused")
    (row,) = outbox.open_events()
    assert (row["requests"], row["why"], row["outcome"]) == (0, "refused", "unsent")
    assert row["failing_since"] is not None


def test_request_in_flight_is_not_repeated_until_its_sender_must_have_died(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outbox.claim("a")
    assert not Outbox(tmp_path / "events.json").claim("a")
    monkeypatch.setattr(module, "_IN_FLIGHT_S", 0.0)
    assert Outbox(tmp_path / "events.json").claim("a")
    assert open_ids(outbox) == [] and not outbox.claim("a")


def test_the_number_of_requests_can_be_limited_to_one(outbox: Outbox) -> None:
    assert outbox.claim("a", most=1)
    outbox.settle("a", "unknown")
    assert not outbox.claim("a", most=1) and outbox.claim("a", most=2)


def test_only_one_of_many_concurrent_claims_succeeds(outbox: Outbox, tmp_path: Path) -> None:
    claims: list[bool] = []
    threads = [
        threading.Thread(target=lambda: claims.append(Outbox(tmp_path / "events.json").claim("a")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claims) == [False] * 15 + [True]


def test_full_disk_does_not_make_a_process_forget_what_it_sent(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_json", fail)
    for _ in range(2):
        assert outbox.claim("a")
        outbox.settle("a", "unknown")
    assert not outbox.claim("a") and open_ids(outbox) == []
