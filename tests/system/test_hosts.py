"""Real hosts behind the endpoint: what a user of EC2 does with two instances, with boto3 and ssh alone."""

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
from tests.support.local_cloud import Cloud, fault_add, fault_clear, left_over, needs_root, refusal, until

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
    """Two instances of one group, with a host key that is known beforehand."""

    cloud: Cloud
    folder: Path
    group: str
    ids: list[str]

    def ssh(self, number: int, *command: str) -> list[str]:
        address = self.cloud.instances(*self.ids)[number]["PublicIpAddress"]
        public = (self.folder / "host.pub").read_text()
        (self.folder / f"known-{number}").write_text(f"{address} {public}")
        known = f"UserKnownHostsFile={self.folder / f'known-{number}'}"
        options = [
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            known,
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
        done = subprocess.run(self.ssh(number, command), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

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
    ids = [one["InstanceId"] for one in made]
    cloud.wait("running", *ids)
    yield Pair(cloud, folder, group, ids)
    ec2.terminate_instances(InstanceIds=ids)
    cloud.wait("terminated", *ids)
    ec2.delete_security_group(GroupId=group)


def test_a_node_is_what_a_deep_learning_image_is(pair: Pair) -> None:
    assert "status: done" in pair.run(0, "cloud-init status --wait")
    assert pair.run(0, "sudo -n id -un; id -un; systemctl is-enabled counted") == "root\nubuntu\nenabled\n"
    assert (
        pair.run(0, '/opt/pytorch/bin/python -c "import torch; print(torch.ones(2).sum().item())"') == "2.0\n"
    )
    # with another patch release's libpython, as the machine's own may be, multiprocessing fails to spawn
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
def test_a_node_is_told_of_itself_by_the_second_version_alone(pair: Pair) -> None:
    paths = [f"meta-data/{name}" for name in ("instance-id", "local-ipv4", "tags", "spot")]

    def told(number: int) -> list[str]:
        return pair.run(number, f"python3 -c {shlex.quote(METADATA)} {' '.join(paths)}").split()

    assert told(1) == ["401", pair.ids[1], pair.address(1), "404", "404", "401"]
    pair.cloud.kill()
    until(lambda: told(0) == ["401", pair.ids[0], pair.address(0), "404", "404", "401"])


def test_port_80_of_a_node_is_free_and_the_metadata_answer_beside_it(pair: Pair) -> None:
    pair.run(0, "sudo systemd-run --quiet --unit=web python3 -m http.server --bind 0.0.0.0 80")
    own = "curl --silent --fail --retry 9 --retry-connrefused --retry-delay 1 --head http://127.0.0.1/"
    assert "200 OK" in pair.run(0, own)
    token = (
        "curl -sX PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token"
    )
    asked = 'curl -sH "X-aws-ec2-metadata-token: $token" http://169.254.169.254/latest/meta-data/instance-id'
    assert pair.run(0, f"token=$({token}); {asked}") == pair.ids[0]
    pair.run(0, "sudo systemctl stop web")


def test_a_role_that_is_associated_gives_the_node_credentials_that_work(pair: Pair) -> None:
    iam, ec2 = pair.cloud.client("iam"), pair.cloud.client("ec2")
    iam.create_role(RoleName="training", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="nodes")
    iam.add_role_to_instance_profile(InstanceProfileName="nodes", RoleName="training")
    path = "meta-data/iam/security-credentials"
    asked = f"python3 -c {shlex.quote(METADATA)} {path}/ {path}/training"
    assert pair.run(0, asked).split() == ["401", "404", "404", "401"]
    made = ec2.associate_iam_instance_profile(InstanceId=pair.ids[0], IamInstanceProfile={"Name": "nodes"})[
        "IamInstanceProfileAssociation"
    ]
    _, name, *document, _ = pair.run(0, asked).splitlines()
    assert name == "training"
    found = json.loads("".join(document))
    keys = {
        "aws_access_key_id": found["AccessKeyId"],
        "aws_secret_access_key": found["SecretAccessKey"],
        "aws_session_token": found["Token"],
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
    ec2.disassociate_iam_instance_profile(AssociationId=made["AssociationId"])
    assert pair.run(0, asked).split() == ["401", "404", "404", "401"]


@pytest.mark.parametrize("key", ["timezone: Europe/Berlin", "packages: [cowsay]", "users: [default]"])
def test_user_data_that_no_node_carries_out_is_refused_by_name(cloud: Cloud, key: str) -> None:
    with pytest.raises(ClientError, match=f"does not carry out {key.split(':')[0]} of the user data"):
        cloud.client("ec2").run_instances(**cloud.request(UserData=f"#cloud-config\n{key}\n"))


def test_user_data_of_another_kind_is_refused(cloud: Cloud) -> None:
    parts = "Content-Type: multipart/mixed; boundary=x\n\n--x\n\n#cloud-config\nswap: {}\n--x--\n"
    launch = cloud.client("ec2").run_instances
    assert refusal(launch, **cloud.request(UserData=parts)) == "UnsupportedOperation"


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


def test_a_disk_holds_what_its_volume_holds_and_no_more(pair: Pair) -> None:
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


def test_a_node_that_takes_all_its_memory_leaves_the_others_theirs(pair: Pair) -> None:
    for tree in cgroups.list_hierarchies():
        cloud = tree / CloudPaths(pair.cloud.home).cgroup
        for whole in (cloud / name for name in cgroups.MEMORY if (cloud / name).exists()):
            nodes = [int((cloud / one / whole.name).read_text()) for one in pair.ids]
            assert sum(nodes) <= int(whole.read_text()) and max(nodes) <= 0.6 * sum(nodes), tree


@pytest.mark.prove
def test_what_a_node_had_goes_to_those_that_stay(pair: Pair) -> None:
    ec2 = pair.cloud.client("ec2")

    def shares() -> set[float]:
        clouds = [tree / CloudPaths(pair.cloud.home).cgroup for tree in cgroups.list_hierarchies()]
        limits = [cloud / name for cloud in clouds for name in cgroups.MEMORY if (cloud / name).exists()]
        return {
            round(int((whole.parent / one / whole.name).read_text()) / int(whole.read_text()), 2)
            for whole in limits
            for one in pair.ids
        }

    made = ec2.run_instances(**pair.cloud.request())["Instances"][0]["InstanceId"]
    pair.cloud.wait("running", made)
    assert shares() == {0.33}
    ec2.terminate_instances(InstanceIds=[made])
    until(lambda: shares() == {0.5})


@pytest.mark.prove
def test_a_node_stays_short_of_memory_while_another_one_comes_and_goes(pair: Pair, whole: None) -> None:
    take = 'python3 -c "print(len(bytearray(500 << 20)))" 2>/dev/null || echo killed'
    fault_add(pair.cloud.info, pair.ids[1], "oom")
    made = pair.cloud.client("ec2").run_instances(**pair.cloud.request())["Instances"][0]["InstanceId"]
    pair.cloud.wait("running", made)
    until(lambda: pair.run(1, take) == "killed\n")
    pair.cloud.client("ec2").terminate_instances(InstanceIds=[made])
    pair.cloud.wait("terminated", made)
    until(lambda: pair.run(1, take) == "killed\n")


@pytest.fixture
def narrow(pair: Pair) -> Iterator[None]:
    """The first node has room for 600 MB and 200 processes, as long as the test lasts."""
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


def test_a_process_that_takes_more_than_the_nodes_memory_is_killed_there(pair: Pair, narrow: None) -> None:
    said = pair.run(0, f"python3 -c {shlex.quote(HOARD)}; echo $?")
    assert said.splitlines()[-1] == str(128 + 9)
    assert pair.run(0, "systemctl is-active ssh") == "active\n"
    assert pair.cloud.instances(*pair.ids)[0]["State"]["Name"] == "running"


def test_more_processes_than_a_node_may_have_cannot_be_started_there(pair: Pair, narrow: None) -> None:
    assert pair.run(0, f"python3 -c {shlex.quote(FORK)}") == "True Resource temporarily unavailable\n"
    assert pair.run(1, "echo there") == "there\n"


def own_subnet(ec2: Any, vpc: str, cidr: str) -> str:
    made = ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, AvailabilityZone="us-east-1a")
    return str(made["Subnet"]["SubnetId"])


@pytest.mark.parametrize("cidr", ["10.200.0.0/16", "192.168.7.0/24"])
def test_a_subnet_that_nobody_can_reach_is_refused_before_anything_is_made(cloud: Cloud, cidr: str) -> None:
    ec2 = cloud.client("ec2")
    vpc = ec2.create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"]
    subnet = own_subnet(ec2, vpc, cidr.replace("/16", "/24"))
    before = cloud.instances()
    assert refusal(ec2.run_instances, **cloud.request(SubnetId=subnet)) == "UnsupportedOperation"
    nics = [{"DeviceIndex": 0, "SubnetId": subnet}]
    assert refusal(ec2.run_instances, **cloud.request(NetworkInterfaces=nics)) == "UnsupportedOperation"
    assert cloud.instances() == before
    ec2.delete_subnet(SubnetId=subnet)
    ec2.delete_vpc(VpcId=vpc)


def test_a_vpc_of_ones_own_within_the_block_is_reached_and_shares_no_address(pair: Pair) -> None:
    ec2 = pair.cloud.client("ec2")
    first = pair.cloud.instances(pair.ids[0])[0]
    same = ec2.describe_subnets(SubnetIds=[first["SubnetId"]])["Subnets"][0]["CidrBlock"]
    vpc = ec2.create_vpc(CidrBlock=same)["Vpc"]["VpcId"]
    subnet = own_subnet(ec2, vpc, same)
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


def test_the_group_decides_what_peers_reach(pair: Pair) -> None:
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
def whole(pair: Pair) -> Iterator[None]:
    """What a test breaks is healed after it."""
    yield
    fault_clear(pair.cloud.info)


def greets(pair: Pair, number: int, *, within_s: float = 0.5) -> bool:
    """Whether the node's sshd answers a caller with its first words."""
    with suppress(OSError), socket.create_connection((pair.address(number), 22), timeout=within_s) as asking:
        return asking.recv(4) == b"SSH-"
    return False


def test_a_cut_node_is_not_reached_and_its_connections_live_on_once_it_heals(pair: Pair, whole: None) -> None:
    count = "for number in $(seq 20); do echo $number; sleep 0.1; done"
    counting = subprocess.Popen(pair.ssh(1, count), stdout=subprocess.PIPE, text=True)
    assert counting.stdout is not None
    assert counting.stdout.readline() == "1\n"
    fault_add(pair.cloud.info, pair.ids[1], "cut", for_s=1.5)
    assert not greets(pair, 1)
    assert greets(pair, 0)
    until(lambda: greets(pair, 1))
    assert control.send_command(pair.cloud.info).faults == ()
    assert counting.communicate(timeout=30)[0].split() == [str(number) for number in range(2, 21)]


def test_one_way_lets_in_what_comes_and_nothing_out(pair: Pair, whole: None) -> None:
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
        fault_add(pair.cloud.info, pair.ids[1], "one-way")
        assert not greets(pair, 1)
        pair.run(0, f"bash -c 'echo heard > /dev/udp/{pair.address(1)}/4000'")
        fault_clear(pair.cloud.info)
        assert hearing.communicate(timeout=30)[0].strip() == "heard"
    finally:
        ec2.revoke_security_group_ingress(**pair.inside)


@pytest.mark.prove
def test_a_frozen_node_says_nothing_until_it_thaws_though_the_daemon_is_killed(
    pair: Pair, whole: None
) -> None:
    fault_add(pair.cloud.info, pair.ids[1], "frozen")
    assert not greets(pair, 1)
    pair.cloud.kill()
    assert not greets(pair, 1)
    assert pair.cloud.instances(pair.ids[1])[0]["State"]["Name"] == "running"
    fault_clear(pair.cloud.info)
    assert greets(pair, 1, within_s=5)


def test_a_full_disk_takes_nothing_until_it_heals(pair: Pair, whole: None) -> None:
    write = "echo more 2>&1 > more || true; cat more"
    fault_add(pair.cloud.info, pair.ids[0], "full-disk")
    assert "more" not in pair.run(0, write).split("\n")
    assert pair.run(0, "df --output=avail / | tail -1").strip() == "0"
    disk = CloudPaths(pair.cloud.home).nodes / pair.ids[0] / "disk.img"
    assert disk.stat().st_blocks * 512 < 2**30, "it fills the machine's own disk"
    fault_clear(pair.cloud.info)
    assert pair.run(0, write) == "more\n"


@pytest.mark.prove
def test_slow_short_of_memory_and_with_another_host_key_until_it_heals(pair: Pair, whole: None) -> None:
    key = ["ssh-keyscan", "-t", "ed25519", pair.address(1)]
    shown = subprocess.run(key, capture_output=True, check=True).stdout
    busy = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\n"
    busy += "print(time.process_time())"
    take = 'python3 -c "print(len(bytearray(500 << 20)))" 2>/dev/null || echo killed'
    for effect in ("slow-cpu", "oom", "hostkey"):
        fault_add(pair.cloud.info, pair.ids[1], effect)
    until(lambda: subprocess.run(key, capture_output=True).stdout not in (shown, b""))
    fault_clear(pair.cloud.info, control.send_command(pair.cloud.info).faults[-1].id)
    until(lambda: subprocess.run(key, capture_output=True).stdout == shown)
    assert float(pair.run(1, f"python3 -c {shlex.quote(busy)}")) < 0.3, "seconds of CPU in one second"
    assert pair.run(1, take) == "killed\n"
    fault_clear(pair.cloud.info)
    assert pair.run(1, take) == f"{500 << 20}\n"


@pytest.mark.skipif(nspawn.find_faketime() is None, reason="Debian's package faketime is missing")
def test_a_login_sees_a_clock_that_is_ahead_until_it_heals(pair: Pair, whole: None) -> None:
    fault_add(pair.cloud.info, pair.ids[1], "clock")
    assert int(pair.run(1, "date +%s")) - time.time() > 100
    fault_clear(pair.cloud.info)
    assert int(pair.run(1, "date +%s")) - time.time() < 2


@pytest.mark.prove
def test_a_shared_folder_is_seen_by_nodes_that_boot_later_read_only(cloud: Cloud, pair: Pair) -> None:
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


def all_reduce(pair: Pair, *, patience_s: int) -> list[subprocess.CompletedProcess[str]]:
    """Start one rank on each node, give them `patience_s` to meet, and return how they ended."""
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
def test_a_process_group_forms_between_two_nodes_of_a_group_that_lets_itself_in(pair: Pair) -> None:
    ec2 = pair.cloud.client("ec2")
    assert all(rank.returncode and not rank.stdout for rank in all_reduce(pair, patience_s=8))
    ec2.authorize_security_group_ingress(**pair.inside)
    try:
        ended = [rank.stdout.split() for rank in all_reduce(pair, patience_s=60)]
    finally:
        ec2.revoke_security_group_ingress(**pair.inside)
    assert [words[0] for words in ended] == ["3.0", "3.0"]
    assert ended[0][1] != ended[1][1]


@pytest.mark.prove
def test_units_of_the_user_data_start_again_after_a_reboot(pair: Pair) -> None:
    boots = pair.run(0, "cat /var/log/boots")
    assert fault_add(pair.cloud.info, pair.ids[0], "reboot") == []
    until(lambda: pair.reaches("grep -c boot /var/log/boots") and pair.run(0, "cat /var/log/boots") > boots)
    assert pair.run(0, "cat /var/log/boots") == boots + "boot\n"


def test_the_console_shows_the_boot_and_the_host_key(pair: Pair) -> None:
    public = (pair.folder / "host.pub").read_text().split()[1]
    console = CloudPaths(pair.cloud.home).nodes / pair.ids[1] / "console.log"
    until(lambda: public in console.read_text(errors="replace"))


def test_a_killed_daemon_finds_its_hosts_again(pair: Pair) -> None:
    up_since = pair.run(0, "systemctl show -p UserspaceTimestampMonotonic")
    pair.cloud.kill()
    assert [one["State"]["Name"] for one in pair.cloud.instances(*pair.ids)] == ["running", "running"]
    assert pair.run(0, "systemctl show -p UserspaceTimestampMonotonic") == up_since


def answers(address: str) -> bool:
    """Whether a machine answers at an address, also that nothing listens there."""
    try:
        socket.create_connection((address, 22), timeout=1).close()
    except TimeoutError:
        return False
    except ConnectionRefusedError:
        pass
    return True


@pytest.mark.prove
@pytest.mark.parametrize(("behaviour", "state"), [("stop", "stopped"), ("terminate", "terminated")])
def test_poweroff_inside_does_what_the_instance_was_launched_for(
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
        until(lambda: not answers(instance["PrivateIpAddress"]))
    ec2.terminate_instances(InstanceIds=[made])
    pair.cloud.wait("terminated", made)
    assert not (pair.cloud.home / "local/nodes" / made).exists()


@pytest.mark.prove
@pytest.mark.timeout(240)
def test_a_host_that_hangs_while_it_boots_is_started_again(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    made = ec2.run_instances(**cloud.request())["Instances"][0]["InstanceId"]
    begun = cloud.home / "local/nodes" / made / "pid"
    systemd: list[str] = []

    def begins() -> bool:
        with suppress(OSError, ValueError):
            pid = int(begun.read_text())
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            # nspawn's first child is a helper that ends at once
            systemd[:] = [one for one in children if Path(f"/proc/{one}/comm").read_text() == "systemd\n"]
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
        cloud.wait("running", *[one["InstanceId"] for one in made])
        assert {"processes", "namespaces", "interfaces", "disks", "cgroups", "files"} <= set(
            left_over(tmp_path)
        )
        if files == "removed":
            shutil.rmtree(tmp_path / "local")
    finally:
        control.stop(tmp_path)
    assert left_over(tmp_path) == {}
