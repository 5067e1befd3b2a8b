"""How nodes are reached: endpoint, login, ssh_config; over a jump host, or through AWS Systems Manager.

To a jump host the system's own ssh goes, with the user's configuration, agent and keys. One connection is
kept and shared (OpenSSH's ControlMaster), by rsync and `ssh -F` as well; it ends by itself half a minute
after the last line over it. Through Systems Manager `aws ssm start-session` carries SSH to a node, and no
port is open:
https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-getting-started-enable-ssh-connections.html
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from awsddp.errors import ConfigError, NodeError
from awsddp.nodes.failures import Layer, NodeFailure, find_program
from awsddp.report import node_name
from awsddp.resources import render
from awsddp.state import make_folder
from awsddp.values import jump_host

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
_LONGEST = 86  # of a socket's path: 104 at the least, less what ssh adds to it while it is made
_OPEN_S = 60.0
_AGAIN_S = 1.0
PLUGIN = "session-manager-plugin"
_PACKAGES = "https://s3.amazonaws.com/session-manager-downloads/plugin/latest"
_KEY = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/install-plugin-linux-verify-signature.html"
)
# What no repetition helps against; a node that boots is TargetNotConnected until its agent has reported.
_FINAL = (
    "AccessDenied",
    "is not found",
    "ExpiredToken",
    "InvalidClientTokenId",
    "locate credentials",
    "usage:",
)
# What ssh says where trying again does not help: what failed, and what to type. The first row counts.
_REFUSALS = (
    (
        ("IDENTIFICATION HAS CHANGED",),
        "it shows another host key than the one that you know",
        "somebody else may answer there; if its key was changed, drop the old one as ssh says above",
    ),
    (
        ("Host key verification failed", "host key is known"),
        "unknown host key",
        "{command}   # compare the fingerprint, and say yes if it is right; then again",
    ),
    (
        ("Permission denied", "authentication failures"),
        "login refused",
        "{command}   # must ask nothing: ssh-add KEY, or User and IdentityFile in ~/.ssh/config",
    ),
    (
        ("prohibited",),
        "it does not let connections through",
        "its sshd_config must allow it: AllowTcpForwarding, and PermitOpen where there is one",
    ),
    (("resolve hostname",), "unknown host", "fix network.jump, or define the host in ~/.ssh/config"),
)
_UNREACHABLE = ("unreachable", "{command}   # must work first: is it up, are you in its network?")


class Line(NamedTuple):
    """A connected socket to a port of a node, and the program that carries it over a jump host."""

    socket: socket.socket
    carrier: "subprocess.Popen[bytes] | None" = None

    def close(self) -> None:
        """Close the socket, and end the program."""
        self.socket.close()
        if self.carrier is not None:
            self.carrier.kill()
            self.carrier.wait()


class JumpFailure(NodeError):
    """The jump host lets nothing through. `final` tells that trying again would not help."""

    def __init__(self, message: str, why: str, next: str, *, final: bool) -> None:
        super().__init__(message, why, next)
        self.final = final


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A jump host as `network.jump` names it. What is kept of it lies in `folder`."""

    name: str
    folder: Path
    by_id: ClassVar[bool] = False
    """Whether it knows nodes by their instance id, not by an address."""
    dial_s: ClassVar[float] = 8.0
    """How long a line may take to open: a jump host goes on with what was given up, so rather fewer tries."""
    program: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen
    """What runs the carrier of a line."""

    @property
    def socket(self) -> Path:
        """Where its connection is shared."""
        return self.folder / f"jump-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    @property
    def log(self) -> Path:
        """Why the connection, or a line over it, was refused."""
        return self.socket.with_suffix(".log")

    @property
    def command(self) -> str:
        """What the user types to get there."""
        destination, port = jump_host(self.name)
        return f"ssh {f'-p {port} ' if port else ''}{destination}"

    def words(self, *more: str) -> list[str]:
        """Return the command line of ssh to it, with `more` options. Raises ConfigError."""
        if len(os.fsencode(self.socket)) > _LONGEST:
            raise ConfigError(
                f"path too long for the connection to {self.name}: {self.folder}",
                "a socket's path is limited to about 100 characters",
                "set a shorter AWSDDP_HOME",
            )
        destination, port = jump_host(self.name)
        options = [*_OPTIONS, f"ControlPath={_config_path(self.socket)}"]
        given = [word for option in options for word in ("-o", option)]
        return ["ssh", *more, *given, *(["-p", str(port)] if port else []), "--", destination]

    def proxy_command(self) -> str:
        """Return the ProxyCommand with which an ssh_config goes over it. Raises ConfigError."""
        before, place, after = shlex.join(self.words("-W", "PLACE")).replace("%", "%%").partition("PLACE")
        assert place
        return f"{before}'[%h]:%p'{after}"

    @property
    def advice(self) -> str:
        """What to look at where it does not reach a node."""
        return (
            f"network.ssh_cidr must hold the address, or the group, of {self.name} as the nodes see it\n"
            "awsddp status   # whether the machine runs"
        )

    def reach(self, *, deadline_s: float = 0) -> None:
        """Connect to the jump host, unless that is done; until the deadline try again.

        Raises JumpFailure, ConfigError.
        """
        find_program("ssh", f"the jump host {self.name} needs it", "install openssh-client")
        end = time.monotonic() + deadline_s
        while not self._answers():
            try:
                self._connect()
            except JumpFailure as failure:
                if failure.final or time.monotonic() + _AGAIN_S > end:
                    raise
                time.sleep(_AGAIN_S)

    def dial(self, host: str, port: int, timeout_s: float) -> Line:
        """Return a line to a port of a node, on which the other side has begun to speak.

        Raises OSError, JumpFailure where trying again would not help, ConfigError.
        """
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as errors:
            with theirs:
                line = Line(ours, self._start(self.carrier(host, port), theirs.fileno(), errors.fileno()))
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(line.close)
                ours.settimeout(timeout_s)
                if ours.recv(1, socket.MSG_PEEK):
                    on_failure.pop_all()
                    return line
            errors.seek(0)
            raise self.refusal(host, errors.read().decode(errors="replace").strip())

    def carrier(self, host: str, port: int | str) -> list[str]:
        """Return the command line whose stdin and stdout are a port of a node. Raises ConfigError."""
        return self._logged("-W", f"[{host}]:{port}")

    def refusal(self, host: str, said: str) -> Exception:
        """Return the error for a line that was not opened: `said` is what its carrier says of it."""
        lines = [text for text in self._said().splitlines() if "open failed: " in text]
        why = lines[-1].partition("open failed: ")[2] if lines else "the jump host opened no way to it"
        return self._explained(why) if "prohibited" in why else ConnectionRefusedError(why)

    def _answers(self) -> bool:
        return subprocess.run(self.words("-O", "check"), capture_output=True).returncode == 0

    def _connect(self) -> None:
        make_folder(self.folder)
        self.log.unlink(missing_ok=True)
        process = self._start(self._logged("-N"))  # goes on in the background once it is logged in
        end = time.monotonic() + _OPEN_S
        try:
            while process.poll() is None and time.monotonic() < end:
                try:
                    process.wait(1)
                except subprocess.TimeoutExpired:
                    if self._answers():  # another awsddp was faster
                        return
            if process.returncode != 0 and not self._answers():
                raise self._explained(self._said() or f"no answer within {_OPEN_S:.0f} s")
        finally:
            process.kill()
            process.wait()

    def _start(
        self, argv: list[str], line: int = subprocess.DEVNULL, errors: int = subprocess.DEVNULL
    ) -> "subprocess.Popen[bytes]":
        """Start a program; Ctrl-C is for awsddp, which still needs its lines."""
        return self.program(argv, stdin=line, stdout=line, stderr=errors, start_new_session=True)

    def _logged(self, *words: str) -> list[str]:
        return self.words("-o", "LogLevel=INFO", "-E", os.fspath(self.log), *words)

    def _said(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def _explained(self, said: str) -> JumpFailure:
        """Return the error for what ssh said: what failed, and what to type."""
        rows = ((what, remedy) for words, what, remedy in _REFUSALS if any(word in said for word in words))
        what, remedy = next(rows, _UNREACHABLE)
        message, final = f"network.jump: {self.name}: {what}", what != _UNREACHABLE[0]
        return JumpFailure(message, said, remedy.format(command=self.command), final=final)


class _Session(subprocess.Popen[bytes]):
    """The aws command line; the plug-in that it starts is its child, and has to end with it."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Ssm(Jump):
    """Systems Manager in place of a jump host: each line is a session of the aws command line."""

    region: str | None = None
    profile: str | None = None
    by_id: ClassVar[bool] = True
    dial_s: ClassVar[float] = 30.0
    program: ClassVar[type[subprocess.Popen[bytes]]] = _Session

    def carrier(self, host: str, port: int | str) -> list[str]:
        """Return the command line whose stdin and stdout are a port of the node with this instance id."""
        words = ["aws", "ssm", "start-session", "--target", host]
        words += ["--document-name", "AWS-StartSSHSession", "--parameters", f"portNumber={port}"]
        words += ["--region", self.region] if self.region else []
        return [*words, *(["--profile", self.profile] if self.profile else [])]

    def proxy_command(self) -> str:
        """Return the ProxyCommand with which an ssh_config goes over it."""
        words = [word.replace("%", "%%") for word in self.carrier("HOST", "PORT")]
        return shlex.join(words).replace(" HOST ", " %h ").replace("portNumber=PORT", "portNumber=%p")

    @property
    def advice(self) -> str:
        """What to look at where it does not reach a node."""
        return (
            "the role of access.instance_profile needs AmazonSSMManagedInstanceCore, and the node a way to "
            "Systems Manager: a route out, or VPC endpoints"
        )

    def reach(self, *, deadline_s: float = 0) -> None:
        """Check that the programs are here: a session is with a node. Raises ConfigError."""
        for program, line in (("aws", "pip install awscli"), (PLUGIN, _install())):
            find_program(program, 'network.jump = "ssm" needs it', line)

    def refusal(self, host: str, said: str) -> Exception:
        """Return the error for a session that was not opened."""
        said = said or "the session ended"
        if not any(word in said for word in _FINAL):
            return ConnectionRefusedError(said)
        advice = "awsddp doctor --iam-policy   # prints the rights that it needs"
        return JumpFailure(f"network.jump: ssm: no session with {host}", said, advice, final=True)


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
    host; `ssh_config` says all this to the system's ssh, which rsync uses.
    """

    key: Path
    known_hosts: Path
    ssh_config: Path
    jump: Jump | None = None


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
