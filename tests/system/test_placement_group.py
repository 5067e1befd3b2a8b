"""Capacity that exists only outside the placement group: `up` uses it, or names the alternatives."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.lab import Lab

NONE = "InsufficientInstanceCapacity"
TWO = ("up", "--local", "-y", "--nodes", "2", "--instance-type")


@contextmanager
def fill_group(records: Lab) -> Iterator[None]:
    """Take all capacity of placement groups within the context."""
    for operation in ("RunInstances", "StartInstances"):
        added = records.run("local", "fault", "add", operation, NONE, "--only", "placement-group")
        assert added.returncode == 0, added.stderr
    try:
        yield
    finally:
        records.run("local", "fault", "clear")


def list_ids(document: dict[str, Any]) -> list[str]:
    return [node["instance_id"] for node in document["nodes"]]


def test_a_full_placement_group_prevents_no_start_and_no_growth(records: Lab) -> None:
    records.json(*TWO, "g6.xlarge")
    assert records.run("stop", "-y").returncode == 0
    with fill_group(records):
        started = records.run("up", "-y", "--nodes", "3")
    assert started.returncode == 0, started.stderr
    assert started.stderr.count("no room in the placement group, starting the nodes without it") == 1
    assert started.stderr.count("no room in the placement group, asking without it") == 1
    assert [node["state"] for node in records.json("status")["nodes"]] == ["running"] * 3
    records.json("down", "-y")


def test_up_with_efa_fails_in_a_full_placement_group_and_names_the_alternatives(records: Lab) -> None:
    efa = ("-o", "capacity.efa=true")
    first = records.json(*TWO, "g6.8xlarge", *efa)
    with fill_group(records):
        grown = records.run("up", "-y", "--nodes", "3")
    assert grown.returncode == 5
    for advice in (
        "AWS has no 1 x g6.8xlarge now in us-east-1a",
        "awsddp up --nodes 3   # again, later",
        "awsddp up --nodes 3 -o capacity.placement_group=false",
        "awsddp stop && awsddp up --nodes 3",
        "awsddp up --nodes 2   # continue without the missing nodes",
        "awsddp down && awsddp --local up --nodes 3",
    ):
        assert advice in grown.stderr, grown.stderr
    assert list_ids(records.json("status")) == list_ids(first)
    assert records.run("stop", "-y").returncode == 0
    with fill_group(records):
        refused = records.run("up", "-y")
        taken = records.json("up", "-y", "-o", "capacity.placement_group=false")
    assert refused.returncode == 5
    assert "capacity.placement_group=false" in refused.stderr
    assert "--nodes 2" not in refused.stderr, "the nodes that are off cannot go on"
    assert list_ids(taken) == list_ids(first)
    records.json("down", "-y")
