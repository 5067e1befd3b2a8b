"""The nodes as a fabric.Group for the user's Fabric tasks. Only this module imports fabric."""

import base64
from collections.abc import Iterable
from pathlib import Path

import paramiko

from awsddp.errors import ConfigError
from awsddp.nodes import hostkeys
from awsddp.nodes.login import Endpoint, Login

try:
    import fabric
except ImportError as error:
    raise ConfigError(
        "fabric is not installed", str(error), "pip install '.[fabric]'   # in a clone of awsddp"
    ) from error


def fabric_group(endpoints: Iterable[Endpoint], login: Login) -> fabric.Group:
    """Return a group with a connection for each of `endpoints`, in the same order; each connection accepts
    only its node's host keys.

    Connections open when they are first used. Raises ConfigError.
    """
    pinned = hostkeys.load_keys(login.known_hosts)
    proxy = login.jump.proxy_command() if login.jump is not None else None
    return fabric.ThreadingGroup.from_connections(
        [
            _connection(endpoint, pinned.get(endpoint.instance_id, ()), login.key, proxy)
            for endpoint in endpoints
        ]
    )


def _connection(
    endpoint: Endpoint, host_keys: tuple[str, ...], key: Path, proxy: str | None
) -> fabric.Connection:
    config = fabric.Config(
        overrides={
            "load_ssh_configs": False,
            "forward_agent": False,
            "run": {"in_stream": False},  # notebooks and threads run tasks without a stdin
        }
    )
    connection = fabric.Connection(
        endpoint.host,
        user=endpoint.user,
        port=endpoint.port,
        config=config,
        gateway=proxy,
        connect_kwargs={"key_filename": str(key), "look_for_keys": False, "allow_agent": False},
    )
    # Fabric's own policy, AutoAddPolicy, would accept any host key.
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
    name = endpoint.host if endpoint.port == 22 else f"[{endpoint.host}]:{endpoint.port}"
    for line in host_keys:
        kind, _, data = line.partition(" ")
        public = paramiko.PKey.from_type_string(kind, base64.b64decode(data))
        connection.client.get_host_keys().add(name, kind, public)
    return connection
