"""Render the instances' user data, and prepare booted nodes: their host key, environment and GPUs."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import msgspec

from awsddp.errors import ConfigError, NodeError
from awsddp.model.events import Event
from awsddp.model.node_answers import InspectionResult, read_answer
from awsddp.model.records import Node, PreparedNode
from awsddp.nodes import hostkeys
from awsddp.nodes.hostkeys import KeyPair
from awsddp.nodes.node_failures import NodeFailure
from awsddp.settings.ec2_limits import MAX_USER_DATA_BYTES
from awsddp.util.formatting import counted, node_name
from awsddp.util.parallel import NodesFailed, results_or_raise
from awsddp.util.shipped_files import render, template

if TYPE_CHECKING:  # user data is rendered before a launch, without importing SSH
    from awsddp.nodes.fleet import Fleet

_REKEY_S = 30.0
Answer = TypeVar("Answer")


class _Inspect(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="inspect"):
    """A request to a node: wait for the end of the boot and for the GPUs, then report the node's facts."""

    user: str
    address: str | None
    rank0: str | None
    expires: tuple[int, str] | None
    idle: int | None
    patience_s: float
    gpus: int
    gpus_patience_s: float


class _Rekey(msgspec.Struct, frozen=True, tag_field="do", tag="rekey"):
    """A request to a node: switch sshd to the host key that was generated on the node."""


class _Rekeyed(msgspec.Struct, frozen=True):
    """The empty response to a `_Rekey` request."""


def render_user_data(*, host_key: KeyPair, expires_at: datetime, idle_s: int = 0) -> str:
    """Return the cloud-config that all nodes in a launch get.

    The cloud-config installs the temporary `host_key` before sshd starts, and a watchdog that powers the
    machine off. The watchdog does this at `expires_at` (timezone-aware), or after `idle_s` seconds without
    use if `idle_s` is not 0. Raises ConfigError if the cloud-config exceeds EC2's limit of 16 KB.
    """
    seconds, text = epoch_and_text(expires_at)
    rendered = render(
        "user_data.yaml",
        host_private=json.dumps(host_key.private),
        host_public=json.dumps(host_key.public),
        expires_s=seconds,
        expires=text,
        idle_s=idle_s,
    )
    if len(rendered.encode()) > MAX_USER_DATA_BYTES:
        raise ConfigError("the user data is too large", "EC2 accepts 16 KB")
    return rendered


def epoch_and_text(when: datetime) -> tuple[int, str]:
    """Return a time as seconds since 1970 and as text in UTC."""
    when = when.astimezone(UTC)
    return int(when.timestamp()), when.strftime("%Y-%m-%dT%H:%M:%SZ")


def prepare(
    fleet: "Fleet",
    nodes: Sequence[Node],
    *,
    expires_at: datetime | None = None,
    idle_s: int | None = None,
    gpus: int = 0,
    deadline_s: float = 600,
    gpus_deadline_s: float = 300,
) -> tuple[PreparedNode, ...]:
    """Prepare all connected nodes at once, and return their facts sorted by node number.

    The preparation waits for the end of the boot, replaces the temporary host key with a key that was
    generated on the node, and finds the environment and the network interface. The preparation can be
    repeated. `expires_at` changes the expiry, and `idle_s` changes the idle time. On each node, torch must
    find `gpus` GPUs. The preparation also waits for GPUs behind NVSwitches. If nodes cannot be prepared,
    raises NodesFailed after all other nodes are prepared. Events are reported by the fleet's `on_event`.
    """
    nodes = sorted(nodes, key=lambda node: node.node)
    for node in nodes:
        fleet.on_event(Event("preparing: end of the boot, torch, GPUs", who=node_name(node.node)))
    failures: dict[int, NodeError] = {}
    requests = {
        node.node: _Inspect(
            user=fleet.endpoints[node.node].user,
            address=node.private_ip or node.address,
            rank0=nodes[0].private_ip or nodes[0].address,
            expires=epoch_and_text(expires_at) if expires_at else None,
            idle=idle_s,
            patience_s=deadline_s,
            gpus=gpus,
            gpus_patience_s=gpus_deadline_s,
        )
        for node in nodes
    }
    timeout_s = deadline_s + gpus_deadline_s + 120
    inspected = _call(fleet, requests, InspectionResult, timeout_s, failures)
    _change_host_keys(fleet, {node: facts.host_key for node, facts in inspected.items()}, failures)
    outcomes: dict[int, PreparedNode | NodeError] = {**failures}
    for node in nodes:
        if node.node in failures:
            continue
        facts = inspected[node.node]
        outcomes[node.node] = _problem(node, facts, gpus) or msgspec.convert(
            {**msgspec.structs.asdict(facts), "node": node.node, "instance_id": node.instance_id},
            PreparedNode,
        )
        if isinstance(outcomes[node.node], PreparedNode):
            fleet.on_event(Event(_summary(facts), who=node_name(node.node), fraction=1.0))
    return tuple(results_or_raise(outcomes).values())


