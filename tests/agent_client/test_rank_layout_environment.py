"""Layouts, environments and placeholders."""

from typing import TYPE_CHECKING

import pytest

from awsddp.agent_client.rank_layout import (
    PLACEHOLDERS,
    Rank,
    Rendezvous,
    default_environment,
    describe_ranks,
    expand_placeholders,
    fill_placeholders,
    layout_ranks,
    rank_environment,
)
from awsddp.errors import UsageError
from awsddp.settings.spec import JobSection, JobSpec

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

RENDEZVOUS = Rendezvous(job="job", master_addr="10.0.0.1", master_port=29400)
RANK = Rank(rank=3, local_rank=1, node=1, node_rank=1, world_size=4, local_world_size=2, nnodes=2)


@pytest.mark.parametrize(
    ("nodes", "gpus", "options", "expected"),
    [
        ([0, 1], 8, {}, [(node, local) for node in (0, 1) for local in range(8)]),
        ([0, 1], 0, {}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([0, 1], 8, {"world_size": 4}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([0, 1], 8, {"nproc_per_node": 1}, [(0, 0), (1, 0)]),
        ([0, 2, 5], 8, {"world_size": 2, "nproc_per_node": 1}, [(0, 0), (2, 0)]),
        ([0, 1, 2], 8, {"world_size": 4, "nproc_per_node": 2}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([0, 1], 8, {"world_size": 1}, [(0, 0)]),
        ([0], 0, {"world_size": 16}, [(0, local) for local in range(16)]),
    ],
)
def test_ranks_are_laid_out_contiguously_by_node(
    nodes: list[int], gpus: int, options: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    ranks = layout_ranks(nodes, gpus=gpus, **options)
    assert [(rank.node, rank.local_rank) for rank in ranks] == expected
    assert [rank.rank for rank in ranks] == list(range(len(expected)))
    assert {rank.world_size for rank in ranks} == {len(expected)}
    assert {rank.nnodes for rank in ranks} == {len({node for node, _ in expected})}
    assert all(rank.rank == rank.node_rank * rank.local_world_size + rank.local_rank for rank in ranks)


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (8, {"world_size": 5}, "--world-size 4 or 6"),
        (8, {"world_size": 18}, "a node has 8 GPUs"),
        (1, {"nproc_per_node": 2}, "a node has 1 GPU\n"),
        (8, {"world_size": 5, "nproc_per_node": 2}, "fit: 2, 4"),
        (8, {"world_size": 8, "nproc_per_node": 2}, "fit: 2, 4"),
    ],
)
def test_size_that_does_not_fit_is_refused_with_sizes_that_do(
    gpus: int, options: dict[str, int], expected: str
) -> None:
    with pytest.raises(UsageError) as refused:
        layout_ranks([0, 1], gpus=gpus, **options)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{rank}", "3"),
        ("--local_rank={local_rank}", "--local_rank=1"),
        ("train_rank{rank}.py", "train_rank3.py"),
        ("tcp://{master_addr}:{master_port}", "tcp://10.0.0.1:29400"),
        ("{node_rank}/{nnodes} {world_size} {local_world_size}", "1/2 4 2"),
        ('{{"a": {{"b": {rank}}}}}', '{"a": {"b": 3}}'),
        ("{{rank}}", "{rank}"),
        ("", ""),
        ("no braces $(x) 'y'", "no braces $(x) 'y'"),
    ],
)
def test_placeholders_are_filled_in(text: str, expected: str) -> None:
    assert expand_placeholders(text, RANK, rendezvous=RENDEZVOUS, folder="/job") == expected


@pytest.mark.parametrize("text", ["{ranks}", "{", "}", '{"a": 1}', "{}", "{rank:02d}", "{rank!r}", "{ rank}"])
def test_unknown_placeholder_is_refused_with_a_next_step(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        expand_placeholders(text, RANK, rendezvous=RENDEZVOUS, folder="/job")
    assert "{local_rank}" in refused.value.why
    assert "{{" in refused.value.next


def test_init_file_is_refused_on_several_nodes() -> None:
    (alone,) = layout_ranks([4], gpus=0, world_size=1)
    assert (
        expand_placeholders("file://{init_file}", alone, rendezvous=RENDEZVOUS, folder="/job")
        == "file:///job/init"
    )
    with pytest.raises(UsageError, match="single node"):
        expand_placeholders("{init_file}", RANK, rendezvous=RENDEZVOUS, folder="/job")


def test_every_listed_placeholder_is_filled_in() -> None:
    (alone,) = layout_ranks([0], gpus=0, world_size=1)
    for name in PLACEHOLDERS:
        assert "{" not in expand_placeholders(
            f"{{{name}}}", alone, rendezvous=RENDEZVOUS, folder="/job", resume="/checkpoint", data="/data"
        )


def test_variables_of_the_user_override_all_but_the_ranks_identity(fleet: "Fleet") -> None:
    variables = {"NCCL_SOCKET_IFNAME": "eth", "WORLD_SIZE": "99", "X": "1", "AWSDDP_RUN_DIR": "/mine"}
    environ = fleet.requests("main.py", variables=variables)[1].processes[0].environment
    assert (environ["NCCL_SOCKET_IFNAME"], environ["X"], environ["WORLD_SIZE"]) == ("eth", "1", "4")
    assert (environ["GLOO_SOCKET_IFNAME"], environ["AWSDDP_RUN_DIR"]) == ("lo", f"{fleet.folder(1)}/run")


def test_group_rank_counts_the_nodes_of_the_job_not_of_the_cluster() -> None:
    last = layout_ranks([2, 5], gpus=0)[-1]
    environ = rank_environment(last, rendezvous=RENDEZVOUS, folder="/job")
    assert (last.node, environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"]) == (5, "1", "2")


def test_single_process_of_a_node_uses_all_threads() -> None:
    assert "OMP_NUM_THREADS" not in default_environment(1)
    assert default_environment(2)["OMP_NUM_THREADS"] == "1"


def test_placeholders_of_a_nodes_command_are_filled_in_and_the_shells_braces_stay() -> None:
    rank = layout_ranks([0, 3], gpus=0, nproc_per_node=1)[1]
    for text, filled in (
        ("{node_rank}/{nnodes} tcp://{master_addr}:{master_port}", "1/2 tcp://10.0.0.1:29400"),
        ("awk '{print $1}' ${rank} {1..3} {{rank}} {init_file}", None),
    ):
        assert fill_placeholders(text, rank, rendezvous=RENDEZVOUS) == (filled or text)


@pytest.mark.parametrize(
    ("options", "gpus", "on_ec2", "expected"),
    [
        ({}, 2, 2, "4 ranks: 2 nodes x 2 GPUs"),
        ({}, 0, 0, "4 ranks: 2 nodes x 2, without GPUs"),
        ({}, 0, 1, "4 ranks: 2 nodes x 2, without GPUs; on EC2 2, one per GPU"),
        ({"world_size": 2}, 0, 8, "2 ranks: job.world_size 2"),
        ({"nproc_per_node": 1}, 2, 2, "2 ranks: job.nproc_per_node 1"),
    ],
)
def test_number_of_ranks_is_described_with_its_reason(
    options: dict[str, int], gpus: int, on_ec2: int, expected: str
) -> None:
    ranks = layout_ranks([0, 1], gpus=gpus, **options)
    assert describe_ranks(JobSpec(job=JobSection(**options)), ranks, gpus=gpus, on_ec2=on_ec2) == expected
