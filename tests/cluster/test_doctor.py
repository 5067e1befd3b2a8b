"""The process group of `doctor`, and its checks if that is slow or fails."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from awsddp.agent import messages
from awsddp.agent_client.node_checks import GroupProgress
from awsddp.agent_client.rank_layout import layout_ranks
from awsddp.cluster import doctor
from awsddp.errors import InUse
from awsddp.model.node_answers import RankStep
from awsddp.model.records import Check
from awsddp.session.connect import list_jobs_on_nodes
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from tests.agent_client.test_node_checks import probes
from tests.session.test_notify import notifying
from tests.support.folder_nodes import NodeConnections, World, start_script
from tests.support.webhook import serve_webhook


class Shell(NodeConnections):
    """Runs the commands of nodes on this machine, as over SSH."""

    def stream(
        self,
        requests: Mapping[int, tuple[Sequence[str], bytes]],
        on_data: Callable[[int, bytes], None],
        **_: Any,
    ) -> None:
        """Pass the output of the commands to `on_data`, one node after the other."""
        running = {
            node: subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for node, (argv, _) in requests.items()
        }
        for node, process in running.items():
            assert process.stdin is not None
            process.stdin.write(requests[node][1])
            process.stdin.close()
        for node, process in running.items():
            assert process.stdout is not None
            for line in process.stdout:
                on_data(node, line)


@pytest.mark.parametrize(
    ("kind", "ok", "value"),
    [
        ("ok", True, "127.0.0.1 took a test event from this machine"),
        ("404", False, "127.0.0.1: HTTP status 404"),
    ],
)
def test_the_url_of_events_gets_a_test_event(world: World, kind: str, ok: bool, value: str) -> None:
    with serve_webhook(kind) as hook:
        (check,) = doctor.check_notify(notifying(world, hook.url), internet=True)
        assert (check.ok, check.value, hook.events) == (ok, value, ["test"])
    assert doctor.check_notify(world.session(), internet=True) == []


def run_group_checks(world: World, monkeypatch: pytest.MonkeyPatch, **node1: Any) -> list[Check]:
    """Return the checks of a process group of two nodes with two ranks each; `node1`: its preparation."""
    if node1:  # otherwise all ranks end long before the limit
        monkeypatch.setattr(doctor, "GROUP_S", 30.0)
    hosts = world.homes.hosts
    probed = replace(
        probes(2),
        nodes={host.node.node: host.node for host in hosts},
        prepared={0: hosts[0].prepared, 1: replace(hosts[1].prepared, **node1)},
    )
    connected = world.connected(line=Shell(world.homes, world.nodes))
    return doctor._group_checks(connected, probed, [1, 0])


@pytest.mark.prove
def test_doctor_times_an_all_reduce_on_two_nodes_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, reduced = run_group_checks(world, monkeypatch)
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
def test_doctor_names_the_node_whose_ranks_fail_to_form_the_group(
    world: World, monkeypatch: pytest.MonkeyPatch, node1: dict[str, str], why: str
) -> None:
    (check,) = run_group_checks(world, monkeypatch, **node1)
    assert (check.name, check.node, check.ok) == ("process group", 1, False)
    assert "rank 2 (node1)" in check.value and "rank 3 (node1)" in check.value and why in check.value


SLOW = 0.5 * doctor.LEAST_GBYTE_S
GOOD = 2 * doctor.LEAST_GBYTE_S


def check_groups(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float | None, by_pair: Callable[[set[int]], float], nodes: int
) -> list[Check]:
    """Return the checks for these bandwidths; None: the group of all nodes fails on each of them."""

    def measure_groups(_: object, probed: object, groups: Sequence[Sequence[int]]) -> list[GroupProgress]:
        progress = [GroupProgress(layout_ranks(list(group), gpus=1)) for group in groups]
        for group in progress:
            members = {rank.node for rank in group.ranks}
            rate = bandwidth if len(members) == nodes else by_pair(members)
            for rank in group.ranks if rate else ():
                group.record(RankStep(rank=rank.rank, at="reduced", gbyte_s=rate or 0.0))
        return progress

    monkeypatch.setattr(doctor, "_run_groups", measure_groups)
    monkeypatch.setattr(doctor, "_network_gbyte_s", lambda _: None)
    monkeypatch.setattr(doctor, "_measure_uploads", lambda *_: {0: 1.0, 1: 100.0})
    located, fleet = LocatedCluster(session=Session(name="default")), cast(Any, None)
    return doctor._group_checks(ConnectedCluster(cluster=located, fleet=fleet), probes(nodes), range(nodes))


def test_doctor_measures_pairs_only_if_the_group_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_with_node2(pair: set[int]) -> float:
        return SLOW if 2 in pair else GOOD

    for nodes in (3, 4, 7):
        *group, slow, others = check_groups(monkeypatch, SLOW, slow_with_node2, nodes)
        assert [(check.name, check.ok) for check in group] == [("process group", True), ("all-reduce", None)]
        assert (slow.name, slow.node, slow.ok, others.ok) == ("pairs", 2, False, True)
        assert "cluster.replace=i-2" in slow.hint
    assert [check.ok for check in check_groups(monkeypatch, GOOD, slow_with_node2, 4)] == [True, True]


def test_doctor_forms_pairs_if_a_group_fails_without_naming_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    group, failed, others = check_groups(monkeypatch, None, lambda pair: 0.0 if 1 in pair else GOOD, 4)
    assert (group.name, group.node, group.ok) == ("process group", None, False)
    assert (failed.name, failed.node, failed.ok, others.ok) == ("pairs", 1, False, True)


def test_of_two_slow_nodes_doctor_names_the_one_that_uploads_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *_, slow, others = check_groups(monkeypatch, SLOW, lambda pair: SLOW, 2)
    assert (slow.name, slow.node, slow.ok, others.ok) == ("network", 0, False, True)


def test_doctor_measures_nothing_while_a_job_runs(world: World) -> None:
    job = start_script(world, "import time\ntime.sleep(60)\n")
    (check,) = (check for check in doctor._check_nodes(world.connected()) if check.name == "process group")
    assert (check.ok, check.value) == (None, f"skipped: job {job.job} is running")


def test_doctor_fails_while_another_client_starts_a_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CLAIM_S", 0.0)
    holder = world.homes.start(0, messages.Claim(owner="ann", wait_s=0), close=False)
    assert holder.stdout is not None
    while b"claimed" not in holder.stdout.readline():
        pass
    with pytest.raises(InUse, match="another client is starting a job"):
        doctor._check_nodes(world.connected())
    holder.communicate(b"")
