"""Which ranks run where, on parts of a cluster and of its nodes."""

from typing import Any

import pytest

from awsddp.agent_client.rank_layout import layout_ranks, sort_for_torchrun
from awsddp.errors import ConfigError, UsageError
from awsddp.settings.loader import load
from awsddp.settings.spec import JobSection
from awsddp.settings.values import parse_gpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", {0: ()}),
        ("0,2-3", {0: (), 2: (), 3: ()}),
        ("0:4-7", {0: (4, 5, 6, 7)}),
        ("1:0-1,0:3", {0: (3,), 1: (0, 1)}),
        ("0-1:4-5,2", {0: (4, 5), 1: (4, 5), 2: ()}),
    ],
)
def test_on_names_nodes_or_gpus_of_nodes(text: str, expected: dict[int, tuple[int, ...]]) -> None:
    assert parse_gpus(text) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "0,", "1-0", "0:", "0:5-4", "0,0", "0-2,1", "0:1,0:2", "0:-1", "²"]
)
def test_invalid_on_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.on: invalid"):
        load(environ={}, overrides={"job.on": text})


def test_each_set_of_gpus_has_its_work_folder() -> None:
    texts = [None, "0", "0,1", "0:0-3", "0:4-7", "0:4-7,1:0-3"]
    folders = [JobSection(on=text).work_folder for text in texts]
    assert folders == ["work", "work", "work", "work-0_0-3", "work-0_4-7", "work-0_4-7_1_0-3"]


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        ({0: 4, 1: 2}, {}, {0: 2, 1: 2}),
        ({0: 0, 3: 0}, {"world_size": 4}, {0: 2, 3: 2}),
        ({0: 8, 1: 8}, {"nproc_per_node": 2}, {0: 2, 1: 2}),
        ({0: 8, 1: 8}, {"world_size": 4}, {0: 2, 1: 2}),
        ({0: 8}, {"nproc_per_node": 3}, {0: 3}),
    ],
)
def test_ranks_fill_nodes(gpus: dict[int, int], options: dict[str, Any], expected: dict[int, int]) -> None:
    ranks = layout_ranks(list(gpus), gpus=gpus, **options)
    assert [rank.rank for rank in ranks] == list(range(sum(expected.values())))
    assert {rank.node: rank.local_world_size for rank in ranks} == expected
    assert [(rank.node, rank.local_rank) for rank in ranks] == [
        (node, local) for node, count in expected.items() for local in range(count)
    ]


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        ({0: 2, 1: 2}, {"world_size": 6}),
        ({0: 8, 1: 2}, {"nproc_per_node": 3}),
        ({0: 8}, {"nproc_per_node": 9}),
    ],
)
def test_layout_that_does_not_fit_is_refused(gpus: dict[int, int], options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="do not fit") as refused:
        layout_ranks(list(gpus), gpus=gpus, **options)
    assert refused.value.next


def test_torch_orders_nodes_by_the_text_of_their_addresses() -> None:
    ranks = sort_for_torchrun(layout_ranks([0, 1, 2], gpus=0), {0: "10.0.0.9", 1: "10.0.0.10", 2: "10.0.0.1"})
    assert [(rank.rank, rank.node, rank.local_rank, rank.node_rank) for rank in ranks] == [
        (0, 2, 0, 0),
        (1, 2, 1, 0),
        (2, 1, 0, 1),
        (3, 1, 1, 1),
        (4, 0, 0, 2),
        (5, 0, 1, 2),
    ]
