"""While results are not home a poweroff stops a node; before and after, it ends it."""

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.power import keep_on_poweroff, release, stop, unfetched_of
from awsddp.errors import CloudError
from awsddp.model.records import OLDER_JOBS, Node
from tests.support.moto_cloud import Cloud, Launcher, find_cluster, plan_for


def state(aws: AwsClient) -> set[tuple[str, tuple[str, ...]]]:
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    attribute = "instanceInitiatedShutdownBehavior"
    found = set()
    for node in cluster.nodes:
        asked = {"InstanceId": node.instance_id, "Attribute": attribute}
        behaviour = aws.call("DescribeInstanceAttribute", asked)["InstanceInitiatedShutdownBehavior"]["Value"]
        found.add((behaviour, node.unfetched))
    return found


def test_the_last_job_that_is_home_lets_a_poweroff_end_the_nodes_again(
    aws: AwsClient, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    assert state(aws) == {("terminate", ())}
    keep_on_poweroff(aws, nodes, "train-1")
    keep_on_poweroff(aws, nodes, "train-2")
    keep_on_poweroff(aws, nodes, "train-2")
    assert state(aws) == {("stop", ("train-1", "train-2"))}
    release(aws, nodes, "train-1")
    assert state(aws) == {("stop", ("train-2",))}
    release(aws, nodes, "train-2")
    assert state(aws) == {("terminate", ())}


def test_a_refusal_keeps_the_job_from_starting(aws: AwsClient, cloud: Cloud, launcher: Launcher) -> None:
    nodes = launcher(plan_for(aws))
    cloud.fail("ModifyInstanceAttribute", *["UnauthorizedOperation"] * 30)
    with pytest.raises(CloudError, match="permission denied"):
        keep_on_poweroff(aws, nodes, "train-1")


def test_nodes_that_aws_does_not_list_everywhere_yet_are_kept_and_tagged(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    for operation in ("ModifyInstanceAttribute", "CreateTags"):
        cloud.fail(operation, "InvalidInstanceID.NotFound")
    keep_on_poweroff(aws, nodes, "train-1")
    assert state(aws) == {("stop", ("train-1",))}


def test_tags_that_were_just_read_are_not_read_again_and_go_after_the_stop(
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
    assert state(aws) == {("terminate", ())}


LONG = [f"sweep-{number:02}-{'x' * 55}" for number in range(12)]


def behaviour(aws: AwsClient) -> set[str]:
    return {one for one, _ in state(aws)}


def test_a_dozen_jobs_with_long_names_fit_one_tag_and_the_last_one_home_frees_the_nodes(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    keep_on_poweroff(aws, nodes, LONG[0])
    for job in LONG[1:]:
        keep_on_poweroff(aws, nodes, job)
        [(_, unfetched)] = state(aws)
        assert unfetched[-1] == job
    assert unfetched == (OLDER_JOBS, *LONG[-3:])
    assert all(len(form["Tag.1.Value"]) <= 256 for form in cloud.sent("CreateTags"))
    for done, job in enumerate(reversed(LONG), 1):
        assert behaviour(aws) == {"stop"}
        left = dict.fromkeys((node.instance_id for node in nodes), LONG[: len(LONG) - done])
        release(aws, nodes, job, older=left)
    assert state(aws) == {("terminate", ())}


def test_jobs_without_names_in_the_tag_keep_the_nodes_until_their_nodes_name_them(
    aws: AwsClient, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    for job in LONG[:5]:
        keep_on_poweroff(aws, nodes, job)
    for job in LONG[:5]:
        release(aws, nodes, job)
    assert state(aws) == {("stop", (OLDER_JOBS,))}
    release(aws, nodes, LONG[4], older={node.instance_id: [] for node in nodes})
    assert state(aws) == {("terminate", ())}


def test_one_value_with_every_name_as_older_versions_wrote_it_is_read_and_goes_on(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    tags = {"awsddp:unfetched": " ".join(LONG[:5])}
    cloud.backend.create_tags([node.instance_id for node in nodes], tags)
    assert state(aws) == {("terminate", tuple(LONG[:5]))}
    release(aws, nodes, LONG[4])
    assert state(aws) == {("terminate", (OLDER_JOBS, *LONG[1:4]))}
    release(aws, nodes, LONG[3], older={node.instance_id: LONG[:1] for node in nodes})
    assert state(aws) == {("terminate", tuple(LONG[:3]))}


def test_release_passes_over_nodes_that_are_gone(aws: AwsClient, launcher: Launcher) -> None:
    nodes: tuple[Node, ...] = launcher(plan_for(aws))
    keep_on_poweroff(aws, nodes, "train-1")
    aws.call("TerminateInstances", {"InstanceIds": [nodes[0].instance_id]})
    release(aws, nodes, "train-1")
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None
    assert [node.unfetched for node in cluster.live] == [()]


def test_nodes_that_are_stopped_are_not_ended_by_a_poweroff_on_the_way(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    nodes = launcher(plan_for(aws))
    cloud.requests.clear()
    stop(aws, nodes, on_event=lambda event: None)
    sent = [name for name, _ in cloud.requests]
    last = len(sent) - 1 - sent[::-1].index("ModifyInstanceAttribute")
    assert last < sent.index("StopInstances")
    assert state(aws) == {("stop", ())}
