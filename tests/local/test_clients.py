"""Foreign clients against the local cloud, unchanged, each in one process: endpoint and credentials are all.

Installed from PyPI once, into the cache: 400 MB for Ray, less than 100 MB for each of the others.
"""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.local.clients import client
from tests.local.conftest import PYTORCH, Cloud, needs_root
from tests.local.test_aws_cli import AWS, Terminal
from tests.local.test_hosts import keygen
from tests.seed import drawn

pytestmark = [needs_root, pytest.mark.prove, pytest.mark.timeout(420)]
TYPE = "g4dn.xlarge"
PATIENCE_S = 150.0


@dataclass
class Desk:
    """Where a client runs: a folder with a key, the environment, and a key pair and group of EC2."""

    cloud: Cloud
    folder: Path
    environ: dict[str, str]
    group: str

    def run(self, program: Path, *argv: str, text: str = "") -> str:
        """Run a program to its end and return all that it printed."""
        done = subprocess.run(
            [program, *argv],
            env=self.environ,
            cwd=self.folder,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        return f"{done.stdout}\nexit {done.returncode}"

    def alive(self) -> list[dict[str, Any]]:
        gone = ("shutting-down", "terminated")
        return [one for one in self.cloud.instances() if one["State"]["Name"] not in gone]


@pytest.fixture
def desk(cloud: Cloud, tmp_path: Path) -> Iterator[Desk]:
    keygen(tmp_path / "login")
    ec2 = cloud.client("ec2")
    ec2.import_key_pair(KeyName="desk", PublicKeyMaterial=(tmp_path / "login.pub").read_bytes())
    group = ec2.create_security_group(GroupName="desk", Description="-")["GroupId"]
    caller = [{"CidrIp": f"{cloud.info.caller_address}/32"}]
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": caller}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[ssh])
    shell = Terminal(cloud, tmp_path)
    made = Desk(cloud, tmp_path, {**shell.environ, "CALLER": cloud.info.caller_address}, group)
    yield made
    if ids := [one["InstanceId"] for one in made.alive()]:
        ec2.terminate_instances(InstanceIds=ids)
    cloud.wait("terminated", *[one["InstanceId"] for one in cloud.instances()])
    ec2.delete_security_group(GroupId=group)
    ec2.delete_key_pair(KeyName="desk")


@pytest.mark.skipif(AWS is None, reason="awscli is not installed")
def test_the_getting_started_tutorial_of_the_aws_command_line(cloud: Cloud, tmp_path: Path) -> None:
    """https://docs.aws.amazon.com/cli/latest/userguide/cli-services-ec2-instances.html and its neighbours."""
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
    shown = shell.aws(f"ec2 describe-security-groups --group-ids {group}")["SecurityGroups"][0]
    assert {one["FromPort"] for one in shown["IpPermissions"]} == {22, 3389}
    image = shell.aws(f"ssm get-parameters --names {PYTORCH} --query Parameters[0].Value")
    subnet = shell.aws("ec2 describe-subnets --query Subnets[0].SubnetId")
    made = shell.aws(
        f"ec2 run-instances --image-id {image} --count 1 --instance-type {TYPE} --key-name MyKeyPair "
        f"--security-group-ids {group} --subnet-id {subnet} "
        '--block-device-mappings \'[{"DeviceName":"/dev/sda1","Ebs":{"DeleteOnTermination":true}}]\''
    )["Instances"][0]["InstanceId"]
    shell.aws(f"ec2 create-tags --resources {made} --tags Key=Name,Value=MyInstance")
    shell.aws(f"ec2 wait instance-running --instance-ids {made}")
    filters = f"--filters Name=tag:Name,Values=MyInstance Name=instance-type,Values={TYPE}"
    (address,) = shell.aws(
        f"ec2 describe-instances {filters} --query Reservations[].Instances[].PublicIpAddress"
    )
    login = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-F", "none"]
    said = subprocess.run(
        ["ssh", *login, "-i", tmp_path / "MyKeyPair.pem", f"ubuntu@{address}", "whoami"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout == "ubuntu\n", said.stderr
    shell.aws(f"ec2 terminate-instances --instance-ids {made}")
    shell.aws(f"ec2 wait instance-terminated --instance-ids {made}")
    shell.aws(f"ec2 delete-security-group --group-id {group}")
    shell.aws("ec2 delete-key-pair --key-name MyKeyPair")
    keys = shell.aws("ec2 describe-key-pairs --query KeyPairs[].KeyName")
    assert "MyKeyPair" not in keys


PLAYBOOK = """\
- hosts: localhost
  connection: local
  gather_facts: false
  vars: {{ansible_python_interpreter: {python}}}
  module_defaults:
    group/amazon.aws.aws: {{region: us-east-1}}
    amazon.aws.ec2_instance: &instance
      name: web
      key_name: desk
      instance_type: {type}
      image_id: {image}
      security_group: desk
      exact_count: 1
      filters: {{"tag:Name": web, instance-state-name: [pending, running]}}
      wait: true
      state: running
  tasks:
    - {{amazon.aws.ec2_instance: {{}}, register: made}}
    - {{amazon.aws.ec2_instance: {{}}, register: again}}
    - assert: {{that: [made.changed, not again.changed]}}
    - add_host:
        name: "{{{{ made.instances[0].public_ip_address }}}}"
        groups: nodes
        ansible_user: ubuntu
        ansible_ssh_private_key_file: login
        ansible_ssh_common_args: -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null
- hosts: nodes
  gather_facts: false
  tasks:
    - {{command: cloud-init status --wait, register: booted}}
    - assert: {{that: ["'status: done' in booted.stdout"]}}
- hosts: localhost
  connection: local
  gather_facts: false
  vars: {{ansible_python_interpreter: {python}}}
  tasks:
    - amazon.aws.ec2_instance: {{filters: {{"tag:Name": web}}, state: absent, wait: true, region: us-east-1}}
"""


def ansible(desk: Desk) -> None:
    """Make an instance once, log in to it, and end it."""
    programs = client("ansible")
    image = desk.cloud.image
    playbook = PLAYBOOK.format(python=programs / "python", type=TYPE, image=image)
    (desk.folder / "playbook.yml").write_text(playbook)
    desk.environ["ANSIBLE_SSH_ARGS"] = "-o ControlMaster=no"  # its socket's path would be too long here
    said = desk.run(programs / "ansible-playbook", "-i", "localhost,", "playbook.yml")
    assert said.endswith("exit 0"), said
    assert desk.alive() == []


FABRIC = """\
import sys
from fabric import Connection
with Connection(sys.argv[1], user="ubuntu", connect_kwargs={"key_filename": "login"}) as node:
    print(node.run("id -un", hide=True).stdout)
    print(node.sudo("id -un", hide=True).stdout)
    node.put("login.pub", "/tmp/there")
    node.get("/tmp/there", "back")
"""


def fabric(desk: Desk) -> None:
    """Run a command and copy a file."""
    programs = client("fabric")
    request = desk.cloud.request(InstanceType=TYPE, KeyName="desk", SecurityGroupIds=[desk.group])
    made = desk.cloud.client("ec2").run_instances(**request)["Instances"][0]["InstanceId"]
    (running,) = desk.cloud.wait("running", made)
    said = desk.run(programs / "python", "-", running["PublicIpAddress"], text=FABRIC)
    assert said.split() == ["ubuntu", "root", "exit", "0"], said
    assert (desk.folder / "back").read_text() == (desk.folder / "login.pub").read_text()


LIBCLOUD = """\
import json, os, sys
from urllib.parse import urlparse
from libcloud.compute.providers import get_driver
from libcloud.compute.types import Provider
at = urlparse(os.environ["AWS_ENDPOINT_URL"])
keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
where = {"secure": False, "host": at.hostname, "port": at.port, "signature_version": "4"}
driver = get_driver(Provider.EC2)(*keys, region="us-east-1", **where)
size = next(one for one in driver.list_sizes() if one.id == sys.argv[1])
image = next(one for one in driver.list_images(ex_owner="898082745236") if one.id == sys.argv[2])
more = {"ex_keyname": "desk", "ex_security_groups": ["desk"]}
node = driver.create_node(name="cloud", image=image, size=size, **more)
[(node, [address])] = driver.wait_until_running([node], wait_period=1, timeout=60)
listed = [one.name for one in driver.list_nodes() if one.state == "running"]
done = [driver.reboot_node(node), driver.destroy_node(node)]
print(json.dumps([listed, address == node.public_ips[0], done]))
"""


def libcloud(desk: Desk) -> None:
    """List, make and destroy a node."""
    said = desk.run(client("libcloud") / "python", "-", TYPE, desk.cloud.image, text=LIBCLOUD)
    assert json.loads(said.splitlines()[0]) == [["cloud"], True, [True, True]], said


def flintrock(desk: Desk) -> None:
    """Its set-up of Spark needs mirrors and Amazon Linux: this is as far as its login."""
    said = desk.run(
        client("flintrock") / "flintrock",
        *("launch", "spark", "--num-slaves", "1", "--java-version", "8", "--assume-yes"),
        *(
            "--no-install-hdfs",
            "--no-install-spark",
            "--ec2-key-name",
            "desk",
            "--ec2-identity-file",
            "login",
        ),
        *("--ec2-instance-type", TYPE, "--ec2-ami", desk.cloud.image, "--ec2-user", "ubuntu"),
        *("--ec2-region", "us-east-1", "--ec2-min-root-ebs-size-gb", "80"),
        *("--ec2-authorize-access-from", desk.cloud.info.caller_address),
    )
    assert said.count("SSH online.") == 2, said


RAY = """\
cluster_name: ray
max_workers: 0
provider: {{type: aws, region: us-east-1, availability_zone: us-east-1a, cache_stopped_nodes: false}}
auth: {{ssh_user: ubuntu, ssh_private_key: {folder}/login}}
available_node_types:
  head:
    resources: {{CPU: 2}}
    node_config: {{InstanceType: {type}, ImageId: {image}, KeyName: desk}}
head_node_type: head
setup_commands: []
head_setup_commands: []
head_start_ray_commands: [echo begun-as-$(id -un)]
"""


def ray(desk: Desk) -> None:
    """Ray itself is not on the node: its start is a line of ours."""
    text = RAY.format(folder=desk.folder, type=TYPE, image=desk.cloud.image)
    (desk.folder / "ray.yaml").write_text(text)
    said = desk.run(client("ray") / "ray", "up", "-y", "--no-config-cache", "ray.yaml")
    assert "begun-as-ubuntu" in said, said
    assert said.endswith("exit 0")
    (head,) = desk.alive()
    assert {"Key": "ray-node-type", "Value": "head"} in head["Tags"]
    profile = desk.cloud.client("iam").list_instance_profiles()["InstanceProfiles"][0]
    assert head["IamInstanceProfile"]["Arn"] == profile["Arn"]


CLIENTS = {one.__name__: one for one in (ansible, fabric, flintrock, libcloud, ray)}


@pytest.mark.parametrize("name", drawn(sorted(CLIENTS), 1, what="client"))
def test_a_foreign_client_finds_what_it_expects(desk: Desk, name: str) -> None:
    CLIENTS[name](desk)
