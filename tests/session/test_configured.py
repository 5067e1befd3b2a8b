"""An existing cluster keeps its settings, whatever awsddp.toml says."""

from pathlib import Path

import pytest

from awsddp.aws.client import AwsClient
from awsddp.cluster.down import down
from awsddp.cluster.plan import plan
from awsddp.errors import ConfigError
from tests.support.machine import On
from tests.support.moto_cloud import Cloud


def test_settings_that_are_not_repeated_are_those_of_the_launch(
    on: On, cloud: Cloud, aws: AwsClient, tmp_path: Path
) -> None:
    key_pair = aws.call("CreateKeyPair", {"KeyName": "mine", "KeyType": "ed25519"})
    vpc = aws.paginate("DescribeSubnets", {}, "Subnets")[0]["VpcId"]
    group = aws.call("CreateSecurityGroup", {"GroupName": "own", "Description": "own", "VpcId": vpc})[
        "GroupId"
    ]
    key_file = tmp_path / "mine.pem"
    key_file.touch(mode=0o600)
    key_file.write_text(key_pair["KeyMaterial"])
    laptop = on("laptop")
    laptop.launch_two_nodes(
        access__key_file=str(key_file), network__security_group=group, tags__team="vision"
    )
    laptop.up(cluster__nodes=3)
    [request] = cloud.requests_of("RunInstances")
    assert request["KeyName"] == "mine"
    assert request["NetworkInterface.1.SecurityGroupId.1"] == group
    assert "vision" in request.values()
    assert cloud.requests_of("CreateSecurityGroup") == []
    down(laptop.context(), confirm=lambda question: None)
    assert aws.call("DescribeSecurityGroups", {"GroupIds": [group]})["SecurityGroups"]
    assert key_file.read_text() == key_pair["KeyMaterial"]


def test_a_wrong_login_name_can_be_corrected(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes(access__user="nobody")
    for keys in ({"access__user": "ubuntu"}, {}):
        laptop.up(**keys)
        assert "User ubuntu\n" in laptop.folder.ssh_config.read_text()


@pytest.mark.prove
def test_up_switches_ssh_to_a_jump_host_and_remembers_it(
    on: On, aws: AwsClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    laptop = on(str(tmp_path_factory.mktemp("short")))  # a socket's path is limited to about 100 characters
    laptop.launch_two_nodes()
    with pytest.raises(ConfigError, match=r"network\.ssh_cidr"):
        laptop.up(network__jump="bastion", network__ssh_cidr="sg-0123456789abcdef0")
    parameters = {"GroupName": "bastion", "Description": "the user's own"}
    group = aws.call("CreateSecurityGroup", parameters)["GroupId"]
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


def test_a_file_that_requests_another_cluster_does_not_change_an_existing_one(on: On, cloud: Cloud) -> None:
    laptop = on("laptop")
    before = laptop.launch_two_nodes(cluster__nodes=1)
    laptop.file.write_text('[cluster]\nnodes = 2\ninstance_type = "g6.xlarge"\nexpires = "48h"\n')
    document = plan(laptop.context())
    assert (document.exists, document.steps, document.nodes) == (True, (), 1)
    laptop.up()
    assert cloud.requests_of("RunInstances") == laptop.questions == []
    assert laptop.cluster == before


@pytest.mark.prove
def test_up_reports_settings_of_the_file_that_differ_and_the_options_that_apply_them(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes(cluster__nodes=1)
    laptop.file.write_text('[cluster]\ninstance_type = "g5.xlarge"\nnodes = 1\nexpires = "24h"\n')
    laptop.messages.clear()
    laptop.up()
    assert [line for line in laptop.messages if "awsddp.toml" in line] == []
    laptop.file.write_text('[cluster]\nnodes = 2\nexpires = "48h"\n[network]\naddress = "private"\n')
    line = (
        "awsddp.toml says network.address = private, which only a new cluster gets; "
        "expires = 48h, the cluster has 24h; "
        "nodes = 2, the cluster has 1: awsddp -c demo up --expires 48h --nodes 2"
    )
    for verb in (laptop.up, lambda: plan(laptop.context())):
        laptop.messages.clear()
        verb()
        assert [text for text in laptop.messages if "awsddp.toml" in text] == [line]
    laptop.file.write_text('[cluster]\nnodes = 2\nexpires = "48h"\n')
    for keys in ({"cluster__nodes": 2, "cluster__expires": "48h"}, {}):
        laptop.messages.clear()
        laptop.up(**keys)
        assert [text for text in laptop.messages if "awsddp.toml" in text] == []
    assert len(laptop.cluster.live) == 2
