"""The user data and the preparation on machines that boot: systemd, cloud-init and sudo are real here."""

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
    """Two instances of the local cloud, launched with our user data and nothing else of ours."""

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
        found = self.ec2.describe_instances(InstanceIds=[node.instance_id for node in self.nodes])
        return [instance for answer in found["Reservations"] for instance in answer["Instances"]]

    def state(self, node: int) -> str:
        wanted = self.nodes[node].instance_id
        return next(str(one["State"]["Name"]) for one in self.describe() if one["InstanceId"] == wanted)


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
        image = next(one["ImageId"] for one in images if one["Architecture"] == "x86_64")
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
        ids = [one["InstanceId"] for one in made]
        hostkeys.add_keys(tmp_path / "known_hosts", dict.fromkeys(ids, seed.public))
        described: list[dict[str, Any]] = []

        def addressed() -> bool:
            found = ec2.describe_instances(InstanceIds=ids)["Reservations"]
            described[:] = [one for answer in found for one in answer["Instances"]]
            return len(described) == 2 and all("PublicIpAddress" in one for one in described)

        wait_until(addressed, "the instances' addresses")
        nodes = tuple(
            Node(
                node=number,
                instance_id=one["InstanceId"],
                state="running",
                instance_type="g4dn.xlarge",
                zone="",
                image_id=image,
                private_ip=one["PrivateIpAddress"],
                public_ip=one["PublicIpAddress"],
            )
            for number, one in enumerate(described)
        )
        yield Launched(ec2, tmp_path, nodes, info.ssh_port)
    finally:
        control.stop(tmp_path / "home")


@pytest.mark.prove
def test_machines_that_boot_are_prepared_survive_a_reboot_and_end_when_their_time_is_over(
    launched: Launched,
) -> None:
    nodes, known_hosts = launched.nodes, launched.known_hosts
    with launched.fleet() as fleet:
        found = prepare(fleet, nodes)
        assert [(one.nic, one.python, one.home) for one in found] == [
            ("ens5", "/opt/pytorch/bin/python", "/home/ubuntu")
        ] * 2
        assert all(one.torch for one in found)
        keys = hostkeys.load_keys(known_hosts)
        assert {len(accepted) for accepted in keys.values()} == {1}
        assert len(set(keys.values())) == 2
        assert prepare(fleet, nodes) == found
        shell = fleet.run(["bash", "-lc", "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"], timeout_s=20)
        assert {result.stdout for result in shell.values()} == {b"=ens5 ens5\n"}
        timers = fleet.run(["systemctl", "is-enabled", "apt-daily.timer"], timeout_s=20)
        assert {result.stdout for result in timers.values()} == {b"masked\n"}

        since = fleet.run(WATCHED_SINCE, timeout_s=20)[1].stdout
        prepare(fleet, nodes[:1], expires_at=datetime.now(UTC))
    launched.ec2.reboot_instances(InstanceIds=[nodes[1].instance_id])
    wait_until(lambda: launched.state(0) == "terminated", "the end of the node whose time is over", 60)

    def watched_again() -> bool:
        with suppress(NodesFailed), launched.fleet(nodes[1:]) as fleet:
            told = fleet.run(WATCHED_SINCE, timeout_s=20)[1].stdout
            return told.startswith(b"ActiveState=active\n") and told != since
        return False

    wait_until(watched_again, "the watchdog after a reboot", 60)
    assert hostkeys.load_keys(known_hosts) == keys
    assert launched.state(1) == "running"
