"""The nodes' endpoints, login and ssh_config, and connections through a jump host or AWS Systems Manager.

The system's ssh connects to a jump host with the user's configuration, agent and keys. All commands,
including rsync and `ssh -F`, share one connection (OpenSSH's ControlMaster), which closes half a minute after
its last use. With Systems Manager, SSH is tunneled through `aws ssm start-session`, and no port is open:
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
from awsddp.settings.values import parse_jump_host
from awsddp.state import make_folder, open_to_append
from awsddp.util.formatting import node_name
from awsddp.util.shipped_files import render

# ssh never shows a prompt, because awsddp may run unattended. ssh never adds a host key.
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
_LOGIN_ADVICE = (
    "must work without a prompt: compare and accept the fingerprint; ssh-add KEY, or set User and "
    "IdentityFile in ~/.ssh/config"
)
PLUGIN = "session-manager-plugin"
_PACKAGES = "https://s3.amazonaws.com/session-manager-downloads/plugin/latest"
_KEY = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/install-plugin-linux-verify-signature.html"
)


class NodeSocket(NamedTuple):
    """A connected socket to a port on a node, and the program that tunnels it through a jump host."""

    socket: socket.socket
    process: "subprocess.Popen[bytes] | None" = None

    def close(self) -> None:
        """Close the socket, and kill the program with its children."""
        self.socket.close()
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class JumpFailure(NodeError):
    """The jump host permanently refuses connections."""


@dataclass(frozen=True, kw_only=True)
class Jump:
    """The jump host `network.jump`. `folder` holds the control socket and the log."""

    name: str
    folder: Path
    uses_instance_ids: ClassVar[bool] = False
    """True if a node is addressed by its instance id."""
    dial_timeout_s: ClassVar[float] = 8.0
    """The timeout in seconds for a connection attempt. It is long, because jump hosts do not stop abandoned
    attempts."""
    permanent_errors: ClassVar[tuple[str, ...]] = ("prohibited",)
    """Texts that appear in permanent errors, which are not retried."""
    remedy: ClassVar[str] = (
        "the jump host's sshd_config must allow it: AllowTcpForwarding, and PermitOpen if set"
    )
    """The next step that is suggested after a permanent error."""
    advice: ClassVar[str] = (
        "network.ssh_cidr must contain the jump host's address as the nodes see it, or its security group\n"
        "awsddp status   # shows whether the node runs"
    )
    """The next step that is suggested if a node is unreachable."""

    @property
    def socket(self) -> Path:
        """The shared connection's control socket."""
        return self.folder / f"jump-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    @property
    def log(self) -> Path:
        """ssh's log, with the shared connection's errors."""
        return self.socket.with_suffix(".log")

    def tunnel_command(self, host: str, port: int | str) -> list[str]:
        """Return the command whose stdin and stdout are connected to a port on a node. Raises ConfigError."""
        return self._ssh_command("-W", f"[{host}]:{port}")

    def proxy_command(self) -> str:
        """Return the ProxyCommand for an ssh_config. Raises ConfigError."""
        line = shlex.join(self.tunnel_command("{host}", "{port}")).replace("%", "%%")
        return line.replace("{host}", "%h").replace("{port}", "%p")

    def ensure_connected(self) -> None:
        """Log in to the jump host, unless a connection is open. Raises JumpFailure, ConfigError."""
        find_program("ssh", f"the jump host {self.name} needs it", "install openssh-client")
        make_folder(self.folder)
        with open_to_append(self.log) as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # concurrent commands must log in only once
            if _exit_code(self._ssh_command("-O", "check")) == 0:
                return
            log.truncate(0)
            # This ssh command continues in the background after the login.
            exit_code = _exit_code(self._ssh_command("-o", "LogLevel=INFO", "-E", os.fspath(self.log), "-N"))
            if exit_code != 0 and _exit_code(self._ssh_command("-O", "check")) != 0:
                log.seek(0)
                raise self._failure(log.read().decode(errors="replace").strip() or "no answer")

    def dial(self, host: str, port: int, timeout_s: float) -> NodeSocket:
        """Connect to a port on a node, and wait for the first byte that it sends.

        Raises OSError, ConfigError, and JumpFailure for permanent errors.
        """
        local_end, remote_end = socket.socketpair()
        with tempfile.TemporaryFile() as errors:
            with remote_end:
                process = subprocess.Popen(
                    self.tunnel_command(host, port),
                    stdin=remote_end.fileno(),
                    stdout=remote_end.fileno(),
                    stderr=errors.fileno(),
                    start_new_session=True,  # Ctrl-C must not end connections that awsddp still needs
                )
            connection = NodeSocket(local_end, process)
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(connection.close)
                local_end.settimeout(timeout_s)
                if local_end.recv(1, socket.MSG_PEEK):
                    on_failure.pop_all()
                    return connection
            errors.seek(0)
            why = self._why(errors.read().decode(errors="replace").strip())
        if any(text in why for text in self.permanent_errors):
            raise JumpFailure(f"network.jump: {self.name}: no way to {host}", why, self.remedy)
        raise ConnectionRefusedError(why)

    def _ssh_command(self, *more: str) -> list[str]:
        """Return the ssh command for the jump host, with the options `more`."""
        destination, port = parse_jump_host(self.name)
        options = [*_OPTIONS, f"ControlPath={_config_path(self.socket)}"]
        option_args = [arg for option in options for arg in ("-o", option)]
        return ["ssh", *more, *option_args, *(["-p", str(port)] if port else []), "--", destination]

    def _why(self, stderr: str) -> str:
        """Return a connection attempt's error, which the shared connection's process may have logged."""
        lines = [text for text in self.log.read_text(errors="replace").splitlines() if _REFUSED in text]
        return lines[-1].partition(_REFUSED)[2] if lines else stderr

    def _failure(self, output: str) -> JumpFailure:
        """Return the error for a failed login, with ssh's output and the next step."""
        destination, port = parse_jump_host(self.name)
        advice = f"ssh {f'-p {port} ' if port else ''}{destination}   # {_LOGIN_ADVICE}"
        if "ControlPath" in output or "unix_listener" in output:  # ssh cannot create the control socket
            advice = "set AWSDDP_HOME to a shorter path, on a file system that supports sockets"
        return JumpFailure(f"network.jump: cannot log in to {self.name}", output, advice)


