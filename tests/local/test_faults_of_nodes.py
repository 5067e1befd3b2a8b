"""Faults of nodes: valid and invalid requests, and when they end. Effects: test_hosts.py."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from awsddp.aws.clusters import find_end_cause, node_of
from awsddp.errors import UsageError
from awsddp.local import control, faults, nspawn
from awsddp.local.faults import Faults
from tests.support.local_cloud import Cloud, add_fault


def make_instance(state: str, *, lifecycle: str | None = None, gpus: str = "rehearsed") -> Any:
    tags = [{"key": "awsddp:gpus", "value": gpus}]
    return SimpleNamespace(state=state, lifecycle=lifecycle, instance_type="g6.xlarge", get_tags=lambda: tags)


INSTANCES = {
    key: make_instance(state)
    for key, state in {"i-0a": "running", "i-0b": "stopped", "i-0c": "terminated"}.items()
}


def fault(instance_id: str, effect: str, **choices: Any) -> dict[str, Any]:
    return {"operation": instance_id, "effect": effect, **choices}


@pytest.mark.parametrize("effect", [*faults.LASTING_EFFECTS, *faults.ONE_TIME_EFFECTS])
def test_every_node_effect_is_accepted(effect: str) -> None:
    if effect == "clock" and nspawn.find_faketime() is None:
        with pytest.raises(UsageError, match="cannot shift a node's clock") as caught:
            faults.check_node_fault(fault("i-0a", effect), INSTANCES, mode="nspawn")
        assert "Debian's package faketime is missing" in caught.value.why
        return
    spot = make_instance("running", lifecycle="spot")
    faults.check_node_fault(fault("i-0a", effect), {"i-0a": spot}, mode="nspawn")
    if effect != "reclaim":
        with pytest.raises(UsageError, match=f"{effect} requires nodes that run in systemd-nspawn"):
            faults.check_node_fault(fault("i-0a", effect), {"i-0a": spot}, mode="loopback")


def test_a_gpu_fault_needs_simulated_gpus() -> None:
    without = {"i-0a": make_instance("running", gpus="pretended"), "i-0b": make_instance("running")}
    without["i-0b"].instance_type = "m7i.large"
    for instance_id in without:
        with pytest.raises(UsageError, match=f"{instance_id} has no simulated GPUs"):
            faults.check_node_fault(fault(instance_id, "xid"), without, mode="nspawn")


@pytest.mark.parametrize(
    ("command", "message", "why"),
    [
        (
            fault("i-0a", "lost"),
            "invalid fault for a node: lost",
            "slow-network, slow-cpu, frozen, full-disk, oom, clock, hostkey, reboot, power",
        ),
        (fault("i-0z", "cut"), "instance not found: i-0z", "the instances are i-0a, i-0b"),
        (fault("i-0c", "cut"), "instance not found: i-0c", "the instances are i-0a, i-0b"),
        (fault("i-0a", "cut", times=2), "--times is not for cut", "it takes --for"),
        (fault("i-0a", "reboot", for_s=3), "--for is not for reboot", "it takes no options"),
        (fault("i-0b", "poweroff"), "i-0b is stopped", "requires a running node"),
        (fault("i-0a", "reclaim"), "i-0a is not a spot instance", "create one: awsddp up --local --spot"),
        (fault("i-0a", "cut", notice_s=9), "--notice is not for cut", "it takes --for"),
    ],
)
def test_an_invalid_node_fault_names_the_choices(command: dict[str, Any], message: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        faults.check_node_fault(command, INSTANCES, mode="nspawn")
    assert caught.value.message == message
    assert why in caught.value.why


def test_records_mode_refuses_node_faults(records: Cloud) -> None:
    (instance,) = records.client("ec2").run_instances(**records.request())["Instances"]
    with pytest.raises(UsageError, match="run in systemd-nspawn"):
        add_fault(records.info, instance["InstanceId"], "frozen")
    assert control.send_command(records.info).faults == ()


def test_a_reclaimed_spot_instance_ends_after_its_notice_with_the_reason_of_ec2(records: Cloud) -> None:
    ec2 = records.client("ec2")
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    (spot_instance,) = ec2.run_instances(**records.request(**spot))["Instances"]
    (on_demand_instance,) = ec2.run_instances(**records.request())["Instances"]
    records.wait("running", spot_instance["InstanceId"], on_demand_instance["InstanceId"])
    began = time.time()
    add_fault(records.info, spot_instance["InstanceId"], "reclaim", notice_s=1.5)
    assert records.instances(spot_instance["InstanceId"])[0]["State"]["Name"] == "running"
    (ended,) = records.wait("terminated", spot_instance["InstanceId"])
    assert time.time() - began >= 1.5
    assert ended["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert find_end_cause(node_of(ended))[0] == "spot_interruption"
    with pytest.raises(UsageError, match="is not a spot instance"):
        add_fault(records.info, on_demand_instance["InstanceId"], "reclaim")
    ec2.terminate_instances(InstanceIds=[on_demand_instance["InstanceId"]])


def test_two_spot_instances_have_their_notices_and_ends_at_once(records: Cloud) -> None:
    ec2 = records.client("ec2")
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}, "MinCount": 2, "MaxCount": 2}
    ids = [row["InstanceId"] for row in ec2.run_instances(**records.request(**spot))["Instances"]]
    records.wait("running", *ids)
    for instance_id in ids:
        add_fault(records.info, instance_id, "reclaim", notice_s=0.5)
    assert {row["State"]["Name"] for row in records.instances(*ids)} == {"running"}
    ended = records.wait("terminated", *ids)
    assert [row["StateReason"]["Code"] for row in ended] == ["Server.SpotInstanceTermination"] * 2


def test_a_fault_ends_at_its_time_even_if_the_daemon_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(tmp_path / "faults").apply_command({"add": fault("i-0a", "cut", for_s=30)})
    Faults(tmp_path / "faults").apply_command({"add": fault("i-0a", "frozen")})
    store = Faults(tmp_path / "faults")
    assert store.get_effects("i-0a") == {"cut", "frozen"}
    assert store.get_effects("i-0b") == frozenset()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 29)
    assert store.get_effects("i-0a") == {"cut", "frozen"}
    monkeypatch.setattr(time, "time", lambda: now + 31)
    assert store.get_effects("i-0a") == {"frozen"}
    assert Faults(tmp_path / "faults").get_effects("i-0a") == {"frozen"}


def test_a_fault_of_calls_ends_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Faults(tmp_path / "faults")
    store.apply_command({"add": fault("DescribeInstances", "cut", for_s=30)})
    assert store.take_fault("DescribeInstances", ()) is not None
    later = time.time() + 31
    monkeypatch.setattr(time, "time", lambda: later)
    assert store.take_fault("DescribeInstances", ()) is None


def test_a_fault_with_a_duration_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Faults(tmp_path / "faults").apply_command({"add": fault("i-0a", "cut", for_s=0)})


def test_faults_of_a_terminated_node_are_removed(tmp_path: Path) -> None:
    store = Faults(tmp_path / "faults")
    for name in ("i-0a", "i-0b", "RunInstances"):
        store.apply_command({"add": fault(name, "cut")})
    store.remove_gone_nodes({"i-0b"})
    assert [row["operation"] for row in store.apply_command({})] == ["i-0b", "RunInstances"]
