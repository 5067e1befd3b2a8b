"""The end: everything that carries our id, nothing else, and the truth about what stays."""

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


def end(aws: AwsClient, clock: Clock, events: list[str] | None = None) -> Teardown:
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    heard: list[str] = [] if events is None else events
    return teardown(aws, cluster, on_event=lambda event: heard.append(event.text))


def ours(aws: AwsClient) -> list[Any]:
    filters = tagged("awsddp:id", IDS["cluster_id"])
    living = [node for node in describe(aws, filters) if node.state != "terminated"]
    return [
        *living,
        *aws.paginate("DescribeSecurityGroups", {"Filters": filters}, "SecurityGroups"),
        *aws.paginate("DescribeKeyPairs", {"Filters": filters}, "KeyPairs"),
        *aws.paginate("DescribePlacementGroups", {"Filters": filters}, "PlacementGroups"),
        *aws.paginate("DescribeVolumes", {"Filters": filters}, "Volumes"),
        *aws.paginate("DescribeNetworkInterfaces", {"Filters": filters}, "NetworkInterfaces"),
    ]


def test_nothing_of_ours_is_left_and_everything_of_others_is(
    aws: AwsClient, launcher: Launcher, clock: Clock
) -> None:
    plan = plan_for(aws)
    nodes = launcher(plan)
    launcher(plan, ids={"cluster_id": "ffffffff", "name": "awsddp-demo-ffffffff"})
    ended = end(aws, clock)
    assert sorted(ended.terminated) == sorted(node.instance_id for node in nodes)
    assert ended.leftovers == ()
    assert ours(aws) == []
    other = find_cluster(aws, "demo", aws.identity().user_id)
    assert other is not None
    assert other.id == "ffffffff"
    assert len(other.live) == 2
    assert len(other.leftovers) == 3


def test_what_another_owner_made_under_the_same_id_survives(
    aws: AwsClient, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    copied = copy.deepcopy(launcher.intents[0].parameters) | {"ClientToken": "another"}
    for pair in [pair for part in copied["TagSpecifications"] for pair in part["Tags"]]:
        pair["Value"] = "AIDAOTHER" if pair["Key"] == "awsddp:owner" else pair["Value"]
    theirs = [one["InstanceId"] for one in aws.call("RunInstances", copied)["Instances"]]
    assert sorted(end(aws, clock).terminated) == sorted(node.instance_id for node in nodes)
    found = describe(aws, [{"Name": "instance-id", "Values": theirs}])
    assert [one.state for one in found] == ["running"] * len(theirs)


def test_a_second_end_finds_nothing_to_do(aws: AwsClient, launcher: Launcher, clock: Clock) -> None:
    launcher(plan_for(aws))
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    teardown(aws, cluster, on_event=lambda event: None)
    assert teardown(aws, cluster, on_event=lambda event: None) == Teardown(terminated=(), leftovers=())
    assert find_cluster(aws, "demo", aws.identity().user_id) is None


def test_a_group_that_is_still_held_is_asked_for_again(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cloud.fail("DeleteSecurityGroup", *["DependencyViolation"] * 5)
    assert end(aws, clock).leftovers == ()
    assert ours(aws) == []


def test_a_group_that_is_held_for_ever_is_a_leftover(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(plan_for(aws))
    monkeypatch.setattr("awsddp.aws.teardown.RELEASED_S", 60)
    cloud.fail("DeleteSecurityGroup", *["DependencyViolation"] * 100)
    [left] = end(aws, clock).leftovers
    assert left.startswith("sg-")
    assert 60 <= clock.monotonic() < 70


def test_instances_that_may_not_be_ended_are_leftovers_with_the_reason(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    cloud.fail("TerminateInstances", "OperationNotPermitted", message="termination protection")
    cloud.fail("DeleteSecurityGroup", "DependencyViolation")
    ended = end(aws, clock)
    assert ended.terminated == ()
    for node in nodes:
        [told] = [left for left in ended.leftovers if left.startswith(node.instance_id)]
        assert "termination protection" in told


def test_key_and_groups_of_nodes_that_may_not_be_ended_stay_and_go_with_them_later(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cloud.fail("TerminateInstances", *["UnauthorizedOperation"] * 30)
    events: list[str] = []
    left = " ".join(end(aws, clock, events).leftovers)
    assert [name for name, _ in cloud.requests if name.startswith("Delete")] == []
    assert [one for one in events if one.startswith("deleted")] == []
    assert left.count("nodes that could not be terminated use it") == 3
    cloud.faults.clear()
    assert len(end(aws, clock).terminated) == 2
    assert ours(aws) == []


def test_what_was_gone_before_is_not_called_deleted(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(plan_for(aws))
    monkeypatch.setattr("awsddp.aws.teardown.RELEASED_S", 5)
    cloud.fail("DeleteSecurityGroup", *["DependencyViolation"] * 100)
    first: list[str] = []
    assert len(end(aws, clock, first).leftovers) == 1
    assert len([one for one in first if one.startswith("deleted")]) == 2
    cloud.faults.clear()
    again: list[str] = []
    [group] = [one["GroupId"] for one in ours(aws)]
    assert end(aws, clock, again).leftovers == ()
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
    ended = end(aws, clock)
    assert clock.monotonic() >= 20
    assert ended.terminated == ()
    for node in nodes:
        assert f"{node.instance_id}: shutting-down" in ended.leftovers


def test_an_id_that_is_not_visible_to_terminate_is_no_proof_of_an_end(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cloud.fail("TerminateInstances", "InvalidInstanceID.NotFound", "InvalidInstanceID.NotFound")
    assert len(end(aws, clock).terminated) == 2
    assert ours(aws) == []


def test_a_launch_that_shows_late_is_ended_too(
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
    assert ours(aws) == []


def test_credentials_that_no_longer_hold_are_said_so(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    cloud.fail("DescribeInstances", "ExpiredToken")
    with pytest.raises(CloudError, match="expired"):
        teardown(aws, cluster, on_event=lambda event: None)
