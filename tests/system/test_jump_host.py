"""`network.jump` from end to end: nodes that admit only members of the jump host's security group."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.nodes.hostkeys import make_key
from awsddp.nodes.provision import render_user_data
from tests.support.lab import Lab
from tests.support.local_cloud import needs_root, until
from tests.system.test_reservations import make_client

SSH = (
    '#!/bin/sh\nfor word; do [ "$word" = -F ] && exec {ssh} "$@"; done\nexec {ssh} -F {folder}/config "$@"\n'
)
CONFIG = """\
Host bastion
    HostName {address}
    User ubuntu
    IdentityFile {folder}/id
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
"""
SCRIPT = """
import os, time
for number in range(30):
    print("line", number, flush=True)
    time.sleep(0.05)
open("made.txt", "w").write(os.environ["RANK"])
"""


@dataclass
class Bastion:
    """The user's own instance in the cloud, and its security group."""

    lab: Lab
    ec2: Any
    group: str
    address: str

    def settings(self, *more: str) -> str:
        return "\n".join(("[cluster]", "nodes = 2", 'instance_type = "g4dn.xlarge"', "[network]", *more))

    def configure_ssh(self, folder: Path, *, host_key: str, key: str) -> None:
        """Put an `ssh` on the PATH that reads `folder` instead of ~/.ssh."""
        folder.mkdir()
        (folder / "config").write_text(CONFIG.format(address=self.address, folder=folder))
        (folder / "known_hosts").write_text(f"{self.address} {host_key}\n")
        (folder / "id").touch(mode=0o600)
        (folder / "id").write_text(key)
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(SSH.format(ssh=shutil.which("ssh"), folder=folder))
        wrapper.chmod(0o755)
        self.lab.environ["PATH"] = f"{wrapper.parent}:{os.environ['PATH']}"

    def list_instances(self) -> list[str]:
        filters = [{"Name": "tag-key", "Values": ["awsddp:id"]}]
        pages = self.ec2.describe_instances(Filters=filters)["Reservations"]
        return [
            instance["InstanceId"]
            for page in pages
            for instance in page["Instances"]
            if instance["State"]["Name"] != "terminated"
        ]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """An empty lab, in a folder whose name is short enough for the path of a socket."""
    root = Path(tempfile.mkdtemp(prefix="jump-"))
    made = Lab(root)
    yield made
    made.close()
    shutil.rmtree(root)


@pytest.fixture
def bastion(lab: Lab) -> Iterator[Bastion]:
    shown = lab.run("local", "start")
    assert shown.returncode == 0, shown.stderr
    ec2 = make_client(lab)
    login, host = make_key("the user's own"), make_key("the bastion's")
    ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=login.public.encode())
    group = ec2.create_security_group(GroupName="bastion", Description="in from outside")["GroupId"]
    anyone = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[anyone])
    image = next(
        image["ImageId"]
        for image in ec2.describe_images(Owners=["amazon"])["Images"]
        if image["Architecture"] == "x86_64"
    )
    (made,) = ec2.run_instances(
        ImageId=image,
        MinCount=1,
        MaxCount=1,
        InstanceType="g4dn.xlarge",
        KeyName="mine",
        SecurityGroupIds=[group],
        UserData=render_user_data(host_key=host, expires_at=datetime.now(UTC) + timedelta(hours=1)),
    )["Instances"]
    instance_id = made["InstanceId"]

    def get_state() -> str:
        (page,) = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"]
        return str(page["Instances"][0]["State"]["Name"])

    until(lambda: get_state() == "running")
    ready = Bastion(lab, ec2, group, made["PrivateIpAddress"])
    ready.configure_ssh(lab.root / "ssh", host_key=host.public, key=login.private)
    yield ready
    assert get_state() == "running"
    assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"] == [
        {**anyone, "UserIdGroupPairs": [], "Ipv6Ranges": [], "PrefixListIds": []}
    ]


def is_reachable(address: str) -> bool:
    """Return True if port 22 is reachable from this machine directly."""
    try:
        socket.create_connection((address, 22), timeout=1.5).close()
    except OSError:
        return False
    return True


