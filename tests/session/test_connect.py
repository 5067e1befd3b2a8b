"""Nodes that can be reached, and those that cannot."""

import pytest

from awsddp.errors import NodeError
from awsddp.job.fetch import fetch
from awsddp.job.jobs import jobs_of_all as jobs
from tests.support.folder_nodes import World
from tests.support.owed_results import at_home


def test_node_that_breaks_off_does_not_silence_the_other(owed: World) -> None:
    owed.cut = {1}
    [job] = jobs(owed.session())["jobs"]
    assert (job["job"], job["nodes"][1].instance_id) == ("j", "i-1")
    assert "node1 was skipped: node1: the connection was lost" in owed.said
    with pytest.raises(NodeError):
        fetch(owed.session(), job="j", start=print)
    assert (at_home(owed), owed.tags) == (["node0"], {"i-0": [], "i-1": ["j"]})
