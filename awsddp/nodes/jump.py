"""The way over a jump host: the system's own ssh goes there, with the user's configuration, agent and keys.

One connection is kept and shared (OpenSSH's ControlMaster), by rsync and `ssh -F` as well; it ends by itself
half a minute after the last line over it.
"""

import contextlib
import hashlib
import os
import shlex
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from awsddp.errors import ConfigError, NodeError
from awsddp.nodes.failures import find_program
from awsddp.nodes.rendering import config_path
from awsddp.spec import jump_host
from awsddp.state import make_folder

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
        options = [*_OPTIONS, f"ControlPath={config_path(self.socket)}"]
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
        while not _answers(self):
            try:
                _connect(self)
            except JumpFailure as failure:
                if failure.final or time.monotonic() + _AGAIN_S > end:
                    raise
                time.sleep(_AGAIN_S)

    def dial(self, host: str, port: int, timeout_s: float) -> Line:
        """Return a line to a port that the jump host reaches, on which the other side has begun to speak.

        Raises OSError, JumpFailure where the jump host forbids it, ConfigError.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            line = Line(ours, _start(self, "-W", f"[{host}]:{port}", line=theirs))
        if not first_word(line, timeout_s):
            said = [text for text in _said(self).splitlines() if "open failed: " in text]
            why = said[-1].partition("open failed: ")[2] if said else "the jump host opened no way to it"
            if "prohibited" in why:
                raise _explained(self, why)
            raise ConnectionRefusedError(why)
        return line


def first_word(line: Line, timeout_s: float) -> bool:
    """Wait until the other side speaks; where it hangs up close the line and return False.

    Raises TimeoutError, the line closed.
    """
    spoke = False
    try:
        line.socket.settimeout(timeout_s)
        spoke = bool(line.socket.recv(1, socket.MSG_PEEK))
    finally:
        if not spoke:
            line.close()
    return spoke


def _answers(jump: Jump) -> bool:
    return subprocess.run(jump.words("-O", "check"), capture_output=True).returncode == 0


def _connect(jump: Jump) -> None:
    make_folder(jump.folder)
    jump.log.unlink(missing_ok=True)
    process = _start(jump, "-N")  # goes on in the background once it is logged in
    end = time.monotonic() + _OPEN_S
    try:
        while process.poll() is None and time.monotonic() < end:
            try:
                process.wait(1)
            except subprocess.TimeoutExpired:
                if _answers(jump):  # another awsddp was faster
                    return
        if process.returncode != 0 and not _answers(jump):
            raise _explained(jump, _said(jump) or f"no answer within {_OPEN_S:.0f} s")
    finally:
        process.kill()
        process.wait()


def _start(jump: Jump, *words: str, line: socket.socket | None = None) -> "subprocess.Popen[bytes]":
    end = line.fileno() if line is not None else subprocess.DEVNULL
    return subprocess.Popen(
        jump.words("-o", "LogLevel=INFO", "-E", os.fspath(jump.log), *words),
        stdin=end,
        stdout=end,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for awsddp, which still needs its lines
    )


def _said(jump: Jump) -> str:
    with contextlib.suppress(FileNotFoundError):
        return jump.log.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _explained(jump: Jump, said: str) -> JumpFailure:
    """Return the error for what ssh said: what failed, and what to type."""
    final = True
    if "IDENTIFICATION HAS CHANGED" in said:
        what = "it shows another host key than the one that you know"
        next = "somebody else may answer there; if its key was changed, drop the old one as ssh says above"
    elif "Host key verification failed" in said or "host key is known" in said:
        what = "unknown host key"
        next = f"{jump.command}   # compare the fingerprint, and say yes if it is right; then again"
    elif "Permission denied" in said or "authentication failures" in said:
        what = "login refused"
        next = f"{jump.command}   # must ask nothing: ssh-add KEY, or User and IdentityFile in ~/.ssh/config"
    elif "prohibited" in said:
        what = "it does not let connections through"
        next = "its sshd_config must allow it: AllowTcpForwarding, and PermitOpen where there is one"
    elif "resolve hostname" in said:
        what = "unknown host"
        next = "fix network.jump, or define the host in ~/.ssh/config"
    else:
        what, final = "unreachable", False
        next = f"{jump.command}   # must work first: is it up, are you in its network?"
    return JumpFailure(f"network.jump: {jump.name}: {what}", said, next, final=final)
