"""How nodes are reached: endpoint, login, ssh_config; over a jump host, or through AWS Systems Manager.

To a jump host the system's own ssh goes, with the user's configuration, agent and keys. One connection is
kept and shared (OpenSSH's ControlMaster), by rsync and `ssh -F` as well; it ends by itself half a minute
after the last line over it. Through Systems Manager `aws ssm start-session` carries SSH to a node, and no
port is open:
https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-getting-started-enable-ssh-connections.html
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from awsddp.errors import ConfigError, NodeError
from awsddp.nodes.node_failures import Layer, NodeFailure, find_program
from awsddp.settings.values import jump_host
from awsddp.state import make_folder, open_to_append
from awsddp.util.format import node_name
from awsddp.util.shipped_files import render

# Nothing is asked, as nobody may be there to answer, and no host key is ever added.
_OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "UpdateHostKeys=no",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "ConnectTimeout=15",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=4",
    "LogLevel=ERROR",
    "ControlMaster=auto",
    "ControlPersist=30",
)
_OPEN_S = 60.0
_REFUSED = "open failed: "
_HOW = (
    "must ask nothing: compare its fingerprint and accept it; ssh-add KEY, or User and IdentityFile in "
    "~/.ssh/config"
)
PLUGIN = "session-manager-plugin"
_PACKAGES = "https://s3.amazonaws.com/session-manager-downloads/plugin/latest"
_KEY = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/install-plugin-linux-verify-signature.html"
)


class Line(NamedTuple):
    """A connected socket to a port of a node, and the program that carries it over a jump host."""

    socket: socket.socket
    carrier: "subprocess.Popen[bytes] | None" = None

    def close(self) -> None:
        """Close the socket, and end the program with its children."""
        self.socket.close()
        if self.carrier is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.carrier.pid, signal.SIGKILL)
            self.carrier.wait()


class JumpFailure(NodeError):
    """The jump host lets nothing through, and trying again would not help."""


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A jump host as `network.jump` names it. What is kept of it lies in `folder`."""

    name: str
    folder: Path
    by_id: ClassVar[bool] = False
    """Whether it knows nodes by their instance id, not by an address."""
    dial_s: ClassVar[float] = 8.0
    """How long a line may take to open: a jump host goes on with what was given up, so rather fewer tries."""
    final: ClassVar[tuple[str, ...]] = ("prohibited",)
    """The texts of a refusal that stays, whatever is tried again."""
    remedy: ClassVar[str] = (
        "its sshd_config must allow it: AllowTcpForwarding, and PermitOpen where there is one"
    )
    """What to do about such a refusal."""
    advice: ClassVar[str] = (
        "network.ssh_cidr must hold the address, or the group, of the jump host as the nodes see it\n"
        "awsddp status   # whether the machine runs"
    )
    """What to look at where it does not reach a node."""

    @property
    def socket(self) -> Path:
        """Where its connection is shared."""
        return self.folder / f"jump-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    @property
    def log(self) -> Path:
        """Why the connection, or a line over it, was refused."""
        return self.socket.with_suffix(".log")

    def carrier(self, host: str, port: int | str) -> list[str]:
        """Return the command line whose stdin and stdout are a port of a node. Raises ConfigError."""
        return self._words("-W", f"[{host}]:{port}")

    def proxy_command(self) -> str:
        """Return the ProxyCommand with which an ssh_config goes over it. Raises ConfigError."""
        line = shlex.join(self.carrier("{host}", "{port}")).replace("%", "%%")
        return line.replace("{host}", "%h").replace("{port}", "%p")

    def reach(self) -> None:
        """Log in to the jump host, unless a connection to it is kept. Raises JumpFailure, ConfigError."""
        find_program("ssh", f"the jump host {self.name} needs it", "install openssh-client")
        make_folder(self.folder)
        with open_to_append(self.log) as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # commands that begin at once log in once
            if _ended(self._words("-O", "check")) == 0:
                return
            log.truncate(0)
            # Once it is logged in it goes on in the background.
            ended = _ended(self._words("-o", "LogLevel=INFO", "-E", os.fspath(self.log), "-N"))
            if ended != 0 and _ended(self._words("-O", "check")) != 0:
                log.seek(0)
                raise self._failure(log.read().decode(errors="replace").strip() or "no answer")

    def dial(self, host: str, port: int, timeout_s: float) -> Line:
        """Return a line to a port of a node, on which the other side has begun to speak.

        Raises OSError, JumpFailure where trying again would not help, ConfigError.
        """
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as errors:
            with theirs:
                carrier = subprocess.Popen(
                    self.carrier(host, port),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=errors.fileno(),
                    start_new_session=True,  # Ctrl-C is for awsddp, which still needs its lines
                )
            line = Line(ours, carrier)
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(line.close)
                ours.settimeout(timeout_s)
                if ours.recv(1, socket.MSG_PEEK):
                    on_failure.pop_all()
                    return line
            errors.seek(0)
            why = self._why(errors.read().decode(errors="replace").strip())
        if any(text in why for text in self.final):
            raise JumpFailure(f"network.jump: {self.name}: no way to {host}", why, self.remedy)
        raise ConnectionRefusedError(why)

    def _words(self, *more: str) -> list[str]:
        """Return the command line of ssh to it, with `more` options."""
        destination, port = jump_host(self.name)
        options = [*_OPTIONS, f"ControlPath={_config_path(self.socket)}"]
        given = [word for option in options for word in ("-o", option)]
        return ["ssh", *more, *given, *(["-p", str(port)] if port else []), "--", destination]

    def _why(self, said: str) -> str:
        """Return why a line was not opened: the program that keeps the connection writes it to the log."""
        lines = [text for text in self.log.read_text(errors="replace").splitlines() if _REFUSED in text]
        return lines[-1].partition(_REFUSED)[2] if lines else said

    def _failure(self, said: str) -> JumpFailure:
        """Return the error of a login that failed: in ssh's own words, with what to type."""
        destination, port = jump_host(self.name)
        next = f"ssh {f'-p {port} ' if port else ''}{destination}   # {_HOW}"
        if "ControlPath" in said or "unix_listener" in said:  # the socket that is to share the connection
            next = "set another AWSDDP_HOME: a shorter path, on a disk that holds sockets"
        return JumpFailure(f"network.jump: cannot log in to {self.name}", said, next)


