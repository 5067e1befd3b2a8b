"""Nodes as OpenSSH servers on this machine, each with its own address and home."""

import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from awsddp.nodes.fleet import Fleet
from awsddp.nodes.hostkeys import KeyPair, make_key
from awsddp.nodes.login import Endpoint, Jump, Login, ssh_config
from tests.support.fleet import free_ports

SSHD = "/usr/sbin/sshd"

CONFIG = """\
ListenAddress {host}
Port {port}
HostKey {root}/etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile {root}/authorized_keys
ForceCommand {root}/enter
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
MaxStartups 100
SetEnv HOME={home}
LogLevel VERBOSE
"""

ENTER = """\
#!/bin/sh
export HOME='{home}' AWSDDP_ROOT='{root}' PATH='{root}/bin':"$PATH"
cd "$HOME"
exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""

SYSTEMCTL = """\
#!/bin/sh
case "$1 $2" in
  "is-active ssh.service" | "is-active awsddp-expiry.service") echo active ;;
  "reload ssh.service") kill -HUP $(cat '{root}/sshd.pid') ;;
  *) exit 3 ;;
esac
"""


@dataclass
class Host:
    """An SSH server that a test can stop, freeze and start again."""

    node: int
    host: str
    port: int
    root: Path
    seed: KeyPair
    process: "subprocess.Popen[bytes] | None" = None
    frozen: list[int] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def work(self) -> Path:
        return self.home / "awsddp" / "work"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            node=self.node,
            instance_id=f"i-{self.node:017x}",
            host=self.host,
            port=self.port,
            user=getpass.getuser(),
        )

    def start(self) -> None:
        log = (self.root / "log").open("ab")
        self.process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(self.root / "sshd_config")], stdin=subprocess.DEVNULL, stderr=log
        )
        log.close()
        (self.root / "sshd.pid").write_text(str(self.process.pid))
        wait_until(self._answers, f"sshd of node{self.node}")

    def stop(self) -> None:
        if self.process is not None:
            self.thaw()
            for pid in self.sessions():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """Stop sshd and its sessions by SIGSTOP, as on a machine that hangs."""
        assert self.process is not None
        self.frozen = [self.process.pid, *self.sessions()]
        for pid in self.frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.frozen = []

    def sessions(self) -> list[int]:
        """Return the process ids of the sessions of sshd."""
        assert self.process is not None
        pids, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    todo += [int(child) for child in (task / "children").read_text().split()]
            pids.append(pid)
        return pids[1:]

    def script(self, name: str, text: str) -> None:
        """Put a program of the test first on the PATH of the host."""
        path = self.root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(root=self.root, home=self.home))
        path.chmod(0o755)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection((self.host, self.port), 1) as line:
            return line.recv(4) == b"SSH-"
        return False


@dataclass
class Lab:
    """Several hosts, the login key that they accept, and their known_hosts."""

    folder: Path
    hosts: list[Host]
    key: Path
    known_hosts: Path

    def endpoints(self, jump: Jump | None = None) -> list[Endpoint]:
        """Return the endpoints of the hosts, with instance ids as addresses for jump hosts that use these."""
        by_id = jump is not None and jump.uses_instance_ids
        endpoints = [host.endpoint for host in self.hosts]
        return [replace(row, host=row.instance_id) for row in endpoints] if by_id else endpoints

    def fleet(self, *, jump: Jump | None = None, deadline_s: float = 20, **settings: Any) -> Fleet:
        if jump is None:
            self.write_ssh_config()
        return Fleet(self.endpoints(jump), self.login(jump), deadline_s=deadline_s, **settings)

    def login(self, jump: Jump | None = None) -> Login:
        config = self.folder / "ssh config"
        return Login(key=self.key, known_hosts=self.known_hosts, ssh_config=config, jump=jump)

    @property
    def ssh_config(self) -> Path:
        return self.write_ssh_config()

    def write_ssh_config(self, jump: Jump | None = None) -> Path:
        path = self.folder / "ssh config"
        path.write_text(ssh_config(self.endpoints(jump), self.login(jump)))
        return path

    def ssh(self, node: int, command: str, *, jump: Jump | None = None) -> str:
        """Return the output of a command that the system's ssh runs on a node; its stderr must be empty."""
        config = self.write_ssh_config(jump)
        done = subprocess.run(["ssh", "-F", config, f"node{node}", command], capture_output=True, text=True)
        assert not done.stderr, done.stderr
        return done.stdout


def wait_until(condition: Callable[[], bool], label: str, seconds: float = 20) -> None:
    """Poll a condition until a deadline. Fails with `label` after it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{label}: not within {seconds} s"
        time.sleep(0.02)


def make_host(folder: Path, node: int, login: KeyPair) -> Host:
    """Write the files of a host into `folder`; it is not started yet."""
    address, port = f"127.77.{os.getpid() % 250 + 1}.{node + 1}", free_ports()
    host = Host(node, address, port, folder / f"node{node}", make_key("seed"))
    (host.root / "etc/ssh").mkdir(parents=True)
    host.home.mkdir()
    private = host.root / "etc/ssh/ssh_host_ed25519_key"
    private.touch(mode=0o600)
    private.write_text(host.seed.private)
    (host.root / "authorized_keys").write_text(login.public + "\n")
    (host.root / "sshd_config").write_text(
        CONFIG.format(host=address, port=port, root=host.root, home=host.home)
    )
    (host.root / "enter").write_text(ENTER.format(home=host.home, root=host.root))
    (host.root / "enter").chmod(0o755)
    host.script("systemctl", SYSTEMCTL)
    host.script("cloud-init", "#!/bin/sh\nexit 0\n")
    return host