def _change_host_keys(fleet: "Fleet", final: Mapping[int, str], failures: dict[int, NodeError]) -> None:
    """Replace the temporary host key with the final key; known_hosts always has the node's current key.

    The public half of the final key is added before sshd uses it. The temporary key is removed after the
    first connection that the final key verified.
    """
    known_hosts = fleet.login.known_hosts
    instance_ids = {node: fleet.endpoints[node].instance_id for node in final}
    pending = [node for node, key in final.items() if fleet.host_key(node) != key]
    hostkeys.add_keys(known_hosts, {instance_ids[node]: final[node] for node in pending})
    pending = list(_call(fleet, dict.fromkeys(pending, _Rekey()), _Rekeyed, 60, failures))
    deadline = time.monotonic() + _REKEY_S
    while pending:  # sshd reloads on a signal, and until then it may still show the temporary key
        try:
            fleet.reconnect(pending)
        except NodesFailed as error:
            failures.update(error.failures)
        pending = [node for node in pending if node not in failures and fleet.host_key(node) != final[node]]
        if pending and time.monotonic() > deadline:
            for node in pending:
                failures[node] = NodeFailure(node, "command", "its sshd does not present its new host key")
            break
    changed = [node for node in final if node not in failures and fleet.host_key(node) == final[node]]
    hostkeys.set_keys(known_hosts, {instance_ids[node]: final[node] for node in changed})


def _call(
    fleet: "Fleet",
    requests: Mapping[int, _Inspect | _Rekey],
    answer: type[Answer],
    timeout_s: float,
    failures: dict[int, NodeError],
) -> dict[int, Answer]:
    """Return the nodes' responses; add an error to `failures` for each node without a response."""
    commands = {}
    for node, request in requests.items():
        sudo = [] if fleet.endpoints[node].user == "root" else ["sudo", "-n"]
        argv = [*sudo, "python3", "-I", "-", msgspec.json.encode(request).decode()]
        commands[node] = argv, template("prepare.py").encode()
    responses = {}
    for node, end in fleet.run_each(commands, timeout_s=timeout_s).items():
        try:
            if isinstance(end, NodeError):
                raise end
            if end.exit_code != 0 or not end.stdout.strip():
                why = f"exit code {end.exit_code}\n{end.tail()}"
                raise NodeFailure(node, "command", "preparation failed", why)
            # The login shell's startup files may print lines before the response.
            responses[node] = read_answer(end.stdout.splitlines()[-1], answer, node=node)
        except NodeError as error:
            failures[node] = error
    return responses


def _problem(node: Node, facts: InspectionResult, gpus: int) -> NodeFailure | None:
    """Return the error for a node that is not ready, or None for a ready node."""
    few = bool(facts.python) and facts.gpus < gpus
    unwatched = "its expiry watchdog is not running, so the node would not shut down at its expiry"
    rows = (  # condition, message, why; the first row whose condition is true applies
        (few, f"torch sees {facts.gpus} of {gpus} GPUs", facts.gpus_said),
        (not facts.watched, unwatched, facts.complaint),
        (not facts.python, "no Python with torch found", "searched /opt/pytorch and in conda's folders"),
        (not facts.nic, "no network interface has its private address", str(node.private_ip)),
        (not facts.rsync, "rsync is not installed", facts.rsync_said or "files are transferred by rsync"),
    )
    advice = "awsddp down && awsddp up --image IMAGE   # another image"
    if few:
        advice = "awsddp up   # again\nawsddp down && awsddp up   # if that does not help"
    for is_so, message, why in rows:
        if is_so:
            return NodeFailure(node.node, "command", message, why, advice)
    return None


def _summary(facts: InspectionResult) -> str:
    gpus = f", {counted(facts.gpus, 'rehearsed GPU' if facts.rehearsed else 'GPU')}" if facts.gpus else ""
    trouble = f" (cloud-init reports: {facts.complaint.splitlines()[0]})" if facts.complaint else ""
    return f"ready: torch {facts.torch}{gpus}, {facts.nic}{trouble}"
