"""What this machine can do: which kind of hosts, and what is missing for the better one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from awsddp.errors import LocalCloudError

PACKAGES = {
    "systemd-nspawn": "systemd-container",
    "cloud-init": "cloud-init",
    "sshd": "openssh-server",
    "sudo": "sudo",
    "nft": "nftables",
    "ip": "iproute2",
    "rsync": "rsync",
}
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def choose(mode: str | None) -> tuple[str, str]:
    """The mode to run in and why: the one asked for, or the best this machine can do.

    :raises LocalCloudError: it cannot; the error names what is missing.
    """
    if sys.platform != "linux":
        raise LocalCloudError(
            "the local cloud runs on Linux only",
            why=f"this is {sys.platform}",
            next="docker run --privileged -it debian:12, and install awsddp[local] in it",
        )
    if mode == "records":
        return "records", "asked for: instances change state and nothing boots"
    if os.geteuid() != 0:
        raise LocalCloudError(
            "the local cloud needs root for its hosts",
            why="systemd-nspawn and network namespaces are root's",
            next="sudo awsddp local start, or: awsddp local start --no-hosts",
        )
    missing = [package for program, package in PACKAGES.items() if shutil.which(program, path=SEARCH) is None]
    if missing:
        raise LocalCloudError(
            "Debian packages are missing for the local cloud",
            why=f"not installed: {', '.join(missing)}",
            next=f"apt-get install -y --no-install-recommends {' '.join(missing)}",
        )
    probe = subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True, text=True)
    if probe.returncode:
        raise LocalCloudError(
            "this machine lets root make no namespaces",
            why=probe.stderr.strip(),
            next="in a container: start it with --privileged",
        )
    return "nspawn", "root, namespaces and systemd-nspawn are here"
