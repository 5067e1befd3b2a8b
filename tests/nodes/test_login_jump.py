"""Connections over a jump host: a real sshd, which is reached with the user's ssh configuration."""

import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes import hostkeys
from awsddp.nodes.hostkeys import KeyPair, make_key
from awsddp.nodes.login import Jump, JumpFailure
from awsddp.nodes.project_files import list_files_to_send
from awsddp.nodes.sync import push
from awsddp.settings.loader import load
from awsddp.util.parallel import NodesFailed
from tests.support.ssh_hosts import Host, Lab, make_host, wait_until

MakeLab = Callable[[int], Lab]
SSH = """\
#!/bin/sh
for word in "$@"; do [ "$word" = -F ] && exec {ssh} "$@"; done
exec {ssh} -F '{config}' "$@"
"""
CONFIG = """\
Host bastion
    HostName {host}
    Port {port}
    User {user}
    IdentityFile "{folder}/id"
Host *
    IdentitiesOnly yes
    UserKnownHostsFile "{folder}/known_hosts"
    GlobalKnownHostsFile /dev/null
    ControlMaster no
    StrictHostKeyChecking accept-new
"""


@dataclass
class Bastion:
    """A jump host. `ssh` on the PATH reads `folder` instead of ~/.ssh."""

    host: Host
    folder: Path
    jump: Jump

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def trust(self, key: KeyPair) -> None:
        self.known_hosts.write_text(f"[{self.host.host}]:{self.host.port} {key.public}\n")

    def restart_with(self, setting: str) -> None:
        """Restart the host with another setting, which overrides later ones."""
        self.host.stop()
        config = self.host.root / "sshd_config"
        config.write_text(f"{setting}\n{config.read_text()}")
        self.host.start()

    def count_forwards(self) -> int:
        """Count the connections that went through it."""
        return (self.host.root / "log").read_text().count("server_request_direct_tcpip: originator")

    def count_logins(self) -> int:
        return (self.host.root / "log").read_text().count("Accepted publickey")


@pytest.fixture
def bastion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated: Path) -> Iterator[Bastion]:
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    login = make_key("the user's own")
    host = make_host(tmp_path, 99, login)
    config = host.root / "sshd_config"
    config.write_text(config.read_text().replace("LogLevel VERBOSE", "LogLevel DEBUG1"))
    folder = tmp_path / "user's .ssh"
    folder.mkdir()
    (folder / "id").touch(mode=0o600)
    (folder / "id").write_text(login.private)
    (folder / "config").write_text(
        CONFIG.format(host=host.host, port=host.port, user=getpass.getuser(), folder=folder)
    )
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH.format(ssh=shutil.which("ssh"), config=str(folder / "config").replace("'", "'\\''")))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=os.pathsep)
    with tempfile.TemporaryDirectory(prefix="a 50%") as short:
        jump_host = Bastion(host, folder, Jump(name="bastion", folder=Path(short)))
        jump_host.trust(host.seed)
        host.start()
        yield jump_host
        host.stop()
        wait_until(lambda: not jump_host.jump.socket.exists(), "the end of the shared connection")


def test_all_nodes_are_reached_over_one_shared_connection(make_lab: MakeLab, bastion: Bastion) -> None:
    lab = make_lab(3)
    with lab.fleet(jump=bastion.jump) as fleet:
        results = fleet.run(["sh", "-c", "cat; exit 3"], stdin=b"x" * 2**20, timeout_s=20)
        assert [(result.exit_code, len(result.stdout)) for result in results.values()] == [(3, 2**20)] * 3
        fleet.reconnect([1])
        assert fleet.run(["true"], timeout_s=20)[1].exit_code == 0
    with lab.fleet(jump=bastion.jump) as fleet:
        assert fleet.nodes == (0, 1, 2)
    assert (bastion.count_forwards(), bastion.count_logins()) == (7, 1)


def test_concurrent_commands_share_a_connection_or_open_their_own(
    make_lab: MakeLab, bastion: Bastion
) -> None:
    lab = make_lab(1)

    def use(number: int) -> int:
        with lab.fleet(jump=bastion.jump) as fleet:
            return fleet.run(["sh", "-c", f"exit {number}"], timeout_s=20)[0].exit_code

    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(use, range(4))) == [0, 1, 2, 3]
    with lab.fleet(jump=bastion.jump):
        assert bastion.count_forwards() == 5


def test_rsync_and_ssh_use_the_shared_connection(make_lab: MakeLab, bastion: Bastion, tmp_path: Path) -> None:
    lab = make_lab(1)
    (tmp_path / "home").mkdir()
    data = os.urandom(3 * 2**20)  # more than goes over the first connection: rsync carries it
    (tmp_path / "home" / "data.bin").write_bytes(data)
    lab.write_ssh_config(bastion.jump)
    with lab.fleet(jump=bastion.jump) as fleet:
        counts = push(list_files_to_send(tmp_path / "home"), fleet)
    assert (counts[0].files, (lab.hosts[0].work / "data.bin").read_bytes()) == (1, data)
    assert (bastion.count_forwards(), bastion.count_logins()) == (2, 1)
    assert (lab.ssh(0, "echo there", jump=bastion.jump), bastion.count_forwards()) == ("there\n", 3)


def test_ssh_connects_without_a_shared_connection(make_lab: MakeLab, bastion: Bastion) -> None:
    lab = make_lab(1)
    assert (lab.ssh(0, "pwd", jump=bastion.jump), bastion.count_forwards()) == (f"{lab.hosts[0].home}\n", 1)


