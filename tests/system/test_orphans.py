"""`down --orphans` terminates no cluster whose instances AWS does not list yet."""

import pytest

from awsddp.cluster.inventory import down_orphans
from awsddp.cluster.up import up
from tests.support.world import PHASES, Kill, World, agree


@pytest.mark.parametrize("kill", [None, Kill("RunInstances", 1, PHASES[1])], ids=["ready", "launching"])
def test_a_cluster_that_aws_does_not_list_yet_is_no_orphan(world: World, kill: Kill | None) -> None:
    world.run(up, confirm=agree, kill=kill)
    made = {node["InstanceId"] for node in world.cloud.live_instances()}
    assert len(made) == 2
    late = ("DescribeInstances", "stale", {"seconds": 30})
    ended = world.run(down_orphans, fault=late, confirm=agree)
    assert (ended.code, ended.document["clusters"]) == (0, ()), ended.text
    assert {node["InstanceId"] for node in world.cloud.live_instances()} == made
