"""The settings of a cluster that exists: those of its record where nothing else is asked."""

import json
import shlex

from awsddp.plan.converge import NODE_KEYS, TYPE_KEYS, is_of_type
from awsddp.session.connect import JUMP
from awsddp.session.context import Session
from awsddp.session.next_steps import advised
from awsddp.settings.loader import differences, overlaid
from awsddp.settings.spec import FILE, ClusterSpec
from awsddp.settings.verbs import command_words
from awsddp.state import Record

# What holds from now on without a launch.
REACH_KEYS = (
    JUMP,
    "network.ssh_cidr",
    "access.user",
    "cluster.expires",
    "cluster.idle",
    "cluster.budget_usd",
)
CHANGEABLE = {"cluster.nodes", *NODE_KEYS, *REACH_KEYS}


def as_before(session: Session, record: Record | None) -> Session:
    """Return the session with the settings of the record, for all that no option and no variable sets."""
    if record is None:
        return session
    return session.with_settings(
        overlaid(session.spec, record.settings), overlaid(session.job_spec, record.asked)
    )


def say_differences(session: Session, standing: ClusterSpec, record: Record) -> None:
    """Report what awsddp.toml says and the cluster does not have, and the `up` that changes it.

    `standing` is the spec of the cluster. Raises ConfigError for an invalid `cluster.gpus`.
    """
    found = differences(session.spec, standing)
    if found.keys() & set(TYPE_KEYS) and is_of_type(session.spec, record.instance_type):
        found = {key: values for key, values in found.items() if key not in TYPE_KEYS}
    if not found:
        return
    launched = {"cluster.instance_type": record.instance_type}
    parts, words = [], []
    for key, (wanted, has) in sorted(found.items(), key=lambda one: one[0] in CHANGEABLE):
        name = f"{key.removeprefix('cluster.')} = {_shown(wanted)}"
        if key in CHANGEABLE:
            parts.append(f"{name}, the cluster has {_shown(launched.get(key) if has is None else has)}")
            words += command_words("up", {key: wanted})
        else:
            parts.append(f"{name}, which only a new cluster gets")
    command = advised(session, shlex.join(["awsddp", "up", *words]))
    session.say(f"{FILE} says {'; '.join(parts)}{f': {command}' if words else ''}")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else "none" if value in (None, ()) else json.dumps(value)
