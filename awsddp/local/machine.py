"""Where a local cloud keeps its things, what they are called, and what this machine can do.

Everything outside the folder (namespaces, interfaces, cgroups, machine names) carries a short hash of
the home, so that daemons live side by side and `sweep` finds all of one by name alone.
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


class Place:
    """The local cloud of one AWSDDP_HOME: paths and names, no I/O beyond resolving the home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.presence = home / "local.lock"
        """Shared by every client for as long as it lives: who can take it alone knows that none is there."""
        self.folder = home / "local"
        self.settings = self.folder / "settings.json"
        """What was asked for: written by the client, read by the daemon."""
        self.report = self.folder / "daemon.json"
        """Where the daemon answers: written by the daemon, read by the client."""
        self.client_lock = self.folder / "client.lock"
        """Held by a client while it starts or stops the daemon."""
        self.daemon_lock = self.folder / "daemon.lock"
        """Held by the daemon as long as it lives; its pid is in it."""
        self.log = self.folder / "daemon.log"
        self.state = self.folder / "state.pickle"
        self.faults = self.folder / "faults.json"
        """The faults that are in force."""
        self.living = self.folder / "living"
        """There as long as an instance is not terminated."""
        self.nodes = self.folder / "nodes"
        self.uploads = self.folder / "uploads"
        """What S3 is receiving."""
        self.buckets = home / "local-s3"
        """What S3 keeps, a folder for each bucket: it outlives a local cloud that ended by itself."""
        self.layer = self.folder / "layer"
        """What is on the disk of a node that is made."""
        self.tag = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]
        self.daemon_mark = f"{self.tag}-daemon"
        """What its commands carry in their environment (loopback_cleanup.py)."""
        self.switch = self.cgroup = f"awsddp-{self.tag}"
        """The network namespace that holds the bridge, and the cgroup of all."""
        self.interface = f"ad{self.tag}"
        """The machine's own end in the network of the nodes (at most 15 characters)."""

    def machine(self, instance_id: str) -> str:
        """Return the name of a node's machine and of its network namespace."""
        return f"{self.switch}-{instance_id}"


def run_into(log: IO[bytes], *argv: str, **settings: Any) -> int:
    """Run a command without input, its output into a log, and return its exit status."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", **settings)
    return done.returncode


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


def choose_mode(mode: str | None, home: Path) -> tuple[str, str]:
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


def run(
    *argv: str,
    text: str = "",
    failed: str = "the local cloud's network could not be set up",
    next: str = "awsddp local stop",
) -> str:
    """Run a command of the system and return its output.

    :raises LocalCloudError: it failed; `why` holds what it said last.
    """
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise LocalCloudError(failed, why="\n".join(lines[-5:]), next=next)
    return done.stdout


def write_json(path: Path, document: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Writes a file whole or not at all, readable by its owner alone."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(document, indent=1))
    new.rename(path)
