"""Launchers, which define the processes that the agent on a node starts for its ranks."""

from collections.abc import Sequence
from typing import Protocol

from awsddp.agent.messages import Process
from awsddp.agent_client.launchers import ssh, torchrun
from awsddp.agent_client.rank_layout import Host, Rank, Rendezvous
from awsddp.errors import ConfigError
from awsddp.settings.spec import JobSpec


class Launcher(Protocol):
    """Return the processes that run `ranks` on `host`. Raises UsageError for an invalid placeholder."""

    def __call__(
        self, spec: JobSpec, ranks: Sequence[Rank], *, host: Host, rendezvous: Rendezvous
    ) -> Sequence[Process]: ...


LAUNCHERS: dict[str, Launcher] = {
    "ssh": ssh.processes,
    "torchrun": torchrun.processes,
}


def launcher(name: str) -> Launcher:
    """Return the launcher `name`. Raises ConfigError."""
    if name not in LAUNCHERS:
        raise ConfigError(f"job.launcher: no launcher {name!r}", "", f"use {' or '.join(LAUNCHERS)}")
    return LAUNCHERS[name]
