"""The user data and the preparation of nodes that boot, with real systemd, cloud-init and sudo."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.model.records import Node
from awsddp.nodes import hostkeys
from awsddp.nodes.fleet import Fleet
from awsddp.nodes.hostkeys import make_key
from awsddp.nodes.login import Endpoint, Login
from awsddp.nodes.provision import prepare, render_user_data
from awsddp.util.parallel import NodesFailed
from tests.support.ssh_hosts import wait_until

boto3 = pytest.importorskip("boto3")
pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("systemd-nspawn") is None, reason="needs root and systemd-nspawn"
    ),
]


WATCHED_SINCE = ["systemctl", "show", "-p", "ActiveState,ActiveEnterTimestamp", "awsddp-expiry"]


@dataclass
class Launched:
    """Two instances of the local cloud that were launched by boto3 with the user data of awsddp."""

    ec2: Any
    folder: Path
    nodes: tuple[Node, ...]
    ssh_port: int

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def fleet(self, nodes: tuple[Node, ...] | None = None) -> Fleet:
        endpoints = [
            Endpoint(
                node=node.node,
                instance_id=node.instance_id,
                host=str(node.address),
                port=self.ssh_port,
                user="ubuntu",
            )
            for node in nodes or self.nodes
        ]
        config = self.folder / "ssh_config"
        login = Login(key=self.folder / "key", known_hosts=self.known_hosts, ssh_config=config)
        return Fleet(endpoints, login, deadline_s=60)

    def describe(self) -> list[dict[str, Any]]:
        pages = self.ec2.describe_instances(InstanceIds=[node.instance_id for node in self.nodes])
        return [instance for page in pages["Reservations"] for instance in page["Instances"]]

    def state(self, node: int) -> str:
        key = self.nodes[node].instance_id
        return next(str(row["State"]["Name"]) for row in self.describe() if row["InstanceId"] == key)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    from awsddp.local import control

    info = control.start(tmp_path / "home")
    try:
        ec2 = boto3.client(
            "ec2",
            endpoint_url=info.endpoint,
            region_name=info.region,
            aws_access_key_id=info.access_key_id,
            aws_secret_access_key=info.secret_access_key,
        )
        login, seed = make_key("login"), make_key("seed")
        (tmp_path / "key").touch(mode=0o600)
        (tmp_path / "key").write_text(login.private)
        ec2.import_key_pair(KeyName="login", PublicKeyMaterial=login.public.encode())
        group = ec2.create_security_group(GroupName="group", Description="test")["GroupId"]
        caller = {"CidrIp": f"{info.caller_address}/32"}
        rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [caller]}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
        images = ec2.describe_images(Owners=["amazon"])["Images"]
        image = next(row["ImageId"] for row in images if row["Architecture"] == "x86_64")
        made = ec2.run_instances(
            ImageId=image,
            MinCount=2,
            MaxCount=2,
            InstanceType="g4dn.xlarge",
            KeyName="login",
            SecurityGroupIds=[group],
            InstanceInitiatedShutdownBehavior="terminate",
            UserData=render_user_data(host_key=seed, expires_at=datetime.now(UTC) + timedelta(hours=1)),
        )["Instances"]
        ids = [instance["InstanceId"] for instance in made]
        hostkeys.add_keys(tmp_path / "known_hosts", dict.fromkeys(ids, seed.public))
        described: list[dict[str, Any]] = []

        def have_addresses() -> bool:
            pages = ec2.describe_instances(InstanceIds=ids)["Reservations"]
            described[:] = [instance for page in pages for instance in page["Instances"]]
            return len(described) == 2 and all("PublicIpAddress" in instance for instance in described)

        wait_until(have_addresses, "the instances' addresses")
        nodes = tuple(
            Node(
                node=number,
                instance_id=instance["InstanceId"],
                state="running",
                instance_type="g4dn.xlarge",
                zone="",
                image_id=image,
                private_ip=instance["PrivateIpAddress"],
                public_ip=instance["PublicIpAddress"],
            )
            for number, instance in enumerate(described)
        )
        yield Launched(ec2, tmp_path, nodes, info.ssh_port)
    finally:
        control.stop(tmp_path / "home")


@pytest.mark.prove
def test_nodes_are_prepared_survive_a_reboot_and_terminate_at_their_expiry(
    launched: Launched,
) -> None:
    nodes, known_hosts = launched.nodes, launched.known_hosts
    with launched.fleet() as fleet:
        prepared = prepare(fleet, nodes)
        assert [(node.nic, node.python, node.home) for node in prepared] == [
            ("ens5", "/opt/pytorch/bin/python", "/home/ubuntu")
        ] * 2
        assert all(node.torch for node in prepared)
        keys = hostkeys.load_keys(known_hosts)
        assert {len(accepted) for accepted in keys.values()} == {1}
        assert len(set(keys.values())) == 2
        assert prepare(fleet, nodes) == prepared
        shell = fleet.run(["bash", "-lc", "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"], timeout_s=20)
        assert {result.stdout for result in shell.values()} == {b"=ens5 ens5\n"}
        timers = fleet.run(["systemctl", "is-enabled", "apt-daily.timer"], timeout_s=20)
        assert {result.stdout for result in timers.values()} == {b"masked\n"}

        since = fleet.run(WATCHED_SINCE, timeout_s=20)[1].stdout
        prepare(fleet, nodes[:1], expires_at=datetime.now(UTC))
    launched.ec2.reboot_instances(InstanceIds=[nodes[1].instance_id])
    wait_until(lambda: launched.state(0) == "terminated", "the end of the node whose time is over", 60)

    def is_watched_again() -> bool:
        with suppress(NodesFailed), launched.fleet(nodes[1:]) as fleet:
            output = fleet.run(WATCHED_SINCE, timeout_s=20)[1].stdout
            return output.startswith(b"ActiveState=active\n") and output != since
        return False

    wait_until(is_watched_again, "the watchdog after a reboot", 60)
    assert hostkeys.load_keys(known_hosts) == keys
    assert launched.state(1) == "running"
