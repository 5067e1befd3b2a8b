"""Nodes that can be reached, and those that cannot."""

from dataclasses import replace

import pytest

from awsddp.errors import NodeError
from awsddp.job.fetch import fetch
from awsddp.job.jobs import list_jobs as jobs
from awsddp.session.connect import list_jobs_on_nodes
from tests.support.folder_nodes import World, start
from tests.support.owed_results import at_home


def test_node_that_breaks_off_does_not_silence_the_other(owed: World) -> None:
    owed.cut = {1}
    [job] = jobs(owed.session())["jobs"]
    assert (job["job"], job["nodes"][1].instance_id) == ("j", "i-1")
    assert "node1 was skipped: node1: the connection was lost" in owed.said
    with pytest.raises(NodeError):
        fetch(owed.session(), job="j", start=print)
    assert (at_home(owed), owed.tags) == (["node0"], {"i-0": [], "i-1": ["j"]})


def test_no_node_chooses_a_folder_of_the_users(world: World) -> None:
    start(world, "", name="mine")
    world.homes.wait("mine")
    world.folder.write(replace(world.record, jobs=()))  # as where another machine has started it
    assert [job.job for job in list_jobs_on_nodes(world.connected())] == ["mine"]
    (world.project / "runs/mine").mkdir(parents=True)
    assert list_jobs_on_nodes(world.connected()) == ()
