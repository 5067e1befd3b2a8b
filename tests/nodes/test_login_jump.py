"""Over a jump host: a real sshd stands between, and what the user's own ssh knows of it decides."""

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
    """A jump host, and what the user's ssh knows of it: `ssh` on the PATH reads `folder` for ~/.ssh."""

    host: Host
    folder: Path
    jump: Jump

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def know(self, key: KeyPair) -> None:
        self.known_hosts.write_text(f"[{self.host.host}]:{self.host.port} {key.public}\n")

    def demand(self, setting: str) -> None:
        """Start the host anew with another setting, which wins over those that follow it."""
        self.host.stop()
        config = self.host.root / "sshd_config"
        config.write_text(f"{setting}\n{config.read_text()}")
        self.host.start()

    def lines(self) -> int:
        """Count the connections that went through it."""
        return (self.host.root / "log").read_text().count("server_request_direct_tcpip: originator")

    def logins(self) -> int:
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
        made = Bastion(host, folder, Jump(name="bastion", folder=Path(short)))
        made.know(host.seed)
        host.start()
        yield made
        host.stop()
        wait_until(lambda: not made.jump.socket.exists(), "the end of the kept connection")


def test_all_nodes_are_reached_over_one_kept_connection(lab: MakeLab, bastion: Bastion) -> None:
    three = lab(3)
    with three.fleet(jump=bastion.jump) as fleet:
        results = fleet.run(["sh", "-c", "cat; exit 3"], stdin=b"x" * 2**20, timeout_s=20)
        assert [(one.exit_code, len(one.stdout)) for one in results.values()] == [(3, 2**20)] * 3
        fleet.reconnect([1])
        assert fleet.run(["true"], timeout_s=20)[1].exit_code == 0
    with three.fleet(jump=bastion.jump) as fleet:
        assert fleet.nodes == (0, 1, 2)
    assert (bastion.lines(), bastion.logins()) == (7, 1)


def test_commands_that_begin_at_once_share_it_or_stand_by_themselves(lab: MakeLab, bastion: Bastion) -> None:
    one = lab(1)

    def use(number: int) -> int:
        with one.fleet(jump=bastion.jump) as fleet:
            return fleet.run(["sh", "-c", f"exit {number}"], timeout_s=20)[0].exit_code

    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(use, range(4))) == [0, 1, 2, 3]
    with one.fleet(jump=bastion.jump):
        assert bastion.lines() == 5


def test_files_and_a_shell_go_over_it_too(lab: MakeLab, bastion: Bastion, tmp_path: Path) -> None:
    one = lab(1)
    (tmp_path / "home").mkdir()
    data = os.urandom(3 * 2**20)  # more than goes over the first connection: rsync carries it
    (tmp_path / "home" / "data.bin").write_bytes(data)
    one.write_ssh_config(bastion.jump)
    with one.fleet(jump=bastion.jump) as fleet:
        sent = push(list_files_to_send(tmp_path / "home"), fleet)
    assert (sent[0].files, (one.hosts[0].work / "data.bin").read_bytes()) == (1, data)
    assert (bastion.lines(), bastion.logins()) == (2, 1)
    assert (one.ssh(0, "echo there", jump=bastion.jump), bastion.lines()) == ("there\n", 3)


def test_a_shell_goes_there_by_itself_where_no_connection_is_kept(lab: MakeLab, bastion: Bastion) -> None:
    one = lab(1)
    assert (one.ssh(0, "pwd", jump=bastion.jump), bastion.lines()) == (f"{one.hosts[0].home}\n", 1)


def test_a_jump_host_may_be_named_in_full(lab: MakeLab, bastion: Bastion) -> None:
    host = bastion.host
    (bastion.folder / "config").write_text(
        (bastion.folder / "config").read_text().replace("Host bastion", f"Host {host.host}")
    )
    name = f"{getpass.getuser()}@{host.host}:{host.port}"
    with lab(1).fleet(jump=Jump(name=name, folder=bastion.jump.folder)) as fleet:
        assert fleet.nodes == (0,)
    assert bastion.lines() == 1
    host.stop()
    wait_until(lambda: not any(bastion.jump.folder.glob("jump-????????")), "the end of the kept connection")


@pytest.mark.parametrize(
    ("known", "told"),
    [(None, "host key is known"), ("another", "IDENTIFICATION HAS CHANGED")],
)
def test_a_jump_host_whose_key_is_not_known_gets_no_login(
    lab: MakeLab, bastion: Bastion, known: str | None, told: str
) -> None:
    bastion.know(make_key(known)) if known else bastion.known_hosts.write_text("")
    before = bastion.known_hosts.read_text()
    with pytest.raises(JumpFailure) as caught, lab(2).fleet(jump=bastion.jump, deadline_s=600):
        pass
    assert caught.value.exit_code == 6
    assert caught.value.message == "network.jump: cannot log in to bastion"
    assert told in caught.value.why
    assert (bastion.known_hosts.read_text(), bastion.logins()) == (before, 0)
    assert "ssh bastion   # must ask nothing: compare its fingerprint" in caught.value.next