def _exit_code(argv: list[str]) -> int | None:
    """Run a program without input or output, and return its exit code, or None after a timeout."""
    null = subprocess.DEVNULL
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.call(argv, stdin=null, stdout=null, stderr=null, timeout=_OPEN_S)
    return None


@dataclass(frozen=True, kw_only=True)
class Ssm(Jump):
    """Uses AWS Systems Manager instead of a jump host: each connection is a session that the aws program
    opens."""

    region: str | None = None
    profile: str | None = None
    uses_instance_ids: ClassVar[bool] = True
    dial_timeout_s: ClassVar[float] = 30.0
    # TargetNotConnected is not permanent: a booting node causes it until its SSM agent has registered.
    permanent_errors: ClassVar[tuple[str, ...]] = (
        "AccessDenied",
        "is not found",
        "ExpiredToken",
        "InvalidClientTokenId",
        "locate credentials",
        "usage:",
    )
    remedy: ClassVar[str] = "awsddp doctor --iam-policy   # prints the required permissions"
    advice: ClassVar[str] = (
        "the role of access.instance_profile needs AmazonSSMManagedInstanceCore, and the node must reach "
        "Systems Manager through a route to the internet or VPC endpoints"
    )

    def tunnel_command(self, host: str, port: int | str) -> list[str]:
        """Return the command whose stdin and stdout are connected to a port on the instance `host`."""
        argv = ["aws", "ssm", "start-session", "--target", host]
        argv += ["--document-name", "AWS-StartSSHSession", "--parameters", f"portNumber={port}"]
        argv += ["--region", self.region] if self.region else []
        return [*argv, *(["--profile", self.profile] if self.profile else [])]

    def ensure_connected(self) -> None:
        """Check that the required programs are installed. Raises ConfigError."""
        for program, line in (("aws", "pip install awscli"), (PLUGIN, _install_command())):
            find_program(program, 'network.jump = "ssm" needs it', line)

    def _why(self, stderr: str) -> str:
        return stderr or "the session ended"


def _install_command() -> str:
    """Return the command that verifies AWS's signature, then installs the Session Manager plug-in."""
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
        f"first import AWS's public key into gpg: {_KEY}"
    )


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A node's address. The node's host keys are stored by `instance_id`."""

    node: int
    instance_id: str
    host: str
    port: int = 22
    user: str

    def __str__(self) -> str:
        return f"{self.instance_id} at {self.host}:{self.port}"

    def failure(self, layer: Layer, message: str, why: str = "", next_step: str = "") -> NodeFailure:
        """Return the error for this node."""
        return NodeFailure(self.node, layer, f"{message} ({self})", why, next_step)


@dataclass(frozen=True, kw_only=True)
class Login:
    """The files and settings that are used to log in to any of a cluster's nodes.

    `key`: the file with the login key. `known_hosts`: the file with the accepted host keys by instance id.
    `ssh_config`: a file with the same settings for the system's ssh, which rsync uses. `boot_key`: an
    unfinished launch's temporary host key, or "" if there is none.
    """

    key: Path
    known_hosts: Path
    ssh_config: Path
    jump: Jump | None = None
    boot_key: str = ""


def ssh_config(endpoints: Sequence[Endpoint], login: Login, *, prefix: str = "") -> str:
    """Return an ssh_config for the hosts node0, node1..., with strict host key checks and only the login key.

    `prefix` is prepended to each host name. Other hosts' settings are not changed. Host keys are looked up
    by instance id. Raises ConfigError for a path that ssh_config cannot express.
    """
    proxy = f"    ProxyCommand {login.jump.proxy_command()}\n" if login.jump else ""
    hosts = "".join(
        f"Host {prefix}{node_name(endpoint.node)}\n"
        f"    HostName {endpoint.host}\n"
        f"    Port {endpoint.port}\n"
        f"    User {endpoint.user}\n"
        f"    HostKeyAlias {endpoint.instance_id}\n"
        f"{proxy}"
        for endpoint in endpoints
    )
    return render(
        "ssh_config",
        hosts=hosts,
        names=" ".join(f"{prefix}{node_name(endpoint.node)}" for endpoint in endpoints),
        key=_config_path(login.key),
        known_hosts=_config_path(login.known_hosts),
    )


def _config_path(path: Path) -> str:
    """Return a path quoted for ssh_config, in which %, ~, ${}, quotes and backslashes have a meaning."""
    text = os.fspath(path.absolute())
    if "\n" in text or "${" in text:
        raise ConfigError(
            f"{text!r}: ssh cannot use a path with a newline or ${{", "", "set another AWSDDP_HOME"
        )
    escaped = text.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