@needs_root
@pytest.mark.prove
def test_all_connections_go_through_the_jump_host(bastion: Bastion, tmp_path: Path) -> None:
    lab = bastion.lab
    assert is_reachable(bastion.address)
    lab.script(
        "awsddp.toml",
        bastion.settings('address = "private"', 'jump = "bastion"', f'ssh_cidr = ["{bastion.group}"]'),
    )
    plan = lab.json("plan", "--local")
    assert (plan["address"], plan["jump"], plan["ssh_cidrs"]) == ("private", "bastion", [bastion.group])
    up = lab.json("up", "--local", "-y")
    assert up["state"] == "ready"
    assert [node["public_ip"] for node in up["nodes"]] == [None, None]
    assert not any(is_reachable(node["private_ip"]) for node in up["nodes"])

    lab.script("train.py", SCRIPT)
    synced = lab.json("sync")
    assert [node["files"] for node in synced["nodes"]] == [2, 2]
    # In another folder, no setting has the jump host: the record of the cluster has it.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    connections = lab.run("exec", "echo $SSH_CONNECTION", cwd=elsewhere)
    assert [line.split()[1] for line in sorted(connections.stdout.splitlines())] == [bastion.address] * 2
    shell = lab.run("ssh", "--node", "1", "--", "echo $SSH_CONNECTION", cwd=elsewhere)
    assert (shell.returncode, shell.stdout.split()[:1]) == (0, [bastion.address]), shell.stderr
    config = lab.home / "clusters" / "default" / "ssh_config"
    plain = subprocess.run(
        ["ssh", "-F", config, "node0", "hostname"], env=lab.environ, capture_output=True, text=True
    )
    assert (plain.returncode, plain.stderr) == (0, "")

    started = lab.run("train", "train.py", "--world-size", "2", "--detach", "--name", "one")
    assert started.returncode == 0, started.stderr
    shown = lab.run("logs", "-f", "one")
    assert shown.returncode == 0, shown.stderr
    assert sum("line 29" in line for line in shown.stdout.splitlines()) == 2
    results_dir = tmp_path / "came home"
    fetched = lab.json("fetch", "one", "-o", f"job.results={results_dir}")
    assert len(fetched["nodes"]) == 2
    assert {path.read_text() for path in results_dir.rglob("made.txt")} <= {"0", "1", "2", "3"}
    job = lab.json("train", "train.py", "--world-size", "2", "--name", "two")
    assert (job["state"], len(job["ranks"])) == ("succeeded", 2)

    again = lab.json("up", "-y", cwd=elsewhere)
    assert again["nodes"] == up["nodes"]
    lab.json("down", "-y", cwd=elsewhere)
    assert bastion.list_instances() == []


@needs_root
@pytest.mark.prove
def test_missing_settings_of_a_jump_host_are_reported_before_any_launch(bastion: Bastion) -> None:
    lab = bastion.lab
    jump = ("up", "--local", "-y", "-o", "network.address=private", "-o", "network.jump=bastion")
    shown = lab.run(*jump)
    assert shown.returncode == 3
    for text in ("network.jump is set", "not from this machine", "network.ssh_cidr=10.0.0.5/32", "sg-..."):
        assert text in shown.stderr
    shown = lab.run(*jump, "-o", "network.ssh_cidr=sg-0123456789abcdef0")
    assert (shown.returncode, "network.ssh_cidr: no security group" in shown.stderr) == (3, True)
    known_hosts = lab.root / "ssh" / "known_hosts"
    known_hosts.write_text("")
    shown = lab.run(*jump, "-o", f"network.ssh_cidr={bastion.group}")
    assert (shown.returncode, "host key is known" in shown.stderr) == (6, True)
    assert "ssh bastion" in shown.stderr
    checks = lab.json("doctor", "--local", *jump[3:], "-o", f"network.ssh_cidr={bastion.group}", code=4)[
        "checks"
    ]
    (check,) = [check for check in checks if check["name"] == "jump host"]
    assert (check["ok"], "ssh bastion" in check["hint"], known_hosts.read_text()) == (False, True, "")
    assert bastion.list_instances() == []
    assert [pair["KeyName"] for pair in bastion.ec2.describe_key_pairs()["KeyPairs"]] == ["mine"]


def test_the_plan_shows_the_jump_host(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab")
    assert lab.run("local", "start", "--no-hosts").returncode == 0
    jump = ("-o", "network.jump=me@192.0.2.9:2222", "-o", "network.ssh_cidr=10.0.0.5")
    shown = lab.run("plan", "--local", *jump).stdout
    assert "public, through me@192.0.2.9:2222; SSH from 10.0.0.5/32" in " ".join(shown.split())
    assert json.loads(lab.run("plan", "--local", "--json", *jump).stdout)["jump"] == "me@192.0.2.9:2222"
    lab.close()
