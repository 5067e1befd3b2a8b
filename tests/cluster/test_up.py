"""`up`: what it asks, what it leaves alone, and how it goes on after an interruption."""

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
def test_what_another_machine_made_once_all_of_ours_was_gone_is_left_alone(on: On, cloud: Cloud) -> None:
    laptop, desktop = on("laptop"), on("desktop")
    gone = laptop.first(cluster__nodes=1)
    laptop.aws.call("TerminateInstances", {"InstanceIds": [gone.nodes[0].instance_id]})
    theirs = desktop.first(cluster__nodes=1)
    with pytest.raises(ConfigError, match="this machine does not have its key"):
        laptop.up(cluster__nodes=2)
    assert cloud.sent("RunInstances") == cloud.sent("TerminateInstances") == []
    assert desktop.cluster.live == theirs.live


def test_a_no_changes_nothing(on: On) -> None:
    laptop = on("laptop")
    before = laptop.first()

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
    laptop_began: list[str] = []

    def late(*given: Any) -> Any:
        """The desk looks; before it launches the laptop has a cluster."""
        found = read_facts_and_cluster(*given)
        if not laptop_began:
            laptop_began.append("now")
            laptop.first()
        return found

    monkeypatch.setattr("awsddp.cluster.up.read_facts_and_cluster", late)
    try:  # the older stays; within one second the id decides
        desk.first()
        stays = desk
    except ConfigError as error:
        assert "another machine made cluster demo" in error.message
        stays = laptop
    [left] = [one for one in find_clusters(aws, "demo", aws.identity().user_id) if one.live]
    assert len(left.live) == 2
    record = stays.folder.read()
    assert record is not None
    assert left.id == record.id
    assert stays.up()["state"] == "ready"


def test_an_interrupted_up_goes_on_with_its_own_size_whatever_the_file_says(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    laptop.home.mkdir()
    laptop.file.write_text("[cluster]\nnodes = 2\n")
    typed = {"cluster__nodes": 1, "cluster__instance_type": "g6.xlarge", "network__ssh_cidr": "10.0.0.7"}

    def stop(event: Event) -> None:
        if event.text.startswith("i-"):  # "i-0ab pending"
            raise KeyboardInterrupt

    ctx = replace(laptop.context(**typed), on_event=stop)
    with pytest.raises(KeyboardInterrupt):
        up(ctx, confirm=lambda what: None)
    record = laptop.folder.read()
    assert record is not None and record.intent is not None
    [again, *_] = complete_commands(ctx, make_interrupted_error(ctx).next).split("   # continue")
    assert (
        again == "awsddp -c demo up --nodes 1 --instance-type g6.xlarge -o 'network.ssh_cidr=[\"10.0.0.7\"]'"
    )
    for keys in (typed, {}):
        result = laptop.up(**keys)
        assert [node["node"] for node in result["nodes"]] == [0]
        assert result["price_usd_per_hour"] == record.price_usd_per_hour
        assert cloud.sent("RunInstances") == []
