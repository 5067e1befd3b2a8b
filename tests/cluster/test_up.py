"""`up` on a cluster that exists: it becomes what is asked for, by the calls that this takes and no others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws.client import Aws
from awsddp.aws.clusters import find_clusters, tagged, tags_of
from awsddp.cluster.down import down
from awsddp.cluster.plan import plan, read_all
from awsddp.cluster.up import up
from awsddp.errors import CapacityError, ConfigError, NodeError, UsageError
from awsddp.job.jobs import jobs_document
from awsddp.model.cluster_state import cluster_state
from awsddp.model.events import Event
from awsddp.model.records import Listed
from awsddp.nodes.node_failures import NodeFailure
from awsddp.plan.records import Image, LaunchPlan
from awsddp.session import locate
from awsddp.session.next_steps import advised, interruption
from tests.support.machine import On
from tests.support.moto_cloud import Cloud, find_cluster


def test_growing_launches_the_missing_numbers_beside_the_others(on: On, cloud: Cloud, aws: Aws) -> None:
    laptop = on("laptop")
    before = laptop.first()
    result = laptop.up(cluster__nodes=4)
    [sent] = cloud.sent("RunInstances")
    assert (sent["MinCount"], sent["MaxCount"], sent["InstanceType"]) == ("2", "2", "g5.xlarge")
    assert [node["node"] for node in result["nodes"]] == [0, 1, 2, 3]
    assert {node["instance_id"] for node in result["nodes"]} > {node.instance_id for node in before.live}
    asked = {"Filters": tagged("awsddp:id", before.id)}
    described = aws.pages("DescribeInstances", asked, "Reservations")
    found = [item for reservation in described for item in reservation["Instances"]]
    for shared in ("KeyName", "ImageId", "SubnetId"):
        assert len({item[shared] for item in found}) == 1, shared
    assert len({item["NetworkInterfaces"][0]["Groups"][0]["GroupId"] for item in found}) == 1
    assert {tags_of(item)["awsddp:expires"] for item in found} == {result["expires"]}
    assert result["price_usd_per_hour"] == pytest.approx(4 * (1.006 + 0.005 + 200 * 0.08 / 730), abs=1e-2)


def test_what_was_not_said_again_is_as_at_the_launch(on: On, cloud: Cloud, aws: Aws, tmp_path: Path) -> None:
    made = aws.call("CreateKeyPair", {"KeyName": "mine", "KeyType": "ed25519"})
    vpc = aws.pages("DescribeSubnets", {}, "Subnets")[0]["VpcId"]
    group = aws.call("CreateSecurityGroup", {"GroupName": "own", "Description": "own", "VpcId": vpc})[
        "GroupId"
    ]
    own = tmp_path / "mine.pem"
    own.touch(mode=0o600)
    own.write_text(made["KeyMaterial"])
    laptop = on("laptop")
    laptop.first(access__key_file=str(own), network__security_group=group, tags__team="vision")
    laptop.up(cluster__nodes=3)
    [sent] = cloud.sent("RunInstances")
    assert sent["KeyName"] == "mine"
    assert sent["NetworkInterface.1.SecurityGroupId.1"] == group
    assert "vision" in sent.values()
    assert cloud.sent("CreateSecurityGroup") == []
    down(laptop.context(), confirm=lambda what: None)
    assert aws.call("DescribeSecurityGroups", {"GroupIds": [group]})["SecurityGroups"]
    assert own.read_text() == made["KeyMaterial"]


def test_a_node_that_was_lost_is_not_missed_in_a_cluster_that_is_now_smaller(on: On) -> None:
    laptop = on("laptop")
    laptop.first(cluster__nodes=2)
    cluster = find_cluster(laptop.aws, "demo", laptop.aws.identity().user_id)
    assert cluster is not None
    laptop.aws.call("TerminateInstances", {"InstanceIds": [cluster.nodes[1].instance_id]})
    result = laptop.up(cluster__nodes=1)
    assert (result["state"], [node["node"] for node in result["nodes"]]) == ("ready", [0])


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


def test_shrinking_ends_the_highest_numbers_and_that_is_no_loss(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    laptop.first(cluster__nodes=3)
    result = laptop.up(cluster__nodes=1)
    assert result["state"] == "ready"
    assert [node["node"] for node in result["nodes"]] == [0]
    assert result["price_usd_per_hour"] == pytest.approx(1.006 + 0.005 + 200 * 0.08 / 730, abs=1e-2)
    assert cloud.sent("RunInstances") == []
    [question] = laptop.questions
    assert "end node1" in str(question)
    assert "end node2" in str(question)
    elsewhere = find_cluster(laptop.aws, "demo", laptop.aws.identity().user_id)
    assert cluster_state(elsewhere, prepared=None, launching=False) == "ready"
    assert laptop.up()["state"] == "ready"
    assert laptop.questions == []


def test_a_lost_node_is_replaced_under_its_number(on: On, aws: Aws) -> None:
    laptop = on("laptop")
    first, second = laptop.first().live
    aws.call("TerminateInstances", {"InstanceIds": [first.instance_id]})
    result = laptop.up()
    assert [node["node"] for node in result["nodes"]] == [0, 1]
    assert result["nodes"][0]["instance_id"] != first.instance_id
    assert result["nodes"][1]["instance_id"] == second.instance_id
    assert result["state"] == "ready"


def test_another_type_is_asked_about_and_built_anew(on: On) -> None:
    laptop = on("laptop")
    old = laptop.first()
    result = laptop.up(cluster__instance_type="g6.xlarge")
    [question] = laptop.questions
    assert isinstance(question, LaunchPlan)
    assert [step.do for step in question.steps] == ["end", "end", "launch"]
    assert {node.instance_type for node in laptop.cluster.live} == {"g6.xlarge"}
    assert laptop.cluster.id == old.id
    assert result["state"] == "ready"


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


@pytest.mark.prove
def test_a_growth_without_capacity_leaves_what_is_there(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    before = laptop.first()
    for _ in ("in the placement group", "without it"):
        cloud.fail("RunInstances", "InsufficientInstanceCapacity", status=500)
    with pytest.raises(CapacityError):
        laptop.up(cluster__nodes=3)
    assert laptop.cluster == before
    result = laptop.up()
    assert (result["state"], len(result["nodes"])) == ("ready", 2)
    assert cloud.sent("RunInstances") == []


def test_ssh_is_opened_for_where_the_user_is_now_without_a_question(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    laptop.up(network__ssh_cidr="10.0.0.8/32")
    assert laptop.questions == []
    assert laptop.cluster.ssh_cidrs == ("10.0.0.8/32",)
    laptop.up()
    assert laptop.cluster.ssh_cidrs == ("10.0.0.8/32",)


def test_a_login_name_that_was_wrong_can_be_mended(on: On) -> None:
    laptop = on("laptop")
    laptop.first(access__user="nobody")
    for keys in ({"access__user": "ubuntu"}, {}):
        laptop.up(**keys)
        assert "User ubuntu\n" in laptop.folder.ssh_config.read_text()


@pytest.mark.prove
def test_ssh_moves_to_a_jump_host_which_is_remembered(
    on: On, aws: Aws, tmp_path_factory: pytest.TempPathFactory
) -> None:
    laptop = on(str(tmp_path_factory.mktemp("short")))  # a socket's path is limited to about 100 characters
    laptop.first()
    with pytest.raises(ConfigError, match=r"network\.ssh_cidr"):
        laptop.up(network__jump="bastion", network__ssh_cidr="sg-0123456789abcdef0")
    made = {"GroupName": "bastion", "Description": "the user's own"}
    group = aws.call("CreateSecurityGroup", made)["GroupId"]
    laptop.up(network__jump="bastion", network__ssh_cidr=group)
    assert laptop.cluster.ssh_cidrs == (group,)
    laptop.up()
    record = laptop.folder.read()
    assert record is not None
    assert record.asked["network.jump"] == "bastion"
    assert "ProxyCommand ssh" in laptop.folder.ssh_config.read_text()
    laptop.up(network__jump="", network__ssh_cidr="10.0.0.8/32")
    assert laptop.cluster.ssh_cidrs == ("10.0.0.8/32",)
    assert "ProxyCommand ssh" not in laptop.folder.ssh_config.read_text()
    aws.call("DeleteSecurityGroup", {"GroupId": group})


def test_the_expiry_is_moved_in_the_tags_of_all(on: On, aws: Aws) -> None:
    laptop = on("laptop")
    laptop.first()
    result = laptop.up(cluster__expires="48h")
    assert {node.expires for node in laptop.cluster.live} == {laptop.cluster.expires}
    assert laptop.cluster.created is not None
    assert result["expires"] > "2026"
    assert laptop.cluster.expires is not None
    assert (laptop.cluster.expires - laptop.cluster.created).total_seconds() == pytest.approx(
        48 * 3600, abs=120
    )
    assert laptop.questions == []


def test_the_plan_of_a_cluster_that_exists_shows_the_steps_and_changes_nothing(on: On) -> None:
    laptop = on("laptop")
    before = laptop.first()
    made = plan(laptop.context(cluster__nodes=3))
    assert [str(step) for step in made.steps] == ["launch node2"]
    assert [
        request.parameters["MinCount"] for request in made.requests if "MinCount" in request.parameters
    ] == [1]
    assert made.nodes == 3
    same = plan(laptop.context())
    assert (same.steps, same.requests) == ((), ())
    assert laptop.cluster == before


def test_two_machines_that_launch_at_once_keep_one_cluster(on: On, aws: Aws, monkeypatch: Any) -> None:
    laptop, desk = on("laptop"), on("desk")
    laptop_began: list[str] = []

    def late(*given: Any) -> Any:
        """The desk looks; before it launches the laptop has a cluster."""
        found = read_all(*given)
        if not laptop_began:
            laptop_began.append("now")
            laptop.first()
        return found

    monkeypatch.setattr("awsddp.cluster.up.read_all", late)
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


def second(aws: Aws, mine: Listed) -> str:
    """Launch a node of a second cluster of the same name and owner, as from another machine."""
    tags = {
        "awsddp:cluster": "demo",
        "awsddp:owner": mine.owner,
        "awsddp:id": "ffffffff",
        "awsddp:nodes": "0",
    }
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    asked = {"ImageId": mine.nodes[0].image_id, "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
    marked = {"TagSpecifications": [{"ResourceType": "instance", "Tags": pairs}]}
    return str(aws.call("RunInstances", asked | marked)["Instances"][0]["InstanceId"])


def test_up_names_and_ends_a_second_cluster_of_the_name(on: On, aws: Aws) -> None:
    laptop = on("laptop")
    mine = laptop.first()
    other = second(aws, mine)
    result = laptop.up()
    assert other in str(laptop.questions)
    assert [node["instance_id"] for node in result["nodes"]] == [node.instance_id for node in mine.live]
    assert [one.id for one in find_clusters(aws, "demo", mine.owner)] == [mine.id]


def test_down_ends_every_cluster_of_the_name_and_owner(on: On, aws: Aws) -> None:
    laptop = on("laptop")
    mine = laptop.first()
    other = second(aws, mine)
    asked: list[str] = []
    ended = down(laptop.context(), confirm=asked.append)
    assert set(ended["terminated"]) == {other, *(node.instance_id for node in mine.live)}
    assert asked[0].count("will be terminated") == 2
    assert find_clusters(aws, "demo", mine.owner) == ()


def test_down_loses_no_results_of_a_second_cluster_of_the_name(on: On, aws: Aws) -> None:
    laptop = on("laptop")
    mine = laptop.first()
    other = second(aws, mine)
    aws.call("CreateTags", {"Resources": [other], "Tags": [{"Key": "awsddp:unfetched", "Value": "theirs"}]})
    with pytest.raises(NodeError, match="results of theirs are not fetched"):
        down(laptop.context(), confirm=lambda what: None)
    assert {one.id for one in find_clusters(aws, "demo", mine.owner) if one.live} == {mine.id, "ffffffff"}


def test_yes_alone_ends_no_second_cluster_that_this_machine_did_not_make(on: On, aws: Aws) -> None:
    laptop = on("laptop")
    mine = laptop.first()
    second(aws, mine)
    with pytest.raises(UsageError, match="-y does not end cluster demo"):
        down(laptop.context(), known_only=True, confirm=lambda what: None)
    assert {one.id for one in find_clusters(aws, "demo", mine.owner) if one.live} == {mine.id, "ffffffff"}


def test_the_bill_of_a_cluster_that_was_ended_is_closed(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    [running] = jobs_document(laptop.context(), ())["clusters"]
    assert running["ended"] is None
    down(laptop.context(), confirm=lambda what: None)
    [ended] = jobs_document(laptop.context(), ())["clusters"]
    assert (ended["id"], ended["nodes"]) == (running["id"], 2)
    assert ended["ended"] is not None


def test_a_plan_over_a_living_cluster_says_what_would_change_or_nothing(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    unchanged = plan(laptop.context())
    assert (unchanged.exists, unchanged.steps, unchanged.makes) == (True, (), [])
    larger = plan(laptop.context(cluster__nodes=3))
    assert (larger.exists, [str(step) for step in larger.steps]) == (True, ["launch node2"])


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
    [again, *_] = advised(ctx, interruption(ctx).next).split("   # continue")
    assert (
        again == "awsddp -c demo up --nodes 1 --instance-type g6.xlarge -o 'network.ssh_cidr=[\"10.0.0.7\"]'"
    )
    for keys in (typed, {}):
        result = laptop.up(**keys)
        assert [node["node"] for node in result["nodes"]] == [0]
        assert result["price_usd_per_hour"] == record.price_usd_per_hour
        assert cloud.sent("RunInstances") == []


def test_a_cluster_is_as_requested_in_a_folder_whose_file_asks_for_another(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    before = laptop.first(cluster__nodes=1)
    laptop.file.write_text('[cluster]\nnodes = 2\ninstance_type = "g6.xlarge"\nexpires = "48h"\n')
    made = plan(laptop.context())
    assert (made.exists, made.steps, made.nodes) == (True, (), 1)
    laptop.up()
    assert cloud.sent("RunInstances") == laptop.questions == []
    assert laptop.cluster == before


@pytest.mark.prove
def test_up_names_what_the_file_says_otherwise_and_the_options_that_apply_it(on: On) -> None:
    laptop = on("laptop")
    laptop.first(cluster__nodes=1)
    laptop.file.write_text('[cluster]\ninstance_type = "g5.xlarge"\nnodes = 1\nexpires = "24h"\n')
    laptop.said.clear()
    laptop.up()
    assert [line for line in laptop.said if "awsddp.toml" in line] == []
    laptop.file.write_text('[cluster]\nnodes = 2\nexpires = "48h"\n[network]\naddress = "private"\n')
    line = (
        "awsddp.toml says network.address = private, which only a new cluster gets; "
        "expires = 48h, the cluster has 24h; "
        "nodes = 2, the cluster has 1: awsddp -c demo up --expires 48h --nodes 2"
    )
    for verb in (laptop.up, lambda: plan(laptop.context())):
        laptop.said.clear()
        verb()
        assert [said for said in laptop.said if "awsddp.toml" in said] == [line]
    laptop.file.write_text('[cluster]\nnodes = 2\nexpires = "48h"\n')
    for keys in ({"cluster__nodes": 2, "cluster__expires": "48h"}, {}):
        laptop.said.clear()
        laptop.up(**keys)
        assert [said for said in laptop.said if "awsddp.toml" in said] == []
    assert len(laptop.cluster.live) == 2


def test_nodes_that_another_command_terminates_are_named_with_what_ec2_says(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    with pytest.raises(NodeFailure) as failed, locate.find_cluster(laptop.context()):
        down(laptop.context(), confirm=lambda _: None)
        raise NodeFailure(1, "files", "the transfer was interrupted")
    assert failed.value.why.splitlines() == [f"EC2 says: node{node} is terminated" for node in (0, 1)]


def test_another_torch_than_the_images_is_refused_at_the_plan_and_a_rehearsal_has_its_own(
    on: On, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "needs.txt"
    file.write_text("torch==2.3.1\n")
    asked: dict[str, Any] = {"cluster__instance_type": "g5.xlarge", "network__ssh_cidr": "10.0.0.7"}
    asked["env__file"], laptop = str(file), on("laptop")
    plan(laptop.context(**asked))
    monkeypatch.setattr(Image, "pretends", False)
    for verb in (plan, lambda cluster: up(cluster, confirm=lambda _: None)):
        with pytest.raises(ConfigError, match=r"torch==2\.3\.1 needs another torch than the image's 2\.12"):
            verb(laptop.context(**asked))
    assert cloud.sent("RunInstances") == []
