"""`up` reconciles an existing cluster: it grows, shrinks, is repaired or relaunched."""

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import find_clusters, tagged, tags_of
from awsddp.errors import CapacityError
from awsddp.model.cluster_state import cluster_state
from awsddp.plan.records import LaunchPlan
from tests.support.machine import On
from tests.support.moto_cloud import Cloud, find_cluster
from tests.support.namesake import launch_namesake


def test_growing_launches_only_the_missing_numbers(on: On, cloud: Cloud, aws: AwsClient) -> None:
    laptop = on("laptop")
    before = laptop.launch_two_nodes()
    result = laptop.up(cluster__nodes=4)
    [sent] = cloud.requests_of("RunInstances")
    assert (sent["MinCount"], sent["MaxCount"], sent["InstanceType"]) == ("2", "2", "g5.xlarge")
    assert [node["node"] for node in result["nodes"]] == [0, 1, 2, 3]
    assert {node["instance_id"] for node in result["nodes"]} > {node.instance_id for node in before.live}
    filters = {"Filters": tagged("awsddp:id", before.id)}
    described = aws.paginate("DescribeInstances", filters, "Reservations")
    instances = [item for reservation in described for item in reservation["Instances"]]
    for shared in ("KeyName", "ImageId", "SubnetId"):
        assert len({item[shared] for item in instances}) == 1, shared
    assert len({item["NetworkInterfaces"][0]["Groups"][0]["GroupId"] for item in instances}) == 1
    assert {tags_of(item)["awsddp:expires"] for item in instances} == {result["expires"]}
    assert result["price_usd_per_hour"] == pytest.approx(4 * (1.006 + 0.005 + 200 * 0.08 / 730), abs=1e-2)


def test_shrinking_does_not_replace_a_lost_node(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes(cluster__nodes=2)
    cluster = find_cluster(laptop.aws, "demo", laptop.aws.identity().user_id)
    assert cluster is not None
    laptop.aws.call("TerminateInstances", {"InstanceIds": [cluster.nodes[1].instance_id]})
    result = laptop.up(cluster__nodes=1)
    assert (result["state"], [node["node"] for node in result["nodes"]]) == ("ready", [0])


def test_shrinking_terminates_the_highest_numbers_and_the_cluster_is_ready(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes(cluster__nodes=3)
    result = laptop.up(cluster__nodes=1)
    assert result["state"] == "ready"
    assert [node["node"] for node in result["nodes"]] == [0]
    assert result["price_usd_per_hour"] == pytest.approx(1.006 + 0.005 + 200 * 0.08 / 730, abs=1e-2)
    assert cloud.requests_of("RunInstances") == []
    [question] = laptop.questions
    assert "end node1" in str(question)
    assert "end node2" in str(question)
    cluster = find_cluster(laptop.aws, "demo", laptop.aws.identity().user_id)
    assert cluster_state(cluster, prepared=None, launching=False) == "ready"
    assert laptop.up()["state"] == "ready"
    assert laptop.questions == []


def test_a_lost_node_is_replaced_under_its_number(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    first, second = laptop.launch_two_nodes().live
    aws.call("TerminateInstances", {"InstanceIds": [first.instance_id]})
    result = laptop.up()
    assert [node["node"] for node in result["nodes"]] == [0, 1]
    assert result["nodes"][0]["instance_id"] != first.instance_id
    assert result["nodes"][1]["instance_id"] == second.instance_id
    assert result["state"] == "ready"


def test_another_instance_type_is_confirmed_and_relaunched(on: On) -> None:
    laptop = on("laptop")
    old = laptop.launch_two_nodes()
    result = laptop.up(cluster__instance_type="g6.xlarge")
    [question] = laptop.questions
    assert isinstance(question, LaunchPlan)
    assert [step.do for step in question.steps] == ["end", "end", "launch"]
    assert {node.instance_type for node in laptop.cluster.live} == {"g6.xlarge"}
    assert laptop.cluster.id == old.id
    assert result["state"] == "ready"


@pytest.mark.prove
def test_growing_without_capacity_leaves_the_cluster_unchanged(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    before = laptop.launch_two_nodes()
    for _ in ("in the placement group", "without it"):
        cloud.fail("RunInstances", "InsufficientInstanceCapacity", status=500)
    with pytest.raises(CapacityError):
        laptop.up(cluster__nodes=3)
    assert laptop.cluster == before
    result = laptop.up()
    assert (result["state"], len(result["nodes"])) == ("ready", 2)
    assert cloud.requests_of("RunInstances") == []


def test_up_changes_the_expiry_in_the_tags_of_all_nodes(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    result = laptop.up(cluster__expires="48h")
    assert {node.expires for node in laptop.cluster.live} == {laptop.cluster.expires}
    assert laptop.cluster.created is not None
    assert result["expires"] > "2026"
    assert laptop.cluster.expires is not None
    assert (laptop.cluster.expires - laptop.cluster.created).total_seconds() == pytest.approx(
        48 * 3600, abs=120
    )
    assert laptop.questions == []


def test_up_names_and_terminates_a_second_cluster_of_the_name(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    mine = laptop.launch_two_nodes()
    other = launch_namesake(aws, mine)
    result = laptop.up()
    assert other in str(laptop.questions)
    assert [node["instance_id"] for node in result["nodes"]] == [node.instance_id for node in mine.live]
    assert [cluster.id for cluster in find_clusters(aws, "demo", mine.owner)] == [mine.id]


def test_up_opens_ssh_for_the_users_new_address_without_a_question(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    laptop.up(network__ssh_cidr="10.0.0.8/32")
    assert laptop.questions == []
    assert laptop.cluster.ssh_cidrs == ("10.0.0.8/32",)
    laptop.up()
    assert laptop.cluster.ssh_cidrs == ("10.0.0.8/32",)
