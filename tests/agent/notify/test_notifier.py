"""The notifier of a job on hosts: each event arrives, in order, at most twice, whoever sends it."""

import base64
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import Cancel, Launch
from awsddp.agent.notify import notifier
from awsddp.agent.notify.notifier import UnsavedClock, is_alive, nodes_between
from awsddp.agent.notify.pending import lock_notifier
from awsddp.agent_client import calls
from awsddp.agent_client.program import NOTIFIER_MODULES, node_program
from benchmarks.campaigns.hangs import HANGS
from tests.support.fleet import Fleet, all_processes, make_launch
from tests.support.waiting import until
from tests.support.webhook import serve_webhook

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
FAILS = "import sys\nraise ValueError('the password is s3cret')\n"


def launch_with_notifier(fleet: Fleet, script: str, url: str | None, **settings: Any) -> None:
    """Launch a job on all nodes of a fleet, with a notifier that sends JSON to a URL."""
    order = {"job": "job", "cluster": "default", "launch": "l1", **settings.pop("order", {})}
    looks = settings.pop("looks", ())
    requests = fleet.requests(script, **settings)
    argv, stdin = node_program("python3", NOTIFIER_MODULES, {"order": order, "url": url, "format": "json"})
    for request in requests.values():
        request.looks = looks
        request.notify = {"argv": argv, "stdin": base64.b64encode(stdin).decode()}
    running = {node: fleet.start(node, request) for node, request in requests.items()}
    for node, process in running.items():
        out, err = process.communicate(timeout=60)
        calls.parse_response(out, request=requests[node], node=node, stderr=err)
    fleet.jobs.append("job")


def is_notifier_running(fleet: Fleet, node: int) -> bool:
    descriptor = lock_notifier(JobFolder("job", fleet.folder(node)))
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def outcome_of(fleet: Fleet, node: int) -> list[tuple[str, str, int]]:
    """Return (event, outcome, requests) for each event on a node."""
    file = fleet.folder(node) / "events.json"
    rows = json.loads(file.read_text())["events"] if file.exists() else []
    return [(row["event"], row["outcome"], row["requests"]) for row in rows]


def find_text(text: str, *folders: Path) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_end_of_a_job_arrives_once_and_the_url_is_in_no_file(fleet: Fleet) -> None:
    with serve_webhook() as hook:
        launch_with_notifier(fleet, FAILS, hook.url)
        (event,) = hook.wait(1)
        assert (event["event"], event["job"], event["cluster"]) == ("ended", "job", "default")
        assert event["cause"]["explanation"] == "ValueError"
        assert not find_text(hook.url, *fleet.homes)
        until(lambda: not any(is_notifier_running(fleet, node) for node in (0, 1)), seconds=10)
        assert outcome_of(fleet, 0) == [("ended", "delivered", 1)]
        assert len(hook.bodies) == 1


def test_server_error_is_answered_with_one_more_request_of_the_same_id(fleet: Fleet) -> None:
    with serve_webhook("500") as hook:
        launch_with_notifier(fleet, "print()\n", hook.url)
        first, second = hook.wait(2)
        assert first == second
        until(lambda: not is_notifier_running(fleet, 0), seconds=10)
        assert outcome_of(fleet, 0) == [("ended", "unknown", 2)]
        assert len(hook.bodies) == 2


@pytest.mark.prove
def test_events_arrive_in_the_order_in_which_they_happen(fleet: Fleet) -> None:
    """The first look of the job's agents at its silent ranks is after half a second."""
    with serve_webhook() as hook:
        order = {"budget_at": time.time()}
        launch_with_notifier(fleet, SLEEP, hook.url, order=order, looks=(0.5, 0.5))
        hook.wait(2)
        abandoned = {"error": "AccessDenied: s3cret", "ended": True, "at": time.time()}
        (fleet.folder(0) / "saving.json").write_text(json.dumps(abandoned))
        hook.wait(3)
        fleet.send_request(0, Cancel(job="job", grace=0))
        hook.wait(4)
        assert hook.events == ["budget", "silent", "unsaved", "ended"]
        assert hook.bodies[3]["cause"]["kind"] == "cancelled"
        until(lambda: not is_notifier_running(fleet, 0), seconds=10)
        assert len(hook.bodies) == 4


