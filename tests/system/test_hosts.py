"""Real hosts behind the endpoint: what a user of EC2 does with two instances, by boto3 and ssh alone."""

import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from awsddp.local import cgroups, control, nspawn
from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import (
    Cloud,
    add_fault,
    clear_fault,
    error_code_of,
    find_leftovers,
    needs_root,
    until,
)

pytestmark = needs_root

USER_DATA = """\
#cloud-config
ssh_keys:
  ed25519_private: |
{private}
  ed25519_public: {public}
write_files:
  - path: /etc/systemd/system/counted.service
    content: |
      [Service]
      Type=oneshot
      ExecStart=/bin/sh -c 'echo boot >> /var/log/boots'
      [Install]
      WantedBy=multi-user.target
runcmd:
  - [systemctl, enable, --now, counted.service]
"""
ALL_REDUCE = """\
import os, socket, sys, time
import torch, torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "ens5"
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}:29500", rank=int(sys.argv[1]), world_size=2)
value = torch.tensor([float(sys.argv[1]) + 1])
dist.all_reduce(value)
print(value.item(), socket.gethostname())
dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""


def keygen(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@dataclass
class Pair:
    """Two instances of one security group, whose host key is known before they boot."""

    cloud: Cloud
    folder: Path
    group: str
    ids: list[str]

    def ssh(self, number: int, *command: str) -> list[str]:
        address = self.cloud.instances(*self.ids)[number]["PublicIpAddress"]
        public = (self.folder / "host.pub").read_text()
        (self.folder / f"known-{number}").write_text(f"{address} {public}")
        known_hosts = f"UserKnownHostsFile={self.folder / f'known-{number}'}"
        options = [
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            known_hosts,
            "-o",
            "ConnectTimeout=10",
            "-o",
            "BatchMode=yes",
        ]
        return [
            "ssh",
            "-F",
            "none",
            "-i",
            str(self.folder / "login"),
            *options,
            f"ubuntu@{address}",
            *command,
        ]

    def run(self, number: int, command: str) -> str:
        result = subprocess.run(self.ssh(number, command), capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    def reaches(self, command: str) -> bool:
        return subprocess.run(self.ssh(0, command), capture_output=True, timeout=60).returncode == 0

    def address(self, number: int) -> str:
        return str(self.cloud.instances(*self.ids)[number]["PrivateIpAddress"])

    @property
    def inside(self) -> dict[str, Any]:
        pairs = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": self.group}]}]
        return {"GroupId": self.group, "IpPermissions": pairs}


@pytest.fixture(scope="module")
def pair(cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("keys")
    login, host = keygen(folder / "login"), keygen(folder / "host")
    ec2 = cloud.client("ec2")
    ec2.import_key_pair(KeyName="login", PublicKeyMaterial=login.with_suffix(".pub").read_bytes())
    group = ec2.create_security_group(GroupName="nodes", Description="-")["GroupId"]
    caller = [{"CidrIp": f"{cloud.info.caller_address}/32"}]
    ssh = [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": caller}]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=ssh)
    private = "".join(f"    {line}\n" for line in host.read_text().splitlines()).rstrip("\n")
    user_data = USER_DATA.format(private=private, public=host.with_suffix(".pub").read_text().strip())
    request = cloud.request(
        MinCount=2,
        MaxCount=2,
        KeyName="login",
        SecurityGroupIds=[group],
        UserData=user_data,
        MetadataOptions={"HttpTokens": "required"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": "pair"}]}],
    )
    made = ec2.run_instances(**request)["Instances"]
    ids = [instance["InstanceId"] for instance in made]
    cloud.wait("running", *ids)
    yield Pair(cloud, folder, group, ids)
    ec2.terminate_instances(InstanceIds=ids)
    cloud.wait("terminated", *ids)
    ec2.delete_security_group(GroupId=group)


def test_a_node_has_what_a_deep_learning_image_has(pair: Pair) -> None:
    assert "status: done" in pair.run(0, "cloud-init status --wait")
    assert pair.run(0, "sudo -n id -un; id -un; systemctl is-enabled counted") == "root\nubuntu\nenabled\n"
    assert (
        pair.run(0, '/opt/pytorch/bin/python -c "import torch; print(torch.ones(2).sum().item())"') == "2.0\n"
    )
    # multiprocessing fails to spawn with the libpython of another patch release, which the machine's may be
    assert pair.run(0, "/opt/pytorch/bin/python --version").split()[1] == platform.python_version()
    name = pair.run(1, "hostname").strip()
    assert pair.run(0, f"getent hosts {name}").split()[0] == pair.address(1)
    assert pair.run(0, "ip -brief -4 address show ens5").split()[2].startswith(pair.address(0))


METADATA = """\
import sys, urllib.error, urllib.request
base = "http://169.254.169.254/latest/"
def ask(path, **headers):
    request = urllib.request.Request(base + path, headers=headers, method="PUT" if "token" in path else "GET")
    try:
        return urllib.request.urlopen(request, timeout=3).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code)
