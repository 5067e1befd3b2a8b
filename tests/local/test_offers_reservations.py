"""Capacity reservations: open, full, of another type, cancelled, over; kept when the daemon dies."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.local_cloud import Cloud, refusal

EXCEEDED = "ReservationCapacityExceeded"


class Held:
    """A reservation in us-east-1b, and launches that are to take from it."""

    def __init__(self, cloud: Cloud, **changes: Any) -> None:
        self.cloud, self.ec2 = cloud, cloud.client("ec2")
        asked = {
            "InstanceType": "g5.12xlarge",
            "InstancePlatform": "Linux/UNIX",
            "AvailabilityZone": "us-east-1b",
            "InstanceCount": 2,
            "InstanceMatchCriteria": "targeted",
            **changes,
        }
        self.id = self.ec2.create_capacity_reservation(**asked)["CapacityReservation"][
            "CapacityReservationId"
        ]
        self.launched: list[str] = []

    def shown(self) -> dict[str, Any]:
        ec2 = self.cloud.client("ec2")
        found = ec2.describe_capacity_reservations(CapacityReservationIds=[self.id])
        return dict(found["CapacityReservations"][0])

    @property
    def free(self) -> int:
        return int(self.shown()["AvailableInstanceCount"])

    def request(self, zone: str = "us-east-1b", *, named: bool = True, **changes: Any) -> dict[str, Any]:
        target = {"CapacityReservationTarget": {"CapacityReservationId": self.id}}
        return self.cloud.request(
            **{
                "InstanceType": "g5.12xlarge",
                "Placement": {"AvailabilityZone": zone},
                **({"CapacityReservationSpecification": target} if named else {}),
                **changes,
            }
        )

    def launch(self, *place: str, **changes: Any) -> dict[str, Any]:
        made = self.ec2.run_instances(**self.request(*place, **changes))["Instances"]
        self.launched += [one["InstanceId"] for one in made]
        self.cloud.wait("running", *[one["InstanceId"] for one in made])
        return self.cloud.instances(made[0]["InstanceId"])[0]


@contextmanager
def reserved(cloud: Cloud, **changes: Any) -> Iterator[Held]:
    held = Held(cloud, **changes)
    yield held
    ec2 = cloud.client("ec2")
    ec2.cancel_capacity_reservation(CapacityReservationId=held.id)
    if held.launched:
        ec2.terminate_instances(InstanceIds=held.launched)
        cloud.wait("terminated", *held.launched)


def test_a_launch_that_names_it_takes_from_it_until_it_is_full(records: Cloud) -> None:
    with reserved(records) as held:
        one = held.launch()
        assert one["CapacityReservationId"] == held.id
        assert held.free == 1
        over = held.request(MinCount=2, MaxCount=2)
        assert refusal(held.ec2.run_instances, **over) == EXCEEDED
        assert held.free == 1
        held.launch()
        assert held.free == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"InstanceType": "g5.4xlarge"},
        {"Placement": {"AvailabilityZone": "us-east-1a"}},
        {"InstanceMarketOptions": {"MarketType": "spot"}},
    ],
    ids=["type", "zone", "spot"],
)
def test_a_launch_that_does_not_fit_it_is_refused(records: Cloud, changes: dict[str, Any]) -> None:
    with reserved(records) as held:
        assert refusal(held.ec2.run_instances, **held.request(**changes)) == EXCEEDED
        assert held.free == 2


def test_one_for_another_platform_takes_no_linux(records: Cloud) -> None:
    with reserved(records, InstancePlatform="Windows") as held:
        assert refusal(held.ec2.run_instances, **held.request()) == EXCEEDED


def test_it_gets_back_what_is_stopped_or_terminated(records: Cloud) -> None:
    with reserved(records, InstanceCount=1) as held:
        stopped = held.launch()["InstanceId"]
        held.ec2.stop_instances(InstanceIds=[stopped])
        records.wait("stopped", stopped)
        assert held.free == 1
        other = held.launch()["InstanceId"]
        assert refusal(held.ec2.start_instances, InstanceIds=[stopped]) == EXCEEDED
        held.ec2.terminate_instances(InstanceIds=[other])
        records.wait("terminated", other)
        held.ec2.start_instances(InstanceIds=[stopped])
        records.wait("running", stopped)
        assert held.free == 0


def test_a_dry_start_outside_of_a_full_one_changes_nothing(records: Cloud) -> None:
    with reserved(records, InstanceCount=1, InstanceMatchCriteria="open") as held:
        stopped = held.launch(named=False)["InstanceId"]
        held.ec2.stop_instances(InstanceIds=[stopped])
        records.wait("stopped", stopped)
        held.launch()
        assert refusal(held.ec2.start_instances, InstanceIds=[stopped], DryRun=True) == "DryRunOperation"
        assert records.instances(stopped)[0]["CapacityReservationId"] == held.id
        held.ec2.start_instances(InstanceIds=[stopped])
        records.wait("running", stopped)
        assert "CapacityReservationId" not in records.instances(stopped)[0]


def test_an_open_one_is_taken_by_any_launch_that_fits_and_by_no_other(records: Cloud) -> None:
    with reserved(records, InstanceMatchCriteria="open") as held:
        assert "CapacityReservationId" not in held.launch("us-east-1a", named=False)
        held.ec2.create_placement_group(GroupName="apart", Strategy="cluster")
        apart = {"Placement": {"AvailabilityZone": "us-east-1b", "GroupName": "apart"}}
        assert "CapacityReservationId" not in held.launch(named=False, **apart)
        assert "CapacityReservationId" not in held.launch(named=False, MinCount=3, MaxCount=3)
        assert held.launch(named=False, MinCount=2, MaxCount=2)["CapacityReservationId"] == held.id
        assert "CapacityReservationId" not in held.launch(named=False)


def test_a_targeted_one_is_left_alone_by_launches_that_do_not_name_it(records: Cloud) -> None:
    with reserved(records) as held:
        assert "CapacityReservationId" not in held.launch(named=False)
        assert held.free == 2


def test_one_that_is_cancelled_or_over_has_nothing_left(records: Cloud) -> None:
    soon = datetime.now(UTC) - timedelta(seconds=1)
    with reserved(records, EndDateType="limited", EndDate=soon) as over, reserved(records) as cancelled:
        cancelled.launch()
        cancelled.ec2.cancel_capacity_reservation(CapacityReservationId=cancelled.id)
        for held, state in ((over, "expired"), (cancelled, "cancelled")):
            assert (held.shown()["State"], held.free) == (state, 0)
            assert refusal(held.ec2.run_instances, **held.request()) == EXCEEDED


def test_reserved_machines_count_against_the_quota_once(records: Cloud) -> None:
    quotas = records.client("service-quotas", region_name="eu-west-1")
    quota = quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-417A185B")["Quota"]["Value"]
    ec2 = records.client("ec2", region_name="eu-west-1")
    zones = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["p4d.24xlarge"]}]
    )["InstanceTypeOfferings"]
    asked = {
        "InstanceType": "p4d.24xlarge",
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": zones[0]["Location"],
        "InstanceCount": int(quota) // 96,
    }
    made = ec2.create_capacity_reservation(**asked)["CapacityReservation"]["CapacityReservationId"]
    assert refusal(ec2.create_capacity_reservation, **{**asked, "InstanceCount": 1}) == "VcpuLimitExceeded"
    images = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
    image = {"ImageId": images[0]["ImageId"], "InstanceType": "p4d.24xlarge", "MinCount": 1, "MaxCount": 1}
    place = {"Placement": {"AvailabilityZone": zones[0]["Location"]}}
    inside = ec2.run_instances(**image, **place)["Instances"][0]["InstanceId"]
    ec2.create_placement_group(GroupName="apart", Strategy="cluster")
    place["Placement"]["GroupName"] = "apart"
    assert refusal(ec2.run_instances, **image, **place) == "VcpuLimitExceeded"
    ec2.terminate_instances(InstanceIds=[inside])
    ec2.cancel_capacity_reservation(CapacityReservationId=made)


def test_it_and_what_is_in_it_outlive_the_daemon(records: Cloud) -> None:
    tags = [{"ResourceType": "capacity-reservation", "Tags": [{"Key": "team", "Value": "vision"}]}]
    with reserved(records, TagSpecifications=tags) as held:
        held.launch()
        before = held.shown()
        records.kill()
        assert held.shown() == before
        by_tag = [{"Name": "tag:team", "Values": ["vision"]}, {"Name": "state", "Values": ["active"]}]
        (found,) = records.client("ec2").describe_capacity_reservations(Filters=by_tag)[
            "CapacityReservations"
        ]
        assert (found["CapacityReservationId"], found["AvailableInstanceCount"]) == (held.id, 1)


def test_what_is_no_reservation_is_told(records: Cloud) -> None:
    describe = records.client("ec2").describe_capacity_reservations
    assert (
        refusal(describe, CapacityReservationIds=["cr-12345678901234567"])
        == "InvalidCapacityReservationId.NotFound"
    )
