"""Nodes whose tags were removed: the machine that launched them describes them by their ids."""

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
    """Remove tags from a running node, as a tagging policy does; return its instance id."""
    instance_id = next(node.instance_id for node in cluster.live if node.node == number)
    machine.aws.call("DeleteTags", {"Resources": [instance_id], "Tags": [{"Key": name} for name in tags]})
    return instance_id


def run_down(machine: Machine) -> dict[str, Any]:
    return down(machine.context(), confirm=lambda question: None)


@pytest.mark.parametrize(
    ("tags", "nodes"),
    [
        (TAGS[:1], 2),
        (TAGS, 1),
        pytest.param(TAGS[1:2], 2, marks=pytest.mark.prove),
        pytest.param(TAGS[3:], 2, marks=pytest.mark.prove),
    ],
)
def test_a_node_without_its_tags_is_not_lost(on: On, cloud: Cloud, tags: list[str], nodes: int) -> None:
    laptop = on("laptop")
    before = laptop.launch_two_nodes(cluster__nodes=nodes)
    untag(laptop, before, nodes - 1, *tags)
    result = status(laptop.context())
    ids = {node["node"]: node["instance_id"] for node in result["nodes"]}
    assert (result["state"], ids) == ("ready", {node.node: node.instance_id for node in before.live})
    assert result["price_usd_per_hour"] == pytest.approx(nodes * (1.006 + 0.005 + 200 * 0.08 / 730), abs=1e-3)
    assert laptop.up()["state"] == "ready"
    assert (cloud.requests_of("RunInstances"), laptop.questions) == ([], [])
    start = CLOCK.monotonic()
    ended = run_down(laptop)
    assert sorted(ended["terminated"]) == sorted(ids.values())
    assert CLOCK.monotonic() - start < 60
    assert not laptop.folder.path.exists()


def test_fetch_does_not_report_a_node_without_tags_as_gone(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awsddp.session.connect.CONNECT_S", 1.0)
    laptop = on("laptop")
    instance_id = untag(laptop, laptop.launch_two_nodes(), 1, *TAGS)
    laptop.messages.clear()
    with pytest.raises(Exception) as error:  # no machine answers; only the report counts
        fetch(laptop.context(), job="train-1", start=print)
    assert "is gone" not in "\n".join([*laptop.messages, str(error.value)])
    assert instance_id in {node["instance_id"] for node in status(laptop.context())["nodes"]}


def test_down_names_a_node_that_it_may_not_terminate_and_its_missing_tags(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    instance_id = untag(laptop, laptop.launch_two_nodes(), 1, *TAGS)
    cloud.fail("TerminateInstances", *["UnauthorizedOperation"] * 9, message="no identity policy allows it")
    start = CLOCK.monotonic()
    with pytest.raises(LeftoverError) as error:
        run_down(laptop)
    assert CLOCK.monotonic() - start < 60
    assert f"{instance_id}: running; " in error.value.why
    assert "it has lost its tags awsddp:id and awsddp:owner" in error.value.why
    assert laptop.folder.key.exists()


def test_down_without_a_record_names_the_untagged_node_of_the_security_group(on: On) -> None:
    laptop, desk = on("laptop"), on("desk")
    instance_id = untag(laptop, laptop.launch_two_nodes(), 1, "awsddp:owner")
    start = CLOCK.monotonic()
    with pytest.raises(LeftoverError) as error:
        run_down(desk)
    assert CLOCK.monotonic() - start < 60
    assert f"of {instance_id}, which lacks the cluster's tags: terminate it" in error.value.why
    states = {node.instance_id: node.state for node in describe(desk.aws, [])}
    assert states[instance_id] == "running"
    assert run_down(laptop)["terminated"] == (instance_id,)
    assert not laptop.folder.path.exists()
