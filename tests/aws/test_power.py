"""A poweroff stops a node that has unfetched results, and terminates one that has none."""

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.power import keep_on_poweroff, release, stop, unfetched_of
from awsddp.errors import CloudError
from awsddp.model.records import OLDER_JOBS, Node
from tests.support.moto_cloud import Cloud, Launcher, find_cluster, plan_for


def read_states(aws: AwsClient) -> set[tuple[str, tuple[str, ...]]]:
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    attribute = "instanceInitiatedShutdownBehavior"
    pairs = set()
    for node in cluster.nodes:
        query = {"InstanceId": node.instance_id, "Attribute": attribute}
        behaviour = aws.call("DescribeInstanceAttribute", query)["InstanceInitiatedShutdownBehavior"]["Value"]
        pairs.add((behaviour, node.unfetched))
    return pairs


def test_a_poweroff_terminates_the_nodes_again_after_the_last_fetch(
    aws: AwsClient, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    assert read_states(aws) == {("terminate", ())}
    keep_on_poweroff(aws, nodes, "train-1")
    keep_on_poweroff(aws, nodes, "train-2")
    keep_on_poweroff(aws, nodes, "train-2")
    assert read_states(aws) == {("stop", ("train-1", "train-2"))}
    release(aws, nodes, "train-1")
    assert read_states(aws) == {("stop", ("train-2",))}
    release(aws, nodes, "train-2")
    assert read_states(aws) == {("terminate", ())}


def test_a_denied_poweroff_setting_is_an_error(aws: AwsClient, cloud: Cloud, launcher: Launcher) -> None:
    nodes = launcher(plan_for(aws))
    cloud.fail("ModifyInstanceAttribute", *["UnauthorizedOperation"] * 30)
    with pytest.raises(CloudError, match="permission denied"):
        keep_on_poweroff(aws, nodes, "train-1")


def test_nodes_that_aws_does_not_list_yet_are_protected_and_tagged(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    for operation in ("ModifyInstanceAttribute", "CreateTags"):
        cloud.fail(operation, "InvalidInstanceID.NotFound")
    keep_on_poweroff(aws, nodes, "train-1")
    assert read_states(aws) == {("stop", ("train-1",))}


def test_tags_are_not_read_twice_and_are_deleted_after_the_shutdown_behaviour(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    for job in ("train-1", "train-2"):
        keep_on_poweroff(aws, nodes, job)
    tagged = unfetched_of(aws, nodes)
    assert list(tagged.values()) == [["train-1", "train-2"]] * len(nodes)
    cloud.requests.clear()
    release(aws, nodes, "train-1", tagged=tagged)
    assert [name for name, _ in cloud.requests] == ["CreateTags"]
    cloud.requests.clear()
    release(aws, nodes, "train-2", tagged={key: ["train-2"] for key in tagged})
    changes = ["ModifyInstanceAttribute"] * len(nodes)
    assert [name for name, _ in cloud.requests] == [*changes, "DeleteTags"]
    assert read_states(aws) == {("terminate", ())}


LONG = [f"sweep-{number:02}-{'x' * 55}" for number in range(12)]


def read_behaviours(aws: AwsClient) -> set[str]:
    return {behaviour for behaviour, _ in read_states(aws)}


def test_twelve_long_job_names_fit_one_tag_and_the_last_fetch_releases_the_nodes(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    keep_on_poweroff(aws, nodes, LONG[0])
    for job in LONG[1:]:
        keep_on_poweroff(aws, nodes, job)
        [(_, unfetched)] = read_states(aws)
        assert unfetched[-1] == job
    assert unfetched == (OLDER_JOBS, *LONG[-3:])
    assert all(len(form["Tag.1.Value"]) <= 256 for form in cloud.requests_of("CreateTags"))
    for done, job in enumerate(reversed(LONG), 1):
        assert read_behaviours(aws) == {"stop"}
        older = dict.fromkeys((node.instance_id for node in nodes), LONG[: len(LONG) - done])
        release(aws, nodes, job, older=older)
    assert read_states(aws) == {("terminate", ())}


def test_jobs_that_the_tag_does_not_name_protect_the_nodes_until_a_node_names_them(
    aws: AwsClient, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    for job in LONG[:5]:
        keep_on_poweroff(aws, nodes, job)
    for job in LONG[:5]:
        release(aws, nodes, job)
    assert read_states(aws) == {("stop", (OLDER_JOBS,))}
    release(aws, nodes, LONG[4], older={node.instance_id: [] for node in nodes})
    assert read_states(aws) == {("terminate", ())}


def test_a_tag_with_every_job_name_of_an_older_version_is_read(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    tags = {"awsddp:unfetched": " ".join(LONG[:5])}
    cloud.backend.create_tags([node.instance_id for node in nodes], tags)
    assert read_states(aws) == {("terminate", tuple(LONG[:5]))}
    release(aws, nodes, LONG[4])
    assert read_states(aws) == {("terminate", (OLDER_JOBS, *LONG[1:4]))}
    release(aws, nodes, LONG[3], older={node.instance_id: LONG[:1] for node in nodes})
    assert read_states(aws) == {("terminate", tuple(LONG[:3]))}


def test_release_skips_terminated_nodes(aws: AwsClient, launcher: Launcher) -> None:
    nodes: tuple[Node, ...] = launcher(plan_for(aws))
    keep_on_poweroff(aws, nodes, "train-1")
    aws.call("TerminateInstances", {"InstanceIds": [nodes[0].instance_id]})
    release(aws, nodes, "train-1")
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    assert [node.unfetched for node in cluster.live] == [()]


def test_a_poweroff_does_not_terminate_a_node_while_it_stops(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    cloud.requests.clear()
    stop(aws, nodes, on_event=lambda event: None)
    sent = [name for name, _ in cloud.requests]
    last = len(sent) - 1 - sent[::-1].index("ModifyInstanceAttribute")
    assert last < sent.index("StopInstances")
    assert read_states(aws) == {("stop", ())}
