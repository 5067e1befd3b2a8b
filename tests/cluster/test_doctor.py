"""The process group of `doctor`, and what it says where that is slow or fails."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from awsddp.agent import messages
from awsddp.agent_client.node_checks import GroupProgress
from awsddp.agent_client.rank_layout import layout_ranks
from awsddp.cluster import doctor as health
from awsddp.errors import InUse
from awsddp.model.node_answers import RankStep
from awsddp.model.records import Check
from awsddp.session.connect import list_jobs_on_nodes
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from tests.agent_client.test_node_checks import probes
from tests.support.folder_nodes import Line, World, start


class Shell(Line):
    """Runs the command of each node here, as over SSH."""

    def stream(
        self,
        requests: Mapping[int, tuple[Sequence[str], bytes]],
        on_data: Callable[[int, bytes], None],
        **_: Any,
    ) -> None:
        """Pass on what the commands print, in the order in which they end."""
        running = {
            node: subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for node, (words, _) in requests.items()
        }
        for node, process in running.items():
            assert process.stdin is not None
            process.stdin.write(requests[node][1])
            process.stdin.close()
        for node, process in running.items():
            assert process.stdout is not None
            for line in process.stdout:
                on_data(node, line)


def form(world: World, monkeypatch: pytest.MonkeyPatch, **node1: Any) -> list[Check]:
    """Return the checks of a process group of two nodes of two ranks, the second one prepared as given."""
    if node1:  # else all ranks end long before
        monkeypatch.setattr(health, "GROUP_S", 30.0)
    hosts = world.homes.hosts
    seen = replace(
        probes(2),
        nodes={host.node.node: host.node for host in hosts},
        prepared={0: hosts[0].prepared, 1: replace(hosts[1].prepared, **node1)},
    )
    connected = world.connected(line=Shell(world.homes, world.nodes))
    return health._group_checks(connected, seen, [1, 0])


@pytest.mark.prove
def test_the_ranks_of_two_nodes_time_an_all_reduce_and_leave_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, reduced = form(world, monkeypatch)
    assert (group.ok, group.value) == (True, "4 ranks")
    assert (reduced.name, reduced.ok) == (
        "all-reduce",
        True,
    ) and "GB/s bus bandwidth of 4 ranks" in reduced.value
    assert list_jobs_on_nodes(world.connected()) == () and not world.located().unfetched_jobs
    assert not any((home / ".awsddp" / "jobs").exists() for home in world.homes.homes)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("node1", "why"),
    [
        ({"python": "/usr/bin/python3"}, "No module named 'torch'"),
        ({"nic": "ens9"}, "ens9"),
    ],
)
def test_a_node_without_torch_and_one_whose_group_fails_are_named(
    world: World, monkeypatch: pytest.MonkeyPatch, node1: dict[str, str], why: str
) -> None:
    (check,) = form(world, monkeypatch, **node1)
    assert (check.name, check.node, check.ok) == ("process group", 1, False)
    assert "rank 2 (node1)" in check.value and "rank 3 (node1)" in check.value and why in check.value


SLOW = 0.5 * health.LEAST_GBYTE_S
GOOD = 2 * health.LEAST_GBYTE_S


def judged(
    monkeypatch: pytest.MonkeyPatch, whole: float | None, pairs: Callable[[set[int]], float], nodes: int
) -> list[Check]:
    """Return the checks of groups with these bandwidths; the one of all fails everywhere alike for None."""

    def fake(_: object, seen: object, groups: Sequence[Sequence[int]]) -> list[GroupProgress]:
        formed = [GroupProgress(layout_ranks(list(one), gpus=1)) for one in groups]
        for group in formed:
            of = {one.node for one in group.ranks}
            rate = whole if len(of) == nodes else pairs(of)
            for one in group.ranks if rate else ():
                group.record(RankStep(rank=one.rank, at="reduced", gbyte_s=rate or 0.0))
        return formed

    monkeypatch.setattr(health, "_run_groups", fake)
    monkeypatch.setattr(health, "_network_gbyte_s", lambda _: None)
    monkeypatch.setattr(health, "_measure_uploads", lambda *_: {0: 1.0, 1: 100.0})
    located, fleet = LocatedCluster(session=Session(name="default")), cast(Any, None)
    return health._group_checks(ConnectedCluster(cluster=located, fleet=fleet), probes(nodes), range(nodes))


def test_a_slow_group_is_measured_in_pairs_and_a_fast_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_with_2(of: set[int]) -> float:
        return SLOW if 2 in of else GOOD

    for nodes in (3, 4, 7):
        *group, bad, rest = judged(monkeypatch, SLOW, slow_with_2, nodes)
        assert [(check.name, check.ok) for check in group] == [("process group", True), ("all-reduce", None)]
        assert (bad.name, bad.node, bad.ok, rest.ok) == ("pairs", 2, False, True)
        assert "cluster.replace=i-2" in bad.hint
    assert [check.ok for check in judged(monkeypatch, GOOD, slow_with_2, 4)] == [True, True]


def test_a_group_that_fails_and_names_no_node_is_formed_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    group, bad, rest = judged(monkeypatch, None, lambda of: 0.0 if 1 in of else GOOD, 4)
    assert (group.name, group.node, group.ok) == ("process group", None, False)
    assert (bad.name, bad.node, bad.ok, rest.ok) == ("pairs", 1, False, True)


def test_of_two_nodes_the_one_is_slow_that_sends_slowly_to_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *_, bad, rest = judged(monkeypatch, SLOW, lambda of: SLOW, 2)
    assert (bad.name, bad.node, bad.ok, rest.ok) == ("network", 0, False, True)


def test_while_a_job_runs_nothing_is_measured(world: World) -> None:
    job = start(world, "import time\ntime.sleep(60)\n")
    (check,) = (check for check in health._check_nodes(world.connected()) if check.name == "process group")
    assert (check.ok, check.value) == (None, f"left out: job {job.job} runs")


def test_while_another_client_starts_a_job_nothing_is_measured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CLAIM_S", 0.0)
    holder = world.homes.start(0, messages.Claim(owner="ann", wait_s=0), close=False)
    assert holder.stdout is not None
    while b"claimed" not in holder.stdout.readline():
        pass
    with pytest.raises(InUse, match="another client is starting a job"):
        health._check_nodes(world.connected())
    holder.communicate(b"")