print(ask("meta-data/instance-id"))
token = ask("api/token", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
for path in sys.argv[1:]:
    print(ask(path, **{"X-aws-ec2-metadata-token": token}))
print(ask("meta-data/instance-id", **{"X-aws-ec2-metadata-token": token + "0"}))
"""


@pytest.mark.prove
def test_a_node_reads_its_metadata_by_version_2_alone(pair: Pair) -> None:
    paths = [f"meta-data/{name}" for name in ("instance-id", "local-ipv4", "tags", "spot")]

    def read_metadata(number: int) -> list[str]:
        return pair.run(number, f"python3 -c {shlex.quote(METADATA)} {' '.join(paths)}").split()

    assert read_metadata(1) == ["401", pair.ids[1], pair.address(1), "404", "404", "401"]
    pair.cloud.kill()
    until(lambda: read_metadata(0) == ["401", pair.ids[0], pair.address(0), "404", "404", "401"])


def test_a_node_can_serve_port_80_while_the_metadata_service_answers(pair: Pair) -> None:
    pair.run(0, "sudo systemd-run --quiet --unit=web python3 -m http.server --bind 0.0.0.0 80")
    request = "curl --silent --fail --retry 9 --retry-connrefused --retry-delay 1 --head http://127.0.0.1/"
    assert "200 OK" in pair.run(0, request)
    token = (
        "curl -sX PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token"
    )
    query = 'curl -sH "X-aws-ec2-metadata-token: $token" http://169.254.169.254/latest/meta-data/instance-id'
    assert pair.run(0, f"token=$({token}); {query}") == pair.ids[0]
    pair.run(0, "sudo systemctl stop web")


def test_an_associated_role_gives_the_node_working_credentials(pair: Pair) -> None:
    iam, ec2 = pair.cloud.client("iam"), pair.cloud.client("ec2")
    iam.create_role(RoleName="training", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="nodes")
    iam.add_role_to_instance_profile(InstanceProfileName="nodes", RoleName="training")
    path = "meta-data/iam/security-credentials"
    command = f"python3 -c {shlex.quote(METADATA)} {path}/ {path}/training"
    assert pair.run(0, command).split() == ["401", "404", "404", "401"]
    association = ec2.associate_iam_instance_profile(
        InstanceId=pair.ids[0], IamInstanceProfile={"Name": "nodes"}
    )["IamInstanceProfileAssociation"]
    _, name, *document, _ = pair.run(0, command).splitlines()
    assert name == "training"
    credentials = json.loads("".join(document))
    keys = {
        "aws_access_key_id": credentials["AccessKeyId"],
        "aws_secret_access_key": credentials["SecretAccessKey"],
        "aws_session_token": credentials["Token"],
    }
    arn = pair.cloud.client("sts", **keys).get_caller_identity()["Arn"]
    assert arn.endswith(f"assumed-role/training/{pair.ids[0]}")
    pair.cloud.client("s3").create_bucket(Bucket="of-nodes")
    pair.cloud.client("s3").put_bucket_acl(Bucket="of-nodes", ACL="public-read")
    rights = {"Effect": "Allow", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::of-nodes/*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": rights})
    iam.put_role_policy(RoleName="training", PolicyName="s3", PolicyDocument=document)
    pair.cloud.client("s3", **keys).put_object(Bucket="of-nodes", Key="one", Body=b"for nodes")
    assert pair.run(0, f"curl -s {pair.cloud.info.node_s3}/of-nodes/one") == "for nodes"
    ec2.disassociate_iam_instance_profile(AssociationId=association["AssociationId"])
    assert pair.run(0, command).split() == ["401", "404", "404", "401"]


@pytest.mark.parametrize("key", ["timezone: Europe/Berlin", "packages: [cowsay]", "users: [default]"])
def test_an_unsupported_key_of_user_data_is_rejected_by_its_name(cloud: Cloud, key: str) -> None:
    with pytest.raises(ClientError, match=f"does not carry out {key.split(':')[0]} of the user data"):
        cloud.client("ec2").run_instances(**cloud.request(UserData=f"#cloud-config\n{key}\n"))


def test_multipart_user_data_is_rejected(cloud: Cloud) -> None:
    parts = "Content-Type: multipart/mixed; boundary=x\n\n--x\n\n#cloud-config\nswap: {}\n--x--\n"
    launch = cloud.client("ec2").run_instances
    assert error_code_of(launch, **cloud.request(UserData=parts)) == "UnsupportedOperation"


def test_a_node_shows_none_of_the_machines_files(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert not pair.reaches(f"sudo ls {tmp_path}")
    assert not pair.reaches(f"sudo ls {pair.cloud.home}")
    assert pair.run(0, "ls /home; sudo ls -A /root | grep -v ssh || true; ls -A /mnt /srv") == (
        "ubuntu\n/mnt:\n\n/srv:\n"
    )
    assert pair.run(0, "getent passwd | awk -F: '$3 >= 1000 && $3 < 65534 { print $1 }'") == "ubuntu\n"


def test_a_node_lists_no_disk_of_the_machine(pair: Pair) -> None:
    shown = subprocess.run(["lsblk", "--noheadings"], capture_output=True, text=True, check=True).stdout
    assert "loop" in shown
    assert pair.run(0, "lsblk --noheadings || true") == ""


def test_a_disk_has_the_size_of_its_volume(pair: Pair) -> None:
    size = int(pair.run(0, "df --output=size -B 1G / | tail -1"))
    assert 70 <= size <= 75
    assert pair.reaches("fallocate -l 60G big")
    assert not pair.reaches("fallocate -l 20G more")
    assert pair.reaches("rm big && fallocate -l 20G more && rm more")


def test_memory_and_processes_of_a_node_are_limited(pair: Pair) -> None:
    groups = [tree / CloudPaths(pair.cloud.home).cgroup / pair.ids[0] for tree in cgroups.list_hierarchies()]
    limits = {file.name: int(file.read_text()) for group in groups for file in group.glob("*.max")}
    limits |= {
        file.name: int(file.read_text()) for group in groups for file in group.glob("memory.limit_in*")
    }
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits["pids.max"] == 8192
    assert 0 < limits.get("memory.max", limits.get("memory.limit_in_bytes", 0)) < machine


def test_the_memory_limits_of_the_nodes_fit_into_that_of_the_cloud(pair: Pair) -> None:
    for tree in cgroups.list_hierarchies():
        cloud = tree / CloudPaths(pair.cloud.home).cgroup
        for limit in (cloud / name for name in cgroups.MEMORY if (cloud / name).exists()):
            nodes = [int((cloud / key / limit.name).read_text()) for key in pair.ids]
            assert sum(nodes) <= int(limit.read_text()) and max(nodes) <= 0.6 * sum(nodes), tree


@pytest.mark.prove
def test_the_memory_of_a_terminated_node_goes_to_the_remaining_nodes(pair: Pair) -> None:
    ec2 = pair.cloud.client("ec2")

    def shares() -> set[float]:
        clouds = [tree / CloudPaths(pair.cloud.home).cgroup for tree in cgroups.list_hierarchies()]
        limits = [cloud / name for cloud in clouds for name in cgroups.MEMORY if (cloud / name).exists()]
        return {
            round(int((limit.parent / key / limit.name).read_text()) / int(limit.read_text()), 2)
            for limit in limits
            for key in pair.ids
        }

    made = ec2.run_instances(**pair.cloud.request())["Instances"][0]["InstanceId"]
    pair.cloud.wait("running", made)
    assert shares() == {0.33}
    ec2.terminate_instances(InstanceIds=[made])
    until(lambda: shares() == {0.5})


@pytest.mark.prove
def test_the_oom_fault_persists_while_another_node_comes_and_goes(pair: Pair, cleared: None) -> None:
    take = 'python3 -c "print(len(bytearray(500 << 20)))" 2>/dev/null || echo killed'
    add_fault(pair.cloud.info, pair.ids[1], "oom")
    made = pair.cloud.client("ec2").run_instances(**pair.cloud.request())["Instances"][0]["InstanceId"]
    pair.cloud.wait("running", made)
    until(lambda: pair.run(1, take) == "killed\n")
    pair.cloud.client("ec2").terminate_instances(InstanceIds=[made])
    pair.cloud.wait("terminated", made)
    until(lambda: pair.run(1, take) == "killed\n")


@pytest.fixture
def limited(pair: Pair) -> Iterator[None]:
    """Limit the first node to 600 MB and 200 processes during the test."""
    limits = {"memory.max": 600 * 2**20, "memory.limit_in_bytes": 600 * 2**20, "pids.max": 200}
    groups = [tree / CloudPaths(pair.cloud.home).cgroup / pair.ids[0] for tree in cgroups.list_hierarchies()]
    files = [group / name for group in groups for name in limits if (group / name).exists()]
    before = {file: file.read_text() for file in files}
    for file in files:
        file.write_text(str(limits[file.name]))
    yield
    for file, text in before.items():
        file.write_text(text)


HOARD = "held = []\nwhile True: held.append(bytearray(2**24))"
FORK = """
import os, sys, time
made = []
try:
    while len(made) < 400:
        pid = os.fork()
        if not pid:
            time.sleep(60)
            os._exit(0)
        made.append(pid)
except BlockingIOError as error:
    print(len(made) < 200, error.strerror)
for pid in made:
    os.kill(pid, 9)
"""


def test_a_process_that_takes_more_than_the_nodes_memory_is_killed_there(pair: Pair, limited: None) -> None:
    output = pair.run(0, f"python3 -c {shlex.quote(HOARD)}; echo $?")
    assert output.splitlines()[-1] == str(128 + 9)
    assert pair.run(0, "systemctl is-active ssh") == "active\n"
    assert pair.cloud.instances(*pair.ids)[0]["State"]["Name"] == "running"


def test_a_node_cannot_start_more_processes_than_its_limit(pair: Pair, limited: None) -> None:
    assert pair.run(0, f"python3 -c {shlex.quote(FORK)}") == "True Resource temporarily unavailable\n"
    assert pair.run(1, "echo there") == "there\n"


def create_subnet(ec2: Any, vpc: str, cidr: str) -> str:
    made = ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, AvailabilityZone="us-east-1a")
    return str(made["Subnet"]["SubnetId"])


@pytest.mark.parametrize("cidr", ["10.200.0.0/16", "192.168.7.0/24"])
def test_an_unreachable_subnet_is_rejected_before_an_instance_is_launched(cloud: Cloud, cidr: str) -> None:
    ec2 = cloud.client("ec2")
    vpc = ec2.create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"]
    subnet = create_subnet(ec2, vpc, cidr.replace("/16", "/24"))
    before = cloud.instances()
    assert error_code_of(ec2.run_instances, **cloud.request(SubnetId=subnet)) == "UnsupportedOperation"
    nics = [{"DeviceIndex": 0, "SubnetId": subnet}]
    assert error_code_of(ec2.run_instances, **cloud.request(NetworkInterfaces=nics)) == "UnsupportedOperation"
    assert cloud.instances() == before
    ec2.delete_subnet(SubnetId=subnet)
    ec2.delete_vpc(VpcId=vpc)


def test_another_vpc_with_the_same_block_is_reachable_and_shares_no_address(pair: Pair) -> None:
    ec2 = pair.cloud.client("ec2")
    first = pair.cloud.instances(pair.ids[0])[0]
    same = ec2.describe_subnets(SubnetIds=[first["SubnetId"]])["Subnets"][0]["CidrBlock"]
    vpc = ec2.create_vpc(CidrBlock=same)["Vpc"]["VpcId"]
    subnet = create_subnet(ec2, vpc, same)
    group = ec2.create_security_group(GroupName="own", Description="own", VpcId=vpc)["GroupId"]
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[ssh])
    request = pair.cloud.request(SubnetId=subnet, SecurityGroupIds=[group])
    made = ec2.run_instances(**request)["Instances"][0]
    try:
        assert made["PrivateIpAddress"] not in (pair.address(0), pair.address(1))
        pair.cloud.wait("running", made["InstanceId"])
        socket.create_connection((made["PrivateIpAddress"], 22), timeout=10).close()
    finally:
        ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
        pair.cloud.wait("terminated", made["InstanceId"])


def test_nodes_reach_the_machine_and_nothing_else(pair: Pair) -> None:
    assert not pair.reaches("timeout 3 bash -c '</dev/tcp/198.51.100.1/80'")
    refused = f"timeout 3 bash -c '</dev/tcp/{pair.cloud.info.caller_address}/9' 2>&1 | grep -q refused"
    assert pair.reaches(refused)


def test_the_security_group_decides_which_ports_peers_reach(pair: Pair) -> None:
    ec2 = pair.cloud.client("ec2")
    server = subprocess.Popen(pair.ssh(1, "python3 -m http.server 8000"), stderr=subprocess.DEVNULL)
    try:
        until(lambda: "8000" in pair.run(1, "ss -tln"))
        probe = f"timeout 1 bash -c '</dev/tcp/{pair.address(1)}/8000'"
        assert not pair.reaches(probe)
        ec2.authorize_security_group_ingress(**pair.inside)
        until(lambda: pair.reaches(probe))
        ec2.revoke_security_group_ingress(**pair.inside)
        until(lambda: not pair.reaches(probe))
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def cleared(pair: Pair) -> Iterator[None]:
    """Clear the faults of a test after it."""
    yield
    clear_fault(pair.cloud.info)


def has_ssh_greeting(pair: Pair, number: int, *, within_s: float = 0.5) -> bool:
    """Return True if the node's sshd sends its greeting."""
    with suppress(OSError), socket.create_connection((pair.address(number), 22), timeout=within_s) as stream:
        return stream.recv(4) == b"SSH-"
    return False


def test_a_cut_node_is_unreachable_and_its_connections_survive_the_fault(pair: Pair, cleared: None) -> None:
    count = "for number in $(seq 20); do echo $number; sleep 0.1; done"
    counting = subprocess.Popen(pair.ssh(1, count), stdout=subprocess.PIPE, text=True)
    assert counting.stdout is not None
    assert counting.stdout.readline() == "1\n"
    add_fault(pair.cloud.info, pair.ids[1], "cut", for_s=1.5)
    assert not has_ssh_greeting(pair, 1)
    assert has_ssh_greeting(pair, 0)
    until(lambda: has_ssh_greeting(pair, 1))
    assert control.send_command(pair.cloud.info).faults == ()
    assert counting.communicate(timeout=30)[0].split() == [str(number) for number in range(2, 21)]


def test_the_one_way_fault_passes_incoming_packets_and_no_outgoing_ones(pair: Pair, cleared: None) -> None:
    ec2 = pair.cloud.client("ec2")
    ec2.authorize_security_group_ingress(**pair.inside)
    hear = "import socket; ear = socket.socket(type=socket.SOCK_DGRAM); ear.bind(('', 4000)); "
    hear += "ear.settimeout(20); print('ready', flush=True); print(ear.recv(9).decode())"
    hearing = subprocess.Popen(
        pair.ssh(1, f"python3 -c {shlex.quote(hear)}"), stdout=subprocess.PIPE, text=True
    )
    try:
        assert hearing.stdout is not None
        assert hearing.stdout.readline() == "ready\n"
        add_fault(pair.cloud.info, pair.ids[1], "one-way")
        assert not has_ssh_greeting(pair, 1)
        pair.run(0, f"bash -c 'echo heard > /dev/udp/{pair.address(1)}/4000'")
        clear_fault(pair.cloud.info)
        assert hearing.communicate(timeout=30)[0].strip() == "heard"
    finally:
        ec2.revoke_security_group_ingress(**pair.inside)


@pytest.mark.prove
def test_a_frozen_node_is_silent_until_the_fault_ends_even_if_the_daemon_is_killed(
    pair: Pair, cleared: None
) -> None:
    add_fault(pair.cloud.info, pair.ids[1], "frozen")
    assert not has_ssh_greeting(pair, 1)
    pair.cloud.kill()
    assert not has_ssh_greeting(pair, 1)
    assert pair.cloud.instances(pair.ids[1])[0]["State"]["Name"] == "running"
    clear_fault(pair.cloud.info)
    assert has_ssh_greeting(pair, 1, within_s=5)


def test_a_full_disk_accepts_no_data_until_the_fault_ends(pair: Pair, cleared: None) -> None:
    write = "echo more 2>&1 > more || true; cat more"
    add_fault(pair.cloud.info, pair.ids[0], "full-disk")
    assert "more" not in pair.run(0, write).split("\n")
    assert pair.run(0, "df --output=avail / | tail -1").strip() == "0"
    disk = CloudPaths(pair.cloud.home).nodes / pair.ids[0] / "disk.img"
    assert disk.stat().st_blocks * 512 < 2**30, "it fills the machine's own disk"
    clear_fault(pair.cloud.info)
    assert pair.run(0, write) == "more\n"


@pytest.mark.prove
def test_faults_of_cpu_memory_and_host_key_last_until_they_are_cleared(pair: Pair, cleared: None) -> None:
    key = ["ssh-keyscan", "-t", "ed25519", pair.address(1)]
    shown = subprocess.run(key, capture_output=True, check=True).stdout
    busy = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\n"
    busy += "print(time.process_time())"
    take = 'python3 -c "print(len(bytearray(500 << 20)))" 2>/dev/null || echo killed'
    for effect in ("slow-cpu", "oom", "hostkey"):
        add_fault(pair.cloud.info, pair.ids[1], effect)
    until(lambda: subprocess.run(key, capture_output=True).stdout not in (shown, b""))
    clear_fault(pair.cloud.info, control.send_command(pair.cloud.info).faults[-1].id)
    until(lambda: subprocess.run(key, capture_output=True).stdout == shown)
    assert float(pair.run(1, f"python3 -c {shlex.quote(busy)}")) < 0.3, "seconds of CPU in one second"
    assert pair.run(1, take) == "killed\n"
    clear_fault(pair.cloud.info)
    assert pair.run(1, take) == f"{500 << 20}\n"


def test_the_message_of_a_failed_gpu_is_in_the_kernel_log_that_root_reads_on_this_node(pair: Pair) -> None:
    add_fault(pair.cloud.info, pair.ids[1], "xid")
    assert pair.run(1, "dmesg 2>&1 || echo refused").endswith("refused\n")
    stamp, text = pair.run(1, "sudo -n dmesg").strip().lstrip("[").split("] ")
    assert text == nspawn.XID
    assert 0 <= time.monotonic() - float(stamp) < 60
    assert nspawn.XID not in pair.run(0, "sudo -n dmesg 2>/dev/null || true")


@pytest.mark.skipif(nspawn.find_faketime() is None, reason="Debian's package faketime is missing")
def test_the_clock_of_a_login_is_ahead_until_the_fault_ends(pair: Pair, cleared: None) -> None:
    add_fault(pair.cloud.info, pair.ids[1], "clock")
    assert int(pair.run(1, "date +%s")) - time.time() > 100
    clear_fault(pair.cloud.info)
    assert int(pair.run(1, "date +%s")) - time.time() < 2


@pytest.mark.prove
def test_a_shared_folder_is_read_only_on_nodes_that_boot_later(cloud: Cloud, pair: Pair) -> None:
    shared = pair.folder / "wheels with space"
    shared.mkdir()
    (shared / "one.whl").write_text("a wheel")
    control.start(cloud.home, share=(shared,))
    pair.cloud.client("ec2").reboot_instances(InstanceIds=pair.ids[1:])
    look = f"cat {shlex.quote(str(shared / 'one.whl'))}"
    until(lambda: subprocess.run(pair.ssh(1, look), capture_output=True).stdout == b"a wheel")
    write = subprocess.run(pair.ssh(1, f"sudo touch {shlex.quote(str(shared / 'two'))}"), capture_output=True)
    assert write.returncode != 0
    assert not pair.reaches(look)


def run_all_reduce(pair: Pair, *, patience_s: int) -> list[subprocess.CompletedProcess[str]]:
    """Start one rank on each node, give them `patience_s` to connect, and return the finished processes."""
    ranks = [
        subprocess.Popen(
            pair.ssh(rank, f"timeout {patience_s} /opt/pytorch/bin/python - {rank} {pair.address(0)}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(ALL_REDUCE)
        rank.stdin.close()
        rank.stdin = None
    outputs = [rank.communicate(timeout=patience_s + 30)[0] for rank in ranks]
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, output)
        for rank, output in zip(ranks, outputs, strict=True)
    ]


@pytest.mark.prove
def test_a_process_group_forms_once_the_security_group_admits_its_own_members(pair: Pair) -> None:
    ec2 = pair.cloud.client("ec2")
    assert all(rank.returncode and not rank.stdout for rank in run_all_reduce(pair, patience_s=8))
    ec2.authorize_security_group_ingress(**pair.inside)
    try:
        ended = [rank.stdout.split() for rank in run_all_reduce(pair, patience_s=60)]
    finally:
        ec2.revoke_security_group_ingress(**pair.inside)
    assert [fields[0] for fields in ended] == ["3.0", "3.0"]
    assert ended[0][1] != ended[1][1]


@pytest.mark.prove
def test_units_of_the_user_data_start_again_after_a_reboot(pair: Pair) -> None:
    boots = pair.run(0, "cat /var/log/boots")
    assert add_fault(pair.cloud.info, pair.ids[0], "reboot") == []
    until(lambda: pair.reaches("grep -c boot /var/log/boots") and pair.run(0, "cat /var/log/boots") > boots)
    assert pair.run(0, "cat /var/log/boots") == boots + "boot\n"


def test_the_console_shows_the_boot_and_the_host_key(pair: Pair) -> None:
    public = (pair.folder / "host.pub").read_text().split()[1]
    console = CloudPaths(pair.cloud.home).nodes / pair.ids[1] / "console.log"
    until(lambda: public in console.read_text(errors="replace"))


def test_a_restarted_daemon_adopts_its_running_hosts(pair: Pair) -> None:
    up_since = pair.run(0, "systemctl show -p UserspaceTimestampMonotonic")
    pair.cloud.kill()
    assert [node["State"]["Name"] for node in pair.cloud.instances(*pair.ids)] == ["running", "running"]
    assert pair.run(0, "systemctl show -p UserspaceTimestampMonotonic") == up_since


def is_reachable(address: str) -> bool:
    """Return True if a machine answers at an address, even if nothing listens on the port."""
    try:
        socket.create_connection((address, 22), timeout=1).close()
    except TimeoutError:
        return False
    except ConnectionRefusedError:
        pass
    return True


@pytest.mark.prove
@pytest.mark.parametrize(("behaviour", "state"), [("stop", "stopped"), ("terminate", "terminated")])
def test_poweroff_in_a_node_stops_or_terminates_it_as_the_launch_requested(
    pair: Pair, behaviour: str, state: str
) -> None:
    ec2 = pair.cloud.client("ec2")
    data = "#cloud-config\nruncmd:\n  - [touch, /home/ubuntu/was-here]\n  - [systemctl, poweroff]\n"
    request = pair.cloud.request(
        UserData=data, InstanceInitiatedShutdownBehavior=behaviour, SecurityGroupIds=[pair.group]
    )
    made = ec2.run_instances(**request)["Instances"][0]["InstanceId"]
    (instance,) = pair.cloud.wait(state, made)
    assert instance["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
    if state == "stopped":
        until(lambda: not is_reachable(instance["PrivateIpAddress"]))
    ec2.terminate_instances(InstanceIds=[made])
    pair.cloud.wait("terminated", made)
    assert not (pair.cloud.home / "local/nodes" / made).exists()


@pytest.mark.prove
@pytest.mark.timeout(240)
def test_a_host_that_hangs_while_it_boots_is_restarted(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    made = ec2.run_instances(**cloud.request())["Instances"][0]["InstanceId"]
    begun = cloud.home / "local/nodes" / made / "pid"
    systemd: list[str] = []

    def begins() -> bool:
        with suppress(OSError, ValueError):
            pid = int(begun.read_text())
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            # nspawn's first child is a helper that ends at once
            systemd[:] = [key for key in children if Path(f"/proc/{key}/comm").read_text() == "systemd\n"]
        return bool(systemd)

    until(begins, every_s=0.002)
    first = begun.read_text()
    os.kill(int(systemd[0]), signal.SIGSTOP)
    until(lambda: begun.exists() and begun.read_text() not in ("", first), seconds=120)
    cloud.wait("running", made)
    ec2.terminate_instances(InstanceIds=[made])
    cloud.wait("terminated", made)


@pytest.mark.parametrize("files", ["there", pytest.param("removed", marks=pytest.mark.prove)])
def test_stop_leaves_nothing(tmp_path: Path, files: str) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path))
    try:
        made = cloud.client("ec2").run_instances(**cloud.request(MinCount=2, MaxCount=2))["Instances"]
        assert [group["GroupName"] for group in made[0]["SecurityGroups"]] == ["default"]
        cloud.wait("running", *[instance["InstanceId"] for instance in made])
        assert {"processes", "namespaces", "interfaces", "disks", "cgroups", "files"} <= set(
            find_leftovers(tmp_path)
        )
        if files == "removed":
            shutil.rmtree(tmp_path / "local")
    finally:
        control.stop(tmp_path)
    assert find_leftovers(tmp_path) == {}
