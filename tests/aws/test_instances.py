"""Launches: the requests are those of the plan, and an interrupted launch is finished."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import boto3
import pytest
from botocore.handlers import base64_encode_user_data
from botocore.serialize import create_serializer
from moto.ec2.models.instances import Instance

from awsddp.aws import instances
from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import Filters, by_id, describe, find_clusters, find_end_cause, node_of, tag, tags_of
from awsddp.aws.instances import check_still_running, find_launched_nodes, resume_launch, wait_running
from awsddp.aws.plan_facts import gather_facts
from awsddp.aws.teardown import give_up_nodes
from awsddp.aws.waits import Clock
from awsddp.errors import AwsddpError, CapacityError, CloudError, NodeError
from awsddp.model.records import LaunchIntent, Node
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import Request
from awsddp.settings.spec import CapacitySection
from tests.support.moto_cloud import (
    IDS,
    NOW,
    Cloud,
    Launcher,
    find_cluster,
    keep_zones,
    plan_for,
    spec,
    values,
)


def serialize(request: Request) -> dict[str, str]:
    """Return the form that botocore sends for a request."""
    model = boto3.client("ec2", region_name="us-east-1").meta.service_model
    parameters = dict(request.parameters)
    base64_encode_user_data(parameters)
    body = create_serializer("ec2").serialize_to_request(parameters, model.operation_model(request.operation))
    return {key: str(value) for key, value in body["body"].items()}


FULL = "InsufficientInstanceCapacity"
CONCURRENT = (
    "ImportKeyPair",
    "CreatePlacementGroup",
    "AuthorizeSecurityGroupIngress",
    "AuthorizeSecurityGroupEgress",
)


def list_running(aws: AwsClient) -> list[str]:
    return [node.instance_id for node in describe(aws, []) if node.state == "running"]


def test_the_requests_sent_are_those_of_the_plan(aws: AwsClient, cloud: Cloud, launcher: Launcher) -> None:
    plan = plan_for(aws)
    before = len(cloud.requests)
    launcher(plan)
    [run] = cloud.requests_of("RunInstances")
    group = cloud.requests_of("AuthorizeSecurityGroupIngress")[0]["GroupId"]
    ids = {
        **IDS,
        "security_group": group,
        "subnet": plan.subnets[0].id,
        "client_token": run["ClientToken"],
    }
    expected = map(values(ids).resolve, plan.requests)
    sent = [request for request in cloud.requests[before:] if request[0] not in CONCURRENT]
    assert sent == [
        (item.operation, serialize(item)) for item in expected if item.operation not in CONCURRENT
    ]
    for item in expected:
        assert cloud.requests_of(item.operation)[-1] == serialize(item)


def test_instances_volumes_groups_and_keys_are_tagged_in_the_creating_call(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    launcher(plan_for(aws))
    kinds = (
        ("DescribeVolumes", "Volumes"),
        ("DescribeSecurityGroups", "SecurityGroups"),
        ("DescribeKeyPairs", "KeyPairs"),
    )
    tag_sets = [node.tags for node in describe(aws, [])]
    for operation, key in kinds:
        items = [item for item in aws.paginate(operation, {}, key) if item.get("GroupName") != "default"]
        assert items
        tag_sets += map(tags_of, items)
    for tags in tag_sets:
        assert tags["awsddp:cluster"] == "demo"
        assert tags["awsddp:id"] == "0a1b2c3d"
        assert tags["awsddp:owner"] == aws.identity().user_id
        assert tags["awsddp:created"] == "2026-11-21T08:45:00Z"
    assert not cloud.requests_of("CreateTags")
    assert describe(aws, [])[0].tags["awsddp:expires"] == "2026-11-22T08:45:00Z"


def test_nodes_are_numbered_by_the_tag_and_the_launch_index(aws: AwsClient, launcher: Launcher) -> None:
    nodes = launcher(plan_for(aws, nodes=4))
    assert [node.node for node in nodes] == [0, 1, 2, 3]
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    assert [node.instance_id for node in cluster.nodes] == [node.instance_id for node in nodes]
    assert cluster.id == "0a1b2c3d"
    assert cluster.expires == NOW + timedelta(hours=24)
    assert {item.split("-")[0] for item in cluster.leftovers} == {"sg", "key", "pg"}


@pytest.fixture
def same_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every instance of a launch the index 0."""
    index = property(lambda _: 0, lambda *_: None)
    monkeypatch.setattr(Instance, "ami_launch_index", index, raising=False)


