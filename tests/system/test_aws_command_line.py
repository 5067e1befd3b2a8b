"""The aws command line as a client of the local cloud, which gets only the endpoint and credentials."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_cloud import PYTORCH, Cloud, needs_root, until
from tests.system.test_hosts import USER_DATA, keygen

AWS = shutil.which("aws", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
pytestmark = [needs_root, pytest.mark.skipif(AWS is None, reason="awscli is not installed")]
SELF = "--ip-permissions=IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group}}}]"


class Terminal:
    """The commands of a user: `aws` and `ssh`."""

    def __init__(self, cloud: Cloud, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "AWS_PAGER": "",
            "AWS_ENDPOINT_URL": cloud.info.endpoint,
            "AWS_DEFAULT_REGION": cloud.info.region,
            "AWS_ACCESS_KEY_ID": cloud.info.access_key_id,
            "AWS_SECRET_ACCESS_KEY": cloud.info.secret_access_key,
        }

    def aws(self, line: str, *, refused: str = "") -> Any:
        result = subprocess.run(
            [str(AWS), *shlex.split(line), "--output=json"],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if refused:
            assert f"({refused})" in result.stderr
            return None
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout) if result.stdout.strip() else None

    def ssh(self, address: str, command: str) -> subprocess.CompletedProcess[str]:
        (self.folder / f"known-{address}").write_text(f"{address} {(self.folder / 'host.pub').read_text()}")
        options = ["StrictHostKeyChecking=yes", f"UserKnownHostsFile=known-{address}", "ConnectTimeout=5"]
        flags = [text for option in options for text in ("-o", option)]
        return subprocess.run(
            ["ssh", "-F", "none", "-i", "login", *flags, f"ubuntu@{address}", command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def state(self, instance_id: str) -> str:
        query = "Reservations[0].Instances[0].State.Name"
        return str(self.aws(f"ec2 describe-instances --instance-ids {instance_id} --query {query}"))


@pytest.mark.prove
def test_aws_creates_a_key_a_group_and_two_instances_and_deletes_them(cloud: Cloud, tmp_path: Path) -> None:
    shell = Terminal(cloud, tmp_path)
    keygen(tmp_path / "login"), keygen(tmp_path / "host")
    private = "".join(f"    {line}\n" for line in (tmp_path / "host").read_text().splitlines()).rstrip("\n")
    public = (tmp_path / "host.pub").read_text().strip()
    (tmp_path / "user-data").write_text(USER_DATA.format(private=private, public=public))

    shell.aws("ec2 import-key-pair --key-name cli --public-key-material fileb://login.pub")
    group = shell.aws("ec2 create-security-group --group-name cli --description cli")["GroupId"]
    caller = f"{cloud.info.caller_address}/32"
    shell.aws(
        f"ec2 authorize-security-group-ingress --group-id {group} --protocol tcp --port 22 --cidr {caller}"
    )
    image = shell.aws(f"ssm get-parameter --name {PYTORCH} --query Parameter.Value")
    launch = (
        f"ec2 run-instances --image-id {image} --instance-type g5.12xlarge --key-name cli "
        f"--security-group-ids {group} --user-data file://user-data"
    )
    ids = [instance["InstanceId"] for instance in shell.aws(f"{launch} --count 2")["Instances"]]
    (ending,) = shell.aws(f"{launch} --instance-initiated-shutdown-behavior terminate")["Instances"]
    every = [*ids, ending["InstanceId"]]
    shell.aws(f"ec2 wait instance-running --instance-ids {' '.join(every)}")
    described = shell.aws(f"ec2 describe-instances --instance-ids {' '.join(every)}")["Reservations"]
    instances = {instance["InstanceId"]: instance for page in described for instance in page["Instances"]}
    first, second, third = (instances[key]["PublicIpAddress"] for key in every)

    command = 'cloud-init status --wait; /opt/pytorch/bin/python -c "import torch; print(torch.__version__)"'
    result = shell.ssh(first, command)
    assert "status: done" in result.stdout, result.stderr
    assert result.stdout.split()[-1].startswith("2.")

    private_ip = instances[ids[1]]["PrivateIpAddress"]
    probe = f"timeout 1 bash -c '</dev/tcp/{private_ip}/22'"
    pairs = SELF.format(group=group)
    assert shell.ssh(first, probe).returncode != 0
    shell.aws(f"ec2 authorize-security-group-ingress --group-id {group} {pairs}")
    until(lambda: shell.ssh(first, probe).returncode == 0, seconds=5)

    boots: Callable[[], str] = lambda: shell.ssh(second, "cat /var/log/boots").stdout  # noqa: E731
    before = boots()
    shell.aws(f"ec2 reboot-instances --instance-ids {ids[1]}")
    until(lambda: boots() == before + "boot\n")

    shell.ssh(first, "sudo shutdown -h now")
    shell.ssh(third, "sudo shutdown -h now")
    until(lambda: shell.state(ids[0]) == "stopped")
    until(lambda: shell.state(every[2]) == "terminated")

    shell.aws(f"ec2 delete-security-group --group-id {group}", refused="DependencyViolation")
    shell.aws(f"ec2 terminate-instances --instance-ids {' '.join(ids)}")
    shell.aws(f"ec2 wait instance-terminated --instance-ids {' '.join(ids)}")
    shell.aws(f"ec2 delete-security-group --group-id {group}")
    shell.aws("ec2 delete-key-pair --key-name cli")


@pytest.mark.prove
def test_the_getting_started_tutorial_of_the_aws_command_line_runs(cloud: Cloud, tmp_path: Path) -> None:
    """https://docs.aws.amazon.com/cli/latest/userguide/cli-services-ec2-instances.html and related pages."""
    shell = Terminal(cloud, tmp_path)
    key = shell.aws("ec2 create-key-pair --key-name MyKeyPair --query KeyMaterial")
    (tmp_path / "MyKeyPair.pem").write_text(key)
    (tmp_path / "MyKeyPair.pem").chmod(0o400)
    assert shell.aws("ec2 describe-key-pairs --key-name MyKeyPair")["KeyPairs"]
    vpc = shell.aws("ec2 describe-vpcs --query Vpcs[0].VpcId")
    group = shell.aws(
        f"ec2 create-security-group --group-name my-sg --description 'My security group' --vpc-id {vpc}"
    )["GroupId"]
    cidr = f"{cloud.info.caller_address}/32"
    for port in (22, 3389):
        rule = f"--protocol tcp --port {port} --cidr {cidr}"
        shell.aws(f"ec2 authorize-security-group-ingress --group-id {group} {rule}")
    group_shown = shell.aws(f"ec2 describe-security-groups --group-ids {group}")["SecurityGroups"][0]
    assert {permission["FromPort"] for permission in group_shown["IpPermissions"]} == {22, 3389}
    image = shell.aws(f"ssm get-parameters --names {PYTORCH} --query Parameters[0].Value")
    subnet = shell.aws("ec2 describe-subnets --query Subnets[0].SubnetId")
    instance_id = shell.aws(
        f"ec2 run-instances --image-id {image} --count 1 --instance-type g4dn.xlarge --key-name MyKeyPair "
        f"--security-group-ids {group} --subnet-id {subnet} "
        '--block-device-mappings \'[{"DeviceName":"/dev/sda1","Ebs":{"DeleteOnTermination":true}}]\''
    )["Instances"][0]["InstanceId"]
    shell.aws(f"ec2 create-tags --resources {instance_id} --tags Key=Name,Value=MyInstance")
    shell.aws(f"ec2 wait instance-running --instance-ids {instance_id}")
    filters = "--filters Name=tag:Name,Values=MyInstance Name=instance-type,Values=g4dn.xlarge"
    (address,) = shell.aws(
        f"ec2 describe-instances {filters} --query Reservations[].Instances[].PublicIpAddress"
    )
    login = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-F", "none"]
    result = subprocess.run(
        ["ssh", *login, "-i", tmp_path / "MyKeyPair.pem", f"ubuntu@{address}", "whoami"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "ubuntu\n", result.stderr
    shell.aws(f"ec2 stop-instances --instance-ids {instance_id}")
    shell.aws(f"ec2 wait instance-stopped --instance-ids {instance_id}")
    shell.aws(f"ec2 start-instances --instance-ids {instance_id}")
    shell.aws(f"ec2 wait instance-running --instance-ids {instance_id}")
    shell.aws(f"ec2 terminate-instances --instance-ids {instance_id}")
    shell.aws(f"ec2 wait instance-terminated --instance-ids {instance_id}")
    shell.aws(f"ec2 delete-security-group --group-id {group}")
    shell.aws("ec2 delete-key-pair --key-name MyKeyPair")
    keys = shell.aws("ec2 describe-key-pairs --query KeyPairs[].KeyName")
    assert "MyKeyPair" not in keys
