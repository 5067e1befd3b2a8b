"""A client takes the events that a node cannot send; the node counts them as sent."""

import time

import pytest

from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import TakeEvent
from awsddp.agent.notify.events import Facts
from awsddp.agent.notify.pending import max_requests, read_facts
from awsddp.model.node_answers import TakenEvent
from tests.agent.notify.test_notifier import is_notifier_running, launch_with_notifier, outcome_of
from tests.support.fleet import Fleet
from tests.support.waiting import until
from tests.support.webhook import serve_webhook


def take(fleet: Fleet, node: int = 0, settled: tuple[str, str, str] | None = None) -> TakenEvent:
    return fleet.send_request(node, TakeEvent(job="job", settled=settled))


def test_node_without_a_url_gives_its_events_in_order_to_a_client(fleet: Fleet) -> None:
    launch_with_notifier(fleet, "print()\n", None, order={"budget_at": time.time()})
    until(lambda: len(outcome_of(fleet, 0)) == 2)
    first = take(fleet)
    assert (first.event.event, first.left) == ("budget", 2)
    assert take(fleet).event is None, "another client sends it"
    second = take(fleet, settled=(first.event.id, "delivered", ""))
    assert (second.event.event, second.event.job, second.event.cause) == ("ended", "job", None)
    third = take(fleet, settled=(second.event.id, "unknown", "no answer"))
    assert third.event == second.event
    assert take(fleet, settled=(third.event.id, "unknown", "no answer")) == TakenEvent(event=None, left=0)
    assert outcome_of(fleet, 0) == [("budget", "delivered", 1), ("ended", "unknown", 2)]
    assert take(fleet, 1) == TakenEvent(event=None, left=0)


def test_node_that_sends_its_events_gives_none(fleet: Fleet) -> None:
    with serve_webhook() as hook:
        launch_with_notifier(fleet, "print()\n", hook.url)
        hook.wait(1)
        until(lambda: not is_notifier_running(fleet, 0))
    assert take(fleet) == TakenEvent(event=None, left=0)


def test_job_without_a_notifier_gives_no_event(fleet: Fleet) -> None:
    fleet.run("print()\n")
    assert take(fleet) == TakenEvent(event=None, left=0)


@pytest.mark.prove
def test_client_takes_over_from_a_node_that_cannot_reach_the_url(fleet: Fleet) -> None:
    with serve_webhook("refused") as dead:
        launch_with_notifier(fleet, "print()\n", dead.url)
        until(lambda: outcome_of(fleet, 0) == [("ended", "unsent", 0)])
    event = take(fleet).event
    assert event is not None and event.event == "ended"
    with serve_webhook(port=dead.port) as hook:
        take(fleet, settled=(event.id, "delivered", ""))
        until(lambda: not is_notifier_running(fleet, 0), seconds=20)
        assert hook.bodies == []


def test_first_node_repeats_the_end_only_if_the_other_nodes_know_it(fleet: Fleet) -> None:
    fleet.run("print()\n")
    facts: Facts = read_facts(JobFolder("job", fleet.folder(0)))
    until(lambda: read_facts(JobFolder("job", fleet.folder(0))).document.acknowledged)
    known = read_facts(JobFolder("job", fleet.folder(0)))
    assert max_requests(known, {"event": "ended"}) == 2
    facts.document.acknowledged = False
    assert max_requests(facts, {"event": "ended"}) == 1
    assert max_requests(facts, {"event": "hung"}) == 2
    assert max_requests(read_facts(JobFolder("job", fleet.folder(1))), {"event": "ended"}) == 1
