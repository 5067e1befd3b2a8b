"""How the nodes are reached: their endpoints, what a login needs, and the ssh_config that says both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from awsddp.nodes.failures import Layer, NodeFailure
from awsddp.nodes.jump import Jump, config_path
from awsddp.report import node_name
from awsddp.resources import render


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
        key=config_path(login.key),
        known_hosts=config_path(login.known_hosts),
    )
