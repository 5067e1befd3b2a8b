"""Instances from the launch to their end."""

import pytest

from tests.support.local_cloud import Cloud, refusal


def test_instances_take_their_states_in_order_and_leave_nothing(records: Cloud) -> None:
    ec2 = records.client("ec2")
    tags = [
        {"ResourceType": kind, "Tags": [{"Key": "Name", "Value": kind}]}
        for kind in ("instance", "volume", "network-interface")
    ]
    made = ec2.run_instances(**records.request(TagSpecifications=tags))["Instances"][0]
    assert made["State"]["Name"] == "pending"
    running = records.wait("running", made["InstanceId"])[0]
    assert running["PublicIpAddress"] == running["PrivateIpAddress"]
    of_instance = [{"Name": "attachment.instance-id", "Values": [made["InstanceId"]]}]
    (nic,) = ec2.describe_network_interfaces(Filters=of_instance)["NetworkInterfaces"]
    assert nic["TagSet"] == [{"Key": "Name", "Value": "network-interface"}]
    ec2.stop_instances(InstanceIds=[made["InstanceId"]])
    assert "PublicIpAddress" not in records.wait("stopped", made["InstanceId"])[0]
    ec2.start_instances(InstanceIds=[made["InstanceId"]])
    records.wait("running", made["InstanceId"])
    change = ec2.terminate_instances(InstanceIds=[made["InstanceId"]])["TerminatingInstances"][0]
    assert change["CurrentState"]["Name"] == "shutting-down"
    records.wait("terminated", made["InstanceId"])
    assert refusal(ec2.start_instances, InstanceIds=[made["InstanceId"]]) == "IncorrectInstanceState"
    assert ec2.describe_network_interfaces(Filters=of_instance)["NetworkInterfaces"] == []


@pytest.mark.prove
def test_sixty_four_instances_come_and_go(records: Cloud) -> None:
    ec2 = records.client("ec2")
    made = ec2.run_instances(**records.request(InstanceType="g6.12xlarge", MinCount=64, MaxCount=64))[
        "Instances"
    ]
    ids = [one["InstanceId"] for one in made]
    assert [one["AmiLaunchIndex"] for one in made] == list(range(64))
    assert len({one["PrivateIpAddress"] for one in records.wait("running", *ids)}) == 64
    ec2.terminate_instances(InstanceIds=ids)
    records.wait("terminated", *ids)
