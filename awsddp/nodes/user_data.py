"""The user data that instances boot with. Made before a launch: nothing of SSH is imported for it."""

import json
from datetime import UTC, datetime

from awsddp.errors import ConfigError
from awsddp.limits import USER_DATA_BYTES
from awsddp.nodes.hostkeys import KeyPair
from awsddp.nodes.rendering import render


def user_data(*, host_key: KeyPair, expires_at: datetime, idle_s: int = 0) -> str:
    """Return the cloud-config that every node of a launch boots with.

    It installs the throw-away `host_key` before sshd answers, and a watchdog that powers the machine off at
    `expires_at` (aware of its zone), or after `idle_s` seconds without use (0: never), with nobody's help.
    Raises ConfigError over EC2's limit of 16 KB.
    """
    seconds, text = moment(expires_at)
    rendered = render(
        "user_data.yaml",
        host_private=json.dumps(host_key.private),
        host_public=json.dumps(host_key.public),
        expires_s=seconds,
        expires=text,
        idle_s=idle_s,
    )
    if len(rendered.encode()) > USER_DATA_BYTES:
        raise ConfigError("the user data is too large", "EC2 accepts 16 KB")
    return rendered


def moment(when: datetime) -> tuple[int, str]:
    """Return a moment as seconds since 1970 and as people read it, in UTC."""
    when = when.astimezone(UTC)
    return int(when.timestamp()), when.strftime("%Y-%m-%dT%H:%M:%SZ")
