"""Jobs that run or wait without a replaced node: `up` names them, and the commands that restart them."""

import contextlib
import os
import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from awsddp.agent_client import launch_requests
from awsddp.cluster.replaced_nodes import report_jobs_without_replaced_nodes
from awsddp.job.cancel import end_ranks
from awsddp.session.connect import list_jobs_on_nodes
from awsddp.session.context import Session
from tests.support.fleet import all_processes
from tests.support.folder_nodes import World, start_script
from tests.support.waiting import until

SLEEPS = "import time; time.sleep(600)\n"
ELASTIC: dict[str, Any] = {"nnodes": "1:2", "max_restarts": 3}


def lose_node(world: World, number: int) -> None:
    """Kill all processes of a node, and replace it by another one with its number."""
    home = f"HOME={world.homes.homes[number]}".encode()

    def list_running() -> list[int]:
        return [pid for pid, environ, _ in all_processes() if home in environ.split(b"\0")]

    for pid in list_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not list_running())
    world.replace_node(number)


def states(world: World) -> dict[str, str]:
    return {job.job: job.state for job in list_jobs_on_nodes(world.connected())}


def list_reports(world: World) -> list[str]:
    """Return what `up` reports about the jobs, without the options that only these tests set."""
    world.events.clear()
    report_jobs_without_replaced_nodes(world.located())
    return [re.sub(r" -o (sync\.workdir|job\.heartbeat_timeout)=\S+", "", text) for text in world.events]


def start_job(world: World, **job: Any) -> None:
    """Start a job with a short heartbeat timeout: a node that ends with unread data resets its connection."""
    start_script(world, SLEEPS, heartbeat_timeout="10s", **job)


@pytest.mark.prove
def test_up_names_jobs_that_lack_a_replaced_node_and_how_to_restart_them(world: World) -> None:
    start_job(world, name="one", **ELASTIC)
    start_job(world, name="two", after="one", **ELASTIC)
    assert list_reports(world) == []
    lose_node(world, 1)
    until(lambda: world.homes.document(0, "two")["state"] == "waiting")
    reports = list_reports(world)
    assert reports == [
        "job one runs without node1, which was replaced; to include it: awsddp cancel one && "
        "awsddp fetch one; awsddp train --nnodes 1:2 --max-restarts 3 --resume one w.py",
        "job two waited for node1, which was replaced: awsddp cancel two && "
        "awsddp train --nnodes 1:2 --after one --max-restarts 3 w.py",
    ]
    assert list_reports(world) == reports
    for name in ("two", "one"):
        end_ranks(world.connected(), name, grace_s=0)
    assert list_reports(world) == []
    lines = world.connection_count
    assert (list_reports(world), world.connection_count - lines) == ([], 0), "the nodes are not asked"


def test_up_names_a_job_that_failed_while_waiting_once_and_without_secret_values(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    make_session = world.session

    def with_variables(**job: object) -> Session:
        session = make_session(**job)
        env = replace(session.job_spec.env, variables={"PLAIN": "pl4in"}, secrets=("TOKEN",))
        return session.with_settings(job_spec=replace(session.job_spec, env=env))

    monkeypatch.setattr(world, "session", with_variables)
    start_job(world, name="one")
    until(lambda: world.homes.document(0, "one")["ranks"][0]["started"])
    # The supervisors may not have met yet when the node is lost: the first then waits this long.
    monkeypatch.setattr(launch_requests, "JOIN_SECONDS", 5.0)
    start_job(world, name="two", after="one")
    lose_node(world, 1)
    until(lambda: set(states(world).values()) == {"failed"})
    (report,) = list_reports(world)
    assert report == (
        "job two waited for node1, which was replaced: "
        "awsddp train -o 'env.secrets=[\"TOKEN\"]' --after one --env-var PLAIN=pl4in w.py"
    )
    assert list_reports(world) == []


@pytest.mark.prove
def test_up_names_a_waiting_job_whose_nodes_are_all_replaced(world: World) -> None:
    start_job(world, name="one")
    start_job(world, name="two", after="one")
    for node in (0, 1):
        lose_node(world, node)
    (report,) = list_reports(world)
    assert report == "job two waited for node0, node1, which was replaced: awsddp train --after all w.py"
