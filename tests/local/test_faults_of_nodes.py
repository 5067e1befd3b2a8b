"""Faults of nodes: what is asked for, what is refused, and when they heal. What they do: test_hosts.py."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from awsddp.aws.clusters import find_end_cause, node_of
from awsddp.errors import UsageError
from awsddp.local import control, faults, nspawn
from awsddp.local.faults import Faults
from tests.support.local_cloud import Cloud, fault_add

INSTANCES = {
    key: SimpleNamespace(state=state, lifecycle=None)
    for key, state in {"i-0a": "running", "i-0b": "stopped", "i-0c": "terminated"}.items()
}


def fault(instance_id: str, effect: str, **choices: Any) -> dict[str, Any]:
    return {"operation": instance_id, "effect": effect, **choices}


@pytest.mark.parametrize("effect", [*faults.LASTING_EFFECTS, *faults.ONE_TIME_EFFECTS])
def test_what_a_node_can_have_is_taken_up(effect: str) -> None:
    if effect == "clock" and nspawn.find_faketime() is None:
        with pytest.raises(UsageError, match="cannot shift a node's clock") as caught:
            faults.check_node_fault(fault("i-0a", effect), INSTANCES, mode="nspawn")
        assert "Debian's package faketime is missing" in caught.value.why
        return
    spot = SimpleNamespace(state="running", lifecycle="spot")
    faults.check_node_fault(fault("i-0a", effect), {"i-0a": spot}, mode="nspawn")


@pytest.mark.parametrize(
    ("asked", "message", "why"),
    [
        (
            fault("i-0a", "lost"),
            "invalid fault of a node: lost",
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
def test_what_cannot_be_is_refused_with_the_choices(asked: dict[str, Any], message: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        faults.check_node_fault(asked, INSTANCES, mode="nspawn")
    assert caught.value.message == message
    assert why in caught.value.why


def test_records_have_no_node_that_could_break(records: Cloud) -> None:
    (made,) = records.client("ec2").run_instances(**records.request())["Instances"]
    with pytest.raises(UsageError, match="run in systemd-nspawn"):
        fault_add(records.info, made["InstanceId"], "frozen")
    assert control.send_command(records.info).faults == ()


def test_a_reclaimed_spot_instance_ends_after_its_notice_with_the_reason_of_ec2(records: Cloud) -> None:
    ec2 = records.client("ec2")
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    (made,) = ec2.run_instances(**records.request(**spot))["Instances"]
    (kept,) = ec2.run_instances(**records.request())["Instances"]
    records.wait("running", made["InstanceId"], kept["InstanceId"])
    began = time.time()
    fault_add(records.info, made["InstanceId"], "reclaim", notice_s=1.5)
    assert records.instances(made["InstanceId"])[0]["State"]["Name"] == "running"
    (ended,) = records.wait("terminated", made["InstanceId"])
    assert time.time() - began >= 1.5
    assert ended["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert find_end_cause(node_of(ended))[0] == "spot_interruption"
    with pytest.raises(UsageError, match="is not a spot instance"):
        fault_add(records.info, kept["InstanceId"], "reclaim")
    ec2.terminate_instances(InstanceIds=[kept["InstanceId"]])


def test_a_fault_heals_at_its_time_though_the_daemon_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(tmp_path / "faults").apply_command({"add": fault("i-0a", "cut", for_s=30)})
    Faults(tmp_path / "faults").apply_command({"add": fault("i-0a", "frozen")})
    known = Faults(tmp_path / "faults")
    assert known.get_effects("i-0a") == {"cut", "frozen"}
    assert known.get_effects("i-0b") == frozenset()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 29)
    assert known.get_effects("i-0a") == {"cut", "frozen"}
    monkeypatch.setattr(time, "time", lambda: now + 31)
    assert known.get_effects("i-0a") == {"frozen"}
    assert Faults(tmp_path / "faults").get_effects("i-0a") == {"frozen"}


def test_a_fault_of_calls_heals_at_its_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Faults(tmp_path / "faults")
    known.apply_command({"add": fault("DescribeInstances", "cut", for_s=30)})
    assert known.take_fault("DescribeInstances", ()) is not None
    later = time.time() + 31
    monkeypatch.setattr(time, "time", lambda: later)
    assert known.take_fault("DescribeInstances", ()) is None


def test_a_fault_that_ends_before_it_begins_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Faults(tmp_path / "faults").apply_command({"add": fault("i-0a", "cut", for_s=0)})


def test_the_faults_of_a_terminated_node_go_with_it(tmp_path: Path) -> None:
    known = Faults(tmp_path / "faults")
    for name in ("i-0a", "i-0b", "RunInstances"):
        known.apply_command({"add": fault(name, "cut")})
    known.remove_gone_nodes({"i-0b"})
    assert [one["operation"] for one in known.apply_command({})] == ["i-0b", "RunInstances"]
