"""Locating a cluster, and errors if another command has terminated it."""

import pytest

from awsddp.cluster.down import down
from awsddp.errors import NodeError
from awsddp.nodes.fleet import Fleet
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session import locate
from awsddp.session.connect import connect
from tests.support.folder_nodes import World
from tests.support.machine import On


def test_an_error_says_that_another_command_has_terminated_the_cluster(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "_search", lambda *_, **__: world.located())
    session = world.session()
    with pytest.raises(NodeError) as refused, locate.find_cluster(session, name_lock_holder=True):
        world.folder.archive("0a1b2c3d")
        raise NodeError("node0: the connection was lost", "Channel is not open", "awsddp status")
    assert refused.value.why == "Channel is not open\nanother command has terminated the cluster"
    assert refused.value.next.startswith("awsddp up")


def test_nodes_that_another_command_terminates_are_reported_with_their_state(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()

    def fail(fleet: Fleet) -> None:
        raise NodeFailure(1, "files", "the transfer was interrupted")

    monkeypatch.setattr(Fleet, "__enter__", fail)
    with pytest.raises(NodeFailure) as failed, locate.find_cluster(laptop.context()) as cluster:
        assert cluster.listing is not None
        down(laptop.context(), confirm=lambda _: None)
        with connect(cluster.with_nodes(cluster.listing.live, all_nodes=())):
            pass
    assert failed.value.why.splitlines() == [f"EC2 says: node{node} is terminated" for node in (0, 1)]
