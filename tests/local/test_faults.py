"""Injected faults, as a client sees them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from awsddp.errors import UsageError
from awsddp.local import control, nspawn
from tests.support.local_cloud import Cloud, add_fault, clear_fault, error_code_of, until


@pytest.fixture(autouse=True)
def cleared(records: Cloud) -> Iterator[None]:
    yield
    clear_fault(records.info)


def test_a_fault_with_times_2_refuses_two_calls(records: Cloud) -> None:
    launch = records.client("ec2").run_instances
    add_fault(records.info, "RunInstances", "InsufficientInstanceCapacity", times=2)
    for _ in range(2):
        assert error_code_of(launch, **records.request()) == "InsufficientInstanceCapacity"
    assert launch(**records.request())["Instances"]
    assert control.send_command(records.info).faults == ()


def test_a_lack_of_capacity_is_a_server_error_as_on_ec2(records: Cloud) -> None:
    add_fault(records.info, "RunInstances", "InsufficientInstanceCapacity")
    patient = records.client("ec2", config=Config(retries={"total_max_attempts": 3, "mode": "standard"}))
    with pytest.raises(patient.exceptions.ClientError, match=r"reached max retries: 2\): .*g4dn\.12xlarge"):
        patient.run_instances(**records.request())


def test_a_fault_can_be_limited_to_a_zone(records: Cloud) -> None:
    ec2 = records.client("ec2")
    add_fault(records.info, "RunInstances", "InsufficientInstanceCapacity", only="us-east-1b")
    subnets = {subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"]}
    request = records.request()
    assert error_code_of(ec2.run_instances, **request, SubnetId=subnets["us-east-1b"])
    assert ec2.run_instances(**request, SubnetId=subnets["us-east-1a"])["Instances"]


@pytest.mark.parametrize("only", ["", "us-east-1a", "g4dn.12xlarge"])
def test_capacity_that_is_gone_comes_back_after_its_time(records: Cloud, only: str) -> None:
    ec2 = records.client("ec2")
    subnets = {subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"]}
    here = records.request(SubnetId=subnets["us-east-1a"])
    other = {
        "us-east-1a": {"SubnetId": subnets["us-east-1b"]},
        "g4dn.12xlarge": {"InstanceType": "g6.xlarge"},
    }
    began = time.monotonic()
    add_fault(records.info, "RunInstances", "InsufficientInstanceCapacity", for_s=0.5, only=only)
    assert error_code_of(ec2.run_instances, **here) == "InsufficientInstanceCapacity"
    if only:
        assert ec2.run_instances(**here | other[only])["Instances"]
    until(lambda: not control.send_command(records.info).faults)
    assert time.monotonic() - began >= 0.5
    assert ec2.run_instances(**here)["Instances"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("RequestLimitExceeded", 503), ("InternalError", 500), ("UnauthorizedOperation", 403), ("Blocked", 400)],
)
def test_a_refusal_has_the_status_that_ec2_gives_it(records: Cloud, code: str, status: int) -> None:
    add_fault(records.info, "*", code)
    ec2 = records.client("ec2")
    with pytest.raises(ec2.exceptions.ClientError) as caught:
        ec2.describe_vpcs()
    assert caught.value.response["Error"]["Code"] == code
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


@pytest.mark.parametrize(("effect", "launched"), [("lost", 1), ("cut", 0)])
def test_a_connection_ends_after_or_before_the_effect(records: Cloud, effect: str, launched: int) -> None:
    before = len(records.instances())
    add_fault(records.info, "RunInstances", effect, times=1)
    request = records.request(ClientToken=f"fault-{effect}")
    with pytest.raises(ConnectionClosedError):
        records.client("ec2").run_instances(**request)
    assert len(records.instances()) == before + launched
    records.client("ec2").run_instances(**request)
    assert len(records.instances()) == before + 1


@pytest.mark.parametrize(("effect", "launched"), [("late", 1), ("delay", 0)])
def test_a_reply_is_late_after_or_before_the_effect(records: Cloud, effect: str, launched: int) -> None:
    before = len(records.instances())
    add_fault(records.info, "RunInstances", effect, times=1, seconds=3)
    hasty = records.client("ec2", config=Config(read_timeout=1, retries={"total_max_attempts": 1}))
    with pytest.raises(ReadTimeoutError):
        hasty.run_instances(**records.request())
    assert len(records.instances()) == before + launched


def test_a_stale_fault_hides_new_resources(records: Cloud) -> None:
    ec2 = records.client("ec2")
    new_id = ec2.run_instances(**records.request())["Instances"][0]["InstanceId"]
    group = ec2.create_security_group(GroupName="young", Description="-")["GroupId"]
    add_fault(records.info, "*", "stale", seconds=60)
    assert error_code_of(ec2.describe_instances, InstanceIds=[new_id]) == "InvalidInstanceID.NotFound"
    assert error_code_of(ec2.create_tags, Resources=[new_id], Tags=[{"Key": "a", "Value": "b"}]).endswith(
        "NotFound"
    )
    assert error_code_of(ec2.authorize_security_group_ingress, GroupId=group, IpPermissions=[]).endswith(
        "NotFound"
    )
    assert (
        error_code_of(ec2.run_instances, **records.request(SecurityGroupIds=[group]))
        == "InvalidGroup.NotFound"
    )
    assert new_id not in {instance["InstanceId"] for instance in records.instances()}
    clear_fault(records.info)
    assert records.instances(new_id)
    ec2.delete_security_group(GroupId=group)


@pytest.mark.prove
def test_a_stale_fault_delays_changes_of_state(records: Cloud) -> None:
    ec2 = records.client("ec2")
    instance_id = ec2.run_instances(**records.request())["Instances"][0]["InstanceId"]
    add_fault(records.info, "DescribeInstances", "stale", seconds=3)
    until(lambda: instance_id in {instance["InstanceId"] for instance in records.instances()})
    records.wait("running", instance_id)
    ec2.terminate_instances(InstanceIds=[instance_id])
    assert records.instances(instance_id)[0]["State"]["Name"] == "running"
    records.wait("terminated", instance_id)


def test_faults_outlive_the_daemon(records: Cloud) -> None:
    (fault,) = add_fault(records.info, "RunInstances", "Blocked", times=3)
    error_code_of(records.client("ec2").run_instances, **records.request())
    records.kill()
    assert msgspec.to_builtins(control.send_command(records.info).faults[0]) == {**fault, "times": 2}
    assert clear_fault(records.info, fault["id"]) == []


@pytest.mark.parametrize(
    ("operation", "effect", "choices", "hint"),
    [
        ("RunInstnces", "lost", {}, "did you mean RunInstances"),
        ("RunInstances", "nothing at all", {}, "use one of delay, late"),
        ("RunInstances", "late", {"seconds": -1}, ""),
        ("RunInstances", "late", {"times": 0}, ""),
        ("RunInstances", "late", {"notice_s": 9.0}, "it takes --for and --only and --seconds and --times"),
    ],
)
def test_an_invalid_fault_is_refused_with_a_hint(
    records: Cloud, operation: str, effect: str, choices: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        add_fault(records.info, operation, effect, **choices)
    assert hint in caught.value.why
    assert control.send_command(records.info).faults == ()


def test_a_replaced_host_key_is_restored(tmp_path: Path) -> None:
    key = tmp_path / nspawn.HOST_KEY
    key.parent.mkdir(parents=True)
    key.write_text("its own")
    for other, changed in ((False, False), (True, True), (True, False), (False, True)):
        assert nspawn.set_host_key(tmp_path, other=other) == changed
        assert (key.read_text() == "its own") != other
