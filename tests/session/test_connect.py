"""Connecting to nodes, of which some do not answer."""

from dataclasses import replace

import pytest

from awsddp.errors import NodeError
from awsddp.job.fetch import fetch
from awsddp.job.jobs import list_jobs as jobs
from awsddp.session.connect import list_jobs_on_nodes
from tests.support.folder_nodes import World, start_script
from tests.support.owed_results import fetched_nodes


def test_a_node_that_loses_its_connection_does_not_hide_the_other(unfetched: World) -> None:
    unfetched.cut = {1}
    [job] = jobs(unfetched.session())["jobs"]
    assert (job["job"], job["nodes"][1].instance_id) == ("j", "i-1")
    assert "node1 was skipped: node1: the connection was lost" in unfetched.events
    with pytest.raises(NodeError):
        fetch(unfetched.session(), job="j", start=print)
    assert (fetched_nodes(unfetched), unfetched.tags) == (["node0"], {"i-0": [], "i-1": ["j"]})


def test_a_job_that_nodes_list_is_ignored_if_its_results_folder_exists(world: World) -> None:
    start_script(world, "", name="mine")
    world.homes.wait("mine")
    world.folder.write(replace(world.record, jobs=()))  # as if another client had started it
    assert [job.job for job in list_jobs_on_nodes(world.connected())] == ["mine"]
    (world.project / "runs/mine").mkdir(parents=True)
    assert list_jobs_on_nodes(world.connected()) == ()
