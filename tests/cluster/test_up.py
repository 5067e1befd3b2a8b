"""`up`: confirmations, clusters of other machines, and how it resumes after an interruption."""

from dataclasses import replace
from typing import Any

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import find_clusters
from awsddp.cluster.plan import read_facts_and_cluster
from awsddp.cluster.up import up
from awsddp.errors import ConfigError
from awsddp.model.events import Event
from awsddp.plan.records import LaunchPlan
from awsddp.session.next_steps import complete_commands, make_interrupted_error
from tests.support.machine import On
from tests.support.moto_cloud import Cloud


@pytest.mark.prove
def test_up_leaves_alone_what_another_machine_launched_after_our_nodes_ended(on: On, cloud: Cloud) -> None:
    laptop, desktop = on("laptop"), on("desktop")
    ours = laptop.launch_two_nodes(cluster__nodes=1)
    laptop.aws.call("TerminateInstances", {"InstanceIds": [ours.nodes[0].instance_id]})
    theirs = desktop.launch_two_nodes(cluster__nodes=1)
    with pytest.raises(ConfigError, match="this machine does not have its key"):
        laptop.up(cluster__nodes=2)
    assert cloud.requests_of("RunInstances") == cloud.requests_of("TerminateInstances") == []
    assert desktop.cluster.live == theirs.live


def test_a_refused_confirmation_changes_nothing(on: On) -> None:
    laptop = on("laptop")
    before = laptop.launch_two_nodes()

    def refuse(plan: LaunchPlan | str) -> None:
        raise ConfigError("no")

    for keys in ({"cluster__nodes": 3}, {"cluster__nodes": 1}, {"cluster__instance_type": "g6.xlarge"}):
        with pytest.raises(ConfigError, match="no"):
            up(laptop.context(**keys), confirm=refuse)
        assert laptop.cluster == before
    assert laptop.up()["state"] == "ready"
    assert laptop.questions == []


def test_two_machines_that_launch_at_once_keep_one_cluster(on: On, aws: AwsClient, monkeypatch: Any) -> None:
    laptop, desk = on("laptop"), on("desk")
    launches: list[str] = []

    def launch_after_reading(*args: Any) -> Any:
        """Read the facts on the desk; the laptop launches before the desk does."""
        facts_and_cluster = read_facts_and_cluster(*args)
        if not launches:
            launches.append("now")
            laptop.launch_two_nodes()
        return facts_and_cluster

    monkeypatch.setattr("awsddp.cluster.up.read_facts_and_cluster", launch_after_reading)
    try:  # the older stays; within one second the id decides
        desk.launch_two_nodes()
        stays = desk
    except ConfigError as error:
        assert "another machine created cluster demo" in error.message
        stays = laptop
    [remaining] = [cluster for cluster in find_clusters(aws, "demo", aws.identity().user_id) if cluster.live]
    assert len(remaining.live) == 2
    record = stays.folder.read()
    assert record is not None
    assert remaining.id == record.id
    assert stays.up()["state"] == "ready"


def test_an_interrupted_up_resumes_with_its_own_size_and_ignores_the_file(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    laptop.home.mkdir()
    laptop.file.write_text("[cluster]\nnodes = 2\n")
    options = {"cluster__nodes": 1, "cluster__instance_type": "g6.xlarge", "network__ssh_cidr": "10.0.0.7"}

    def interrupt(event: Event) -> None:
        if event.text.startswith("i-"):  # "i-0ab pending"
            raise KeyboardInterrupt

    session = replace(laptop.context(**options), on_event=interrupt)
    with pytest.raises(KeyboardInterrupt):
        up(session, confirm=lambda plan: None)
    record = laptop.folder.read()
    assert record is not None and record.intent is not None
    [retry, *_] = complete_commands(session, make_interrupted_error(session).next).split("   # continue")
    assert (
        retry == "awsddp -c demo up --nodes 1 --instance-type g6.xlarge -o 'network.ssh_cidr=[\"10.0.0.7\"]'"
    )
    for keys in (options, {}):
        result = laptop.up(**keys)
        assert [node["node"] for node in result["nodes"]] == [0]
        assert result["price_usd_per_hour"] == record.price_usd_per_hour
        assert cloud.requests_of("RunInstances") == []
