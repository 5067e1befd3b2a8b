"""Which node each check names. Answers of real nodes: tests/agent/test_probe.py."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from awsddp.agent.diagnosis.causes import TABLE
from awsddp.agent.diagnosis.job_causes import NODE_FAULTS
from awsddp.agent_client import node_checks
from awsddp.agent_client.rank_layout import layout_ranks
from awsddp.errors import NodeError
from awsddp.model.node_answers import DialResult, ProbeResult, RankStep
from tests.support.fleet import make_node, make_prepared_node

ANSWER: dict[str, Any] = {
    "ports": [29400, 41000],
    "gpus": 8,
    "disk_free": 10**11,
    "memory_free": 10**11,
    "memory_size": 2 * 10**11,
    "cpus": 96.0,
    "time": 1000.5,
    "kernel": "6.8.0-aws",
    "links_down": 0,
    "xids": [],
    "smi": [{"name": "A100", "memory_mib": 40960, "errors": 0, "faults": []}] * 8,
}


def probes(count: int = 4, **changes: Mapping[str, Any]) -> node_checks.Probes:
    """Return the answers of `count` nodes with 8 GPUs; `node2={"gpus": 7}` changes one."""
    nodes = range(count)
    return node_checks.Probes(
        nodes={node: make_node(node) for node in nodes},
        prepared={node: make_prepared_node(node, gpus=8, driver="535") for node in nodes},
        answers={
            node: msgspec.convert({**ANSWER, **changes.get(f"node{node}", {})}, ProbeResult) for node in nodes
        },
        request_times=(1000.0, 1001.0),
    )


def get_failed(checks: list[Any]) -> list[tuple[str, int | None, str]]:
    return [(check.name, check.node, check.value) for check in checks if check.ok is False]


BROKEN_GPU = {**ANSWER["smi"][0], "errors": 2, "faults": ["needs a reset"]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"smi": ANSWER["smi"][:7]}, [("GPUs", "7 of 8"), ("alike: GPUs", "7 x A100 40960 MiB")]),
        ({"disk_free": 10**6}, [("disk", "1.0 MB free")]),
        ({"memory_free": 10**6}, [("memory", "1.0 MB free")]),
        ({"time": 1005.0}, [("clock", "4 s ahead")]),
        ({"time": 900.0}, [("clock", "100 s behind")]),
        ({"memory_size": 180 * 10**9}, []),
        ({"memory_size": 90 * 10**9}, [("alike: memory", "83.8 GiB")]),
        ({"cpus": 4.0}, [("alike: CPUs", "4")]),
        ({"kernel": "6.9"}, [("alike: kernel", "6.9")]),
        ({"links_down": 2}, [("NVLink", "2 inactive links")]),
        ({"xids": [79, 79]}, [("Xid", "Xid 79 (2 times)")]),
        (
            {"smi": [*ANSWER["smi"][:7], BROKEN_GPU]},
            [("ECC", "GPU 7: 2 uncorrectable"), ("GPU state", "GPU 7: needs a reset")],
        ),
    ],
)
@pytest.mark.parametrize("count", [2, 8])
def test_unfit_node_is_named(changes: dict[str, Any], expected: list[tuple[str, str]], count: int) -> None:
    probed = probes(count, node1=changes)
    failed = get_failed([*node_checks.quick_checks(probed), *node_checks.thorough_checks(probed)])
    if count == 2 and "kernel" in changes:  # two nodes: neither is the usual one
        assert [name for name, _, _ in failed] == ["alike: kernel"]
        return
    assert failed == [(name, 1, value) for name, value in expected]


def test_quick_probe_takes_the_number_of_gpus_from_the_driver() -> None:
    probed = probes(2)
    quick = {
        node: msgspec.structs.replace(answer, smi=None, gpus=8 - node)
        for node, answer in probed.answers.items()
    }
    checks = node_checks.quick_checks(
        node_checks.Probes(
            nodes=probed.nodes,
            prepared=probed.prepared,
            answers=quick,
            request_times=probed.request_times,
        )
    )
    assert get_failed(checks) == [("GPUs", 1, "7 of 8")]
    (check,) = [check for check in checks if check.ok is False]
    assert check.hint == "awsddp up -o cluster.replace=i-1   # replaces node1"


def test_clocks_of_two_nodes_that_agree_are_right_and_the_clients_is_not() -> None:
    probed = probes(2, node0={"time": 5000.0}, node1={"time": 5000.4})
    assert get_failed(node_checks.quick_checks(probed)) == []


def make_dials(count: int, lost: set[tuple[int, int]]) -> dict[int, list[tuple[int, int, str]]]:
    return {
        node: [(to, 41000, "no answer" if (node, to) in lost else "") for to in range(count) if to != node]
        for node in range(count)
    }


def test_connections_are_checked_though_a_node_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {0: DialResult(dials=((1, 41000, "no answer"),)), 1: NodeError("node1: no answer")}
    monkeypatch.setattr(node_checks, "call_each_node", lambda fleet, requests: answers)
    checks = node_checks.check_connections(None, probes(2))  # type: ignore[arg-type]
    assert [text for *_, text in get_failed(checks)] == ["node0, node1 do not reach each other: no answer"]


@pytest.mark.parametrize(
    ("count", "lost", "expected"),
    [
        (4, set(), []),
        (4, {(2, 0), (2, 1), (2, 3)}, [(2, "no connection with node0, node1, node3: no answer")]),
        (4, {(0, 2), (1, 2), (3, 2)}, [(2, "no connection with node0, node1, node3: no answer")]),
        (4, {(0, 3)}, [(None, "node0 and node3 do not reach each other: no answer")]),
        (2, {(0, 1)}, [(None, "node0, node1 do not reach each other: no answer")]),
        (8, {(4, to) for to in range(8)}, [(4, "no connection with nodes 0-3,5-7: no answer")]),
        (
            5,
            {(1, to) for to in range(5)} | {(3, to) for to in range(5)},
            None,
        ),
    ],
)
def test_failed_connections_name_the_node_that_they_share(
    count: int, lost: set[tuple[int, int]], expected: list[tuple[int | None, str]] | None
) -> None:
    checks = node_checks.dial_checks(probes(count), make_dials(count, lost))
    if expected is None:  # two nodes fail: both explain as much
        text = " ".join(f"{check.node} {check.value}" for check in checks)
        assert "1" in text and "3" in text
        return
    assert [(check.node, check.value) for check in checks if check.ok is False] == expected


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ([100, 90], []),
        ([100, 30], [1]),
        ([100, 40, 90, 95], []),
        ([100, 20, 90, 95], [1]),
        ([100, 0, 0, 0], [1, 2, 3]),
        ([5, 100, 90, 6, 80, 70, 110, 100], [0, 3]),
    ],
)
def test_slow_node_is_named_in_comparison_with_the_others(rates: list[float], slow: list[int]) -> None:
    *failed, rest = node_checks.rate_checks(probes(len(rates)), "pairs", dict(enumerate(rates)))
    assert [(check.node, check.ok) for check in failed] == [(node, False) for node in slow]
    assert (rest.node, rest.ok) == (None, True)


def test_no_node_is_named_if_no_pair_forms_a_group() -> None:
    (check,) = node_checks.rate_checks(probes(3), "pairs", dict.fromkeys(range(3), 0.0))
    assert (check.node, check.ok) == (None, False)


@pytest.mark.parametrize("count", [3, 4, 7, 16])
def test_each_node_meets_two_others_in_rounds_of_disjoint_pairs(count: int) -> None:
    rounds = node_checks.ring_rounds(range(count))
    pairs = [frozenset(pair) for group in rounds for pair in group]
    assert len(pairs) == len(set(pairs)) == count and len(rounds) == 2 + count % 2
    for group in rounds:
        nodes = [node for pair in group for node in pair]
        assert len(nodes) == len(set(nodes))
    assert all(sum(node in pair for pair in pairs) == 2 for node in range(count))


@pytest.mark.parametrize(
    ("at", "whys", "node", "value"),
    [
        (["reduced"] * 4, {}, None, "4 ranks"),
        (
            ["arrived", "arrived", "", "arrived"],
            {},
            1,
            "rank 2 (node1): did not start; the other 3: arrived",
        ),
        (
            ["joined", "joined", "joined", "arrived"],
            {},
            1,
            "rank 3 (node1): arrived; the other 3: joined",
        ),
        (
            ["failed", "failed", "arrived", "failed"],
            {3: "CUDA error", 0: "Connection closed by peer", 1: "Connection closed by peer"},
            None,
            "rank 3 (node1): CUDA error; rank 0 (node0): Connection closed by peer; "
            "rank 1 (node0): Connection closed by peer; the other 1: arrived",
        ),
    ],
)
def test_a_group_that_does_not_form_names_the_ranks_that_are_behind(
    at: list[str], whys: dict[int, str], node: int | None, value: str
) -> None:
    group = node_checks.GroupProgress(layout_ranks([0, 1], gpus=0, world_size=4))
    for rank in [*whys, *(rank for rank in range(4) if at[rank] and rank not in whys)]:
        group.record(RankStep(rank=rank, at=at[rank], gbyte_s=1.0, why=whys.get(rank, "")))  # type: ignore[arg-type]
    check = node_checks.group_check(probes(2), group)
    assert (check.ok, check.node, check.value) == (at[0] == "reduced", node, value)


def test_at_most_eight_ranks_that_are_behind_are_named() -> None:
    value = node_checks.group_check(
        probes(2), node_checks.GroupProgress(layout_ranks([0, 1], gpus=0, world_size=10))
    ).value
    assert value.count("did not start") == 8
    assert value.endswith("rank 7 (node1): did not start; and 2 more")


def test_failure_after_the_all_reduce_keeps_the_measured_rate() -> None:
    group = node_checks.GroupProgress(layout_ranks([0, 1], gpus=0, world_size=2))
    for rank, rate in enumerate((2.0, 1.0)):
        group.record(RankStep(rank=rank, at="reduced", gbyte_s=rate))
        group.record(RankStep(rank=rank, at="failed", why="Aborted"))
    assert group.gbyte_s == 1.0


def test_the_xids_of_a_failed_gpu_are_those_of_the_causes() -> None:
    patterns = [row.conditions.get("kernel", "") for row in TABLE if row.kind in NODE_FAULTS]
    named = {int(number) for text in patterns for number in re.findall(r"\d+(?=[|)])", text)}
    assert named == node_checks.HARDWARE_XIDS