@pytest.mark.prove
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("recover", "event"), [(None, "hung"), (1, "ended")])
def test_hang_of_real_ranks_is_an_event_that_names_the_rank(
    fleet: Fleet, recover: int | None, event: str
) -> None:
    """The agents look after 4 s of silence and 3 s later, not after half an hour."""
    settings = {"looks": (4.0, 3.0), "recover": recover, "variables": {"CULPRIT": "1"}}
    with serve_webhook() as hook:
        launch_with_notifier(fleet, HANGS["skip"][0], hook.url, **settings)
        (body,) = hook.wait(1, seconds=90)
        assert (body["event"], body["cause"]["kind"], body["cause"]["rank"]) == (event, "hang", 1)


@pytest.mark.prove
def test_events_wait_for_a_server_that_is_down_and_arrive_in_order(fleet: Fleet) -> None:
    with serve_webhook("refused") as dead:
        launch_with_notifier(fleet, "print()\n", dead.url, order={"budget_at": time.time()})
        until(lambda: len(outcome_of(fleet, 0)) == 2 and outcome_of(fleet, 0)[0][1] == "unsent", seconds=10)
        with serve_webhook(port=dead.port) as hook:
            hook.wait(2)
        assert hook.events == ["budget", "ended"]


@pytest.mark.prove
def test_second_node_sends_the_end_if_the_first_node_is_lost(make_fleet: Any) -> None:
    fleet = make_fleet(3)
    with serve_webhook() as hook:
        launch_with_notifier(fleet, SLEEP, hook.url, heartbeat_timeout="5s")
        until(fleet.ranks_are_up)
        for pid, environ, _ in all_processes():
            if f"HOME={fleet.homes[0]}".encode() in environ.split(b"\0"):
                os.kill(pid, signal.SIGKILL)
        (event,) = hook.wait(1)
        assert (event["event"], event["cause"]["kind"], event["cause"]["node"]) == ("ended", "node_lost", 0)
        until(lambda: not any(is_notifier_running(fleet, node) for node in (1, 2)), seconds=10)
        assert outcome_of(fleet, 1) == [("ended", "delivered", 1)]
        assert not (fleet.folder(2) / "events.json").exists()
        assert len(hook.bodies) == 1


@pytest.mark.prove
def test_notifier_lives_on_when_the_agent_is_killed_and_sends_the_end_once(fleet: Fleet) -> None:
    with serve_webhook("500") as hook:
        launch_with_notifier(fleet, SLEEP, hook.url)
        until(fleet.ranks_are_up)
        os.kill(fleet.document(0)["pid"], signal.SIGKILL)
        hook.wait(2)
        until(lambda: not any(is_notifier_running(fleet, node) for node in (0, 1)), seconds=20)
        # Each node knows that the other one may send the end, so each sends it once.
        assert hook.bodies[0]["id"] == hook.bodies[1]["id"] and len(hook.bodies) == 2
        assert outcome_of(fleet, 0) == outcome_of(fleet, 1) == [("ended", "gave up", 1)]


def test_uploads_that_fail_are_reported_after_a_while_and_abandoned_ones_at_once() -> None:
    clock, failing = UnsavedClock(), {"error": "AccessDenied: s3cret", "ended": False, "at": 0.0}
    assert clock.update(failing, 0.0, 0.0) == clock.update(failing, 599.0, 0.0) == ""
    assert clock.update(failing, 600.0, 0.0) == "its uploads fail"
    assert clock.update({**failing, "error": ""}, 601.0, 0.0) == ""
    assert clock.update(failing, 602.0, 0.0) == ""
    assert clock.update({**failing, "ended": True}, 603.0, 0.0) == "its uploads were abandoned"
    assert UnsavedClock().update(None, 0.0, 0.0) == ""


def test_uploader_without_a_heartbeat_saves_nothing() -> None:
    clock, saving = UnsavedClock(), {"error": "", "ended": False, "at": 1000.0}
    assert clock.update(saving, 0.0, 1119.0) == clock.update(saving, 1.0, 1121.0) == ""
    assert clock.update(saving, 601.0, 1721.0) == "its uploader has died or hangs"
    assert clock.update({**saving, "ended": True}, 700.0, 2000.0) == ""


def test_machine_that_refuses_connections_is_alive_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [{"node": n, "private_ip": f"127.0.0.{n + 1}", "instance_id": f"i-{n}"} for n in range(4)]
    request = make_launch(3, nodes=nodes, link_port=1)
    assert nodes_between(request) == ["127.0.0.2", "127.0.0.3"]
    assert nodes_between(Launch.from_json({**request.to_json(), "node": 1})) == []
    assert is_alive("127.0.0.2", request)
    monkeypatch.setattr(notifier, "_PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        request.link_port = listener.getsockname()[1]
        assert is_alive("127.0.0.1", request)
    with serve_webhook("blackhole") as dead:
        request.link_port = dead.port
        assert not is_alive("127.0.0.1", request)
