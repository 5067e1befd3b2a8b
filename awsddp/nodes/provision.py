"""Makes launched instances ready: their own host key, what they have."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from awsddp.answers import check
from awsddp.errors import NodeError
from awsddp.nodes import hostkeys
from awsddp.nodes.command import Request, Result
from awsddp.nodes.failures import NodeFailure, NodesFailed, split
from awsddp.nodes.parallel import ignore
from awsddp.nodes.transport import Fleet
from awsddp.nodes.user_data import moment
from awsddp.records import Node, Prepared
from awsddp.report import Event, OnEvent, node_name
from awsddp.resources import template

_REKEY_S = 30.0


def prepare(
    fleet: Fleet,
    nodes: Sequence[Node],
    *,
    known_hosts: Path,
    expires_at: datetime | None = None,
    idle_s: int | None = None,
    gpus: int = 0,
    deadline_s: float = 600,
    gpus_deadline_s: float = 300,
    on_event: OnEvent = ignore,
) -> tuple[Prepared, ...]:
    """Make connected nodes ready, all at once, and return what was found, by node number. May be repeated.

    Waits for the end of the boot, replaces the throw-away host key by one made on the node, finds the
    environment and the network interface. `expires_at` moves the expiry, `idle_s` the idle time. Torch is to
    find `gpus` GPUs on each node; those behind NVSwitches are waited for. Raises NodesFailed for all nodes
    that cannot be made ready; the others are.
    """
    nodes = sorted(nodes, key=lambda node: node.node)
    for node in nodes:
        on_event(Event("preparing", who=node_name(node.node)))
    failures: dict[int, NodeError] = {}
    requests = {
        node.node: {
            "do": "inspect",
            "user": fleet.endpoints[node.node].user,
            "address": node.private_ip or node.address,
            "rank0": nodes[0].private_ip or nodes[0].address,
            "expires": moment(expires_at) if expires_at else None,
            "idle": idle_s,
            "patience_s": deadline_s,
            "gpus": gpus,
            "gpus_patience_s": gpus_deadline_s,
        }
        for node in nodes
    }
    found = _ask(fleet, requests, deadline_s + gpus_deadline_s + 120, failures)
    _change_host_keys(fleet, found, known_hosts, failures)
    prepared: dict[int, Prepared] = {}
    for node in nodes:
        if node.node in failures:
            continue
        facts = found[node.node]
        if (problem := _problem(node, facts, gpus)) is not None:
            failures[node.node] = problem
            continue
        record = {**facts, "node": node.node, "instance_id": node.instance_id}
        prepared[node.node] = msgspec.convert(record, Prepared)
        on_event(Event(_summary(prepared[node.node], facts), who=node_name(node.node), fraction=1.0))
    return tuple(split({**prepared, **failures}).values())


def _change_host_keys(
    fleet: Fleet, found: Mapping[int, dict[str, Any]], known_hosts: Path, failures: dict[int, NodeError]
) -> None:
    """Replace the seed by the final key. There is no moment at which the key shown is not accepted here.

    The final key's public half is written down before sshd uses it; the seed is dropped after the first
    connection that the final key verified.
    """
    final = {node: facts["host_key"] for node, facts in found.items()}
    names = {node: fleet.endpoints[node].instance_id for node in found}
    pending = [node for node, key in final.items() if fleet.host_key(node) != key]
    hostkeys.accept(known_hosts, {names[node]: final[node] for node in pending})
    pending = list(_ask(fleet, {node: {"do": "rekey"} for node in pending}, 60, failures))
    deadline = time.monotonic() + _REKEY_S
    while pending:  # sshd is told by a signal: a connection made in that very moment may still show the seed
        try:
            fleet.reconnect(pending)
        except NodesFailed as error:
            failures.update(error.failures)
        pending = [n for n in pending if n not in failures and fleet.host_key(n) != final[n]]
        if pending and time.monotonic() > deadline:
            for node in pending:
                failures[node] = NodeFailure(node, "command", "its sshd does not present its new host key")
            break
    settled = [node for node in final if node not in failures and fleet.host_key(node) == final[node]]
    hostkeys.settle(known_hosts, {names[node]: final[node] for node in settled})


def _ask(
    fleet: Fleet, requests: Mapping[int, dict[str, Any]], timeout_s: float, failures: dict[int, NodeError]
) -> dict[int, dict[str, Any]]:
    """Return the nodes' answers; who gives none is added to `failures`."""
    commands: dict[int, Request] = {}
    for node, request in requests.items():
        sudo = [] if fleet.endpoints[node].user == "root" else ["sudo", "-n"]
        argv = [*sudo, "python3", "-I", "-", json.dumps(request)]
        commands[node] = argv, template("prepare.py").encode()
    try:
        results: dict[int, Result] = fleet.run_each(commands, timeout_s=timeout_s)
    except NodesFailed as error:
        failures.update(error.failures)
        results = error.results
    answers = {}
    for node, result in results.items():
        if result.exit_code != 0 or not result.stdout.strip():
            why = f"exit code {result.exit_code}\n{result.tail()}"
            failures[node] = NodeFailure(node, "command", "preparation failed", why)
            continue
        try:  # what the login shell's own files print stands before the answer
            answers[node] = check(result.stdout.splitlines()[-1], request=requests[node], node=node)
        except NodeError as error:
            failures[node] = error
    return answers


def _problem(node: Node, facts: dict[str, Any], gpus: int) -> NodeFailure | None:
    """Return why a node is not ready, None where it is."""
    if facts["python"] and facts["gpus"] < gpus:
        message = f"torch sees {facts['gpus']} of {gpus} GPUs"
        advice = "awsddp up   # again\nawsddp down && awsddp up   # if that does not help"
        return NodeFailure(node.node, "command", message, facts["gpus_said"], advice)
    boot = facts["complaint"]
    if not facts["watched"]:
        message, why = "its expiry watchdog is not running, so it would not shut down by itself", boot
    elif not facts["python"]:
        message, why = "no Python with torch found", "searched /opt/pytorch and in conda's folders"
    elif not facts["nic"]:
        message, why = "no network interface has its private address", f"{node.private_ip}"
    elif not facts["rsync"]:
        message, why = "rsync is not installed", "files are transferred by rsync"
    else:
        return None
    return NodeFailure(
        node.node, "command", message, why, "awsddp down && awsddp up --image IMAGE   # another image"
    )


def _summary(prepared: Prepared, facts: dict[str, Any]) -> str:
    gpus = f", {prepared.gpus} {'rehearsed ' * facts['rehearsed']}GPUs" if prepared.gpus else ""
    trouble = f" (cloud-init reports: {facts['complaint'].splitlines()[0]})" if facts["complaint"] else ""
    return f"ready: torch {prepared.torch}{gpus}, {prepared.nic}{trouble}"