def test_a_login_that_the_jump_host_refuses_is_told_once(lab: MakeLab, bastion: Bastion) -> None:
    (bastion.folder / "id").write_text(make_key("not the right one").private)
    with (
        pytest.raises(JumpFailure, match="cannot log in to bastion") as caught,
        lab(2).fleet(jump=bastion.jump),
    ):
        pass
    assert "Permission denied" in caught.value.why
    assert "ssh-add" in caught.value.next


def test_a_jump_host_that_lets_nothing_through_is_not_waited_for(lab: MakeLab, bastion: Bastion) -> None:
    bastion.demand("AllowTcpForwarding no")
    with (
        pytest.raises(NodesFailed, match="no way to") as caught,
        lab(2).fleet(jump=bastion.jump, deadline_s=3600),
    ):
        pass
    assert "administratively prohibited" in caught.value.why
    assert "AllowTcpForwarding" in caught.value.next


def test_a_jump_host_that_is_off_or_does_not_exist_is_named(lab: MakeLab, bastion: Bastion) -> None:
    bastion.host.stop()
    two = lab(2)
    with pytest.raises(JumpFailure, match="cannot log in to bastion") as caught, two.fleet(jump=bastion.jump):
        pass
    assert "Connection refused" in caught.value.why
    nowhere = Jump(name="nobody@nowhere.invalid", folder=bastion.jump.folder)
    with pytest.raises(JumpFailure, match="nobody@nowhere") as caught, two.fleet(jump=nowhere):
        pass
    assert "resolve hostname" in caught.value.why


def test_a_node_that_the_jump_host_cannot_reach_is_told_with_its_reason(
    lab: MakeLab, bastion: Bastion
) -> None:
    two = lab(2)
    two.hosts[1].stop()
    with two.fleet(jump=bastion.jump, deadline_s=1, partial=True) as fleet:
        assert fleet.nodes == (0,)
        failure = fleet.failures[1]
    assert "unreachable through bastion" in failure.message
    assert "Connection refused" in failure.why
    assert "network.ssh_cidr" in failure.next


def test_a_node_must_show_its_own_host_key_over_a_jump_host_too(
    lab: MakeLab, bastion: Bastion, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lab(1)
    hostkeys.set_keys(one.known_hosts, {one.hosts[0].endpoint.instance_id: make_key("another").public})
    carriers: list[subprocess.Popen[bytes]] = []

    dial = Jump.dial

    def kept(*asked: Any) -> Any:
        line = dial(*asked)
        carriers.append(line.process)
        return line

    monkeypatch.setattr(Jump, "dial", kept)
    with (
        pytest.raises(NodesFailed, match="host key mismatch"),
        one.fleet(jump=bastion.jump, deadline_s=3600),
    ):
        pass
    assert [carrier.returncode is None for carrier in carriers] == [False], "its program runs on"


def test_a_jump_host_that_was_away_is_connected_to_again(lab: MakeLab, bastion: Bastion) -> None:
    one = lab(1)
    with one.fleet(jump=bastion.jump) as fleet:
        bastion.host.stop()
        with pytest.raises(NodesFailed):
            fleet.run(["true"], timeout_s=20)
        fleet.reconnect(partial=True)
        assert (fleet.nodes, "Connection refused" in fleet.failures[0].why) == ((), True)
        bastion.host.start()
        fleet.reconnect(partial=True)
        assert fleet.run(["true"], timeout_s=20)[0].exit_code == 0


@pytest.mark.parametrize("length", [80, 100])  # ssh adds to the path while it makes the socket
def test_a_folder_whose_path_is_too_long_for_a_socket_is_named(bastion: Bastion, length: int) -> None:
    folder = bastion.jump.folder / ("x" * (length - len(str(bastion.jump.folder))))
    with pytest.raises(JumpFailure, match="bastion") as caught:
        Jump(name="bastion", folder=folder).ensure_connected()
    assert "too long" in caught.value.why
    assert "AWSDDP_HOME: a shorter path" in caught.value.next


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "a b", "a;b", "a,b", "u@h:0", "u@h:65536", "h:x", "$(x)", "%h", "u@"]
)
def test_what_is_no_jump_host_is_refused_with_the_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.jump"):
        load(environ={}, overrides={"network.jump": name})
