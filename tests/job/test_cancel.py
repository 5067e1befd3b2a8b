"""Jobs are cancelled by their names, also waiting ones."""

import os
import signal

import pytest

from awsddp.errors import NotFoundError, UsageError
from awsddp.job.cancel import cancel_jobs, end_ranks
from tests.support.folder_nodes import World, start_script
from tests.support.waiting import until
from tests.support.waiting_jobs import jobs, script, states


def test_one_cancel_ends_several_jobs_and_the_waiting_ones_first(world: World) -> None:
    start_script(world, script(1, 600), name="one")
    for name in ("two", "three", "four"):
        start_script(world, script(2), name=name, after="one")
    with pytest.raises(NotFoundError, match="no job none"):
        cancel_jobs(world.session(), ["two", "none"])
    assert set(states(world).values()) == {"running", "waiting"}
    assert [job.job for job in cancel_jobs(world.session(), ["two", "two"])] == ["two"]
    assert [job.job for job in cancel_jobs(world.session(grace="1s"), ["all"])] == ["four", "three", "one"]
    assert set(states(world).values()) == {"cancelled"}
    with pytest.raises(NotFoundError, match="no job is running"):
        cancel_jobs(world.session(), ["all"])
    assert cancel_jobs(world.session(), ["one"])[0].state == "cancelled"


def test_a_waiting_job_can_be_cancelled_and_fails_if_it_loses_a_node(world: World) -> None:
    start_script(world, script(1, 600), name="one")
    start_script(world, script(2), name="two", after="on")
    start_script(world, script(3), name="three", after="one")
    with pytest.raises(UsageError, match="several jobs have o in their name"):
        start_script(world, script(4), after="o")
    end_ranks(world.connected(), "two")
    os.kill(world.homes.document(1, "three")["pid"], signal.SIGKILL)
    until(lambda: states(world) == {"one": "running", "two": "cancelled", "three": "failed"}, seconds=60)
    by_name = jobs(world)
    cause = by_name["three"].cause
    assert cause is not None
    assert (cause.node, cause.kind) == (1, "node_lost")
    assert cause.explanation.startswith("node1 left the job while it waited: ")
    assert by_name["two"].started is None
    end_ranks(world.connected(), "one", grace_s=0)
    assert world.homes.processes() == []
