"""Instances from their launch to their termination."""

import pytest

from tests.support.local_cloud import Cloud, error_code_of


def test_instances_take_their_states_in_order_and_leave_nothing(records: Cloud) -> None:
    ec2 = records.client("ec2")
    tags = [
        {"ResourceType": kind, "Tags": [{"Key": "Name", "Value": kind}]}
        for kind in ("instance", "volume", "network-interface")
    ]
    instance = ec2.run_instances(**records.request(TagSpecifications=tags))["Instances"][0]
    assert instance["State"]["Name"] == "pending"
    running = records.wait("running", instance["InstanceId"])[0]
    assert running["PublicIpAddress"] == running["PrivateIpAddress"]
    of_instance = [{"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}]
    (nic,) = ec2.describe_network_interfaces(Filters=of_instance)["NetworkInterfaces"]
    assert nic["TagSet"] == [{"Key": "Name", "Value": "network-interface"}]
    ec2.stop_instances(InstanceIds=[instance["InstanceId"]])
    assert "PublicIpAddress" not in records.wait("stopped", instance["InstanceId"])[0]
    ec2.start_instances(InstanceIds=[instance["InstanceId"]])
    records.wait("running", instance["InstanceId"])
    change = ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])["TerminatingInstances"][0]
    assert change["CurrentState"]["Name"] == "shutting-down"
    records.wait("terminated", instance["InstanceId"])
    assert (
        error_code_of(ec2.start_instances, InstanceIds=[instance["InstanceId"]]) == "IncorrectInstanceState"
    )
    assert ec2.describe_network_interfaces(Filters=of_instance)["NetworkInterfaces"] == []


@pytest.mark.prove
def test_64_instances_are_launched_and_terminated(records: Cloud) -> None:
    ec2 = records.client("ec2")
    instances = ec2.run_instances(**records.request(InstanceType="g6.12xlarge", MinCount=64, MaxCount=64))[
        "Instances"
    ]
    ids = [instance["InstanceId"] for instance in instances]
    assert [instance["AmiLaunchIndex"] for instance in instances] == list(range(64))
    assert len({instance["PrivateIpAddress"] for instance in records.wait("running", *ids)}) == 64
    ec2.terminate_instances(InstanceIds=ids)
    records.wait("terminated", *ids)
