"""Apply an existing cluster's settings from its record, unless an option or a variable overrides them."""

import json
import shlex

from awsddp.plan.converge import NODE_KEYS, TYPE_KEYS, is_of_type
from awsddp.session.connect import JUMP_KEY
from awsddp.session.context import Session
from awsddp.session.next_steps import complete_commands
from awsddp.settings.loader import find_differences, with_cluster_settings
from awsddp.settings.spec import FILE, ClusterSpec
from awsddp.settings.verbs import command_arguments
from awsddp.state import Record

# Changes to these keys are applied to running nodes, without a launch.
KEYS_WITHOUT_LAUNCH = (
    JUMP_KEY,
    "network.ssh_cidr",
    "access.user",
    "cluster.expires",
    "cluster.idle",
    "cluster.budget_usd",
)
CHANGEABLE = {"cluster.nodes", *NODE_KEYS, *KEYS_WITHOUT_LAUNCH}


def with_record_settings(session: Session, record: Record | None) -> Session:
    """Return the session with the record's settings; options and environment variables override them."""
    if record is None:
        return session
    return session.with_settings(
        with_cluster_settings(session.spec, record.settings),
        with_cluster_settings(session.job_spec, record.asked),
    )


def report_differences(session: Session, cluster_spec: ClusterSpec, record: Record) -> None:
    """Report where awsddp.toml differs from the cluster, and the `up` command that applies awsddp.toml.

    `cluster_spec` is the cluster's spec. Raises ConfigError for an invalid `cluster.gpus`.
    """
    changed = find_differences(session.spec, cluster_spec)
    if changed.keys() & set(TYPE_KEYS) and is_of_type(session.spec, record.instance_type):
        changed = {key: values for key, values in changed.items() if key not in TYPE_KEYS}
    if not changed:
        return
    launched = {"cluster.instance_type": record.instance_type}
    texts, words = [], []
    for key, (wanted, has) in sorted(changed.items(), key=lambda item: item[0] in CHANGEABLE):
        name = f"{key.removeprefix('cluster.')} = {_format_value(wanted)}"
        if key in CHANGEABLE:
            texts.append(
                f"{name}, the cluster has {_format_value(launched.get(key) if has is None else has)}"
            )
            words += command_arguments("up", {key: wanted})
        else:
            texts.append(f"{name}, which only a new cluster gets")
    command = complete_commands(session, shlex.join(["awsddp", "up", *words]))
    session.say(f"{FILE} says {'; '.join(texts)}{f': {command}' if words else ''}")


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else "none" if value in (None, ()) else json.dumps(value)
