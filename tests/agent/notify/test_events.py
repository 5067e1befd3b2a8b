"""Which events a node sends, from what it knows; and what their texts do not contain."""

from typing import Any

import pytest

from awsddp.agent.diagnosis.job_causes import Cause
from awsddp.agent.job_folder import Document
from awsddp.agent.notify.events import Facts, Order, clean, find_events
from awsddp.agent.shutdown import Shutdown
from tests.support.fleet import make_launch

ORDER = Order("train-1", "default", "launch")
CAUSE = Cause("exception", explanation="ValueError: the password is s3cret", node=1, rank=3)


def facts(node: int = 0, **changes: Any) -> Facts:
    """Return the facts of a running job, with changes; `state`, `cause` and `complete` are the document's."""
    fields = {"state": "running", "cause": None, "complete": node == 0}
    fields |= {name: changes.pop(name) for name in [*fields] if name in changes}
    document = Document(job="train-1", node=node, boot="b", created="", ranks=[], **fields)
    usual: dict[str, Any] = {
        "now": 1000.0,
        "request": make_launch(node),
        "document": document,
        "final": document.final,
        "shutdown": Shutdown("", ""),
        "hang": {},
        "unsaved": "",
    }
    return Facts(**{**usual, **changes})


def names(found: Facts, order: Order = ORDER) -> list[str]:
    return [event["event"] for event in find_events(order, found)]


def test_running_job_has_no_event() -> None:
    assert names(facts()) == names(facts(1)) == []


def test_end_has_the_cause_up_to_its_first_colon() -> None:
    (event,) = find_events(ORDER, facts(state="failed", cause=CAUSE))
    text = "job train-1 on cluster default failed (exception, rank 3 on node1): ValueError"
    assert (event["text"], event["time"]) == (text, "1970-01-01T00:16:40Z")
    assert event["cause"] == {"kind": "exception", "explanation": "ValueError", "node": 1, "rank": 3}
    assert (event["cluster"], event["job"]) == ("default", "train-1")


def test_success_has_no_cause() -> None:
    (event,) = find_events(ORDER, facts(state="succeeded"))
    assert (event["text"], event["cause"]) == ("job train-1 on cluster default succeeded", None)


@pytest.mark.parametrize(
    "text", ["<!channel> @everyone `x` & <http://evil|click>", "\x1b[2Jx\nline two\x07", "word " * 999]
)
def test_text_of_a_cause_has_no_markup_and_is_short(text: str) -> None:
    cleaned = clean(text)
    assert not set(cleaned) & set("<>&@`\n\x1b\x07") and len(cleaned) <= 200


def test_only_the_first_node_sends_the_events_of_the_whole_job() -> None:
    hang = {"state": "hung", "since": 5, "rank": 3}
    everything: dict[str, Any] = {"unsaved": "its uploads fail", "hang": hang}
    order = ORDER._replace(budget_at=999.0)
    ended = facts(state="failed", cause=CAUSE, **everything)
    assert names(ended, order) == ["budget", "hung", "unsaved", "ended"]
    assert names(facts(1, state="failed", cause=CAUSE, complete=True, **everything), order) == ["unsaved"]


def test_each_node_sends_once_that_it_saves_nothing_any_more() -> None:
    first, second = (find_events(ORDER, facts(node, unsaved="its uploads fail"))[0] for node in (0, 1))
    assert (
        second["text"]
        == "job train-1 on cluster default saves nothing from node1 to S3 any more: its uploads fail"
    )
    assert first["text"] == "job train-1 on cluster default saves nothing to S3 any more: its uploads fail"
    assert first["id"] != second["id"]


def test_another_node_sends_the_end_only_if_its_agent_ended_the_job_without_the_first() -> None:
    lost = Cause("node_lost", explanation="node1 ended its ranks: it lost node0", node=0)
    assert names(facts(1, state="failed", cause=lost)) == ["ended"]
    assert names(facts(1, state="interrupted", cause=lost, final=False)) == []


def test_agent_that_was_killed_on_the_first_node_is_an_end() -> None:
    assert names(facts(state="interrupted", cause=CAUSE, final=False, complete=False)) == ["ended"]


@pytest.mark.parametrize(
    ("hang", "expected"),
    [({"state": "hung", "since": 5}, "hung"), ({"state": "unknown", "since": 5}, "silent")],
)
def test_hang_is_an_event_for_each_time_at_which_it_began(hang: dict[str, Any], expected: str) -> None:
    (first,) = find_events(ORDER, facts(hang=hang))
    (again,) = find_events(ORDER, facts(hang=hang)._replace(now=2000.0))
    (later,) = find_events(ORDER, facts(hang={**hang, "since": 6}))
    assert first["event"] == expected
    assert first["id"] == again["id"] != later["id"]


def test_hang_that_ends_the_job_is_its_end_and_no_event_before() -> None:
    found = facts(hang={"state": "hung", "since": 5, "rank": 3})
    found.request.ends_when_hung = True
    assert names(found) == []


def test_spot_notice_names_its_node_and_each_node_has_its_own() -> None:
    reason = Shutdown("spot", "2026-11-23T20:30:00Z")
    (first,), (second,) = (find_events(ORDER, facts(node, shutdown=reason)) for node in (0, 1))
    assert first["event"] == second["event"] == "spot_notice" and first["id"] != second["id"]
    assert second["text"].endswith("node: AWS reclaims node1 at 2026-11-23T20:30:00Z")
    assert second["cause"]["kind"] == "spot_interruption"


def test_expiry_which_all_nodes_have_is_sent_by_the_first() -> None:
    assert names(facts(0, shutdown=Shutdown("expires", ""))) == ["power_off"]
    assert names(facts(1, shutdown=Shutdown("expires", ""))) == []
    assert names(facts(1, shutdown=Shutdown("poweroff", ""))) == ["power_off"]


def test_budget_is_sent_once_its_share_is_spent() -> None:
    assert names(facts(), ORDER._replace(budget_at=1001.0)) == []
    assert names(facts(), ORDER._replace(budget_at=1000.0)) == ["budget"]


def test_ids_differ_between_launches_and_are_the_same_on_all_machines() -> None:
    ended = facts(state="succeeded")
    ids = {find_events(ORDER._replace(launch=launch), ended)[0]["id"] for launch in ("x", "y", "x")}
    assert len(ids) == 2 and all(len(event_id) == 16 for event_id in ids)
