"""Values of the cluster's tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awsddp.model.records import (
    OLDER_JOBS,
    Node,
    format_node_numbers,
    list_unfetched_jobs,
    parse_node_numbers,
)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0,), "0"),
        ((1, 0), "0,1"),
        ((0, 1, 2), "0-2"),
        (tuple(range(64)), "0-63"),
        ((0, 2, 3, 7, 8, 9), "0,2,3,7-9"),
    ],
)
def test_node_numbers_are_formatted_as_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert format_node_numbers(numbers) == text


@given(st.sets(st.integers(0, 999), min_size=1))
def test_node_numbers_are_read_as_they_were_written(numbers: set[int]) -> None:
    assert parse_node_numbers(format_node_numbers(numbers)) == tuple(sorted(numbers))


def test_unfetched_jobs_are_in_the_order_of_the_tags_and_not_of_their_names() -> None:
    machine = {"state": "running", "instance_type": "g6.xlarge", "zone": "z", "image_id": "ami-0"}
    nodes = [
        Node(node=node, instance_id=f"i-{node}", unfetched=jobs, **machine)
        for node, jobs in enumerate([(OLDER_JOBS, "w-9", "w-10"), ("w-10", "a-1")])
    ]
    assert list_unfetched_jobs(nodes) == ["w-9", "w-10", "a-1", OLDER_JOBS]
