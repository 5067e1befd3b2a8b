"""`down` with a second cluster of the same name, and what `jobs` lists after it."""

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import find_clusters
from awsddp.cluster.down import down
from awsddp.errors import NodeError, UsageError
from awsddp.job.jobs import make_jobs_document
from tests.support.machine import On
from tests.support.namesake import launch_namesake


def test_down_terminates_every_cluster_of_the_name_and_owner(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    mine = laptop.launch_two_nodes()
    other = launch_namesake(aws, mine)
    questions: list[str] = []
    ended = down(laptop.context(), confirm=questions.append)
    assert set(ended["terminated"]) == {other, *(node.instance_id for node in mine.live)}
    assert questions[0].count("will be terminated") == 2
    assert find_clusters(aws, "demo", mine.owner) == ()


def test_down_loses_no_results_of_a_second_cluster_of_the_name(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    mine = laptop.launch_two_nodes()
    other = launch_namesake(aws, mine)
    aws.call("CreateTags", {"Resources": [other], "Tags": [{"Key": "awsddp:unfetched", "Value": "theirs"}]})
    with pytest.raises(NodeError, match="results of theirs are not fetched"):
        down(laptop.context(), confirm=lambda question: None)
    assert {row.id for row in find_clusters(aws, "demo", mine.owner) if row.live} == {mine.id, "ffffffff"}


def test_yes_terminates_no_second_cluster_that_another_machine_launched(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    mine = laptop.launch_two_nodes()
    launch_namesake(aws, mine)
    with pytest.raises(UsageError, match="-y does not end cluster demo"):
        down(laptop.context(), known_only=True, confirm=lambda question: None)
    assert {row.id for row in find_clusters(aws, "demo", mine.owner) if row.live} == {mine.id, "ffffffff"}


def test_jobs_lists_when_down_terminated_a_cluster(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    [running] = make_jobs_document(laptop.context(), ())["clusters"]
    assert running["ended"] is None
    down(laptop.context(), confirm=lambda question: None)
    [ended] = make_jobs_document(laptop.context(), ())["clusters"]
    assert (ended["id"], ended["nodes"]) == (running["id"], 2)
    assert ended["ended"] is not None
