"""The way through AWS Systems Manager: `aws ssm start-session` carries SSH to a node, and no port is open.

https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-getting-started-enable-ssh-connections.html
"""

import contextlib
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from typing import ClassVar

from awsddp.nodes.failures import find_program
from awsddp.nodes.jump import Jump, JumpFailure, Line, first_word

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


@dataclass(frozen=True, kw_only=True)
class Ssm(Jump):
    """Systems Manager in place of a jump host: each line is a session of the aws command line."""

    region: str | None = None
    profile: str | None = None
    by_id: ClassVar[bool] = True
    dial_s: ClassVar[float] = 30.0

    def session(self, instance_id: str, port: int | str) -> list[str]:
        """Return the command line whose stdin and stdout are a port of a node."""
        words = ["aws", "ssm", "start-session", "--target", instance_id]
        words += ["--document-name", "AWS-StartSSHSession", "--parameters", f"portNumber={port}"]
        words += ["--region", self.region] if self.region else []
        return [*words, *(["--profile", self.profile] if self.profile else [])]

    def proxy_command(self) -> str:
        """Return the ProxyCommand with which an ssh_config goes over it."""
        words = [word.replace("%", "%%") for word in self.session("HOST", "PORT")]
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

    def dial(self, host: str, port: int, timeout_s: float) -> Line:
        """Return a line to a port of the node with the instance id `host`.

        Raises OSError, JumpFailure where trying again would not help.
        """
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as errors:
            with theirs:
                process = _Session(
                    self.session(host, port),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for awsddp, which still needs its lines
                )
            line = Line(ours, process)
            if not first_word(line, timeout_s):
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip() or "the session ended"
                if any(word in said for word in _FINAL):
                    advice = "awsddp doctor --iam-policy   # prints the rights that it needs"
                    raise JumpFailure(f"network.jump: ssm: no session with {host}", said, advice, final=True)
                raise ConnectionRefusedError(said)
        return line


class _Session(subprocess.Popen[bytes]):
    """The aws command line; the plug-in that it starts is its child, and has to end with it."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


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
