"""Makes the ranks' environment on all nodes at once, where it is not there already, and holds them alike."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from awsddp.answers import Environment, Platform, read_answer, take
from awsddp.errors import NodeError
from awsddp.nodes.failures import NodeFailure
from awsddp.nodes.packages import LINES, collect
from awsddp.nodes.sync import files_to_send, push
from awsddp.nodes.transport import Fleet, Request, Result
from awsddp.parallel import split
from awsddp.plan.environment import EnvironmentPlan, explain, image_constraints, refuse_unlike
from awsddp.report import Event, node_name
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
    send_files: Callable[[], object] = lambda: None,
) -> dict[int, Environment]:
    """Return each node's environment, made where it is not there; one round trip where it is everywhere.

    `pythons` are the image's, `cache` keeps packages that are fetched here, `send_files` sends the synced
    folder, in which commands of `env.setup` run. Raises NodeError for nodes that failed, each with its last
    lines, and for nodes that differ; ConfigError. Events go where the fleet's go.
    """
    looks = {node: _request(plan, "look", pythons[node]) for node in fleet.nodes}
    found = _ask(fleet, plan, looks, _LOOK_S)
    missing = [node for node, one in found.items() if not one.ready]
    if missing:
        if plan.setup:
            send_files()
        chosen = _choose(fleet, plan, found[missing[0]].platform, cache)
        sent = _send_packages(fleet, chosen, [found[node].platform for node in missing], cache)
        builds = {
            node: _request(
                plan,
                "build",
                pythons[node],
                wheels=sent is not None,
                lines=chosen.lines if sent is None else sent,
                constraints=[*plan.constraints, *_pins(plan, found[node])],
            )
            for node in missing
        }
        found |= _ask(fleet, plan, builds, _SILENT_S)
        for node in missing:
            torch = found[node].facts.get("torch")
            fleet.on_event(
                Event(f"environment: {plan.name}, torch {torch}", who=node_name(node), fraction=1.0)
            )
    refuse_unlike({node: one.facts for node, one in found.items()})
    return found


def _choose(fleet: Fleet, plan: EnvironmentPlan, platform: Platform | None, cache: Path) -> EnvironmentPlan:
    """Return the plan with the versions that all nodes get; as it is where the nodes are to choose them.

    Raises ConfigError for what cannot be met.
    """
    if not plan.lines or platform is None:
        return plan
    from awsddp.plan.resolve import choose, target_of

    fleet.on_event(Event(f"choosing packages for {plan.name}", ""))
    pins, why = choose(plan, target_of(plan, platform), cache=cache)
    if why:
        fleet.on_event(Event(f"{plan.name}: {why}; the nodes choose its packages", ""))
    return plan if pins is None or plan.kind == "conda" else replace(plan, lines=pins)


def _pins(plan: EnvironmentPlan, found: Environment) -> tuple[str, ...]:
    platform = found.platform
    return image_constraints(platform.packages) if platform and plan.kind == "image" else ()


def _send_packages(
    fleet: Fleet,
    plan: EnvironmentPlan,
    platforms: Sequence[Platform | None],
    cache: Path,
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
    wheels = collect(plan, first, folder=cache, on_event=fleet.on_event)
    push(files_to_send(wheels), fleet, folder=WHEELS, on_event=fleet.on_event)
    return (wheels / LINES).read_text().splitlines()


def _request(plan: EnvironmentPlan, do: str, image: str, **more: object) -> Request:
    """Return the request to "look" whether the environment is there, or to "build" it."""
    asked = {
        **asdict(plan),
        "environ": {**plan.environ, **plan.indexes.environ},
        "ca": plan.indexes.ca,
        "stamp": plan.stamp,
        "setup_stamp": plan.setup_stamp,
        "offline": plan.packages_from == "client",
        "do": do,
        "image": image,
        **more,
    }
    # By stdin: an index URL may hold a password, and everybody on a node may read a command line.
    return ["python3", "-I", "-c", template("environment.py")], json.dumps(asked).encode()


class _Line(msgspec.Struct, frozen=True):
    """A line of templates/environment.py: what it does now, or else (`at` is None) its answer."""

    at: str | None = None


def _ask(
    fleet: Fleet, plan: EnvironmentPlan, requests: Mapping[int, Request], silent_s: float
) -> dict[int, Environment]:
    said = {node: bytearray() for node in requests}
    last: dict[int, bytes] = {}

    def on_data(node: int, data: bytes) -> None:
        take(said[node], data, node=node)
        *lines, said[node] = said[node].split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # what a login shell's own files print is no JSON
                step = msgspec.json.decode(line, type=_Line)
                if step.at is None:
                    last[node] = bytes(line)
                else:
                    fleet.on_event(Event(step.at[:200], who=node_name(node)))

    ends = fleet.stream(requests, on_data, silent_after_s=silent_s)
    return split({node: _outcome(plan, node, last.get(node), end) for node, end in ends.items()})


def _outcome(
    plan: EnvironmentPlan, node: int, last: bytes | None, end: Result | NodeError
) -> Environment | NodeError:
    if isinstance(end, NodeError):
        return end
    if last is None:
        return NodeFailure(node, "command", "its environment could not be created", end.tail())
    try:
        found = read_answer(last, Environment, node=node)
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