def map_numbers(nodes: Iterable[Node]) -> dict[str, int]:
    return {node.instance_id: node.node for node in nodes}


@pytest.mark.usefixtures("same_index")
def test_nodes_that_share_a_launch_index_are_numbered_by_their_ids(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    first = map_numbers(launcher(plan_for(aws, nodes=4)))
    assert first == {key: number for number, key in enumerate(sorted(first))}
    assert map_numbers(describe(aws, [])) == first
    removed, *others = sorted(first)
    for key, reservation in list(cloud.backend.reservations.items()):
        reservation.instances = [instance for instance in reservation.instances if instance.id != removed]
        cloud.backend.reservations[key] = reservation
    assert map_numbers(describe(aws, [])) == {key: first[key] for key in others}
    assert map_numbers(describe(aws, by_id(others[-1]))) == {others[-1]: 3}


@pytest.mark.usefixtures("same_index")
def test_an_interrupted_launch_without_indexes_is_numbered_even_if_listed_in_part(
    aws: AwsClient, launcher: Launcher, clock: Clock, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.fail("CreateTags", *["TagLimitExceeded"] * 2)
    with pytest.raises(CloudError):
        launcher(plan_for(aws, nodes=3))
    clock.sleep(3601)
    began, launched = clock.monotonic(), describe(aws, [])
    hidden = [max(node.instance_id for node in launched)]

    def list_late(aws: AwsClient, filters: Filters) -> list[Node]:
        nodes = [node for node in describe(aws, filters) if node.instance_id not in hidden]
        hidden.clear()
        return nodes

    monkeypatch.setattr(instances, "describe", list_late)
    nodes = resume_launch(aws, launcher.intents[0], on_event=launcher.events.append)
    assert nodes is not None
    assert map_numbers(nodes) == {key: number for number, key in enumerate(sorted(map_numbers(launched)))}
    assert clock.monotonic() - began < 10
    assert {node.tags["awsddp:nodes"] for node in describe(aws, [])} == {"0-2", "1", "2"}


@pytest.mark.usefixtures("same_index")
def test_a_copy_that_was_launched_later_does_not_renumber_the_nodes(
    aws: AwsClient, launcher: Launcher, cloud: Cloud
) -> None:
    nodes = launcher(plan_for(aws))
    [first, second] = list(cloud.backend.all_instances())
    second.launch_time = first.launch_time + timedelta(hours=2)
    tag(aws, [node.instance_id for node in nodes], "awsddp:nodes", "0,1")
    assert {node.node for node in describe(aws, [])} == {0}


def test_another_owners_cluster_of_the_same_name_is_not_found(aws: AwsClient, launcher: Launcher) -> None:
    launcher(plan_for(aws))
    assert find_cluster(aws, "demo", "AIDASOMEBODYELSE") is None
    assert find_cluster(aws, "other", aws.identity().user_id) is None


def test_a_zone_without_capacity_is_followed_by_the_next_with_a_new_token(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    plan = plan_for(aws)
    cloud.fail("RunInstances", FULL, FULL, status=500)
    nodes = launcher(plan)
    sent = cloud.requests_of("RunInstances")
    assert len({form["ClientToken"] for form in sent}) == 3
    assert [intent.zone for intent in launcher.intents] == [plan.zones[0], *plan.zones[:2]]
    assert {node.zone for node in nodes} == {plan.zones[1]}


def test_a_full_placement_group_is_given_up_in_the_same_zone_with_one_message(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    plan = plan_for(aws)
    cloud.fail("RunInstances", FULL, status=500, to="Placement.GroupName")
    nodes = launcher(plan)
    grouped, alone = cloud.requests_of("RunInstances")
    assert grouped["Placement.GroupName"] == IDS["name"]
    varies = {"ClientToken", "Placement.GroupName"}
    assert {key: grouped[key] for key in grouped.keys() - varies} == {
        key: alone[key] for key in alone.keys() - varies
    }
    assert "Placement.GroupName" not in alone
    assert {node.zone for node in nodes} == {plan.zones[0]}
    assert [event.text for event in launcher.events if "placement group, " in event.text] == [
        f"{plan.zones[0]}: no room in the placement group, asking without it"
    ]


def test_nodes_with_efa_stay_in_their_placement_group(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    requested = replace(spec(instance_type="g5.48xlarge"), capacity=CapacitySection(efa=True))
    plan = make_plan(requested, gather_facts(aws, requested, caller_address="10.77.0.1", target="local"))
    cloud.fail("RunInstances", FULL, status=500, to="Placement.GroupName")
    nodes = launcher(plan)
    assert all("Placement.GroupName" in form for form in cloud.requests_of("RunInstances"))
    assert {node.zone for node in nodes} == {plan.zones[1]}


@pytest.mark.parametrize("efa", [True, False])
def test_no_placement_group_is_made_if_the_key_is_false(aws: AwsClient, cloud: Cloud, efa: bool) -> None:
    capacity = CapacitySection(efa=efa, placement_group=False)
    requested = replace(spec(instance_type="g5.48xlarge"), capacity=capacity)
    plan = make_plan(requested, gather_facts(aws, requested, caller_address="10.77.0.1", target="local"))
    assert not plan.has_request("CreatePlacementGroup")
    assert "Placement" not in plan.request("RunInstances").parameters
    assert plan.placement_why == "none: capacity.placement_group is false"


def test_a_capacity_error_names_each_attempt(aws: AwsClient, cloud: Cloud, launcher: Launcher) -> None:
    plan = keep_zones(plan_for(aws), 2)
    cloud.fail("RunInstances", *[FULL] * 4, status=500)
    with pytest.raises(CapacityError) as caught:
        launcher(plan)
    assert all(zone in caught.value.why for zone in plan.zones)
    assert caught.value.exit_code == 5
    assert not list_running(aws)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("VcpuLimitExceeded", 4),
        ("PendingVerification", 4),
        ("OptInRequired", 4),
    ],
)
def test_a_refused_launch_is_not_repeated(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, code: str, exit_code: int
) -> None:
    cloud.fail("RunInstances", code)
    with pytest.raises(AwsddpError) as caught:
        launcher(plan_for(aws))
    assert caught.value.exit_code == exit_code
    assert code in caught.value.why
    assert caught.value.next
    assert len(cloud.requests_of("RunInstances")) == 1


def test_a_lost_reply_is_retried_with_the_same_request_and_launches_once(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    cloud.fail("RunInstances", "InternalError", status=500, after=True)
    nodes = launcher(plan_for(aws))
    first, second = cloud.requests_of("RunInstances")
    assert first == second
    assert sorted(list_running(aws)) == sorted(node.instance_id for node in nodes)


@pytest.mark.parametrize("sent", [True, False])
def test_an_interrupted_launch_is_finished_and_never_doubled(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock, sent: bool
) -> None:
    class Killed(Exception):
        pass

    def stop(intent: LaunchIntent) -> None:
        raise Killed

    if sent:
        launcher(plan_for(aws))
    else:
        launcher.on_intent = stop
        with pytest.raises(Killed):
            launcher(plan_for(aws))
    nodes = resume_launch(aws, launcher.intents[-1], on_event=launcher.events.append)
    assert nodes is not None
    assert sorted(list_running(aws)) == sorted(node.instance_id for node in nodes)
    assert len(nodes) == 2


def test_an_old_intent_is_not_replayed_but_found_by_tag(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    clock.sleep(3601)
    resumed = resume_launch(aws, launcher.intents[0], on_event=launcher.events.append)
    assert resumed is not None
    assert [node.instance_id for node in resumed] == [node.instance_id for node in nodes]
    assert len(cloud.requests_of("RunInstances")) == 1


def test_instances_of_another_owner_with_the_same_id_do_not_belong_to_the_launch(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    copied = copy.deepcopy(launcher.intents[0].parameters) | {"ClientToken": "another"}
    for specification in copied["TagSpecifications"]:
        for pair in specification["Tags"]:
            pair["Value"] = "AIDAOTHER" if pair["Key"] == "awsddp:owner" else pair["Value"]
    aws.call("RunInstances", copied)
    clock.sleep(3601)
    resumed = resume_launch(aws, launcher.intents[0], on_event=launcher.events.append)
    assert resumed is not None
    assert [node.instance_id for node in resumed] == [node.instance_id for node in nodes]


def test_a_replay_of_terminated_instances_returns_none(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    cloud.fail("RunInstances", "IdempotentInstanceTerminated")
    assert resume_launch(aws, launcher.intents[0], on_event=launcher.events.append) is None


def test_a_node_that_was_given_up_no_longer_belongs_to_its_launch(
    aws: AwsClient, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    give_up_nodes(aws, nodes[1:])
    remaining = find_launched_nodes(aws, launcher.intents[0], on_event=launcher.events.append)
    assert remaining is not None
    assert [node.node for node in remaining] == [0]


def test_a_large_cluster_is_described_with_at_most_200_values_per_filter(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    cloud.requests.clear()
    ids = [f"i-{number:017x}" for number in range(400)]
    described = describe(aws, by_id(*ids, *(node.instance_id for node in nodes)))
    assert {node.instance_id for node in described} == {node.instance_id for node in nodes}
    sent = cloud.requests_of("DescribeInstances")
    assert [len([name for name in form if name.startswith("Filter.1.Value.")]) for form in sent] == [
        200,
        200,
        2,
    ]


def test_a_search_by_tag_ends_after_two_minutes(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launcher(plan_for(aws))
    parameters = copy.deepcopy(launcher.intents[0].parameters)
    for pair in [pair for part in parameters["TagSpecifications"] for pair in part["Tags"]]:
        pair["Value"] = "ffffffff" if pair["Key"] == "awsddp:id" else pair["Value"]
    other = replace(launcher.intents[0], parameters=parameters)
    began = clock.monotonic()
    assert find_launched_nodes(aws, other, on_event=lambda event: None) is None
    assert 120 <= clock.monotonic() - began < 130


def test_one_describe_waits_for_all_nodes(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    launched = launcher(plan_for(aws, nodes=8))
    before = len(cloud.requests_of("DescribeInstances"))
    nodes = wait_running(aws, launched, on_event=launcher.events.append)
    assert len(nodes) == 8
    assert all(node.address for node in nodes)
    assert len(cloud.requests_of("DescribeInstances")) == before + 1


def test_a_node_that_runs_without_an_address_yet_is_waited_for(
    aws: AwsClient, launcher: Launcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launcher(plan_for(aws))
    answers = []

    def late(*args: Any) -> list[Node]:
        hidden: dict[str, None] = {"private_ip": None, "public_ip": None} if not answers else {}
        answers.append([replace(node, **hidden) for node in describe(*args)])
        return answers[-1]

    monkeypatch.setattr(instances, "describe", late)
    nodes = wait_running(aws, launched, on_event=launcher.events.append)
    assert all(node.address for node in nodes)
    assert len(answers) == 2


def test_a_node_that_ends_while_it_starts_is_named_with_the_reason(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    aws.call("TerminateInstances", {"InstanceIds": [nodes[1].instance_id]})
    with pytest.raises(NodeError) as caught:
        wait_running(aws, nodes, on_event=launcher.events.append)
    assert nodes[1].instance_id in caught.value.message
    assert caught.value.why.splitlines() == [
        "Client.UserInitiatedShutdown: User initiated shutdown",
        "another command, here or elsewhere, or the EC2 console ended it",
    ]


def test_a_node_that_another_command_stopped_is_reported_at_once(
    aws: AwsClient, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    check_still_running(aws, nodes)
    aws.call("StopInstances", {"InstanceIds": [nodes[1].instance_id]})
    began = clock.monotonic()

    def wait(awaited: Sequence[Node]) -> None:
        wait_running(aws, awaited, on_event=lambda event: None, deadline_s=60)

    for check in (lambda: wait(nodes), lambda: check_still_running(aws, nodes)):
        with pytest.raises(NodeError, match=r"node1 \(i-\w+\) is stopped, while it was started") as caught:
            check()
        assert "another command, here or elsewhere" in caught.value.why
        assert caught.value.next == "awsddp up   # starts it again"
    assert clock.monotonic() == began
    with pytest.raises(NodeError, match="not all 2 nodes run after 60 s"):  # it was just started: AWS is late
        wait([nodes[0], replace(nodes[1], state="stopped")])


def test_a_throttled_check_does_not_end_the_launch(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = launcher(plan_for(aws))
    monkeypatch.setattr("awsddp.aws.client.ATTEMPTS", 1)
    cloud.fail("DescribeInstances", "RequestLimitExceeded", status=503)
    check_still_running(aws, nodes)


def test_a_throttled_poll_is_repeated(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launcher(plan_for(aws))
    monkeypatch.setattr("awsddp.aws.client.ATTEMPTS", 1)
    cloud.fail("DescribeInstances", "RequestLimitExceeded", "InternalError", status=503)
    assert len(wait_running(aws, launched, on_event=launcher.events.append)) == 2


def test_a_tag_is_retried_until_aws_lists_the_node(
    aws: AwsClient, cloud: Cloud, launcher: Launcher, clock: Clock
) -> None:
    nodes = launcher(plan_for(aws))
    cloud.fail("CreateTags", "InvalidInstanceID.NotFound", "InvalidInstanceID.NotFound")
    tag(aws, [node.instance_id for node in nodes], "awsddp:nodes", "left")
    assert {node.tags["awsddp:nodes"] for node in describe(aws, [])} == {"left"}


def test_two_clusters_with_one_name_are_both_found(aws: AwsClient, launcher: Launcher) -> None:
    plan = plan_for(aws)
    launcher(plan)
    launcher(plan, ids={"cluster_id": "ffffffff", "name": "awsddp-demo-ffffffff"})
    clusters = find_clusters(aws, "demo", aws.identity().user_id)
    assert {cluster.id for cluster in clusters} == {"0a1b2c3d", "ffffffff"}
    assert all(len(cluster.live) == 2 for cluster in clusters)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("Server.SpotInstanceTermination", "spot_interruption"),
        ("Server.ScheduledStop", "instance_retired"),
        ("Client.UserInitiatedShutdown", "node_lost"),
    ],
)
def test_the_end_reason_of_an_instance_gives_the_kind_of_cause(code: str, kind: str) -> None:
    described = {"InstanceId": "i-1", "InstanceType": "g5.xlarge", "State": {"Name": "terminated"}}
    reason = {"Code": code, "Message": f"{code}: as EC2 says"}
    assert find_end_cause(node_of({**described, "StateReason": reason})) == (kind, f"{code}: as EC2 says")
    assert find_end_cause(node_of(described)) == ("node_lost", "no reason was given")