def _ended(argv: list[str]) -> int | None:
    """Return the exit code of a program without input and output; None if it runs on, and is ended."""
    none = subprocess.DEVNULL
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.call(argv, stdin=none, stdout=none, stderr=none, timeout=_OPEN_S)
    return None


@dataclass(frozen=True, kw_only=True)
class Ssm(Jump):
    """Systems Manager in place of a jump host: each line is a session of the aws command line."""

    region: str | None = None
    profile: str | None = None
    by_id: ClassVar[bool] = True
    dial_s: ClassVar[float] = 30.0
    # A node that boots is TargetNotConnected until its agent has reported.
    final: ClassVar[tuple[str, ...]] = (
        "AccessDenied",
        "is not found",
        "ExpiredToken",
        "InvalidClientTokenId",
        "locate credentials",
        "usage:",
    )
    remedy: ClassVar[str] = "awsddp doctor --iam-policy   # prints the rights that it needs"
    advice: ClassVar[str] = (
        "the role of access.instance_profile needs AmazonSSMManagedInstanceCore, and the node a way to "
        "Systems Manager: a route out, or VPC endpoints"
    )

    def carrier(self, host: str, port: int | str) -> list[str]:
        """Return the command line whose stdin and stdout are a port of the node with this instance id."""
        words = ["aws", "ssm", "start-session", "--target", host]
        words += ["--document-name", "AWS-StartSSHSession", "--parameters", f"portNumber={port}"]
        words += ["--region", self.region] if self.region else []
        return [*words, *(["--profile", self.profile] if self.profile else [])]

    def reach(self) -> None:
        """Check that the programs are here: a session is with a node. Raises ConfigError."""
        for program, line in (("aws", "pip install awscli"), (PLUGIN, _install())):
            find_program(program, 'network.jump = "ssm" needs it', line)

    def _why(self, said: str) -> str:
        return said or "the session ended"


def _install() -> str:
    """Return the line that installs the plug-in on this machine, once gpg has found AWS's signature right."""
    if platform.system() == "Darwin":
        return "brew install --cask session-manager-plugin"
    kind = "arm64" if platform.machine() in ("aarch64", "arm64") else "64bit"
    system, suffix, install = "linux", "rpm", "yum install -y ./"
    if shutil.which("dpkg"):
        system, suffix, install = "ubuntu", "deb", "dpkg -i "
    file, url = f"{PLUGIN}.{suffix}", f"{_PACKAGES}/{system}_{kind}/{PLUGIN}.{suffix}"
    return (
        f'(cd "$(mktemp -d)" && curl -fsSL --remote-name-all {url} {url}.sig && '
        f"gpg --verify {file}.sig {file} && sudo {install}{file})\n"
        f"gpg needs AWS's public key for it first: {_KEY}"
    )


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """How a node is reached. `instance_id` names its host keys."""

    node: int
    instance_id: str
    host: str
    port: int = 22
    user: str

    def __str__(self) -> str:
        return f"{self.instance_id} at {self.host}:{self.port}"

    def failure(self, layer: Layer, message: str, why: str = "", next: str = "") -> NodeFailure:
        """Return the error of this node."""
        return NodeFailure(self.node, layer, f"{message} ({self})", why, next)


@dataclass(frozen=True, kw_only=True)
class Login:
    """What a login to any node of a cluster needs beside its endpoint.

    `key` is the file of the login key, `known_hosts` the accepted host keys by instance id, `jump` the jump
    host; `ssh_config` says all this to the system's ssh, which rsync uses. `boot_key` is the temporary host
    key of a launch that is not finished, "" for none.
    """

    key: Path
    known_hosts: Path
    ssh_config: Path
    jump: Jump | None = None
    boot_key: str = ""


def ssh_config(endpoints: Sequence[Endpoint], login: Login, *, prefix: str = "") -> str:
    """Return an ssh_config that reaches the nodes as node0, node1...: strict, by this key alone.

    It sets nothing for other hosts; `prefix` is put before each name. Host keys go by instance id. Raises
    ConfigError for a path that ssh_config cannot hold.
    """
    over = f"    ProxyCommand {login.jump.proxy_command()}\n" if login.jump else ""
    hosts = "".join(
        f"Host {prefix}{node_name(one.node)}\n"
        f"    HostName {one.host}\n"
        f"    Port {one.port}\n"
        f"    User {one.user}\n"
        f"    HostKeyAlias {one.instance_id}\n"
        f"{over}"
        for one in endpoints
    )
    return render(
        "ssh_config",
        hosts=hosts,
        names=" ".join(f"{prefix}{node_name(one.node)}" for one in endpoints),
        key=_config_path(login.key),
        known_hosts=_config_path(login.known_hosts),
    )


def _config_path(path: Path) -> str:
    """Return a path as a word of ssh_config, which expands %, ~ and ${} and knows quotes and backslashes."""
    text = os.fspath(path.absolute())
    if "\n" in text or "${" in text:
        raise ConfigError(
            f"{text!r}: ssh cannot use a path with a newline or ${{", "", "set another AWSDDP_HOME"
        )
    escaped = text.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
