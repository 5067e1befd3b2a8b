"""Makes the ranks' environment on all nodes at once, where it is not there already, and holds them alike."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from awsddp.answers import Environment, Platform, environment, take
from awsddp.errors import NodeError
from awsddp.nodes.command import Request, Result
from awsddp.nodes.failures import NodeFailure, split
from awsddp.nodes.listing import files_to_send
from awsddp.nodes.packages import LINES, collect
from awsddp.nodes.parallel import ignore
from awsddp.nodes.sync import push
from awsddp.nodes.transport import Fleet
from awsddp.plan.environment import EnvironmentPlan, explain, image_constraints, refuse_unlike
from awsddp.report import Event, OnEvent, node_name
from awsddp.resources import template

WHEELS = "wheels"
_LOOK_S = 60.0
_SILENT_S = 2400.0
"""How long a build may say nothing: a large package travels, or is unpacked."""


def ensure(
    fleet: Fleet,
    plan: EnvironmentPlan,
    *,
    pythons: Mapping[int, str],
    cache: Path,
    ssh_config: Path,
    send_files: Callable[[], object] = lambda: None,
    on_event: OnEvent = ignore,
) -> dict[int, Environment]:
    """Return each node's environment, made where it is not there; one round trip where it is everywhere.

    `pythons` are the image's, `cache` keeps packages that are fetched here, `send_files` sends the synced
    folder, in which commands of `env.setup` run. Raises NodeError for nodes that failed, each with its last
    lines, and for nodes that differ; ConfigError.
    """
    found = _ask(
        fleet, plan, {node: {"do": "look", "image": pythons[node]} for node in fleet.nodes}, on_event
    )
    missing = [node for node, one in found.items() if not one.ready]
    if missing:
        if plan.setup:
            send_files()
        platforms = [found[node].platform for node in missing]
        sent = _send_packages(fleet, plan, platforms, cache, ssh_config, on_event)
        found |= _ask(
            fleet,
            plan,
            {
                node: {
                    "do": "build",
                    "image": pythons[node],
                    "wheels": sent is not None,
                    "lines": plan.lines if sent is None else sent,
                    "constraints": [*plan.constraints, *_pins(plan, found[node])],
                }
                for node in missing
            },
            on_event,
        )
        for node in missing:
            torch = found[node].facts.get("torch")
            on_event(Event(f"environment: {plan.name}, torch {torch}", who=node_name(node), fraction=1.0))
    refuse_unlike({node: one.facts for node, one in found.items()})
    return found


def _pins(plan: EnvironmentPlan, found: Environment) -> tuple[str, ...]:
    platform = found.platform
    return image_constraints(platform.packages) if platform and plan.kind == "image" else ()


def _send_packages(
    fleet: Fleet,
    plan: EnvironmentPlan,
    platforms: Sequence[Platform | None],
    cache: Path,
    ssh_config: Path,
    on_event: OnEvent,
) -> list[str] | None:
    """Send packages where this machine provides them, and return the requirements that they meet, else None.

    Raises NodeError where nodes need different ones.
    """
    first = platforms[0]
    if plan.packages_from == "node" or not plan.has_packages or first is None:
        return None
    if any(one != first for one in platforms):
        raise NodeError(
            "the nodes' images differ",
            "packages that are fetched here fit one Python and one set of installed packages",
            "awsddp down && awsddp up   # with one image",
        )
    wheels = collect(plan, first, folder=cache, on_event=on_event)
    push(files_to_send(wheels), fleet, ssh_config=ssh_config, folder=WHEELS, on_event=on_event)
    return (wheels / LINES).read_text().splitlines()


def _ask(
    fleet: Fleet, plan: EnvironmentPlan, words: Mapping[int, Mapping[str, Any]], on_event: OnEvent
) -> dict[int, Environment]:
    said = {node: bytearray() for node in words}
    last: dict[int, bytes] = {}

    def on_data(node: int, data: bytes) -> None:
        take(said[node], data, node=node)
        *lines, said[node] = said[node].split(b"\n")
        for line in filter(None, map(_json, lines)):
            if "at" in line:
                on_event(Event(str(line["at"])[:200], who=node_name(node)))
            else:
                last[node] = json.dumps(line).encode()

    requests: dict[int, Request] = {node: _request(plan, one) for node, one in words.items()}
    looks = all(one["do"] == "look" for one in words.values())
    ends = fleet.stream(requests, on_data, silent_after_s=_LOOK_S if looks else _SILENT_S)
    return split({node: _outcome(plan, node, last.get(node), end) for node, end in ends.items()})


def _json(line: bytearray) -> dict[str, Any] | None:
    """Return a line of the program; None for what a login shell's own files print."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _request(plan: EnvironmentPlan, words: Mapping[str, Any]) -> Request:
    offline = plan.packages_from == "client"
    asked = {**asdict(plan), "stamp": plan.stamp, "setup_stamp": plan.setup_stamp, "offline": offline}
    # By stdin: an index URL may hold a password, and everybody on a node may read a command line.
    return ["python3", "-I", "-c", template("environment.py")], json.dumps({**asked, **words}).encode()


def _outcome(
    plan: EnvironmentPlan, node: int, last: bytes | None, end: Result | NodeError
) -> Environment | NodeError:
    if isinstance(end, NodeError):
        return end
    if last is None:
        return NodeFailure(node, "command", "its environment could not be created", end.tail())
    try:
        found = environment(last, node=node)
    except NodeError as error:
        return error
    if not found.failed:
        return found
    if found.failed in plan.setup:
        return NodeFailure(
            node, "command", f"env.setup: {found.failed!r} failed", found.said, "correct the command"
        )
    refusal = explain(found.said, name="[env]" if plan.name == plan.kind else plan.name)
    return NodeFailure(node, "command", f"{found.failed}: {refusal.message}", refusal.why, refusal.next)
