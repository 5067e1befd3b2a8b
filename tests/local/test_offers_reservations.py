"""Capacity reservations: open, full, of another type, cancelled, expired; kept if the daemon is killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.local_cloud import Cloud, error_code_of

EXCEEDED = "ReservationCapacityExceeded"


class Reservation:
    """A reservation in us-east-1b, and launches into it."""

    def __init__(self, cloud: Cloud, **changes: Any) -> None:
        self.cloud, self.ec2 = cloud, cloud.client("ec2")
        parameters = {
            "InstanceType": "g5.12xlarge",
            "InstancePlatform": "Linux/UNIX",
            "AvailabilityZone": "us-east-1b",
            "InstanceCount": 2,
            "InstanceMatchCriteria": "targeted",
            **changes,
        }
        self.id = self.ec2.create_capacity_reservation(**parameters)["CapacityReservation"][
            "CapacityReservationId"
        ]
        self.launched: list[str] = []

    def describe(self) -> dict[str, Any]:
        ec2 = self.cloud.client("ec2")
        response = ec2.describe_capacity_reservations(CapacityReservationIds=[self.id])
        return dict(response["CapacityReservations"][0])

    @property
    def free(self) -> int:
        return int(self.describe()["AvailableInstanceCount"])

    def request(self, zone: str = "us-east-1b", *, is_named: bool = True, **changes: Any) -> dict[str, Any]:
        target = {"CapacityReservationTarget": {"CapacityReservationId": self.id}}
        return self.cloud.request(
            **{
                "InstanceType": "g5.12xlarge",
                "Placement": {"AvailabilityZone": zone},
                **({"CapacityReservationSpecification": target} if is_named else {}),
                **changes,
            }
        )

    def launch(self, *zone: str, **changes: Any) -> dict[str, Any]:
        instances = self.ec2.run_instances(**self.request(*zone, **changes))["Instances"]
        self.launched += [instance["InstanceId"] for instance in instances]
        self.cloud.wait("running", *[instance["InstanceId"] for instance in instances])
        return self.cloud.instances(instances[0]["InstanceId"])[0]


@contextmanager
def reserve(cloud: Cloud, **changes: Any) -> Iterator[Reservation]:
    capacity = Reservation(cloud, **changes)
    yield capacity
    ec2 = cloud.client("ec2")
    ec2.cancel_capacity_reservation(CapacityReservationId=capacity.id)
    if capacity.launched:
        ec2.terminate_instances(InstanceIds=capacity.launched)
        cloud.wait("terminated", *capacity.launched)


def test_launches_that_target_a_reservation_use_it_until_it_is_full(records: Cloud) -> None:
    with reserve(records) as capacity:
        instance = capacity.launch()
        assert instance["CapacityReservationId"] == capacity.id
        assert capacity.free == 1
        excess = capacity.request(MinCount=2, MaxCount=2)
        assert error_code_of(capacity.ec2.run_instances, **excess) == EXCEEDED
        assert capacity.free == 1
        capacity.launch()
        assert capacity.free == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"InstanceType": "g5.4xlarge"},
        {"Placement": {"AvailabilityZone": "us-east-1a"}},
        {"InstanceMarketOptions": {"MarketType": "spot"}},
    ],
    ids=["type", "zone", "spot"],
)
def test_a_targeted_launch_that_does_not_match_is_refused(records: Cloud, changes: dict[str, Any]) -> None:
    with reserve(records) as capacity:
        assert error_code_of(capacity.ec2.run_instances, **capacity.request(**changes)) == EXCEEDED
        assert capacity.free == 2


def test_a_reservation_for_another_platform_refuses_linux(records: Cloud) -> None:
    with reserve(records, InstancePlatform="Windows") as capacity:
        assert error_code_of(capacity.ec2.run_instances, **capacity.request()) == EXCEEDED


def test_stopped_and_terminated_instances_free_their_reservation(records: Cloud) -> None:
    with reserve(records, InstanceCount=1) as capacity:
        stopped = capacity.launch()["InstanceId"]
        capacity.ec2.stop_instances(InstanceIds=[stopped])
        records.wait("stopped", stopped)
        assert capacity.free == 1
        other = capacity.launch()["InstanceId"]
        assert error_code_of(capacity.ec2.start_instances, InstanceIds=[stopped]) == EXCEEDED
        capacity.ec2.terminate_instances(InstanceIds=[other])
        records.wait("terminated", other)
        capacity.ec2.start_instances(InstanceIds=[stopped])
        records.wait("running", stopped)
        assert capacity.free == 0


def test_a_dry_run_of_a_start_outside_a_full_reservation_changes_nothing(records: Cloud) -> None:
    with reserve(records, InstanceCount=1, InstanceMatchCriteria="open") as capacity:
        stopped = capacity.launch(is_named=False)["InstanceId"]
        capacity.ec2.stop_instances(InstanceIds=[stopped])
        records.wait("stopped", stopped)
        capacity.launch()
        assert (
            error_code_of(capacity.ec2.start_instances, InstanceIds=[stopped], DryRun=True)
            == "DryRunOperation"
        )
        assert records.instances(stopped)[0]["CapacityReservationId"] == capacity.id
        capacity.ec2.start_instances(InstanceIds=[stopped])
        records.wait("running", stopped)
        assert "CapacityReservationId" not in records.instances(stopped)[0]


def test_an_open_reservation_is_used_by_every_launch_that_matches_and_no_other(records: Cloud) -> None:
    with reserve(records, InstanceMatchCriteria="open") as capacity:
        assert "CapacityReservationId" not in capacity.launch("us-east-1a", is_named=False)
        capacity.ec2.create_placement_group(GroupName="apart", Strategy="cluster")
        apart = {"Placement": {"AvailabilityZone": "us-east-1b", "GroupName": "apart"}}
        assert "CapacityReservationId" not in capacity.launch(is_named=False, **apart)
        assert "CapacityReservationId" not in capacity.launch(is_named=False, MinCount=3, MaxCount=3)
        assert capacity.launch(is_named=False, MinCount=2, MaxCount=2)["CapacityReservationId"] == capacity.id
        assert "CapacityReservationId" not in capacity.launch(is_named=False)


def test_a_targeted_reservation_is_not_used_by_launches_that_do_not_name_it(records: Cloud) -> None:
    with reserve(records) as capacity:
        assert "CapacityReservationId" not in capacity.launch(is_named=False)
        assert capacity.free == 2


def test_a_cancelled_or_expired_reservation_has_no_capacity(records: Cloud) -> None:
    soon = datetime.now(UTC) - timedelta(seconds=1)
    with reserve(records, EndDateType="limited", EndDate=soon) as expired, reserve(records) as cancelled:
        cancelled.launch()
        cancelled.ec2.cancel_capacity_reservation(CapacityReservationId=cancelled.id)
        for capacity, state in ((expired, "expired"), (cancelled, "cancelled")):
            assert (capacity.describe()["State"], capacity.free) == (state, 0)
            assert error_code_of(capacity.ec2.run_instances, **capacity.request()) == EXCEEDED


def test_reserved_instances_count_against_the_quota_once(records: Cloud) -> None:
    quotas = records.client("service-quotas", region_name="eu-west-1")
    quota = quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-417A185B")["Quota"]["Value"]
    ec2 = records.client("ec2", region_name="eu-west-1")
    zones = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["p4d.24xlarge"]}]
    )["InstanceTypeOfferings"]
    request = {
        "InstanceType": "p4d.24xlarge",
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": zones[0]["Location"],
        "InstanceCount": int(quota) // 96,
    }
    reserved_id = ec2.create_capacity_reservation(**request)["CapacityReservation"]["CapacityReservationId"]
    assert (
        error_code_of(ec2.create_capacity_reservation, **{**request, "InstanceCount": 1})
        == "VcpuLimitExceeded"
    )
    images = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
    image = {"ImageId": images[0]["ImageId"], "InstanceType": "p4d.24xlarge", "MinCount": 1, "MaxCount": 1}
    placement = {"Placement": {"AvailabilityZone": zones[0]["Location"]}}
    inside = ec2.run_instances(**image, **placement)["Instances"][0]["InstanceId"]
    ec2.create_placement_group(GroupName="apart", Strategy="cluster")
    placement["Placement"]["GroupName"] = "apart"
    assert error_code_of(ec2.run_instances, **image, **placement) == "VcpuLimitExceeded"
    ec2.terminate_instances(InstanceIds=[inside])
    ec2.cancel_capacity_reservation(CapacityReservationId=reserved_id)


def test_a_reservation_and_its_instances_outlive_the_daemon(records: Cloud) -> None:
    tags = [{"ResourceType": "capacity-reservation", "Tags": [{"Key": "team", "Value": "vision"}]}]
    with reserve(records, TagSpecifications=tags) as capacity:
        capacity.launch()
        before = capacity.describe()
        records.kill()
        assert capacity.describe() == before
        by_tag = [{"Name": "tag:team", "Values": ["vision"]}, {"Name": "state", "Values": ["active"]}]
        (row,) = records.client("ec2").describe_capacity_reservations(Filters=by_tag)["CapacityReservations"]
        assert (row["CapacityReservationId"], row["AvailableInstanceCount"]) == (capacity.id, 1)


def test_an_unknown_reservation_is_not_found(records: Cloud) -> None:
    describe = records.client("ec2").describe_capacity_reservations
    assert (
        error_code_of(describe, CapacityReservationIds=["cr-12345678901234567"])
        == "InvalidCapacityReservationId.NotFound"
    )
