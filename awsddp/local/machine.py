"""A local cloud's paths and names, and the choice of a mode that this machine can run.

The names of everything outside its folder (namespaces, interfaces, cgroups, machines) contain a short hash of
AWSDDP_HOME, so that several local clouds can run on one machine, and so that `sweep` can find all parts of a
local cloud by their names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from awsddp.errors import LocalCloudError


class CloudPaths:
    """Holds the paths and names of one AWSDDP_HOME's local cloud. The class only resolves paths."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.presence_lock = home / "local.lock"
        """A lock that all running clients share. It can be taken exclusively only while no client runs."""
        self.folder = home / "local"
        self.settings = self.folder / "settings.json"
        """The settings, which clients write and the daemon reads."""
        self.report = self.folder / "daemon.json"
        """The daemon's address, which the daemon writes and clients read."""
        self.client_lock = self.folder / "client.lock"
        """A lock that a client holds while it starts or stops the daemon."""
        self.daemon_lock = self.folder / "daemon.lock"
        """A lock that the daemon holds until it ends. The file contains the daemon's pid."""
        self.log = self.folder / "daemon.log"
        self.state = self.folder / "state.pickle"
        self.faults = self.folder / "faults.json"
        """The active faults."""
        self.live_mark = self.folder / "living"
        """A file that exists as long as any instance is not terminated."""
        self.nodes = self.folder / "nodes"
        self.uploads = self.folder / "uploads"
        """Objects that S3 is receiving."""
        self.buckets = home / "local-s3"
        """S3's buckets, one folder for each. The buckets are kept when the local cloud ends without `local
        stop`."""
        self.layer = self.folder / "layer"
        """The initial content of a node's disk."""
        self.tag = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]
        self.daemon_mark = f"{self.tag}-daemon"
        """The mark in the daemon's environment and in its commands' environment (loopback_cleanup.py)."""
        self.switch = self.cgroup = f"awsddp-{self.tag}"
        """The name of the bridge's network namespace, and of the cgroup that contains all of the nodes'
        cgroups."""
        self.interface = f"ad{self.tag}"
        """The machine's interface in the nodes' network (at most 15 characters)."""

    def machine_name(self, instance_id: str) -> str:
        """Return the name that a node's container and its network namespace have."""
        return f"{self.switch}-{instance_id}"


def run_to_log(log: IO[bytes], *argv: str, **settings: Any) -> int:
    """Run a command without input, append its output to a log, and return its exit status."""
    process = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", **settings)
    return process.returncode


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
LOOPBACK = "awsddp local start --loopback   # without systemd-nspawn: an sshd for each instance"
RECORDS = "awsddp local start --no-hosts   # without hosts"
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def choose_mode(mode: str | None, home: Path) -> tuple[str, str]:
    """Return the mode to run in and the reason: the requested mode, or the best that this machine can run.

    :raises LocalCloudError: the machine cannot run the mode; the error names what is missing.
    """
    if sys.platform != "linux":
        raise LocalCloudError(
            "the local cloud runs on Linux only",
            why=f"this is {sys.platform}",
            next_step="docker build -t awsddp .   # in a clone of awsddp; then see docs/local.md",
        )
    missing = [name for name in ("moto", "werkzeug") if importlib.util.find_spec(name) is None]
    if missing:
        raise LocalCloudError(
            "the packages of the local cloud are not installed",
            why=f"missing: {', '.join(missing)}; install awsddp with the extra `local`",
            next_step="pipx install --force '.[local]'   # in a clone of awsddp; or: pip install '.[local]'",
        )
    if mode == "records":
        return "records", "requested: instances change state and nothing boots"
    why_loopback = _why_no_namespaces() if mode != "loopback" else "requested"
    if why_loopback is None:
        _check_packages(PACKAGES, LOOPBACK, RECORDS)
        return "nspawn", "root, namespaces and systemd-nspawn are here"
    _check_packages(LOOPBACK_PACKAGES, RECORDS)
    if any(letter.isspace() or letter in "'\"" for letter in str(home)):
        raise LocalCloudError(
            "hosts without root need an AWSDDP_HOME without spaces and quotes in its path",
            why=f"it is {str(home)!r}",
            next_step="set AWSDDP_HOME to another folder",
        )
    return "loopback", f"{why_loopback}: an sshd for each instance, no groups, no systemd"


def _why_no_namespaces() -> str | None:
    """Return the reason why this machine cannot run hosts with namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "not root"
    probe = subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True, text=True)
    return f"no namespaces ({probe.stderr.strip()})" if probe.returncode else None


def _check_packages(packages: dict[str, str], *alternatives: str) -> None:
    """Raise LocalCloudError if these packages' programs are not installed."""
    missing = [package for program, package in packages.items() if shutil.which(program, path=SEARCH) is None]
    if missing:
        install = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
        raise LocalCloudError(
            "Debian packages are missing for the local cloud",
            why=f"not installed: {', '.join(missing)}",
            next_step="\n".join([install, *alternatives]),
        )


def run(
    *argv: str,
    text: str = "",
    failed: str = "the local cloud's network could not be set up",
    next_step: str = "awsddp local stop",
) -> str:
    """Run a command and return its output.

    :raises LocalCloudError: the command failed; `why` has the last lines that it printed.
    """
    process = subprocess.run(argv, input=text, capture_output=True, text=True)
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines()
        raise LocalCloudError(failed, why="\n".join(lines[-5:]), next_step=next_step)
    return process.stdout


def write_json(path: Path, document: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Write a document to a file atomically; only the owner can read the file."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(document, indent=1))
    new.rename(path)