def test_jump_host_may_be_user_host_and_port(make_lab: MakeLab, bastion: Bastion) -> None:
    host = bastion.host
    (bastion.folder / "config").write_text(
        (bastion.folder / "config").read_text().replace("Host bastion", f"Host {host.host}")
    )
    name = f"{getpass.getuser()}@{host.host}:{host.port}"
    with make_lab(1).fleet(jump=Jump(name=name, folder=bastion.jump.folder)) as fleet:
        assert fleet.nodes == (0,)
    assert bastion.count_forwards() == 1
    host.stop()
    wait_until(lambda: not any(bastion.jump.folder.glob("jump-????????")), "the end of the shared connection")


@pytest.mark.parametrize(
    ("known_key", "reason"),
    [(None, "host key is known"), ("another", "IDENTIFICATION HAS CHANGED")],
)
def test_jump_host_without_a_known_key_gets_no_login(
    make_lab: MakeLab, bastion: Bastion, known_key: str | None, reason: str
) -> None:
    bastion.trust(make_key(known_key)) if known_key else bastion.known_hosts.write_text("")
    before = bastion.known_hosts.read_text()
    with pytest.raises(JumpFailure) as error, make_lab(2).fleet(jump=bastion.jump, deadline_s=600):
        pass
    assert error.value.exit_code == 6
    assert error.value.message == "network.jump: cannot log in to bastion"
    assert reason in error.value.why
    assert (bastion.known_hosts.read_text(), bastion.count_logins()) == (before, 0)
    assert "ssh bastion   # must work without a prompt: compare" in error.value.next


def test_login_refused_by_the_jump_host_is_reported_once(make_lab: MakeLab, bastion: Bastion) -> None:
    (bastion.folder / "id").write_text(make_key("not the right one").private)
    with (
        pytest.raises(JumpFailure, match="cannot log in to bastion") as error,
        make_lab(2).fleet(jump=bastion.jump),
    ):
        pass
    assert "Permission denied" in error.value.why
    assert "ssh-add" in error.value.next


def test_jump_host_without_forwarding_is_not_retried(make_lab: MakeLab, bastion: Bastion) -> None:
    bastion.restart_with("AllowTcpForwarding no")
    with (
        pytest.raises(NodesFailed, match="no way to") as error,
        make_lab(2).fleet(jump=bastion.jump, deadline_s=3600),
    ):
        pass
    assert "administratively prohibited" in error.value.why
    assert "AllowTcpForwarding" in error.value.next


def test_unreachable_jump_host_is_named(make_lab: MakeLab, bastion: Bastion) -> None:
    bastion.host.stop()
    lab = make_lab(2)
    with pytest.raises(JumpFailure, match="cannot log in to bastion") as error, lab.fleet(jump=bastion.jump):
        pass
    assert "Connection refused" in error.value.why
    nowhere = Jump(name="nobody@nowhere.invalid", folder=bastion.jump.folder)
    with pytest.raises(JumpFailure, match="nobody@nowhere") as error, lab.fleet(jump=nowhere):
        pass
    assert "resolve hostname" in error.value.why


def test_node_that_the_jump_host_cannot_reach_is_reported_with_the_reason(
    make_lab: MakeLab, bastion: Bastion
) -> None:
    lab = make_lab(2)
    lab.hosts[1].stop()
    with lab.fleet(jump=bastion.jump, deadline_s=1, partial=True) as fleet:
        assert fleet.nodes == (0,)
        failure = fleet.failures[1]
    assert "unreachable through bastion" in failure.message
    assert "Connection refused" in failure.why
    assert "network.ssh_cidr" in failure.next


def test_host_key_of_a_node_is_checked_over_a_jump_host_too(
    make_lab: MakeLab, bastion: Bastion, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(1)
    hostkeys.set_keys(lab.known_hosts, {lab.hosts[0].endpoint.instance_id: make_key("another").public})
    carriers: list[subprocess.Popen[bytes]] = []

    dial = Jump.dial

    def record_dial(*arguments: Any) -> Any:
        connection = dial(*arguments)
        carriers.append(connection.process)
        return connection

    monkeypatch.setattr(Jump, "dial", record_dial)
    with (
        pytest.raises(NodesFailed, match="host key mismatch"),
        lab.fleet(jump=bastion.jump, deadline_s=3600),
    ):
        pass
    assert [carrier.returncode is None for carrier in carriers] == [False], "its program still runs"


def test_restarted_jump_host_is_connected_to_again(make_lab: MakeLab, bastion: Bastion) -> None:
    lab = make_lab(1)
    with lab.fleet(jump=bastion.jump) as fleet:
        bastion.host.stop()
        with pytest.raises(NodesFailed):
            fleet.run(["true"], timeout_s=20)
        fleet.reconnect(partial=True)
        assert (fleet.nodes, "Connection refused" in fleet.failures[0].why) == ((), True)
        bastion.host.start()
        fleet.reconnect(partial=True)
        assert fleet.run(["true"], timeout_s=20)[0].exit_code == 0


@pytest.mark.parametrize("length", [80, 100])  # ssh adds to the path while it makes the socket
def test_path_too_long_for_a_socket_is_reported(bastion: Bastion, length: int) -> None:
    folder = bastion.jump.folder / ("x" * (length - len(str(bastion.jump.folder))))
    with pytest.raises(JumpFailure, match="bastion") as error:
        Jump(name="bastion", folder=folder).ensure_connected()
    assert "too long" in error.value.why
    assert "AWSDDP_HOME to a shorter path" in error.value.next


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "a b", "a;b", "a,b", "u@h:0", "u@h:65536", "h:x", "$(x)", "%h", "u@"]
)
def test_invalid_jump_host_is_refused_with_its_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.jump"):
        load(environ={}, overrides={"network.jump": name})
