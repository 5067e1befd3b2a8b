"""Hosts without root: one sshd each, on the loopback interface; and a whole `run` as an ordinary user."""

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

import awsddp
from awsddp.local import control
from tests.support.local_cloud import Cloud, find_leftovers, needs_root, until
from tests.system.test_hosts import keygen

USER_DATA = """\
#cloud-config
ssh_keys: {{ed25519_private: {private}, ed25519_public: {public}}}
write_files: [{{path: /etc/given, content: "given\\n", permissions: "0640"}}]
bootcmd:
  - echo boot >> /etc/boots
  - |
    cat > /etc/systemd/system/dog.service <<'END'
    [Service]
    ExecStart=/bin/sh -c "while [ ! -e /etc/now ]; do sleep 0.1; done; rm /etc/now; systemctl poweroff"
    END
  - systemctl start --no-block dog.service
runcmd: [[sh, -c, "cat /etc/given > /etc/ran"]]
"""
HELLO = "import os; print('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


class Loopback:
    """A loopback cloud of this user, and logins to its instances."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.login, self.host = keygen(folder / "login"), keygen(folder / "host")
        self.cloud = Cloud(home, control.start(home, mode="loopback"))
        public = self.login.with_suffix(".pub").read_bytes()
        self.cloud.client("ec2").import_key_pair(KeyName="login", PublicKeyMaterial=public)

    def launch(self, behaviour: str = "stop") -> str:
        data = USER_DATA.format(
            private=json.dumps(self.host.read_text()),
            public=json.dumps(self.host.with_suffix(".pub").read_text().strip()),
        )
        request = self.cloud.request(
            KeyName="login", UserData=data, InstanceInitiatedShutdownBehavior=behaviour
        )
        made: str = self.cloud.client("ec2").run_instances(**request)["Instances"][0]["InstanceId"]
        self.cloud.wait("running", made)
        return made

    def ssh(self, instance_id: str, command: str) -> subprocess.CompletedProcess[str]:
        address = self.cloud.instances(instance_id)[0]["PublicIpAddress"]
        known_hosts, port = self.folder / "known", self.cloud.info.ssh_port
        known_hosts.write_text(f"[{address}]:{port} {self.host.with_suffix('.pub').read_text()}")
        options = [f"UserKnownHostsFile={known_hosts}", "StrictHostKeyChecking=yes", "BatchMode=yes"]
        flags = [text for option in options for text in ("-o", option)]
        user = getpass.getuser()
        return subprocess.run(
            [
                "ssh",
                "-F",
                "none",
                "-i",
                str(self.login),
                "-p",
                str(port),
                *flags,
                f"{user}@{address}",
                command,
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )

    def run(self, instance_id: str, command: str) -> str:
        result = self.ssh(instance_id, command)
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    home = tmp_path_factory.mktemp("shelter")
    yield Loopback(tmp_path_factory.mktemp("keys"), home)
    control.stop(home)
    assert find_leftovers(home) == {}


@pytest.mark.prove
def test_a_host_carries_out_the_user_data_and_has_torch(loopback: Loopback) -> None:
    made = loopback.launch()
    assert loopback.run(made, "cat $AWSDDP_ROOT/etc/ran $AWSDDP_ROOT/etc/boots") == "given\nboot\n"
    assert loopback.run(made, "pwd; echo $HOME").split()[0].endswith(f"{made}/home")
    assert loopback.run(made, "sudo -n systemctl is-active dog.service ssh.service") == "active\nactive\n"
    command = '$AWSDDP_ROOT/opt/pytorch/bin/python -c "import torch; print(torch.ones(2).sum().item())"'
    assert loopback.run(made, command) == "2.0\n"
    assert loopback.ssh(made, "exit 7").returncode == 7


def test_user_data_that_is_neither_script_nor_cloud_config_is_rejected(loopback: Loopback) -> None:
    with pytest.raises(ClientError, match="neither a script nor a cloud-config"):
        loopback.cloud.client("ec2").run_instances(**loopback.cloud.request(UserData="neither"))


@pytest.mark.prove
def test_a_reboot_ends_all_processes_and_runs_bootcmd_alone(loopback: Loopback) -> None:
    made = loopback.launch()
    loopback.run(made, "setsid sleep 987 >/dev/null 2>&1 </dev/null & rm $AWSDDP_ROOT/etc/ran; echo 1 > kept")
    loopback.cloud.client("ec2").reboot_instances(InstanceIds=[made])
    until(lambda: loopback.ssh(made, "cat $AWSDDP_ROOT/etc/boots").stdout == "boot\nboot\n")
    assert (
        loopback.run(made, "cat kept; ls $AWSDDP_ROOT/etc/ran 2>/dev/null; pgrep -f 'sleep [9]87' || :")
        == "1\n"
    )


@pytest.mark.parametrize(
    ("behaviour", "state"),
    [("stop", "stopped"), pytest.param("terminate", "terminated", marks=pytest.mark.prove)],
)
def test_a_unit_of_the_user_data_powers_the_host_off(loopback: Loopback, behaviour: str, state: str) -> None:
    made = loopback.launch(behaviour)
    loopback.run(made, "touch $AWSDDP_ROOT/etc/now")
    (instance,) = loopback.cloud.wait(state, made)
    assert instance["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
    if state == "stopped":
        loopback.cloud.client("ec2").start_instances(InstanceIds=[made])
        loopback.cloud.wait("running", made)
        assert loopback.run(made, "cat $AWSDDP_ROOT/etc/boots").startswith("boot\nboot\n")
        loopback.cloud.client("ec2").terminate_instances(InstanceIds=[made])
        loopback.cloud.wait("terminated", made)
    assert not (loopback.cloud.home / "local/nodes" / made).exists()


@pytest.mark.prove
def test_a_restarted_daemon_adopts_its_running_hosts(loopback: Loopback) -> None:
    made = loopback.launch()
    pid = loopback.run(made, "setsid sleep 986 >/dev/null 2>&1 </dev/null & echo $!").strip()
    loopback.cloud.kill()
    assert loopback.run(made, f"kill -0 {pid} && echo there") == "there\n"
    assert loopback.cloud.instances(made)[0]["State"]["Name"] == "running"


@pytest.fixture
def person() -> Iterator[str]:
    """An ordinary user of this machine, with a home folder."""
    name = f"awsddp{os.getpid()}"
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", name], check=True)
    yield name
    subprocess.run(["userdel", "--remove", name], capture_output=True, check=True)


@pytest.mark.prove
@needs_root
def test_an_ordinary_user_can_launch_train_and_terminate(person: str) -> None:
    home = Path("~" + person).expanduser()
    python = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")
    if python is None:
        pytest.skip("this machine's own python is another one")
    packages = [str(Path(awsddp.__file__).parents[1]), str(Path(boto3.__file__).parents[1])]
    environ = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(packages),
        "AWSDDP_CACHE": os.environ.get("AWSDDP_CACHE", "/var/cache/awsddp"),
    }
    as_person = ["setpriv", "--reuid", person, "--regid", person, "--init-groups"]

    def run_awsddp(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*as_person, python, "-m", "awsddp", *args],
            cwd=home / "project",
            env=environ,
            capture_output=True,
            text=True,
            timeout=170,
        )

    subprocess.run([*as_person, "mkdir", str(home / "project")], check=True)
    (home / "project/hello.py").write_text(HELLO)
    result = run_awsddp("run", "hello.py", "--local", "--nodes", "2", "--world-size", "2", "-y", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["train"]["state"] == "succeeded"
    assert [node["nic"] for node in document["up"]["nodes"]] == ["lo", "lo"]
    assert len(document["down"]["terminated"]) == 2
    ps = subprocess.run(["ps", "-u", person, "-o", "stat=,args="], capture_output=True, text=True).stdout
    assert [line for line in ps.splitlines() if not line.startswith("Z")] == []
    assert not (home / ".awsddp/local").exists()
