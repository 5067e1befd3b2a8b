"""Where a local cloud keeps its things, and what they are called on the machine.

Everything outside the folder (namespaces, interfaces, cgroups, machine names) carries a short hash of
the home, so that daemons live side by side and `sweep` finds all of one by name alone.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import IO, Any


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
        self.layer = self.folder / "layer"
        """What is on the disk of a node that is made."""
        self.tag = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]
        self.daemon_mark = f"{self.tag}-daemon"
        """What its commands carry in their environment (ending.py)."""
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
