"""`capacity.reservation` from end to end: what fits is taken and given back, what does not costs nothing."""

import json
from typing import Any

import botocore.session
import pytest

from tests.support.lab import Lab
from tests.support.local_cloud import needs_root

TYPE = "g5.12xlarge"


def make_client(lab: Lab) -> Any:
    """An EC2 client of the lab's local cloud, with nothing of ours."""
    told = json.loads(lab.run("--json", "local", "status").stdout)
    return botocore.session.Session().create_client(
        "ec2",
        region_name=told["region"],
        endpoint_url=told["endpoint"],
        aws_access_key_id=told["access_key_id"],
        aws_secret_access_key=told["secret_access_key"],
    )


def reserve(ec2: Any, **changes: Any) -> str:
    asked = {
        "InstanceType": TYPE,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": "us-east-1b",
        "InstanceCount": 2,
        "InstanceMatchCriteria": "targeted",
        **changes,
    }
    return str(ec2.create_capacity_reservation(**asked)["CapacityReservation"]["CapacityReservationId"])


def free(ec2: Any, held: str) -> int:
    (found,) = ec2.describe_capacity_reservations(CapacityReservationIds=[held])["CapacityReservations"]
    return int(found["AvailableInstanceCount"])


@pytest.mark.parametrize("criteria", ["targeted", pytest.param("open", marks=pytest.mark.prove)])
def test_a_cluster_goes_into_its_reservation_and_gives_it_back(records: Lab, criteria: str) -> None:
    ec2 = make_client(records)
    held = reserve(ec2, InstanceMatchCriteria=criteria)
    up = records.json("up", "--local", "-y", "-o", f"capacity.reservation={held}")
    assert (up["state"], up["instance_type"], free(ec2, held)) == ("ready", TYPE, 0)
    ids = [node["instance_id"] for node in up["nodes"]]
    (page,) = ec2.describe_instances(InstanceIds=ids)["Reservations"]
    assert {one["CapacityReservationId"] for one in page["Instances"]} == {held}
    assert {one["Placement"]["AvailabilityZone"] for one in page["Instances"]} == {"us-east-1b"}
    again = records.run("-c", "other", "plan", "--local", "-o", f"capacity.reservation={held}")
    assert again.returncode == 3
    assert f"capacity.reservation: {held} has 0 free machines, and 2 are requested" in again.stderr
    records.json("down", "-y")
    assert free(ec2, held) == 2
    ec2.cancel_capacity_reservation(CapacityReservationId=held)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("changes", "words", "told"),
    [
        (
            {},
            ("--instance-type", "g6.48xlarge"),
            ("capacity.reservation", "is of g5.12xlarge, not of g6.48xlarge", "--instance-type"),
        ),
        ({}, ("--gpus", "L4:8"), ("--gpus", "is not what g5.12xlarge has", "A10G:4")),
        (
            {},
            ("--nodes", "3"),
            ("capacity.reservation", "has 2 free machines, and 3 are requested", "--nodes 2"),
        ),
        ({}, ("-o", "capacity.zones=us-east-1a"), ("capacity.zones", "is in us-east-1b", "=us-east-1b")),
        ({}, ("--spot",), ("capacity.reservation", "cannot be used by spot", "omit --spot")),
        ({"InstancePlatform": "Windows"}, (), ("capacity.reservation", "is for Windows", "Linux/UNIX")),
    ],
    ids=["type", "gpus", "full", "zone", "spot", "platform"],
)
def test_what_does_not_fit_is_refused_before_a_cent(
    records: Lab, changes: dict[str, Any], words: tuple[str, ...], told: tuple[str, ...]
) -> None:
    ec2 = make_client(records)
    held = reserve(ec2, **changes)
    shown = records.run("up", "--local", "-y", "-o", f"capacity.reservation={held}", *words)
    assert shown.returncode == 3
    for text in told:
        assert text in shown.stderr
    alive = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopped"]}]
    assert ec2.describe_instances(Filters=alive)["Reservations"] == []
    assert ec2.describe_key_pairs()["KeyPairs"] == []
    ec2.cancel_capacity_reservation(CapacityReservationId=held)


def test_one_that_is_gone_or_never_was_is_named(records: Lab) -> None:
    ec2 = make_client(records)
    held = reserve(ec2)
    ec2.cancel_capacity_reservation(CapacityReservationId=held)
    for key, why in ((held, f"{held} is cancelled"), ("cr-12345678901234567", "no capacity reservation")):
        shown = records.run("up", "--local", "-y", "-o", f"capacity.reservation={key}")
        assert (shown.returncode, "capacity.reservation" in shown.stderr, why in shown.stderr) == (
            3,
            True,
            True,
        )


@pytest.mark.prove
def test_one_that_fills_up_meanwhile_is_a_lack_of_capacity_and_leaves_nothing(records: Lab) -> None:
    ec2 = make_client(records)
    held = reserve(ec2)
    records.run("local", "fault", "add", "RunInstances", "ReservationCapacityExceeded", "--times", "1")
    shown = records.run("up", "--local", "-y", "-o", f"capacity.reservation={held}")
    assert (shown.returncode, "ReservationCapacityExceeded" in shown.stderr) == (5, True)
    assert ec2.describe_key_pairs()["KeyPairs"] == []
    ec2.cancel_capacity_reservation(CapacityReservationId=held)


@needs_root
@pytest.mark.prove
def test_real_hosts_go_into_a_reservation_and_a_full_one_is_refused(cluster: Lab) -> None:
    ec2 = make_client(cluster)
    held = reserve(ec2, InstanceCount=1)
    asked = ("--local", "-y", "-o", f"capacity.reservation={held}", "--nodes", "1")
    up = cluster.json("up", "-c", "reserved", *asked)
    assert (up["state"], up["instance_type"], free(ec2, held)) == ("ready", TYPE, 0)
    for words, why in (((), "0 free"), (("--instance-type", "g6.48xlarge"), f"of {TYPE}")):
        shown = cluster.run("up", "-c", "other", *asked, *words)
        assert (shown.returncode, "capacity.reservation" in shown.stderr, why in shown.stderr) == (
            3,
            True,
            True,
        )
    cluster.json("down", "-c", "reserved", "-y")
    assert free(ec2, held) == 1
    ec2.cancel_capacity_reservation(CapacityReservationId=held)
