"""Teardown: everything with the cluster's id is deleted, nothing else, and leftovers are reported."""

import copy
from typing import Any

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import describe, tagged
from awsddp.aws.teardown import Teardown, teardown
from awsddp.aws.waits import Clock
from awsddp.errors import CloudError
from awsddp.model.events import Event
from tests.support.moto_cloud import IDS, Cloud, Launcher, find_cluster, plan_for


def tear_down(aws: AwsClient, clock: Clock, events: list[str] | None = None) -> Teardown:
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    messages: list[str] = [] if events is None else events
    return teardown(aws, cluster, on_event=lambda event: messages.append(event.text))


def list_own(aws: AwsClient) -> list[Any]:
    filters = tagged("awsddp:id", IDS["cluster_id"])
    nodes = [node for node in describe(aws, filters) if node.state != "terminated"]
    return [
        *nodes,
        *aws.paginate("DescribeSecurityGroups", {"Filters": filters}, "SecurityGroups"),
        *aws.paginate("DescribeKeyPairs", {"Filters": filters}, "KeyPairs"),
        *aws.paginate("DescribePlacementGroups", {"Filters": filters}, "PlacementGroups"),
        *aws.paginate("DescribeVolumes", {"Filters": filters}, "Volumes"),
        *aws.paginate("DescribeNetworkInterfaces", {"Filters": filters}, "NetworkInterfaces"),
    ]


def test_everything_of_the_cluster_is_deleted_and_nothing_of_others(
    aws: AwsClient, launcher: Launcher, clock: Clock
) -> None:
    plan = plan_for(aws)
    nodes = launcher(plan)
    launcher(plan, ids={"cluster_id": "ffffffff", "name": "awsddp-demo-ffffffff"})
    ended = tear_down(aws, clock)
    assert sorted(ended.terminated) == sorted(node.instance_id for node in nodes)
    assert ended.leftovers == ()
    assert list_own(aws) == []
    other = find_cluster(aws, "demo", aws.identity().user_id)
    assert other is not None
    assert other.id == "ffffffff"
    assert len(other.live) == 2
    assert len(other.leftovers) == 3


def test_resources_of_another_owner_with_the_same_id_stay(
    aws: AwsClient, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    copied = copy.deepcopy(launcher.intents[0].parameters) | {"ClientToken": "another"}
    for pair in [pair for part in copied["TagSpecifications"] for pair in part["Tags"]]:
        pair["Value"] = "AIDAOTHER" if pair["Key"] == "awsddp:owner" else pair["Value"]
    theirs = [item["InstanceId"] for item in aws.call("RunInstances", copied)["Instances"]]
    assert sorted(tear_down(aws, clock).terminated) == sorted(node.instance_id for node in nodes)
    others = describe(aws, [{"Name": "instance-id", "Values": theirs}])
    assert [item.state for item in others] == ["running"] * len(theirs)


def test_a_second_teardown_deletes_nothing(aws: AwsClient, launcher: Launcher, clock: Clock) -> None:
    launcher(plan_for(aws))
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    teardown(aws, cluster, on_event=lambda event: None)
    assert teardown(aws, cluster, on_event=lambda event: None) == Teardown(terminated=(), leftovers=())
    assert find_cluster(aws, "demo", aws.identity().user_id) is None


def test_the_deletion_of_a_group_in_use_is_retried(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cloud.fail("DeleteSecurityGroup", *["DependencyViolation"] * 5)
    assert tear_down(aws, clock).leftovers == ()
    assert list_own(aws) == []


def test_a_group_that_stays_in_use_is_a_leftover(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(plan_for(aws))
    monkeypatch.setattr("awsddp.aws.teardown.RELEASED_S", 60)
    cloud.fail("DeleteSecurityGroup", *["DependencyViolation"] * 100)
    [leftover] = tear_down(aws, clock).leftovers
    assert leftover.startswith("sg-")
    assert 60 <= clock.monotonic() < 70


def test_instances_that_may_not_be_terminated_are_leftovers_with_the_reason(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    cloud.fail("TerminateInstances", "OperationNotPermitted", message="termination protection")
    cloud.fail("DeleteSecurityGroup", "DependencyViolation")
    ended = tear_down(aws, clock)
    assert ended.terminated == ()
    for node in nodes:
        [leftover] = [item for item in ended.leftovers if item.startswith(node.instance_id)]
        assert "termination protection" in leftover


def test_key_and_groups_are_deleted_only_after_their_nodes_are_terminated(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cloud.fail("TerminateInstances", *["UnauthorizedOperation"] * 30)
    events: list[str] = []
    leftovers = " ".join(tear_down(aws, clock, events).leftovers)
    assert [name for name, _ in cloud.requests if name.startswith("Delete")] == []
    assert [event for event in events if event.startswith("deleted")] == []
    assert leftovers.count("nodes that could not be terminated use it") == 3
    cloud.faults.clear()
    assert len(tear_down(aws, clock).terminated) == 2
    assert list_own(aws) == []


def test_only_resources_that_existed_are_reported_as_deleted(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(plan_for(aws))
    monkeypatch.setattr("awsddp.aws.teardown.RELEASED_S", 5)
    cloud.fail("DeleteSecurityGroup", *["DependencyViolation"] * 100)
    first: list[str] = []
    assert len(tear_down(aws, clock, first).leftovers) == 1
    assert len([item for item in first if item.startswith("deleted")]) == 2
    cloud.faults.clear()
    again: list[str] = []
    [group] = [item["GroupId"] for item in list_own(aws)]
    assert tear_down(aws, clock, again).leftovers == ()
    assert again == ["deleting what the nodes used", f"deleted {group}"]


def test_instance_that_is_still_shutting_down_at_the_deadline_is_a_leftover(
    aws: AwsClient, launcher: Launcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = launcher(plan_for(aws))

    def terminate(instance: Any) -> Any:
        before = copy.copy(instance._state)
        instance._state.name, instance._state.code = "shutting-down", 32
        return before

    monkeypatch.setattr("moto.ec2.models.instances.Instance.terminate", terminate)
    monkeypatch.setattr("awsddp.aws.teardown.deadline_s", lambda types: 20)
    ended = tear_down(aws, clock)
    assert clock.monotonic() >= 20
    assert ended.terminated == ()
    for node in nodes:
        assert f"{node.instance_id}: shutting-down" in ended.leftovers


def test_an_instance_that_is_not_found_is_not_assumed_to_be_terminated(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cloud.fail("TerminateInstances", "InvalidInstanceID.NotFound", "InvalidInstanceID.NotFound")
    assert len(tear_down(aws, clock).terminated) == 2
    assert list_own(aws) == []


def test_instances_that_are_listed_late_are_terminated(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    hidden = dict(cloud.backend.reservations)
    cloud.backend.reservations.clear()
    cloud.fail("DeleteSecurityGroup", "DependencyViolation")

    def appear(event: Event) -> None:
        if event.text.startswith("deleted key"):
            cloud.backend.reservations.update(hidden)

    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    ended = teardown(aws, cluster, on_event=appear)
    assert len(ended.terminated) == 2
    assert list_own(aws) == []


def test_expired_credentials_are_an_error(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    cloud.fail("DescribeInstances", "ExpiredToken")
    with pytest.raises(CloudError, match="expired"):
        teardown(aws, cluster, on_event=lambda event: None)
