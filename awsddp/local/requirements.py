"""What this machine can do: which kind of hosts, and what is missing for the better one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from awsddp.errors import LocalCloudError

PACKAGES = {
    "systemd-nspawn": "systemd-container",
    "cloud-init": "cloud-init",
    "sshd": "openssh-server",
    "sudo": "sudo",
    "nft": "nftables",
    "ip": "iproute2",
    "rsync": "rsync",
    "mkfs.ext4": "e2fsprogs",
}
LOOPBACK_PACKAGES = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "rsync": "rsync"}
LOOPBACK = "awsddp local start --loopback   # without them: an sshd for each instance"
RECORDS = "awsddp local start --no-hosts   # without hosts"
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def choose(mode: str | None, home: Path) -> tuple[str, str]:
    """Return the mode to run in and why: the one asked for, or the best this machine can do.

    :raises LocalCloudError: it cannot; the error names what is missing.
    """
    if sys.platform != "linux":
        raise LocalCloudError(
            "the local cloud runs on Linux only",
            why=f"this is {sys.platform}",
            next="docker build -t awsddp .   # in a clone of awsddp: a container for it, docs/local.md",
        )
    absent = [name for name in ("moto", "werkzeug") if importlib.util.find_spec(name) is None]
    if absent:
        raise LocalCloudError(
            "the packages of the local cloud are not installed",
            why=f"missing: {', '.join(absent)}; they come with the extra `local`",
            next="pipx install --force '.[local]'   # in a clone of awsddp; or: pip install '.[local]'",
        )
    if mode == "records":
        return "records", "requested: instances change state and nothing boots"
    lack = _lack() if mode != "loopback" else "requested"
    if lack is None:
        _need(PACKAGES, LOOPBACK, RECORDS)
        return "nspawn", "root, namespaces and systemd-nspawn are here"
    _need(LOOPBACK_PACKAGES, RECORDS)
    if any(letter.isspace() or letter in "'\"" for letter in str(home)):
        raise LocalCloudError(
            "hosts without root need a home without spaces and quotes in its path",
            why=f"it is {str(home)!r}",
            next="set AWSDDP_HOME to another folder",
        )
    return "loopback", f"{lack}: an sshd for each instance, no groups, no systemd"


def _lack() -> str | None:
    """What is missing for hosts with namespaces; None if nothing is."""
    if os.geteuid() != 0:
        return "not root"
    probe = subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True, text=True)
    return f"no namespaces ({probe.stderr.strip()})" if probe.returncode else None


def _need(packages: dict[str, str], *instead: str) -> None:
    missing = [package for program, package in packages.items() if shutil.which(program, path=SEARCH) is None]
    if missing:
        raise LocalCloudError(
            "Debian packages are missing for the local cloud",
            why=f"not installed: {', '.join(missing)}",
            next="\n".join([f"apt-get install -y --no-install-recommends {' '.join(missing)}", *instead]),
        )
