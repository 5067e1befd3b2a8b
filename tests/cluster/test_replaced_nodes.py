"""Jobs that run or wait without a node that was replaced: `up` names them, and what starts them on all."""

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
from tests.support.folder_nodes import World, start
from tests.support.waiting import until

SLEEPS = "import time; time.sleep(600)\n"
ELASTIC: dict[str, Any] = {"nnodes": "1:2", "max_restarts": 3}


def lose_node(world: World, number: int) -> None:
    """Lose a node with all that runs on it; another machine takes its number."""
    home = f"HOME={world.homes.homes[number]}".encode()

    def running() -> list[int]:
        return [pid for pid, environ, _ in all_processes() if home in environ.split(b"\0")]

    for pid in running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not running())
    world.replace_node(number)


def states(world: World) -> dict[str, str]:
    return {job.job: job.state for job in list_jobs_on_nodes(world.connected())}


def named(world: World) -> list[str]:
    """Return what `up` says of the jobs, without the settings that only these tests choose."""
    world.said.clear()
    report_jobs_without_replaced_nodes(world.located())
    return [re.sub(r" -o (sync\.workdir|job\.heartbeat_timeout)=\S+", "", text) for text in world.said]


def begin(world: World, **job: Any) -> None:
    """Start a job that gives a lost node up soon: one that ends with words unread resets its connection."""
    start(world, SLEEPS, heartbeat_timeout="10s", **job)


@pytest.mark.prove
def test_job_that_waits_and_goes_on_waiting_is_named_with_what_starts_it_again(world: World) -> None:
    begin(world, name="one", **ELASTIC)
    begin(world, name="two", after="one", **ELASTIC)
    assert named(world) == []
    lose_node(world, 1)
    until(lambda: world.homes.document(0, "two")["state"] == "waiting")
    said = named(world)
    assert said == [
        "job one runs without node1, which was replaced; to include it: awsddp cancel one && "
        "awsddp fetch one; awsddp train --nnodes 1:2 --max-restarts 3 --resume one w.py",
        "job two waited for node1, which was replaced: awsddp cancel two && "
        "awsddp train --nnodes 1:2 --after one --max-restarts 3 w.py",
    ]
    assert named(world) == said
    for name in ("two", "one"):
        end_ranks(world.connected(), name, grace_s=0)
    assert named(world) == []
    lines = world.lines
    assert (named(world), world.lines - lines) == ([], 0), "the nodes are not asked"


def test_job_that_failed_as_it_waited_is_named_once_without_the_values_of_its_variables(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    session = world.session

    def with_variables(**job: object) -> Session:
        made = session(**job)
        env = replace(made.job_spec.env, variables={"PLAIN": "pl4in"}, secrets=("TOKEN",))
        return made.with_settings(job_spec=replace(made.job_spec, env=env))

    monkeypatch.setattr(world, "session", with_variables)
    begin(world, name="one")
    until(lambda: world.homes.document(0, "one")["ranks"][0]["started"])
    # Its supervisors may not have met yet when the node goes: then the first waits this long for the other.
    monkeypatch.setattr(launch_requests, "JOIN_SECONDS", 5.0)
    begin(world, name="two", after="one")
    lose_node(world, 1)
    until(lambda: set(states(world).values()) == {"failed"})
    (said,) = named(world)
    assert said == (
        "job two waited for node1, which was replaced: "
        "awsddp train -o 'env.secrets=[\"TOKEN\"]' --after one --env-var PLAIN=pl4in w.py"
    )
    assert named(world) == []


@pytest.mark.prove
def test_job_whose_nodes_are_all_replaced_is_named_where_it_waited(world: World) -> None:
    begin(world, name="one")
    begin(world, name="two", after="one")
    for node in (0, 1):
        lose_node(world, node)
    (said,) = named(world)
    assert said == "job two waited for node0, node1, which was replaced: awsddp train --after all w.py"
