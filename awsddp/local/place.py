"""Where a local cloud keeps its things, and what they are called on the machine.

Everything outside the folder (namespaces, interfaces, cgroups, machine names) carries a short hash of
the home, so that daemons live side by side and `sweep` finds all of one by name alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The local cloud of one AWSDDP_HOME: paths and names, no I/O beyond resolving the home."""

    home: Path

    @cached_property
    def tag(self) -> str:
        return hashlib.sha256(str(self.home.resolve()).encode()).hexdigest()[:8]

    @property
    def folder(self) -> Path:
        return self.home / "local"

    @property
    def settings(self) -> Path:
        """What was asked for: written by the client, read by the daemon."""
        return self.folder / "settings.json"

    @property
    def report(self) -> Path:
        """Where the daemon answers: written by the daemon, read by the client."""
        return self.folder / "daemon.json"

    @property
    def presence(self) -> Path:
        """Shared by every client for as long as it lives: who can take it alone knows that none is there."""
        return self.home / "local.lock"

    @property
    def client_lock(self) -> Path:
        """Held by a client while it starts or stops the daemon."""
        return self.folder / "client.lock"

    @property
    def daemon_lock(self) -> Path:
        """Held by the daemon as long as it lives; its pid is in it."""
        return self.folder / "daemon.lock"

    @property
    def log(self) -> Path:
        return self.folder / "daemon.log"

    @property
    def state(self) -> Path:
        return self.folder / "state.pickle"

    @property
    def faults(self) -> Path:
        """The faults that are in force."""
        return self.folder / "faults.json"

    @property
    def living(self) -> Path:
        """There as long as an instance is not terminated."""
        return self.folder / "living"

    @property
    def nodes(self) -> Path:
        return self.folder / "nodes"

    @property
    def packages(self) -> Path:
        """The apt repository that nodes see."""
        return self.folder / "packages"

    @property
    def layer(self) -> Path:
        """What is on the disk of a node that is made."""
        return self.folder / "layer"

    @property
    def switch(self) -> str:
        """The network namespace that holds the bridge."""
        return f"awsddp-{self.tag}"

    @property
    def interface(self) -> str:
        """The machine's own end in the network of the nodes (at most 15 characters)."""
        return f"ad{self.tag}"

    @property
    def cgroup(self) -> str:
        return f"awsddp-{self.tag}"

    def machine(self, instance_id: str) -> str:
        """The name of a node's machine and of its network namespace."""
        return f"awsddp-{self.tag}-{instance_id}"
