"""`capacity.reservation` from end to end: nodes use and free it; settings that do not fit launch nothing."""

import json
from typing import Any

import botocore.session
import pytest

from tests.support.lab import Lab
from tests.support.local_cloud import needs_root

TYPE = "g5.12xlarge"


def make_client(lab: Lab) -> Any:
    """Return an EC2 client of the lab's local cloud that is independent of awsddp."""
    cloud = json.loads(lab.run("--json", "local", "status").stdout)
    return botocore.session.Session().create_client(
        "ec2",
        region_name=cloud["region"],
        endpoint_url=cloud["endpoint"],
        aws_access_key_id=cloud["access_key_id"],
        aws_secret_access_key=cloud["secret_access_key"],
    )


def reserve(ec2: Any, **changes: Any) -> str:
    request = {
        "InstanceType": TYPE,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": "us-east-1b",
        "InstanceCount": 2,
        "InstanceMatchCriteria": "targeted",
        **changes,
    }
    return str(ec2.create_capacity_reservation(**request)["CapacityReservation"]["CapacityReservationId"])


def count_free(ec2: Any, reservation: str) -> int:
    (row,) = ec2.describe_capacity_reservations(CapacityReservationIds=[reservation])["CapacityReservations"]
    return int(row["AvailableInstanceCount"])


@pytest.mark.parametrize("criteria", ["targeted", pytest.param("open", marks=pytest.mark.prove)])
def test_a_cluster_uses_its_reservation_and_down_frees_it(records: Lab, criteria: str) -> None:
    ec2 = make_client(records)
    reservation = reserve(ec2, InstanceMatchCriteria=criteria)
    up = records.json("up", "--local", "-y", "-o", f"capacity.reservation={reservation}")
    assert (up["state"], up["instance_type"], count_free(ec2, reservation)) == ("ready", TYPE, 0)
    ids = [node["instance_id"] for node in up["nodes"]]
    (page,) = ec2.describe_instances(InstanceIds=ids)["Reservations"]
    assert {node["CapacityReservationId"] for node in page["Instances"]} == {reservation}
    assert {node["Placement"]["AvailabilityZone"] for node in page["Instances"]} == {"us-east-1b"}
    again = records.run("-c", "other", "plan", "--local", "-o", f"capacity.reservation={reservation}")
    assert again.returncode == 3
    assert f"capacity.reservation: {reservation} has 0 free machines, and 2 are requested" in again.stderr
    records.json("down", "-y")
    assert count_free(ec2, reservation) == 2
    ec2.cancel_capacity_reservation(CapacityReservationId=reservation)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("changes", "args", "texts"),
    [
        (
            {},
            ("--instance-type", "g6.48xlarge"),
            ("capacity.reservation", "is for g5.12xlarge, not for g6.48xlarge", "--instance-type"),
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
def test_settings_that_do_not_fit_the_reservation_are_refused_before_a_launch(
    records: Lab, changes: dict[str, Any], args: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    ec2 = make_client(records)
    reservation = reserve(ec2, **changes)
    result = records.run("up", "--local", "-y", "-o", f"capacity.reservation={reservation}", *args)
    assert result.returncode == 3
    for text in texts:
        assert text in result.stderr
    alive = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopped"]}]
    assert ec2.describe_instances(Filters=alive)["Reservations"] == []
    assert ec2.describe_key_pairs()["KeyPairs"] == []
    ec2.cancel_capacity_reservation(CapacityReservationId=reservation)


def test_a_cancelled_or_unknown_reservation_is_named(records: Lab) -> None:
    ec2 = make_client(records)
    reservation = reserve(ec2)
    ec2.cancel_capacity_reservation(CapacityReservationId=reservation)
    for key, reason in (
        (reservation, f"{reservation} is cancelled"),
        ("cr-12345678901234567", "no capacity reservation"),
    ):
        result = records.run("up", "--local", "-y", "-o", f"capacity.reservation={key}")
        assert (result.returncode, "capacity.reservation" in result.stderr, reason in result.stderr) == (
            3,
            True,
            True,
        )


@pytest.mark.prove
def test_a_reservation_that_fills_up_is_a_lack_of_capacity_and_leaves_nothing(records: Lab) -> None:
    ec2 = make_client(records)
    reservation = reserve(ec2)
    records.run("local", "fault", "add", "RunInstances", "ReservationCapacityExceeded", "--times", "1")
    result = records.run("up", "--local", "-y", "-o", f"capacity.reservation={reservation}")
    assert (result.returncode, "ReservationCapacityExceeded" in result.stderr) == (5, True)
    assert ec2.describe_key_pairs()["KeyPairs"] == []
    ec2.cancel_capacity_reservation(CapacityReservationId=reservation)


@needs_root
@pytest.mark.prove
def test_real_hosts_use_a_reservation_and_a_full_one_is_refused(cluster: Lab) -> None:
    ec2 = make_client(cluster)
    reservation = reserve(ec2, InstanceCount=1)
    args = ("--local", "-y", "-o", f"capacity.reservation={reservation}", "--nodes", "1")
    up = cluster.json("up", "-c", "reserved", *args)
    assert (up["state"], up["instance_type"], count_free(ec2, reservation)) == ("ready", TYPE, 0)
    for more, reason in (((), "0 free"), (("--instance-type", "g6.48xlarge"), f"for {TYPE}")):
        result = cluster.run("up", "-c", "other", *args, *more)
        assert (result.returncode, "capacity.reservation" in result.stderr, reason in result.stderr) == (
            3,
            True,
            True,
        )
    cluster.json("down", "-c", "reserved", "-y")
    assert count_free(ec2, reservation) == 1
    ec2.cancel_capacity_reservation(CapacityReservationId=reservation)
