"""Nodes whose tags somebody removed: the machine that made them asks for them by their ids."""

from typing import Any

import pytest

from awsddp.aws.clusters import describe
from awsddp.aws.waits import CLOCK
from awsddp.cluster.down import down
from awsddp.cluster.status import status
from awsddp.errors import LeftoverError
from awsddp.job.fetch import fetch
from awsddp.model.records import ClusterListing
from tests.support.machine import Machine, On
from tests.support.moto_cloud import Cloud

TAGS = ["awsddp:owner", "awsddp:id", "awsddp:cluster", "awsddp:nodes"]


def untag(machine: Machine, cluster: ClusterListing, number: int, *tags: str) -> str:
    """Remove tags from a living node, as a tagging policy does; return its id."""
    key = next(node.instance_id for node in cluster.live if node.node == number)
    machine.aws.call("DeleteTags", {"Resources": [key], "Tags": [{"Key": name} for name in tags]})
    return key


def end(machine: Machine) -> dict[str, Any]:
    return down(machine.context(), confirm=lambda what: None)


@pytest.mark.parametrize(
    ("tags", "nodes"),
    [
        (TAGS[:1], 2),
        (TAGS, 1),
        pytest.param(TAGS[1:2], 2, marks=pytest.mark.prove),
        pytest.param(TAGS[3:], 2, marks=pytest.mark.prove),
    ],
)
def test_a_node_without_its_tags_is_no_lost_node(on: On, cloud: Cloud, tags: list[str], nodes: int) -> None:
    laptop = on("laptop")
    before = laptop.first(cluster__nodes=nodes)
    untag(laptop, before, nodes - 1, *tags)
    seen = status(laptop.context())
    ids = {node["node"]: node["instance_id"] for node in seen["nodes"]}
    assert (seen["state"], ids) == ("ready", {node.node: node.instance_id for node in before.live})
    assert seen["price_usd_per_hour"] == pytest.approx(nodes * (1.006 + 0.005 + 200 * 0.08 / 730), abs=1e-3)
    assert laptop.up()["state"] == "ready"
    assert (cloud.sent("RunInstances"), laptop.questions) == ([], [])
    began = CLOCK.monotonic()
    ended = end(laptop)
    assert sorted(ended["terminated"]) == sorted(ids.values())
    assert CLOCK.monotonic() - began < 60
    assert not laptop.folder.path.exists()


def test_a_node_without_its_tags_still_owes_its_results(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awsddp.session.connect.CONNECT_S", 1.0)
    laptop = on("laptop")
    key = untag(laptop, laptop.first(), 1, *TAGS)
    laptop.said.clear()
    with pytest.raises(Exception) as failed:  # no machine answers here; what counts is who was asked
        fetch(laptop.context(), job="train-1", start=print)
    assert "is gone" not in "\n".join([*laptop.said, str(failed.value)])
    assert key in {node["instance_id"] for node in status(laptop.context())["nodes"]}


def test_an_end_that_is_refused_says_what_stands_in_the_way(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    key = untag(laptop, laptop.first(), 1, *TAGS)
    cloud.fail("TerminateInstances", *["UnauthorizedOperation"] * 9, message="no identity policy allows it")
    began = CLOCK.monotonic()
    with pytest.raises(LeftoverError) as left:
        end(laptop)
    assert CLOCK.monotonic() - began < 60
    assert f"{key}: running; " in left.value.why
    assert "it has lost its tags awsddp:id and awsddp:owner" in left.value.why
    assert laptop.folder.key.exists()


def test_a_machine_without_the_record_names_what_holds_the_group(on: On) -> None:
    laptop, desk = on("laptop"), on("desk")
    key = untag(laptop, laptop.first(), 1, "awsddp:owner")
    began = CLOCK.monotonic()
    with pytest.raises(LeftoverError) as left:
        end(desk)
    assert CLOCK.monotonic() - began < 60
    assert f"of {key}, which lacks the cluster's tags: terminate it" in left.value.why
    states = {node.instance_id: node.state for node in describe(desk.aws, [])}
    assert states[key] == "running"
    assert end(laptop)["terminated"] == (key,)
    assert not laptop.folder.path.exists()
